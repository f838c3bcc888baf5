"""The members of an object are found by their offsets as a decoder finds them by decoding."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstate import scan
from kvstate.errors import ManyMembersError, MembersError, NoObjectError
from kvstate.scan import Edit, Members, Parts
from tests.oracles import plain_scan

Find = Callable[[bytes, tuple[bytes, ...]], Members]
FINDERS = pytest.mark.parametrize("members", [scan.members, plain_scan.members])
NAMES = (b"ab", b"a_c", b"abc")
PARTS = Parts(1, b"a_c", (b"abc",), 3)
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
    expected = [pair for pair in pairs(body) if pair[0].encode() in NAMES]
    assert [pairs(b"{%b}" % body[one.start : one.end])[0] for one in found.each] == expected
    assert [one.name.decode() for one in found.each] == [name for name, _ in expected]
    for one in found.each:
        assert body[one.start - 1 : one.start] in b"{,"
        assert body[one.end : one.end + 1] in b",}"
        value = body[one.value : one.value_end]
        assert value == value.strip()
        assert body[one.start : one.end].endswith(value + body[one.value_end : one.end])
    assert found.total == len(pairs(body))
    assert body[found.close :].strip() == b"}"


@given(
    st.lists(st.sampled_from([*b'{}[],:"\\ \nabc_u0', 0xFF])).map(bytes) | objects().map(str.encode)
)
@example(b'{"a":1}' + b" " * 70_000)
@example(b'{"ab":1,' * 65 + b'"ab":1}')
@example(b"{" + b'"ab":1,' * 64 + b'"ab":1}')
@example(b"{" + b'"ab":1,' * 63 + b'"ab":1}')
@example(b'{"a":"\\')
@example(b'{"ab":[[[{"a_c":1}]]]}')
@example(b'{"ab":[1}')
@example(b'{"ab":[{"abc":[{"a_c":null}]}, {"a_c":2}]}')
def test_members_are_those_of_the_plain_scan(body: bytes) -> None:
    for cut in range(max(0, len(body) - 40), len(body) + 1):
        for parts in (scan.NO_PARTS, PARTS):
            compiled = read_by(lambda: scan.members(body[:cut], NAMES, parts))  # noqa: B023
            assert compiled == read_by(lambda: plain_scan.members(body[:cut], NAMES, parts))  # noqa: B023


def read_by(find: Callable[[], Members]) -> Members | type[MembersError]:
    """What was found, or why nothing was."""
    try:
        return find()
    except MembersError as error:
        return type(error)


@FINDERS
@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"{", b"[]", b'{"ab":1', b'{"ab":1}]', b'{"ab":1,}', b'{"ab" 1}', b'{"ab":]}'],
)
def test_what_is_no_object_cannot_be_taken_for_one_without_members(
    members: Find, body: bytes
) -> None:
    with pytest.raises(NoObjectError):
        members(body, NAMES)


@FINDERS
@pytest.mark.parametrize("count", [63, 64, 65])
def test_too_many_members_cannot_be_taken_for_none(members: Find, count: int) -> None:
    body = b'{%b"x":1}' % (b'"ab":1,' * count)
    if count <= scan.MAX_MEMBERS:
        assert len(members(body, NAMES).each) == count
        return
    with pytest.raises(ManyMembersError):
        members(body, NAMES)


@FINDERS
def test_members_of_an_object_within_another_one_have_places_in_the_body(members: Any) -> None:
    body = b'{"x": {"ab" : 1} , "ab": 2}'
    (one,) = members(body, NAMES, scan.NO_PARTS, 6, 16).each
    assert body[one.value : one.value_end] == b"1"


def named_in(value: Any, depth: int) -> bool:
    """Whether a part has the name that `PARTS` looks for, or lies too deep."""
    if not isinstance(value, list | dict):
        return False
    if not depth:
        return True
    if isinstance(value, list):
        return any(named_in(one, depth - 1) for one in value)
    is_named = value.get("a_c") is not None
    return is_named or named_in(value.get("abc"), depth - 1)


KEYS = st.sampled_from(["a_c", "abc", "x"])
NESTED = st.recursive(
    st.none() | st.integers(0, 1) | st.just("a_c"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
)


@FINDERS
@given(NESTED, st.sampled_from([None, 1]))
def test_parts_are_named_where_a_decoder_finds_their_name(
    members: Any, value: Any, indent: int | None
) -> None:
    for name, is_named in (("ab", named_in(value, PARTS.depth)), ("x", False)):
        body = json.dumps({name: value, "y": [{"a_c": 1}]}, indent=indent).encode()
        assert members(body, NAMES, PARTS).is_named is is_named


SPLICERS = pytest.mark.parametrize("splice", [scan.splice, plain_scan.splice])


@SPLICERS
@given(st.binary(max_size=30), st.lists(st.tuples(st.integers(0, 30), st.binary(max_size=4))))
def test_splice_puts_each_part_in_its_place(
    splice: Any, body: bytes, parts: list[tuple[int, bytes]]
) -> None:
    places = sorted(min(at, len(body)) for at, _ in parts)
    bounds = list(zip(places[::2], places[1::2], strict=False))
    edits: tuple[Edit, ...] = tuple(
        (start, end, new) for (start, end), (_, new) in zip(bounds, parts, strict=False)
    )
    expected = body
    for start, end, new in reversed(edits):
        expected = expected[:start] + new + expected[end:]
    assert splice(body, edits) == expected


@pytest.mark.parametrize("places", [[(2, 1)], [(0, 4)], [(-1, 0)], [(1, 2), (1, 1)]])
def test_splice_refuses_places_out_of_order_or_out_of_bounds(places: list[tuple[int, int]]) -> None:
    edits: tuple[Edit, ...] = tuple((start, end, b"") for start, end in places)
    with pytest.raises(ValueError, match="out of"):
        scan.splice(b"abc", edits)
    with pytest.raises(TypeError):
        scan.splice(b"abc", (1,))  # type: ignore[arg-type]


@pytest.mark.parametrize("braces", [scan.braces, plain_scan.braces])
@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"{}", (1, True)),
        (b" { \n} ", (4, True)),
        (b'{"a":1}\t', (6, False)),
        (b"{", None),
        (b"}", None),
        (b"", None),
        (b" ", None),
        (b"[]", None),
        (b"{]", None),
        (b"x{}", None),
    ],
)
def test_braces_are_the_outermost(
    braces: Callable[[bytes], Any], body: bytes, found: tuple[int, bool] | None
) -> None:
    assert braces(body) == found
