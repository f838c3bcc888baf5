"""The compiled claims at marks, and walks over claims, against those in Python."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc._core import MarkTable, expected
from extproc.routing.claims.claim_table import Claim, Costs, Holdings, Lifetimes
from extproc.routing.claims.marks import Marks, packed
from extproc.sharing.messages import ClaimReport
from tests.oracles.routing.mark_table import PlainMarkTable, plain_expected

LIFETIMES = Lifetimes(speculative=5.0, grace=1.0, approximate=20.0)
KEYS = range(9)
COSTS = Costs(slot=100, place=50, keys=2_000)


def fewer(claims: tuple[Claim, ...], since: float) -> tuple[Claim, ...]:
    return tuple([one for one in claims if one.sent_at > since])[:3]


def table(make: Callable[..., Claim] = Claim, most: int = 5) -> MarkTable:
    return MarkTable(make, most, fewer, COSTS)


class Both:
    """Two equal generations, compiled and in Python, of the same claims."""

    def __init__(self, claims: list[Claim]) -> None:
        self.claims = claims
        self.known: tuple[dict[int, Claim], dict[int, Claim]] = {}, {}
        makers = [partial(self._make, count(len(claims))) for _ in range(2)]
        self.ours = table(makers[0])
        self.plain = PlainMarkTable(makers[1], 5, fewer, COSTS)

    def __iter__(self) -> Iterator[MarkTable | PlainMarkTable]:
        return iter((self.ours, self.plain))

    def _make(self, numbers: Iterator[int], *fields: Any) -> Claim:
        """Makes a claim, which the other of both then gets as well."""
        number = next(numbers)
        if number == len(self.claims):
            self.claims.append(Claim(*fields))
        made = self.claims[number]
        assert fields[2:4] == (made.sent_at, made.mark_bytes)
        return made

    def record(self, holdings: Holdings, keys: Sequence[int], now: float) -> None:
        marks = Marks(tuple(keys), packed(keys))
        made = [one.record(holdings, marks, now, now - 4.0) for one in self]
        assert made[0] is made[1]
        assert (made[0].lengths, made[0].keys) == (marks.lengths, marks.keys)

    def record_reported(self, rng: Random, holdings: Sequence[Holdings], now: float) -> None:
        told = tuple(
            ClaimReport(rng.randrange(12), rng.randrange(5), packed(rng.choices(KEYS, k=count)))
            for count in rng.choices(range(1, 5), k=rng.randrange(6))
        )
        places = {number: ("10.0.0.1:1", one) for number, one in enumerate(holdings[:4])}
        bounds = rng.randrange(20), rng.random() * 20, rng.randrange(1, 9)
        counts = [
            one.record_reported(told, places, known, bounds, now, now - 4.0)
            for one, known in zip(self, self.known, strict=True)
        ]
        assert counts[0] == counts[1]
        assert list(self.known[0].items()) == list(self.known[1].items())

    def withdraw(self, claim: Claim) -> None:
        for one in self:
            one.withdraw(claim)

    def assert_same(self) -> None:
        assert len(self.ours) == len(self.plain)
        assert self.ours.bytes == self.plain.bytes
        assert everything_in(self.ours) == everything_in(self.plain)


def everything_in(
    table: MarkTable | PlainMarkTable,
) -> list[Sequence[tuple[int, tuple[Claim, ...]]]]:
    return [table.stretches((key,), packed((key,))) for key in KEYS]


def step(rng: Random, both: Both, now: float) -> None:
    """One change of two equal generations."""
    claims = both.claims
    if claims and rng.random() < 0.3:
        rng.choice(claims).ended_at = now
        rng.choice(claims).holdings.lost_at = rng.choice((now, -1.0))
    start, length = rng.randrange(4), rng.randrange(6)
    keys = rng.choices(KEYS, k=length) if not start else range(start, start + length)
    holdings = rng.choice(claims).holdings if claims and rng.random() < 0.6 else Holdings(str(now))
    if rng.random() < 0.5:
        both.record(holdings, keys, now)
    else:
        both.record_reported(rng, [holdings, *[one.holdings for one in claims]], now)
    if claims and rng.random() < 0.3:
        both.withdraw(rng.choice(claims))


@given(st.integers(), st.integers(1, 30))
def test_claims_at_marks_are_the_same_in_both(seed: int, steps: int) -> None:
    rng, claims = Random(seed), list[Claim]()
    old, young = Both(claims), Both(claims)
    for at in range(steps):
        now = at + rng.random()
        step(rng, young, now)
        if rng.random() < 0.1:
            old, young = young, Both(claims)
        young.assert_same()
        keys = tuple(range(rng.randrange(4), 9))
        asked = tuple([64 * key for key in keys]), packed(keys)
        assert young.ours.stretches(*asked) == young.plain.stretches(*asked)
        later = now + rng.choice((0.0, 0.5, 3.0, 30.0))
        found = expected(old.ours, young.ours, *asked, later, LIFETIMES)
        same = plain_expected(old.plain, young.plain, *asked, later, LIFETIMES)
        assert list(found.items()) == list(same.items())


def test_claims_at_many_marks_are_the_same_in_both() -> None:
    both = Both([])
    for number in range(3_000):
        both.record(Holdings(str(number)), range(number * 5, number * 5 + 7), float(number))
    for claim in both.claims[::2]:
        both.withdraw(claim)
    both.assert_same()
    asked = [(claim.lengths, claim.keys) for claim in both.claims]
    found = [[one.stretches(*each) for each in asked] for one in both]
    assert found[0] == found[1]


def test_table_frees_its_claims_with_itself() -> None:
    marks = Marks(tuple(range(50)), packed(range(50)))
    claim = Claim(Holdings("a"), marks.keys, 0.0)
    told, places = (ClaimReport(7, 1, packed(range(40, 60))),), {1: ("", claim.holdings)}
    before = [sys.getrefcount(one) for one in (claim, claim.holdings, told[0], told[0].keys)]
    for _ in range(3):
        made = table(lambda *_: claim)
        made.record(claim.holdings, marks, 0.0, 0.0)
        made.record(claim.holdings, marks, 0.0, 0.0)
        made.record_reported(told, places, {}, (99, 99.0, 9), 0.0, 0.0)
        made.withdraw(claim)
        made.stretches(marks.lengths, marks.keys)
        del made
    after = [sys.getrefcount(one) for one in (claim, claim.holdings, told[0], told[0].keys)]
    assert after == before


def test_claims_that_are_told_again_keep_their_number() -> None:
    for made in (table(), PlainMarkTable(Claim, 5, fewer, COSTS)):
        known: dict[int, Claim] = {}
        told = tuple(ClaimReport(number, 1, packed((number,))) for number in (1, 1, 2))
        places = {1: ("", Holdings("a"))}
        assert made.record_reported(told, places, known, (9, 9.0, 9), 0.0, 0.0) == (2, 0, 0)
        first = known[1]
        assert made.record_reported(told, places, known, (9, 9.0, 9), 0.0, 0.0) == (0, 0, 0)
        assert known[1] is first


def test_walks_pass_errors_on() -> None:
    young, holdings, one = table(), Holdings("a"), packed((1,))
    claim = young.record(holdings, Marks((1,), one), 0.0, 0.0)
    wrong: Any = object()
    with pytest.raises(ValueError, match="a length for each key"):
        expected(table(), young, (), one, 0.0, LIFETIMES)
    with pytest.raises(ValueError, match="a length for each key"):
        young.stretches((), one)
    with pytest.raises(TypeError):
        expected(table(), young, ("x",), one, 0.0, LIFETIMES)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        expected(wrong, young, (64,), one, 0.0, LIFETIMES)
    with pytest.raises(AttributeError):
        young.record(holdings, wrong, 0.0, 0.0)
    assert everything_in(young)[1] == [(1, (claim,))]


def test_compiled_tables_refuse_what_is_of_another_type() -> None:
    wrong: Any = Marks((1,), "no bytes")  # type: ignore[arg-type]
    for given_instead in ((), (Claim, 5, fewer, (1, 2)), (Claim, "x", fewer, COSTS)):
        with pytest.raises(TypeError):
            MarkTable(*given_instead)
    young, marks = table(), Marks((1,), packed((1,)))
    for refused in (young.withdraw, lambda one: young.record(Holdings("a"), one, 0.0, 0.0)):
        with pytest.raises(TypeError):
            refused(wrong)
    failing = MarkTable(Claim, 0, lambda *_: (1 // 0,), COSTS)  # type: ignore[arg-type]
    failing.record(Holdings("a"), marks, 0.0, 0.0)
    with pytest.raises(ZeroDivisionError):
        failing.record(Holdings("b"), marks, 0.0, 0.0)
    assert len(failing) == 1


@pytest.mark.parametrize(
    "given_instead",
    [
        ([], {}, {}, (9, 9.0, 9)),
        ((None,), {}, {}, (9, 9.0, 9)),
        ((ClaimReport(1, 1, packed((1,))),), {1: "no place"}, {}, (9, 9.0, 9)),
        ((ClaimReport(1, 1, packed((1,))),), {1: ("",)}, {}, (9, 9.0, 9)),
        ((), {}, {}, (9, 9.0)),
        ((), {}, [], (9, 9.0, 9)),
    ],
    ids=["a list", "no news", "no place", "no holdings", "few bounds", "nothing known"],
)
def test_compiled_tables_refuse_to_record_what_is_of_another_type(given_instead: Any) -> None:
    told, places, known, bounds = given_instead
    with pytest.raises((TypeError, AttributeError, IndexError)):
        table().record_reported(told, places, known, bounds, 0.0, 0.0)
