"""Whether recordings keep the shape of what clients say, and none of their sentences."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.misses.recordings import CLIENTS, recorded
from tests.misses.wording import TASK, made_up, reworded

SYSTEM = "You are an agent. Use Read, and <think> of 12 Things.\n"
ASKED = {"role": "user", "content": [{"type": "text", "text": "Task codex-1: why does it fail?"}]}
ANSWERED = {"role": "assistant", "content": "I look at it.", "tool_calls": [{"id": "call_1"}]}
TOOL = {"name": "Read", "description": "Reads a file.", "parameters": {"type": "object"}}
CHAT = {
    "messages": [{"role": "system", "content": SYSTEM}, ASKED, ANSWERED],
    "tools": [{"type": "function", "function": TOOL}],
}

# Words that English texts of some length have, and made-up ones are not.
COMMON = re.compile(r"\b(?:the|and|that|with|from|this|when|should)\b", re.IGNORECASE)


def test_words_of_clients_are_made_up_and_their_shape_is_kept() -> None:
    made = reworded(CHAT)
    text = made["messages"][0]["content"]
    shape = re.sub(r"[a-z]{3,}", "w", re.sub(r"[A-Z][a-z]{2,}", "W", text))
    assert shape == "W w an w. W W, w <w> of 12 W.\n"
    assert len(text) == len(SYSTEM)
    assert "Read, " in text
    assert not COMMON.search(text)
    assert made["messages"][1:] == [ASKED, ANSWERED]
    described = made["tools"][0]["function"]
    assert (described["name"], described["parameters"]) == ("Read", {"type": "object"})
    assert "file" not in described["description"]


def test_word_is_made_up_the_same_everywhere() -> None:
    assert made_up("Agent").lower() == made_up("agent")
    assert made_up("AGENT").isupper()
    assert len(made_up("word" * 50)) == 200


def texts_of(value: Any) -> Iterator[str]:
    """The texts that clients write by themselves."""
    if isinstance(value, dict):
        if value.get("role") in ("assistant", "tool") or value.get("type") == "tool_result":
            return
        for key, one in value.items():
            if isinstance(one, str) and key in ("text", "content", "description", "instructions"):
                yield one
            yield from texts_of(one) if not isinstance(one, str) else ()
    elif isinstance(value, list):
        for one in value:
            yield from texts_of(one)


@pytest.mark.parametrize("client", CLIENTS)
def test_recordings_have_no_sentences_of_clients(client: str) -> None:
    count = 0
    for conversation in recorded(client).values():
        for asked in conversation.asked:
            own = [text for text in texts_of(asked.body) if not TASK.search(text)]
            assert [text for text in own if COMMON.search(text)] == []
            count += sum(map(len, own))
    assert count > 100_000
