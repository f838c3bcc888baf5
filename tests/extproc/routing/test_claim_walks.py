"""The compiled walks over claims and marks against those in Python."""

from array import array
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
    expected,
    plain_expected,
    plain_recorded,
    recorded,
)
from extproc.routing.claims import Claims, held_tokens, plain_held, plain_weighed, weighed
from extproc.routing.marks import Marks, chained, plain_chained
from kvstate.overlap import Overlap, worth_tokens
from tests.without_core import without_core

pytestmark = pytest.mark.skipif(
    not load_columns.IS_COMPILED, reason="no C compiler at installation"
)

Generation = dict[int, tuple[Claim, ...]]
LIFETIMES = Lifetimes(speculative=5.0, grace=1.0, approximate=20.0)


def fewer(claims: tuple[Claim, ...], since: float) -> tuple[Claim, ...]:
    return tuple([one for one in claims if one.sent_at > since])[:3]


def step(rng: Random, both: tuple[Generation, Generation], claims: list[Claim], now: float) -> None:
    """One change of two equal generations, by each walk."""
    if claims and rng.random() < 0.3:
        rng.choice(claims).ended_at = now
        rng.choice(claims).holdings.lost_at = rng.choice((now, -1.0))
    start, count = rng.randrange(4), rng.randrange(6)
    keys = tuple(rng.choices(range(9), k=count) if not start else range(start, start + count))
    holdings = rng.choice(claims).holdings if claims and rng.random() < 0.6 else Holdings(str(now))
    claim = Claim(holdings, Marks(keys, keys), now, rng.randrange(99))
    claims.append(claim)
    compiled = recorded(both[0], claim, keys, 5, fewer, now - 4.0)
    assert compiled == plain_recorded(both[1], claim, keys, 5, fewer, now - 4.0)


@given(st.integers(), st.integers(1, 30))
def test_walks_over_claims_are_the_same_in_both(seed: int, steps: int) -> None:
    rng, claims = Random(seed), list[Claim]()
    old: tuple[Generation, Generation] = ({}, {})
    young: tuple[Generation, Generation] = ({}, {})
    for at in range(steps):
        now = at + rng.random()
        step(rng, young, claims, now)
        if rng.random() < 0.1:
            old, young = young, ({}, {})
        assert young[0] == young[1]
        keys = tuple(range(rng.randrange(4), 9))
        lengths = tuple([64 * key for key in keys])
        later = now + rng.choice((0.0, 0.5, 3.0, 30.0))
        found = expected(old[0], young[0], lengths, keys, later, LIFETIMES)
        same = plain_expected(old[1], young[1], lengths, keys, later, LIFETIMES)
        assert list(found.items()) == list(same.items())


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
    claim = Claim(Holdings("a"), Marks((), ()), 0.0)
    young: Generation = {1: (claim,)}
    with pytest.raises(TypeError):
        chained(len, memoryview(b"abc"), (slice(0, 1),), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a length for each key"):
        expected({}, young, (), (1,), 0.0, LIFETIMES)
    with pytest.raises(TypeError):
        expected({}, young, ("x",), (1,), 0.0, LIFETIMES)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        expected({}, {1: (object(),)}, (64,), (1,), 0.0, LIFETIMES)  # type: ignore[dict-item]
    with pytest.raises(AttributeError):
        recorded(young, object(), (1,), 5, fewer, 0.0)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        recorded(young, claim, (1,), 0, lambda *_: 1 // 0, 0.0)  # type: ignore[arg-type]
    assert young == {1: (claim,)}


def test_walks_are_plain_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    table = without_core(claim_table, "extproc._core", monkeypatch)
    assert (table.expected, table.recorded) == (table.plain_expected, table.plain_recorded)
    alone = without_core(claims, "extproc._core", monkeypatch)
    assert (alone.weighed, alone.held_tokens) == (alone.plain_weighed, alone.plain_held)
    bare = without_core(marks, "extproc._core", monkeypatch)
    assert bare.chained is bare.plain_chained
