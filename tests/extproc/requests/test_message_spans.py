import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.requests.known_bodies import shortened, span_of

FIRST, SECOND, THIRD = '{"role": "user"}', '{"content": "]}, {"}', '{"content": []}'


def body(*messages: str, between: str = ", ", tail: str = "]}") -> bytes:
    return f'{{"model": "m", "messages": [{between.join(messages)}{tail}'.encode()


def spanned(content: bytes) -> str | None:
    span = span_of(content)
    return None if span is None else content[slice(*span)].decode()


@pytest.mark.parametrize("between", [",", ", ", "\n ,\t"])
def test_messages_span_from_the_first_to_the_last(between: str) -> None:
    assert spanned(body(FIRST)) == FIRST
    content = body(FIRST, SECOND, THIRD, between=between, tail='], "user": "u"}')
    assert spanned(content) == between.join((FIRST, SECOND, THIRD))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"messages": []}',
        b'{"messages": 1}',
        b'{"messages": [1',
        b'{"x": "\xff"}',
        b"[" * 100_000,
        b'{"x": [{}], "messages": [{} , {}]}',  # the first message stands elsewhere as well
        b'{"x": {\t \t}, "messages": [{}]}',
        b'{"messages": [{},{}, {}]}',
    ],
)
def test_messages_that_are_not_plain_to_see_have_no_span(content: bytes) -> None:
    assert span_of(content) is None


def test_a_body_is_shortened_by_what_it_shares_with_another() -> None:
    span = span_of(body(FIRST, SECOND))
    assert span is not None
    longer = body(FIRST, SECOND, THIRD, tail='], "user": "u"}')
    short = shortened(longer, *span)
    assert short is not None
    text, end = short
    assert json.loads(text) == {"model": "m", "messages": [{}, json.loads(THIRD)], "user": "u"}
    assert longer[:end].decode().endswith(THIRD)


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b",]}",
        b"{}]}",
        b',{"role": "user"},\n{"role": "user"}]}',
        b'], "x": {\t \t}}',
        b'], "messages": []}',
        b'], "messages": [{}]}',
        b'], "\\u006dessages": [{}, {}]}',
    ],
)
def test_a_rest_that_is_not_plain_is_not_shortened(rest: bytes) -> None:
    beginning = body(FIRST, tail="")
    span = span_of(beginning + b"]}")
    assert span is not None
    assert shortened(beginning + b"]}", *span) is not None
    assert shortened(beginning + rest, *span) is None


values = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
messages = st.dictionaries(st.sampled_from(("role", "content", "messages")), values, min_size=1)


@given(st.lists(messages, min_size=1, max_size=4), st.lists(messages, max_size=3), values)
def test_what_is_shortened_says_the_same(
    known: list[dict[str, Any]], added: list[dict[str, Any]], other: object
) -> None:
    span = span_of(json.dumps({"messages": known}).encode())
    longer = json.dumps({"messages": known + added, "x": other}).encode()
    short = None if span is None else shortened(longer, *span)
    if short is not None:
        assert json.loads(short[0]) == {"messages": [{}, *added], "x": other}
        assert longer[: short[1]].decode().endswith(json.dumps((known + added)[-1]))
