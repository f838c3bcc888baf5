import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.requests.chat_request import (
    MEDIA_MARK,
    flat,
    has_media,
    has_part_fields,
    in_parts,
    marked,
    messages_of,
    texts_before_media,
    without_billing_line,
    without_part_fields,
)
from extproc.requests.prompt import (
    BILLING,
    EMPTIED,
    LEFT_OUT,
    MAX_MESSAGES,
    TOOL_REFERENCES,
)

USER = {"role": "user", "content": "hello"}
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image"}
LINE = "x-anthropic-billing-header: cch=1"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def only(message: dict[str, Any], *, orders_calls: bool = True) -> dict[str, Any]:
    (parsed,), *_ = messages_of([message], orders_calls=orders_calls)
    return parsed


def refusal(*messages: dict[str, Any]) -> str:
    with pytest.raises(RequestError) as caught:
        messages_of([*messages])
    return caught.value.reason


def test_message_keeps_only_fields_that_engines_show_to_templates() -> None:
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
        {"type": "refusal", "refusal": "a", "text": "b"},
    ],
)
def test_text_parts_have_many_names(part: dict[str, Any]) -> None:
    assert only({"role": "user", "content": [part, TEXT]})["content"] == [TEXT, TEXT]


def test_other_fields_of_a_part_are_kept_for_the_template_to_refuse() -> None:
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
def test_media_part_is_named_by_its_kind_alone(kind: str, media: str) -> None:
    part = {"type": kind, kind: {"url": "data:x"}}
    (message, _), has_media, _ = messages_of([{"role": "user", "content": [TEXT, part]}, USER])
    assert has_media
    assert message["content"] == [TEXT, {"type": media}]


@pytest.mark.parametrize(
    ("arguments", "parsed"), [('{"a": 1}', {"a": 1}), ("", {}), (None, {}), ({"a": 1}, {"a": 1})]
)
def test_tool_call_arguments_become_objects(arguments: object, parsed: object) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    message = only({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == parsed


def test_tool_calls_have_the_key_order_of_engines() -> None:
    call = {"index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}, "id": "1"}
    message = {"role": "assistant", "tool_calls": [call]}
    assert json.dumps(only(message)["tool_calls"][0]) == (
        '{"id": "1", "function": {"arguments": {}, "name": "f"}, "type": "function", "index": 0}'
    )
    as_given = only(message, orders_calls=False)["tool_calls"][0]
    assert list(as_given) == ["index", "type", "function", "id"]


@pytest.mark.parametrize(
    ("message", "is_unchanged"),
    [
        ({"role": "tool", "content": "a", "tool_call_id": "1"}, True),
        ({"role": "tool", "tool_call_id": "1", "content": "a"}, False),
        ({"role": "tool", "content": [TEXT], "tool_call_id": "1"}, False),
        ({"role": "user", "content": "a", "tool_call_id": "1"}, False),
    ],
)
def test_result_in_the_form_of_templates_is_passed_on(
    message: dict[str, Any], is_unchanged: bool
) -> None:
    assert (only(message) is message) is is_unchanged
    (parsed, _), *_ = messages_of([message, {"role": "assistant"}])
    assert (parsed is message) is is_unchanged


@pytest.mark.parametrize("calls", [None, []])
def test_turn_without_calls_has_no_tool_calls(calls: object) -> None:
    assert "tool_calls" not in only({"role": "assistant", "content": "a", "tool_calls": calls})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "no role"}, "bad_request"),
        ({"role": "user", "content": 5}, "bad_request"),
        ({"role": "user", "content": None}, "bad_request"),
        ({"role": "tool", "tool_call_id": "1", "content": None}, "bad_request"),
        ({"role": "user", "content": [5]}, "unsupported_content"),
        ({"role": "tool", "content": [{"type": "tool_reference"}]}, "unsupported_content"),
        ({"role": "user", "content": [{"text": "no type"}]}, "unsupported_content"),
        ({"role": "user", "content": [{"type": "file"}]}, "unsupported_content"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "unsupported_content"),
        ({"role": "developer", "tools": [{}]}, "unsupported_tools"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "bad_request"),
        ({"role": "assistant", "tool_calls": [5]}, "bad_request"),
        ({"role": "assistant", "tool_calls": [{"function": 5}]}, "bad_request"),
    ],
)
def test_unkeyable_messages_name_their_reason(message: dict[str, Any], reason: str) -> None:
    assert refusal(USER, message) == reason


def calling(arguments: object) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }


def arguments_of(message: dict[str, Any]) -> object:
    (call,) = message["tool_calls"]
    return call["function"]["arguments"]


@given(st.text('{}[]",:\\udu8NaI0e- \ufeff', max_size=14) | VALUES.map(json.dumps))
def test_arguments_of_a_call_are_read_as_the_engine_reads_them(text: str) -> None:
    try:
        found = json.loads(text) if text else {}
    except json.JSONDecodeError:
        found = None
    (message,), _, forms = messages_of([calling(text)])
    assert repr(arguments_of(message)) == repr(found if isinstance(found, dict) else {})
    assert forms == (0 if isinstance(found, dict) else EMPTIED)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([1], "unsupported_tool_arguments"),
        ('{"a": %s}' % ("1" * 5000), "unsupported_tool_arguments"),
        ('{"a": %s}' % ("[" * 3000 + "]" * 3000), "odd_json"),
        ('{"a": "\\ud800"}', "odd_json"),
    ],
)
def test_arguments_that_only_the_engine_judges_are_refused(arguments: object, reason: str) -> None:
    assert refusal(calling(arguments)) == reason


