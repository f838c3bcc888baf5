import json
from typing import Any

import pytest

from extproc.errors import RequestError
from extproc.requests.chat_request import (
    MEDIA_MARK,
    flat,
    has_media,
    in_parts,
    marked,
    messages_of,
    texts_before_media,
)
from extproc.requests.prompt import MAX_MESSAGES

USER = {"role": "user", "content": "hello"}
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image"}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def only(message: dict[str, Any], *, orders_calls: bool = True) -> dict[str, Any]:
    (parsed,), _ = messages_of([message], orders_calls=orders_calls)
    return parsed


def refusal(*messages: dict[str, Any]) -> str:
    with pytest.raises(RequestError) as caught:
        messages_of([*messages])
    return caught.value.reason


def test_templates_see_of_a_message_only_what_an_engine_shows_them() -> None:
    said = {"role": "assistant", "content": None, "name": "n", "refusal": "r", "reasoning": "w"}
    result = {"role": "tool", "content": "c", "tool_call_id": "1", "tool_calls": [5]}
    assert only(said) == {"role": "assistant", "content": None, "name": "n", "reasoning": "w"}
    assert only(result) == {"role": "tool", "content": "c", "tool_call_id": "1"}
    assert only({"role": "user", "content": "u", "name": 5}) == {"role": "user", "content": "u"}
    developer = {"role": "developer", "content": "d"}
    assert only(developer) == {**developer, "tools": None}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "a"},
        {"type": "refusal", "refusal": "a"},
    ],
)
def test_parts_of_text_have_many_names(part: dict[str, Any]) -> None:
    assert only({"role": "user", "content": [part, TEXT]})["content"] == [TEXT, TEXT]


def test_what_else_a_part_says_is_kept_for_the_template_to_refuse() -> None:
    part = {**TEXT, "cache_control": {"type": "ephemeral"}}
    assert only({"role": "user", "content": [part]})["content"] == [part]


@pytest.mark.parametrize(
    ("kind", "media"),
    [
        ("image_url", "image"),
        ("input_image", "image"),
        ("input_audio", "audio"),
        ("audio_url", "audio"),
        ("video_url", "video"),
    ],
)
def test_media_is_named_by_its_kind_alone(kind: str, media: str) -> None:
    part = {"type": kind, kind: {"url": "data:x"}}
    (message, _), has_media = messages_of([{"role": "user", "content": [TEXT, part]}, USER])
    assert has_media
    assert message["content"] == [TEXT, {"type": media}]


@pytest.mark.parametrize(
    ("arguments", "parsed"), [('{"a": 1}', {"a": 1}), ("", {}), (None, {}), ({"a": 1}, {"a": 1})]
)
def test_tool_call_arguments_become_objects(arguments: object, parsed: object) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    message = only({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == parsed


def test_tool_calls_have_the_order_of_keys_in_which_engines_print_them() -> None:
    call = {"index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}, "id": "1"}
    message = {"role": "assistant", "tool_calls": [call]}
    assert json.dumps(only(message)["tool_calls"][0]) == (
        '{"id": "1", "function": {"arguments": {}, "name": "f"}, "type": "function", "index": 0}'
    )
    as_given = only(message, orders_calls=False)["tool_calls"][0]
    assert list(as_given) == ["index", "type", "function", "id"]


@pytest.mark.parametrize("calls", [None, []])
def test_a_turn_without_calls_has_none(calls: object) -> None:
    assert "tool_calls" not in only({"role": "assistant", "content": "a", "tool_calls": calls})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "no role"}, "bad_request"),
        ({"role": "user", "content": 5}, "bad_request"),
        ({"role": "user", "content": ["bare"]}, "unsupported_content"),
        ({"role": "user", "content": [{"text": "no type"}]}, "unsupported_content"),
        ({"role": "user", "content": [{"type": "file"}]}, "unsupported_content"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "unsupported_content"),
        ({"role": "user", "content": [{**TEXT, "image_url": "u"}]}, "unsupported_content"),
        ({"role": "user", "content": "a", "task": "t"}, "unsupported_task"),
        ({"role": "developer", "tools": [{}]}, "unsupported_tools"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "bad_request"),
        ({"role": "assistant", "tool_calls": [5]}, "bad_request"),
        ({"role": "assistant", "tool_calls": [{"function": 5}]}, "bad_request"),
    ],
)
def test_messages_that_cannot_be_keyed_say_why(message: dict[str, Any], reason: str) -> None:
    assert refusal(USER, message) == reason


@pytest.mark.parametrize("arguments", ["{", "[]", "5", [1]])
def test_arguments_that_are_no_object_are_not_claimed(arguments: object) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    assert refusal({"role": "assistant", "tool_calls": [call]}) == "unsupported_tool_arguments"


@pytest.mark.parametrize("as_part", [True, False])
def test_a_line_that_only_some_releases_strip_is_not_claimed(as_part: bool) -> None:  # noqa: FBT001
    line = "x-anthropic-billing-header: cch=1"
    content = [{"type": "text", "text": line}] if as_part else line
    assert refusal({"role": "system", "content": content}) == "unsupported_billing_line"
    assert only({"role": "user", "content": content})
    assert only({"role": "system", "content": None})


def test_too_many_messages_are_not_keyed() -> None:
    assert refusal(*[USER] * (MAX_MESSAGES + 1)) == "too_many_messages"
    assert refusal() == "empty_prompt"


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
