"""The members of an object are found by their offsets as a decoder finds them by decoding."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstate import scan

Find = Callable[[bytes, frozenset[bytes]], tuple[scan.Span, ...] | None]
FINDERS = pytest.mark.parametrize("members", [scan.members, scan.plain_members])
NAMES = frozenset((b"ab", b"a_c", b"abc"))
SPACES = st.text(" \t\r\n", max_size=2)
LETTERS = st.tuples(st.sampled_from('abc_{}[],:"\\é'), st.sampled_from(["plain", "u", "U"]))
TEXTS = st.lists(LETTERS, max_size=3)


def spelled(letters: list[tuple[str, str]]) -> str:
    """A text in JSON, each letter as it is or as an escape of lower or upper case."""
    escapes = {"u": "\\u{:04x}", "U": "\\u{:04X}"}
    plain = [json.dumps(letter, ensure_ascii=False)[1:-1] for letter, _ in letters]
    return "".join(
        escapes[how].format(ord(letter)) if how in escapes else text
        for (letter, how), text in zip(letters, plain, strict=True)
    )


@st.composite
def objects(draw: st.DrawFn, depth: int = 0) -> str:
    """An object, written in many ways, with names that occur several times and within values."""
    count = draw(st.integers(0, 4))
    parts = [
        f'{draw(SPACES)}"{spelled(draw(TEXTS))}"{draw(SPACES)}:{draw(SPACES)}{draw(values(depth))}'
        f"{draw(SPACES)}"
        for _ in range(count)
    ]
    return f"{{{','.join(parts) or draw(SPACES)}}}"


def values(depth: int) -> st.SearchStrategy[str]:
    """A value; NaN is one for Python's json only."""
    simple = st.sampled_from(
        ["1", "-0.5e9", "null", "NaN", "[]", "[[], {}]", '["ab", 1]', '"\\"' + '"']
    )
    texts = TEXTS.map(lambda letters: f'"{spelled(letters)}"')
    return simple | texts if depth > 1 else simple | texts | objects(depth=depth + 1)


def pairs(body: bytes | str) -> list[tuple[str, Any]]:
    """The members of an object in order, as Python's decoder finds them."""
    found: list[list[tuple[str, Any]]] = []
    json.loads(body, object_pairs_hook=found.append, parse_constant=str)
    return found[-1]


@FINDERS
@given(SPACES, objects(), SPACES)
def test_members_equal_those_that_a_decoder_finds(
    members: Find, before: str, text: str, behind: str
) -> None:
    body = (before + text + behind).encode()
    found = members(body, NAMES)
    assert found is not None
    expected = [pair for pair in pairs(body) if pair[0].encode() in NAMES]
    assert [pairs(b"{%b}" % body[start:end])[0] for start, end in found] == expected
    assert all(
        body[start - 1 : start] in b"{," and body[end : end + 1] in b",}" for start, end in found
    )


@pytest.mark.skipif(not scan.IS_COMPILED, reason="no C compiler at installation")
@given(
    st.lists(st.sampled_from([*b'{}[],:"\\ \nabc_u0', 0xFF])).map(bytes) | objects().map(str.encode)
)
@example(b'{"a":1}' + b" " * 70_000)
@example(b'{"ab":1,' * 65 + b'"ab":1}')
@example(b"{" + b'"ab":1,' * 64 + b'"ab":1}')
@example(b"{" + b'"ab":1,' * 63 + b'"ab":1}')
@example(b'{"a":"\\')
def test_members_are_the_same_compiled_and_plain(body: bytes) -> None:
    for cut in range(max(0, len(body) - 40), len(body) + 1):
        assert scan.members(body[:cut], NAMES) == scan.plain_members(body[:cut], NAMES)


@FINDERS
@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"{", b"[]", b'{"ab":1', b'{"ab":1}]', b'{"ab":1,}', b'{"ab" 1}', b'{"ab":]}'],
)
def test_members_of_an_invalid_object_are_none(members: Find, body: bytes) -> None:
    assert members(body, NAMES) is None
