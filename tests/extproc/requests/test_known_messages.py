"""Messages by their bytes: read once, and the same as if they were read anew."""

import contextlib
import copy
import json
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.requests import chat_request, messages_request, responses_request
from extproc.requests.dialect import NEWEST
from extproc.requests.known_messages import KnownMessages, memory_of
from extproc.requests.prompt import MAX_MESSAGES, Chat
from extproc.requests.request import parse
from extproc.templates.chat_template import ChatTemplate
from tests.extproc.template_shapes import SHAPES, SPECIAL_TOKENS

APIS: dict[str, Any] = {
    "messages": (chat_request, '{"messages":[%s]}'),
    "blocks": (messages_request, '{"max_tokens":9,"system":"s","messages":[%s]}'),
    "items": (responses_request, '{"input":[%s]}'),
}


def call(arguments: str) -> str:
    return '{"id":"c","type":"function","function":{"name":"f","arguments":' + arguments + "}}"


def calling(*arguments: str) -> str:
    return '{"role":"assistant","tool_calls":[' + ",".join(map(call, arguments)) + "]}"


PIECES = [
    '{"role":"user","content":"a"}',
    '{"content":"a","role":"user"}',
    '{"role":"user","content":"a","content":"b"}',
    '{"r\\u006fle":"user","content":"\\u0061\\ud83d\\ude00"}',
    '{"role":"system","content":"x-anthropic-billing-header: 1\\nb"}',
    '{"role":"assistant","content":"a","reasoning":"t"}',
    calling('"{\\"x\\":[1,{}]}"'),
    calling('"{}"', "{}"),
    calling('"no"'),
    '{"role":"assistant","tool_calls":7}',
    '{"role":"tool","content":"r","tool_call_id":"c"}',
    '{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b","x":1}]}',
    '{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}',
    '{"role":"assistant","content":[{"type":"thinking","thinking":"t"}]}',
    '{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":{"x":1}}]}',
    '{"role":"user","content":[{"type":"tool_result","tool_use_id":"c","content":"r"}]}',
    '{"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"t"}]}',
    '{"type":"function_call","call_id":"c","name":"f","arguments":"{\\"x\\":1}"}',
    '{"type":"function_call_output","call_id":"c","output":"r"}',
    '{"role":"user","content":"\\ud800"}',
    '{"role":"user","content":"\\q"}',
    '{"role":"user","content":"\xff"}',
    '{"role":"user",}',
    "7",
    "",
]
conversations = st.lists(st.sampled_from(PIECES), max_size=6)


def outcome(api: Any, body: bytes) -> Any:
    try:
        return parse(api.PATH, body, lambda _: NEWEST)
    except RequestError as error:
        return error.reason


@pytest.mark.parametrize("name", APIS)
@given(pieces=conversations)
def test_known_messages_make_the_request_that_new_ones_make(name: str, pieces: list[str]) -> None:
    api, shape = APIS[name]
    body = (shape % ",".join(pieces)).encode("latin-1")
    known = api._known
    api._known = KnownMessages(known._read, max_bytes=0)  # reads all of them anew
    anew = outcome(api, body)
    api._known = known
    assert [outcome(api, body) for _ in range(2)] == [anew, anew]


@pytest.mark.parametrize("name", SHAPES)
@given(st.lists(st.sampled_from([one for one in PIECES if "ud800" not in one]), max_size=6))
def test_templates_leave_shared_messages_as_they_are(name: str, pieces: list[str]) -> None:
    api, shape = APIS["messages"]
    request = outcome(api, (shape % ",".join(pieces)).encode("latin-1"))
    chat = request if isinstance(request, str) else request.prompts[0]
    before = copy.deepcopy(chat.messages) if isinstance(chat, Chat) else None
    if isinstance(chat, Chat) and not chat.has_media:
        with contextlib.suppress(RequestError):
            ChatTemplate(SHAPES[name], SPECIAL_TOKENS).render(chat)
        assert chat.messages == before
        assert outcome(api, (shape % ",".join(pieces)).encode("latin-1")) == request


def counting(read: list[bytes], max_bytes: int) -> KnownMessages[Any]:
    def decode(written: bytes) -> Any:
        read.append(written)
        return msgspec.json.decode(written)

    return KnownMessages(decode, max_bytes=max_bytes)


def raws(*values: Any) -> list[msgspec.Raw]:
    return [msgspec.Raw(json.dumps(one).encode()) for one in values]


def test_only_new_messages_are_read() -> None:
    read: list[bytes] = []
    known = counting(read, 100_000)
    for count in (1, 2, 3, 3):
        assert known.read(raws(*"abc"[:count])) == [*"abc"[:count]]
    assert read == [b'"a"', b'"b"', b'"c"']


def test_messages_that_were_not_asked_for_lately_are_forgotten() -> None:
    read: list[bytes] = []
    known = counting(read, 2 * 3_000)  # two in each generation
    for one in ("a", "b", "c", "a", "d", "e", "a", "b", "x" * 3_000, "x" * 3_000):
        known.read(raws(one))
    assert [json.loads(one)[:1] for one in read] == ["a", "b", "c", "d", "e", "b", "x", "x"]


HOSTILE: dict[str, Callable[[int], str]] = {
    "lists": lambda at: "[" * 200 + f"{at}" + "]" * 200,
    "empty objects": lambda at: f"[{at}" + ",{}" * 300 + "]",
    "names": lambda at: "{" + ",".join(f'"{at}-{n}":0' for n in range(200)) + "}",
    "wide text": lambda at: json.dumps(f"{at}" + "a" * 3_000 + "\U0001f600"),
    "escaped": lambda at: json.dumps(f"{at}" + "\u4e2d" * 500),
    "nothing": lambda at: f'"{at}"',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_memory_is_bounded_whatever_messages_hold(name: str) -> None:
    most = 1_000_000
    known = counting([], most)
    known._read = msgspec.json.decode  # keeps nothing of its own
    tracemalloc.start()
    try:
        for at in range(600):
            known.read([msgspec.Raw(HOSTILE[name](at).encode())])
        assert tracemalloc.get_traced_memory()[0] < most
    finally:
        tracemalloc.stop()


def held_bytes(value: Any) -> int:
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    shallow = inner if isinstance(value, list | dict) else ()
    return sys.getsizeof(value) + sum(map(held_bytes, shallow))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.lists(json_values), st.booleans())
def test_messages_take_at_most_the_memory_that_is_counted(values: list[Any], escaped: bool) -> None:
    written = [json.dumps(one, ensure_ascii=escaped).encode("utf-8", "replace") for one in values]
    held = sum(held_bytes(msgspec.json.decode(one)) for one in written)
    assert held <= memory_of(b",".join(written))


@pytest.mark.parametrize("name", ["messages", "blocks"])
def test_too_many_messages_are_not_read(name: str) -> None:
    api, shape = APIS[name]
    body = shape % ",".join(['{"role":"user","content":"a"}'] * (MAX_MESSAGES + 1))
    assert outcome(api, body.encode()) == "too_many_messages"
