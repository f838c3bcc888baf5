"""Lists of tools by their bytes: read once, and the same as if they were read anew."""

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.requests.dialect import NEWEST
from extproc.requests.known_tools import (
    MAX_BYTES,
    MOST_LISTS,
    MOST_MARKS,
    PrintedTool,
    PrintedTools,
    Tools,
    read_tools,
)
from extproc.requests.prompt import Chat
from extproc.requests.request import parse

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
SENT: Tools = [{"type": "function", "function": FUNCTION}]


def raw(tools: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(tools).encode())


def printed(tools: Tools) -> PrintedTools:
    return PrintedTools([{"function": one["function"], "type": "function"} for one in tools], 1)


def with_functions(tools: Tools) -> PrintedTools:
    return PrintedTools([{"function": {}, **one} for one in tools])


def test_known_tools_are_neither_decoded_nor_converted_again() -> None:
    known, converted = read_tools(raw(SENT)), []
    assert known is not None
    assert known is read_tools(raw(SENT))
    assert known.sent == SENT

    def convert(tools: Tools) -> PrintedTools:
        converted.append(tools)
        return printed(tools)

    first = known.printed("test", convert)
    assert first == (SENT, 1)
    assert first is known.printed("test", convert)
    assert converted == [SENT]
    assert known.printed("others", lambda _: PrintedTools([])) == ([], 0)


def test_tools_that_cannot_be_printed_are_refused_each_time() -> None:
    def refuse(_: Tools) -> PrintedTools:
        raise RequestError("unsupported_tools")

    for _ in range(2):
        known = read_tools(raw(SENT))
        assert known is not None
        with pytest.raises(RequestError, match="unsupported_tools"):
            known.printed("refusing", refuse)


@pytest.mark.parametrize("item", [b"{}", b'{"function":{}}', b'{"function":{"a":[[],[],[]]}}'])
def test_known_lists_take_some_tens_of_megabytes_at_the_worst(item: bytes) -> None:
    marks = sum(map(item.count, (b",", b"{", b"["))) + 1
    count = min(MAX_BYTES // (len(item) + 1), MOST_MARKS // marks) - 1
    assert read_tools(msgspec.Raw(b"[]")) is read_tools(msgspec.Raw(b"[]"))
    tracemalloc.start()
    for number in range(4):
        written = b" " * number + b"[" + b",".join([item] * count) + b"]"
        known = read_tools(msgspec.Raw(written))
        assert known is not None
        assert known is read_tools(msgspec.Raw(written))
        known.printed("test", with_functions)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / 4 * MOST_LISTS < 100_000_000


def test_lists_of_many_values_are_not_kept() -> None:
    many = msgspec.Raw(b"[" + b",".join([b"{}"] * MOST_MARKS) + b"]")
    assert read_tools(many) is not read_tools(many)


def test_null_is_no_list_and_long_lists_are_not_kept() -> None:
    assert read_tools(raw(None)) is None
    long = [{"name": "x" * MAX_BYTES}]
    known = read_tools(raw(long))
    assert known is not None
    assert known.sent == long
    assert known is not read_tools(raw(long))


@pytest.mark.parametrize("tools", [5, "tools", {}, [5], [None]])
def test_anything_else_is_no_list_of_tools(tools: Any) -> None:
    for _ in range(2):
        with pytest.raises(msgspec.DecodeError):
            read_tools(raw(tools))


def test_json_of_a_tool_is_written_once() -> None:
    tool, texts = PrintedTool(FUNCTION), iter(["first"])

    def write(_: object) -> str:
        return next(texts)

    assert [tool.json(write), tool.json(write)] == ["first"] * 2
    assert tool == FUNCTION


def bodies(tools: Tools) -> Iterator[tuple[str, bytes]]:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": tools}),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [
                    {"name": tool["function"]["name"], "input_schema": {"type": "object"}}
                    for tool in tools
                ],
            },
        ),
        (
            "/v1/responses",
            {"input": "a", "tools": [{"type": "function", **tool["function"]} for tool in tools]},
        ),
    ]
    for path, body in asked:
        yield path, json.dumps({"model": "m", "max_tokens": 9, **body}).encode()


NAMES = st.lists(st.sampled_from(["f", "g", "é", "\n"]), min_size=1, max_size=3)


@given(st.lists(NAMES, max_size=5))
def test_tools_of_a_request_do_not_depend_on_those_before(requests: list[list[str]]) -> None:
    for names in requests:
        tools = [{"type": "function", "function": {**FUNCTION, "name": name}} for name in names]
        for path, body in bodies(tools):
            (prompt,) = parse(path, body, lambda _: NEWEST).prompts
            assert isinstance(prompt, Chat)
            found = [tool["function"]["name"] for tool in prompt.variables["tools"]]
            assert found == names
