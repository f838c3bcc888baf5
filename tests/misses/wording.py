"""Replaces the words of what clients say by themselves by made-up ones, the same everywhere.

A recording is of use for its shape: which parts a request has, how long they are, what repeats and
what changes from turn to turn. The sentences in it are others', so they are not kept. What our own
scripts say, tags, numbers, names of tools and ids stay as they are.
"""

import re
from collections.abc import Collection
from hashlib import sha256
from typing import Any

from extproc.requests.messages_request import BILLING_LINE

# Fields whose texts clients write, and those of the model and of tools, which our scripts write.
_SAID = frozenset(("text", "content", "description", "instructions", "system", "title"))
_SCRIPTED = frozenset(
    ("assistant", "tool", "tool_result", "function_call_output", "custom_tool_call_output")
)

# A part of a text with this is of our scripts.
TASK = re.compile(r"Task [a-z-]+-\d+|Now show calc\.py")

# A tag, or a word of three letters at least.
_WORD = re.compile(r"</?[A-Za-z_-]+>|[A-Za-z]{3,}")
_SYLLABLES = ("ba", "den", "fi", "gol", "hu", "ka", "lem", "mi", "nor", "pu", "ras", "ti", "vel")


def made_up(word: str) -> str:
    """A made-up word for another one, as long, and with capitals at the same places."""
    digest = sha256(word.lower().encode()).digest()
    letters = "".join(_SYLLABLES[byte % len(_SYLLABLES)] for byte in digest)[: len(word)]
    letters = letters.ljust(len(word), "a")
    pairs = zip(letters, word, strict=True)
    return "".join(made.upper() if old.isupper() else made for made, old in pairs)


def reworded(body: dict[str, Any]) -> dict[str, Any]:
    """A request's body with made-up words where its client speaks."""
    found: dict[str, Any] = _value(body, _names_of(body), is_said=False)
    return found


def _names_of(body: dict[str, Any]) -> Collection[str]:
    """The names of its tools, which texts speak of."""
    tools = body.get("tools") or ()
    return {str((one.get("function") or one).get("name")) for one in tools}


def _value(value: Any, names: Collection[str], *, is_said: bool) -> Any:
    if isinstance(value, str):
        return _text(value, names) if is_said else value
    if isinstance(value, list):
        return [_value(one, names, is_said=is_said) for one in value]
    if not isinstance(value, dict):
        return value
    kinds = [value.get("role"), value.get("type")]
    if any(one in _SCRIPTED for one in kinds if isinstance(one, str)):
        return value
    return {
        key: _value(one, names, is_said=key in _SAID and not isinstance(one, dict))
        for key, one in value.items()
    }


def _text(text: str, names: Collection[str]) -> str:
    if text.startswith(BILLING_LINE) or TASK.search(text):
        return text

    def word(found: re.Match[str]) -> str:
        one = found[0]
        return one if one.startswith("<") or one in names else made_up(one)

    return _WORD.sub(word, text)
