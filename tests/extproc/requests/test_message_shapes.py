from typing import Any

import pytest

from extproc.errors import RequestError
from extproc.requests.message_shapes import (
    MEDIA_MARK,
    flat,
    has_media,
    in_parts,
    marked,
    texts_before_media,
)

IMAGE = {"type": "image"}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def test_texts_are_joined_by_line_ends_without_the_empty_ones() -> None:
    plain = {"role": "user", "content": "a"}
    assert flat(plain) is plain
    assert flat(user(text("a"), text(""), text("b")))["content"] == "a\nb"
    assert flat({"role": "assistant", "content": None})["content"] == ""


def test_a_text_is_one_part_and_none_are_none() -> None:
    assert in_parts({"role": "user", "content": ""})["content"] == [text("")]
    assert in_parts({"role": "assistant", "content": None})["content"] == []
    assert in_parts(user(text(""), IMAGE))["content"] == [text(""), IMAGE]


def test_what_a_tool_said_is_a_text_unless_it_showed_something() -> None:
    said = {"role": "tool", "content": [text("a"), text("b")]}
    assert in_parts(said)["content"] == "a\nb"
    assert in_parts({"role": "tool", "content": [text("a"), text("")]})["content"] == "a\n"
    assert in_parts({"role": "tool", "content": "a"})["content"] == "a"
    assert in_parts({"role": "tool", "content": None})["content"] == ""
    showed = {"role": "tool", "content": [text("a"), IMAGE]}
    assert in_parts(showed) == showed


def test_what_else_a_part_says_is_not_claimed() -> None:
    with pytest.raises(RequestError, match="unsupported_content"):
        in_parts(user({**text("a"), "cache_control": {}}))


def test_media_is_marked() -> None:
    assert has_media(user(text("a"), IMAGE))
    assert marked(user(text("a"), IMAGE)) == user(text("a"), text(MEDIA_MARK))
    plain = user(text("a"))
    assert marked(plain) is plain
    assert not has_media({"role": "user", "content": "a"})


def test_texts_before_media_end_with_it() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None},
    ]
    assert texts_before_media([*messages, user(text("b"), IMAGE, text("c"))]) == ["a", "b"]
    assert texts_before_media([*messages, user(text("b"))]) == ["a", "b"]