@pytest.mark.parametrize(
    ("part", "passed_on", "forms"),
    [
        ("bare", text("bare"), LEFT_OUT),
        (
            {"type": "thinking", "thinking": "hm", "closed": True, "new": 1},
            {**text("hm"), "new": 1},
            LEFT_OUT,
        ),
        ({**TEXT, "image_url": "u", "new": 1}, {**TEXT, "new": 1}, LEFT_OUT),
        ({**TEXT, "name": "n", "uuid": None}, TEXT, LEFT_OUT),
        ({**TEXT, "new": 1}, {**TEXT, "new": 1}, 0),
        (
            {"name": "f", "type": "tool_reference", "new": 1},
            {"type": "tool_reference", "name": "f"},
            TOOL_REFERENCES,
        ),
    ],
)
def test_parts_have_the_fields_that_templates_get(
    part: object, passed_on: object, forms: int
) -> None:
    (message,), has_media, found = messages_of([{"role": "user", "content": [part]}])
    assert (message["content"], has_media, found) == ([passed_on], False, forms)


def test_named_tools_are_texts_to_templates_of_texts_and_parts_to_others() -> None:
    parts = [text("a"), {"type": "tool_reference", "name": "f"}]
    message = {"role": "tool", "content": parts}
    assert flat(message)["content"] == "a\nf"
    assert in_parts(message) == message


def test_task_is_passed_on() -> None:
    (message,), _, forms = messages_of([{"role": "user", "content": "a", "task": "t"}])
    assert (message["task"], forms) == ("t", LEFT_OUT)


@pytest.mark.parametrize("as_part", [True, False])
def test_billing_line_of_a_system_turn_is_a_form_of_its_own(as_part: bool) -> None:
    content = [text(LINE)] if as_part else LINE
    assert messages_of([{"role": "system", "content": content}])[2] == BILLING
    for other in ({"role": "user", "content": content}, {"role": "system"}):
        assert messages_of([other])[2] == 0


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (LINE, []),
        (f"{LINE}\nrules", [text("rules")]),
        ([text(LINE), text(""), text(f"{LINE}\nb")], [text(""), text("b")]),
        ([{**text(f"{LINE}\na"), "cache_control": {}}], [{**text("a"), "cache_control": {}}]),
    ],
)
def test_billing_line_is_cut_off_the_texts_that_begin_with_it(content: Any, left: object) -> None:
    assert without_billing_line({"role": "system", "content": content})["content"] == left
    user = {"role": "user", "content": content}
    assert without_billing_line(user) is user


def test_messages_beyond_the_limit_are_refused() -> None:
    assert refusal(*[USER] * (MAX_MESSAGES + 1)) == "too_many_messages"
    assert refusal() == "empty_prompt"


def test_flat_joins_texts_by_line_ends_without_empty_ones() -> None:
    plain = {"role": "user", "content": "a"}
    assert flat(plain) is plain
    assert flat(user(text("a"), text(""), text("b")))["content"] == "a\nb"
    assert flat({"role": "assistant", "content": None})["content"] == ""


def test_in_parts_turns_a_text_into_one_part_and_none_into_none() -> None:
    assert in_parts({"role": "user", "content": ""})["content"] == [text("")]
    assert in_parts({"role": "assistant", "content": None})["content"] == []
    assert in_parts(user(text(""), IMAGE))["content"] == [text(""), IMAGE]


def test_in_parts_keeps_a_tool_result_a_text_without_media() -> None:
    said = {"role": "tool", "content": [text("a"), text("b")]}
    assert in_parts(said)["content"] == "a\nb"
    assert in_parts({"role": "tool", "content": [text("a"), text("")]})["content"] == "a\n"
    assert in_parts({"role": "tool", "content": "a"})["content"] == "a"
    assert in_parts({"role": "tool", "content": None})["content"] == ""
    showed = {"role": "tool", "content": [text("a"), IMAGE]}
    assert in_parts(showed) == showed


def test_other_fields_of_text_parts_are_found_and_left_out() -> None:
    fielded = user({**text("a"), "cache_control": {}}, IMAGE)
    assert has_part_fields(fielded)
    assert without_part_fields(fielded) == user(text("a"), IMAGE)
    for plain in (user(text("a"), IMAGE), USER, {**fielded, "role": "tool"}):
        assert not has_part_fields(plain)
        assert without_part_fields(plain) is plain


def test_media_is_marked() -> None:
    assert has_media(user(text("a"), IMAGE))
    assert marked(user(text("a"), IMAGE)) == user(text("a"), text(MEDIA_MARK))
    plain = user(text("a"))
    assert marked(plain) is plain
    assert not has_media({"role": "user", "content": "a"})


def test_texts_before_media_end_at_the_first_media() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None},
    ]
    assert texts_before_media([*messages, user(text("b"), IMAGE, text("c"))]) == ["a", "b"]
    assert texts_before_media([*messages, user(text("b"))]) == ["a", "b"]
