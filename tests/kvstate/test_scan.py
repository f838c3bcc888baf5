"""The passes over a request's bytes find the same as those in Python."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate import scan
from kvstate.overlap import Tokens, shared_tokens
from tests.oracles import plain_scan

BODIES = st.lists(
    st.sampled_from([b'"', b"u", b"\\", b"{", b"[", b"]", b",", b"a", b"\n", b"\xff"])
)
TEXTS = st.lists(st.sampled_from(['"', "\\", "{[", ",", "a", "\n", "é"])).map("".join)


@given(BODIES.map(b"".join), st.integers(0, 9), st.integers(0, 2))
def test_marks_are_those_of_the_plain_scan(body: bytes, most: int, long: int) -> None:
    body *= 1 + long * 70_000 // max(1, len(body))
    assert scan.marks(body) == plain_scan.marks(body)
    ours, theirs = scan.marks_outside(body, len(body)), plain_scan.marks_outside(body, len(body))
    assert ours == theirs
    assert scan.sizes(body) == plain_scan.sizes(body)
    bounded = scan.marks_outside(body, most), plain_scan.marks_outside(body, most)
    for found in bounded:
        assert found == ours if ours.quotes <= most else found.quotes > most


VALUES = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def texts_in(value: object) -> list[str]:
    match value:
        case str():
            return [value]
        case dict():
            return [text for pair in value.items() for one in pair for text in texts_in(one)]
        case list():
            return [text for one in value for text in texts_in(one)]
    return []


def count_in(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count_in, inner))


@pytest.mark.parametrize("sizes", [scan.sizes, plain_scan.sizes])
@given(VALUES, st.booleans())
def test_sizes_are_at_least_those_of_what_is_decoded(
    sizes: Callable[[bytes], tuple[int, int]], value: object, ensure_ascii: bool
) -> None:
    written = json.dumps(value, ensure_ascii=ensure_ascii).encode()
    values, text_bytes = sizes(written)
    assert values + 1 >= count_in(value)
    widths = [
        4 if one > "\uffff" else 2 if one > "\xff" else 1 for one in map(largest, texts_in(value))
    ]
    lengths = map(len, texts_in(value))
    assert text_bytes >= sum(a * b for a, b in zip(widths, lengths, strict=True))


def largest(text: str) -> str:
    return max(text, default="")


@pytest.mark.parametrize("marks_outside", [scan.marks_outside, plain_scan.marks_outside])
@given(TEXTS, TEXTS, st.integers(0, 3))
def test_marks_outside_ignore_the_insides_of_texts(
    marks_outside: Callable[[bytes, int], scan.BodyMarks], one: str, two: str, long: int
) -> None:
    body = json.dumps({one * (1 + long * 50_000): [two, {"a": two}, 1]}).encode()
    assert marks_outside(body, 100) == (3, 8, 2)


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_shared_tokens_counts_tokens_before_the_first_difference(
    both: list[int], one: list[int], other: list[int]
) -> None:
    left, right = Tokens("I", both + one), Tokens("I", both + other)
    pairs = zip(left, right, strict=False)
    expected = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
    assert shared_tokens(left, right) == expected
