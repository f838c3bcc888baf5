"""New texts and conversations, made of Python's own documentation and sources.

They consist of sentences of its language reference and lines of its sources, in an order given by
a seed.
"""

import inspect
import json
import pydoc_data.topics
import re
from random import Random

KIB = 1024

# Lengths of questions and answers, in turn, in characters.
QUESTION, ANSWER = 400, 2_400


class Prose:
    """Pieces of text, all different."""

    def __init__(self, seed: int = 1) -> None:
        self._rng = Random(seed)
        reference = "\n\n".join(pydoc_data.topics.topics.values())
        prose = [one for one in re.split(r"(?<=[.:]\s)|\n\n", reference) if one]
        modules = (inspect, json, re)
        code = [
            line
            for module in modules
            for line in inspect.getsource(module).splitlines(keepends=True)
        ]
        self._passages = [prose[at : at + 3] for at in range(0, len(prose) - 3, 3)]
        self._passages += [code[at : at + 6] for at in range(0, len(code) - 6, 6)]

    def text(self, characters: int) -> str:
        """Returns a text of this many characters."""
        pieces: list[str] = []
        length = 0
        while length < characters:
            passage = " ".join(self._rng.choice(self._passages))
            pieces.append(f"{passage} {self._rng.randrange(10_000)}\n")
            length += len(pieces[-1])
        return "".join(pieces)[:characters]

    def turns(self, characters: int) -> list[dict[str, str]]:
        """Returns a conversation of about this many characters, ending with a question."""
        messages = [self.question()]
        length = QUESTION
        while length < characters:
            messages += [self.answer(), self.question()]
            length += ANSWER + QUESTION
        return messages

    def question(self) -> dict[str, str]:
        """Returns a user's message."""
        return {"role": "user", "content": self.text(QUESTION)}

    def answer(self) -> dict[str, str]:
        """Returns a model's message."""
        return {"role": "assistant", "content": self.text(ANSWER)}


def body(messages: list[dict[str, str]]) -> bytes:
    """Returns the body of a chat request, in the form of OpenAI's clients."""
    return json.dumps({"model": "tekken", "messages": messages}).encode()


def rendered(messages: list[dict[str, str]]) -> str:
    """Returns the conversation as rendered by the benchmark's chat template."""
    return "".join(
        f"[INST]{one['content']}[/INST]" if one["role"] == "user" else f"{one['content']}</s>"
        for one in messages
    )
