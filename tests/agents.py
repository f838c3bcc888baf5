"""Conversations in the shapes of coding agents' requests, with words of our own."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

Body = dict[str, Any]

_WORDS = (
    "read",
    "edit",
    "run",
    "the",
    "a",
    "test",
    "file",
    "that",
    "fails",
    "again",
    "then",
    "why",
)
_BILLING = "x-anthropic-billing-header: cc_version=2.1.197; cch=%05x;"


def prose(words: int, seed: object) -> str:
    """Some words, the same for the same seed."""
    rng = Random(str(seed))
    return " ".join(rng.choices(_WORDS, k=words))


def claude_code(number: int, turns: int) -> Iterator[Body]:
    """The requests of one conversation to /v1/messages, with the system first.

    Its billing line changes with every request, and only the newest block has `cache_control`. Its
    conversations share their system, which is most of a request.
    """
    messages: list[Body] = []
    for turn in range(turns):
        asked = {"type": "text", "text": f"task {number}, step {turn}: {prose(60, (number, turn))}"}
        messages.append({"role": "user", "content": [asked]})
        newest = json.loads(json.dumps(messages))
        newest[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        cch = Random(str((number, turn))).randrange(1 << 20)
        yield {
            "model": "tiny",
            "system": [
                {"type": "text", "text": _BILLING % cch},
                {"type": "text", "text": prose(3_000, "system")},
            ],
            "messages": newest,
            "max_tokens": 8,
        }
        said = {"type": "text", "text": prose(40, (turn, number))}
        messages.append({"role": "assistant", "content": [said]})


def codex(number: int, turns: int) -> Iterator[Body]:
    """The requests of one conversation to /v1/responses; `client_metadata` changes its order."""
    items: list[Body] = []
    tools = [
        {"type": "function", "name": f"tool_{at}", "description": prose(80, at), "parameters": {}}
        for at in range(12)
    ]
    for turn in range(turns):
        text = f"task {number}, step {turn}: {prose(60, (number, turn))}"
        said = [{"type": "input_text", "text": text}]
        items.append({"type": "message", "role": "user", "content": said})
        about = {"a": str(turn), "b": str(number)}
        names = Random(turn).sample(sorted(about), 2)
        yield {
            "model": "tiny",
            "client_metadata": {name: about[name] for name in names},
            "instructions": prose(2_000, "instructions"),
            "input": list(items),
            "tools": tools,
            "store": False,
        }
        items += [
            {"type": "reasoning", "id": f"rs_{turn}", "summary": [], "encrypted_content": "x"},
            {"type": "function_call", "call_id": "c", "name": "tool_1", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": prose(200, text)},
        ]
