"""The compiled claims at marks, and walks over claims, against those in Python."""

import sys
from array import array
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing import claim_table, claims, load_columns, marks
from extproc.routing.claim_table import (
    Claim,
    Expected,
    Holdings,
    Lifetimes,
    MarkTable,
    PlainMarkTable,
    expected,
    plain_expected,
)
from extproc.routing.claims import Claims, held_tokens, plain_held, plain_weighed, weighed
from extproc.routing.marks import Marks, chained, packed, plain_chained
from kvstate.overlap import Overlap, worth_tokens
from tests.without_core import without_core

pytestmark = pytest.mark.skipif(
    not load_columns.IS_COMPILED, reason="no C compiler at installation"
)

Both = tuple[PlainMarkTable, PlainMarkTable]
LIFETIMES = Lifetimes(speculative=5.0, grace=1.0, approximate=20.0)
KEYS = range(9)


def fewer(claims: tuple[Claim, ...], since: float) -> tuple[Claim, ...]:
    return tuple([one for one in claims if one.sent_at > since])[:3]


def empty() -> Both:
    return MarkTable(), PlainMarkTable()


def everything_in(table: PlainMarkTable) -> list[Sequence[tuple[int, tuple[Claim, ...]]]]:
    return [table.stretches((key,), packed((key,))) for key in KEYS]


def step(rng: Random, both: Both, claims: list[Claim], now: float) -> None:
    """One change of two equal generations."""
    if claims and rng.random() < 0.3:
        rng.choice(claims).ended_at = now
        rng.choice(claims).holdings.lost_at = rng.choice((now, -1.0))
    start, count = rng.randrange(4), rng.randrange(6)
    keys = tuple(rng.choices(KEYS, k=count) if not start else range(start, start + count))
    holdings = rng.choice(claims).holdings if claims and rng.random() < 0.6 else Holdings(str(now))
    claim = Claim(holdings, Marks(keys, packed(keys)), now, rng.randrange(99))
    claims.append(claim)
    told = claim, claim.marks.keys, 5, fewer, now - 4.0
    assert both[0].record(*told) == both[1].record(*told)
    if rng.random() < 0.3:
        refused = rng.choice(claims)
        gone = [one.withdraw(refused, refused.marks.keys) for one in both]
        assert gone[0] == gone[1]


@given(st.integers(), st.integers(1, 30))
def test_claims_at_marks_are_the_same_in_both(seed: int, steps: int) -> None:
    rng, claims = Random(seed), list[Claim]()
    old, young = empty(), empty()
    for at in range(steps):
        now = at + rng.random()
        step(rng, young, claims, now)
        if rng.random() < 0.1:
            old, young = young, empty()
        assert len(young[0]) == len(young[1])
        assert everything_in(young[0]) == everything_in(young[1])
        keys = tuple(range(rng.randrange(4), 9))
        asked = tuple([64 * key for key in keys]), packed(keys)
        assert young[0].stretches(*asked) == young[1].stretches(*asked)
        later = now + rng.choice((0.0, 0.5, 3.0, 30.0))
        found = expected(old[0], young[0], *asked, later, LIFETIMES)
        same = plain_expected(old[1], young[1], *asked, later, LIFETIMES)
        assert list(found.items()) == list(same.items())


def test_claims_at_many_marks_are_the_same_in_both() -> None:
    both, claims = empty(), list[Claim]()
    for number in range(3_000):
        keys = packed(tuple(range(number * 5, number * 5 + 7)))
        claims.append(Claim(Holdings(str(number)), Marks((), keys), 0.0))
        told = claims[-1], keys, 5, fewer, -1.0
        assert both[0].record(*told) == both[1].record(*told)
    for claim in claims[::2]:
        gone = [one.withdraw(claim, claim.marks.keys) for one in both]
        assert gone[0] == gone[1]
    assert len(both[0]) == len(both[1])
    lengths = tuple(range(20_000))
    asked = [(lengths[:7], claim.marks.keys) for claim in claims]
    assert [both[0].stretches(*one) for one in asked] == [both[1].stretches(*one) for one in asked]


