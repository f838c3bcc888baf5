"""The passes over a request's bytes: compiled and in Python, they find the same."""

import importlib
import json
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate import scan
from kvstate.overlap import Tokens, shared_tokens

compiled = pytest.mark.skipif(not scan.IS_COMPILED, reason="no C compiler at installation")
BODIES = st.lists(st.sampled_from([b'"', b"\\", b"{", b"[", b"]", b",", b"a", b"\n", b"\xff"]))
TEXTS = st.lists(st.sampled_from(['"', "\\", "{[", ",", "a", "\n", "é"])).map("".join)


@compiled
@given(BODIES.map(b"".join), st.integers(0, 9), st.integers(0, 2))
def test_marks_are_the_same_compiled_and_plain(body: bytes, most: int, long: int) -> None:
    body *= 1 + long * 70_000 // max(1, len(body))
    assert scan.marks(body) == scan.plain_marks(body)
    ours, theirs = scan.marks_outside(body, len(body)), scan.plain_marks_outside(body, len(body))
    assert ours == theirs
    bounded = scan.marks_outside(body, most), scan.plain_marks_outside(body, most)
    for found in bounded:
        assert found == ours if ours.quotes <= most else found.quotes > most


@pytest.mark.parametrize("marks_outside", [scan.marks_outside, scan.plain_marks_outside])
@given(TEXTS, TEXTS, st.integers(0, 3))
def test_marks_outside_ignore_the_insides_of_texts(
    marks_outside: Callable[[bytes, int], scan.BodyMarks], one: str, two: str, long: int
) -> None:
    body = json.dumps({one * (1 + long * 50_000): [two, {"a": two}, 1]}).encode()
    assert marks_outside(body, 100) == (3, 8, 2)


def test_plain_passes_serve_without_the_compiled_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = b'{"a": ["[", 1]}'
    before = scan.marks(body), scan.marks_outside(body, 9)
    monkeypatch.setitem(sys.modules, "kvstate._core", None)
    try:
        assert not importlib.reload(scan).IS_COMPILED
        assert before == (scan.marks(body), scan.marks_outside(body, 9))
    finally:
        monkeypatch.undo()
        importlib.reload(scan)


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_shared_tokens_counts_tokens_before_the_first_difference(
    both: list[int], one: list[int], other: list[int]
) -> None:
    left, right = Tokens("I", both + one), Tokens("I", both + other)
    pairs = zip(left, right, strict=False)
    expected = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
    assert shared_tokens(left, right) == expected
