"""What the simulated model says: whole words, the same ones for the same prompt every time.

Clients send an answer back as text with the next turn. Its tokens are in the cache already, so the
text has to give the same tokens again: only words that are one token each are said.
"""

import hashlib
import re
from array import array
from collections.abc import Sequence

from simulator.tokens import ModelTokens

_WORD = re.compile(r" ?[a-z]{2,}")
_SHORTEST_ANSWER = 16
_ANSWER_LENGTHS = 112


class Writer:
    """Picks the tokens of answers for one tokenizer."""

    def __init__(self, tokens: ModelTokens) -> None:
        self._tokens = tokens
        words = _words(tokens)
        self._first_on_line = [token for token, text in words if not text.startswith(" ")]
        self._others = [token for token, text in words if text.startswith(" ")]
        if not (self._first_on_line and self._others):
            raise ValueError("the tokenizer has no whole words to say")

    def seed(self, prompt: Sequence[int], choice: int) -> bytes:
        """What an answer is made from; `choice` tells the answers to one prompt apart."""
        return hashlib.sha256(array("Q", [choice, *prompt]).tobytes()).digest()

    def length(self, seed: bytes) -> int:
        """Tokens of an answer that nobody limited, the end-of-turn token included."""
        return _SHORTEST_ANSWER + _pick(seed, -1, _ANSWER_LENGTHS)

    def token(self, seed: bytes, position: int, previous: int) -> int:
        """The answer's token number `position`, after the token `previous`."""
        # A word glued to the prompt's last one would be cut elsewhere when read again; after a
        # line break the space would be.
        starts_line = self._tokens.text_of([previous]).endswith("\n")
        words = self._first_on_line if starts_line else self._others
        return words[_pick(seed, position, len(words))]


def _words(tokens: ModelTokens) -> list[tuple[int, str]]:
    texts = [(token, tokens.text_of([token])) for token in range(tokens.size)]
    candidates = [(token, text) for token, text in texts if _WORD.fullmatch(text)]
    encoded = tokens.of_texts([text for _, text in candidates])
    return [word for word, ids in zip(candidates, encoded, strict=True) if ids == [word[0]]]


def _pick(seed: bytes, position: int, choices: int) -> int:
    digest = hashlib.sha256(seed + position.to_bytes(8, "big", signed=True)).digest()
    return int.from_bytes(digest[:8], "big") % choices