def test_table_frees_its_claims_with_itself() -> None:
    claim = Claim(Holdings("a"), Marks((), packed(range(50))), 0.0)
    before = sys.getrefcount(claim)
    for _ in range(3):
        table = MarkTable()
        table.record(claim, claim.marks.keys, 5, fewer, 0.0)
        table.record(claim, claim.marks.keys, 5, fewer, 0.0)
        table.withdraw(claim, claim.marks.keys[:80])
        table.stretches(tuple(range(50)), claim.marks.keys)
        del table
    assert sys.getrefcount(claim) == before


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(0, 200)))
def test_chained_keys_are_the_same_in_both(ids: list[int], edges: list[int]) -> None:
    view = memoryview(array("I", ids)).cast("B")
    parts = tuple([slice(edge, edge + 7) for edge in edges])
    key = xxhash.xxh3_64_intdigest
    assert chained(key, view, parts, 3) == plain_chained(key, view, parts, 3)


def overlaps(rng: Random) -> dict[str, Overlap]:
    def count() -> int:
        return rng.choice((0, 0, rng.randrange(9)))

    return {
        name: Overlap(rng.choice((1, 16)), (rng.randrange(9), count(), count(), count()), count())
        for name in rng.sample("abcd", rng.randrange(5))
    }


def lengths_of(rng: Random) -> dict[str, Expected]:
    names = rng.sample("abcd", rng.randrange(5))
    return {name: (rng.randrange(200), rng.randrange(200)) for name in names}


@given(st.integers(0, 2**32), st.integers(0, 3), st.booleans())
def test_overlaps_are_weighed_alike_in_both(seed: int, prompts: int, is_sent: bool) -> None:
    rng = Random(seed)
    held = [overlaps(rng) for _ in range(prompts)]
    sent = [lengths_of(rng) for _ in range(prompts or 1)] if is_sent else []
    ours = weighed(held, sent, 0.3, worth_tokens, Claims)
    plain = plain_weighed(held, sent, 0.3, worth_tokens, Claims)
    assert ours == plain
    assert list(ours[0]) == list(plain[0])
    assert [held_tokens(name, held) for name in "ae"] == [plain_held(name, held) for name in "ae"]


def test_weighing_refuses_what_is_no_overlap() -> None:
    wrong: Any = ({"a": (1, 2)}, {"a": (1, (1, 2), 0, 0, 0)}, {"a": 5}, 7)
    for one in wrong:
        with pytest.raises(TypeError):
            held_tokens("a", [one])
        with pytest.raises(TypeError):
            weighed([one], [], 0.3, worth_tokens, Claims)
    with pytest.raises(TypeError):
        weighed([], [{"a": ("x", 1)}], 0.3, worth_tokens, Claims)  # type: ignore[dict-item]
    with pytest.raises(IndexError):
        weighed([{}], [{}, {}], 0.3, worth_tokens, Claims)
    unsure = {"a": Overlap(1, (1, 0, 0, 0), 1)}
    with pytest.raises(ZeroDivisionError):
        weighed([unsure], [], 0.3, lambda *_: 1 // 0, Claims)


def test_walks_pass_errors_on() -> None:
    claim = Claim(Holdings("a"), Marks((), b""), 0.0)
    young, one = MarkTable(), packed((1,))
    young.record(claim, one, 5, fewer, 0.0)
    wrong: Any = object()
    with pytest.raises(TypeError):
        chained(len, memoryview(b"abc"), (slice(0, 1),), 1)  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        chained(lambda *_: -1, memoryview(b"abc"), (slice(0, 1),), 1)
    with pytest.raises(ValueError, match="a length for each key"):
        expected(MarkTable(), young, (), one, 0.0, LIFETIMES)
    with pytest.raises(ValueError, match="a length for each key"):
        young.stretches((), one)
    with pytest.raises(TypeError):
        expected(MarkTable(), young, ("x",), one, 0.0, LIFETIMES)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        expected(wrong, young, (64,), one, 0.0, LIFETIMES)
    with pytest.raises(AttributeError):
        young.record(wrong, one, 5, fewer, 0.0)
    with pytest.raises(ZeroDivisionError):
        young.record(claim, one, 0, lambda *_: (1 // 0,), 0.0)  # type: ignore[arg-type]
    assert everything_in(young)[1] == [(1, (claim,))]


def test_walks_are_plain_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    table = without_core(claim_table, "extproc._core", monkeypatch)
    assert (table.expected, table.MarkTable) == (table.plain_expected, table.PlainMarkTable)
    alone = without_core(claims, "extproc._core", monkeypatch)
    assert (alone.weighed, alone.held_tokens) == (alone.plain_weighed, alone.plain_held)
    bare = without_core(marks, "extproc._core", monkeypatch)
    assert bare.chained is bare.plain_chained
