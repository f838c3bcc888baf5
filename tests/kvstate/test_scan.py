"""The passes over a request's bytes: compiled and in Python, they find the same."""

import importlib
import json
import sys
from array import array
from collections.abc import Callable
from random import Random

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
def test_what_stands_in_texts_is_no_mark(
    marks_outside: Callable[[bytes, int], scan.Marks], one: str, two: str, long: int
) -> None:
    body = json.dumps({one * (1 + long * 50_000): [two, {"a": two}, 1]}).encode()
    assert marks_outside(body, 100) == (3, 8, 2)


@compiled
@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_runs_are_the_same_compiled_and_plain(ids: list[int]) -> None:
    assert scan.runs(Tokens("I", ids)) == scan.plain_runs(Tokens("I", ids))


def test_without_the_compiled_core_the_plain_passes_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body, tokens = b'{"a": ["[", 1]}', Tokens("I", range(20))
    before = scan.marks(body), scan.marks_outside(body, 9), scan.runs(tokens)
    monkeypatch.setitem(sys.modules, "kvstate._core", None)
    try:
        assert not importlib.reload(scan).IS_COMPILED
        assert before == (scan.marks(body), scan.marks_outside(body, 9), scan.runs(tokens))
    finally:
        monkeypatch.undo()
        importlib.reload(scan)


@pytest.mark.parametrize("runs", [scan.runs, scan.plain_runs])
def test_equal_runs_have_equal_numbers_and_others_do_not(
    runs: Callable[[Tokens], Tokens],
) -> None:
    ids = Random(1).sample(range(100_000), 500)
    first, again = runs(Tokens("I", ids)), runs(Tokens("I", [7, *ids[100:]]))
    assert isinstance(first, array)
    assert len(set(first)) == len(first) == 493
    assert first[100:] == again[1:]
    assert not set(first) & set(again[:1])


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_the_shared_tokens_are_those_before_the_first_difference(
    both: list[int], one: list[int], other: list[int]
) -> None:
    left, right = Tokens("I", both + one), Tokens("I", both + other)
    pairs = zip(left, right, strict=False)
    expected = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
    assert shared_tokens(left, right) == expected
