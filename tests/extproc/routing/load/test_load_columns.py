"""The compiled columns and draws against those in Python, to the last bit."""

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc._core import LoadColumns, drawn, evicted, load_of, lowest
from extproc.config.schema import Cost
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.cost.spread import Spread
from extproc.routing.load.endpoint_load import EndpointLoad, LoadSample, Ticket
from extproc.routing.load.loads import Gauges, Load, Loads
from tests.oracles.routing import load_columns as oracle
from tests.oracles.routing.draws import plain_drawn, plain_lowest, plain_numbers
from tests.oracles.routing.load_columns import PlainColumns, plain_evicted

WORKERS = [Candidate(f"w{n}", f"10.0.0.{n}:1") for n in range(6)]
TOKENS = {"w1": 100.0, "w4": 0.1, "other": 5.0}
EMPTY = [0.0] * len(WORKERS)


def used(rng: Random) -> tuple[Loads, float]:
    """Loads of a fleet after a while, in which one worker has no record; and the time."""
    endpoints = {worker.endpoint: EndpointLoad() for worker in WORKERS[1:]}
    loads = Loads(endpoints, rng.choice((1_000.0, 8_000.0)), learns=True)
    open_ones: list[Ticket] = []
    now = 100.0
    for _ in range(rng.randrange(30)):
        now += rng.choice((0.0, 0.01, 1.3))
        endpoint, kind = rng.choice(list(endpoints)), rng.randrange(6)
        if kind <= 1:
            open_ones.append(loads.begin(endpoint, rng.random() * 10_000, now))
        elif kind == 2 and open_ones:
            loads.end(open_ones.pop(), now)
        elif kind == 3:
            pending = rng.choice((None, rng.randrange(5_000)))
            sample = LoadSample(rng.randrange(9), rng.randrange(3), now, pending)
            loads.report(endpoint, sample, now)
        elif kind == 4:
            gauges = Gauges(rng.randrange(4), rng.randrange(999), rng.randrange(9_999), 9, 99)
            loads.record_report("peer", endpoint, gauges, now, is_known=rng.random() < 0.5)
        else:
            speed = endpoints[endpoint].speed
            speed.slowness, speed.pace = 0.3 + rng.random(), 0.2 + rng.random()
            speed.is_even = rng.random() < 0.5
    return loads, now + rng.choice((-0.1, 0.0, 0.7, 3.0, 60.0))


def figures_of(columns: LoadColumns | PlainColumns, rng: Random) -> Iterator[object]:
    """Everything that columns say."""
    yield list(columns), [columns[at] for at in range(len(columns))]
    yield columns.requests(), columns.slowness()
    cost = Cost(rng.randrange(300), rng.randrange(500), rng.randrange(1, 9_000))
    yield columns.affinity(rng.randint(0, len(columns)), cost)
    saved = rng.choice((TOKENS, {}))
    weighed, affinity, running = 1_000 * rng.random(), 7 * rng.random(), 100 * rng.random()
    yield columns.costs(WORKERS, saved, weighed, affinity, running)


@given(st.integers(0, 2**32))
def test_columns_are_the_same_compiled_and_in_python(seed: int) -> None:
    loads, now = used(Random(seed))
    ours = loads.columns(WORKERS, now)
    plain = PlainColumns([oracle.load_of(loads, worker.endpoint, now) for worker in WORKERS])
    expected = list(figures_of(plain, Random(seed)))
    for columns in (ours, LoadColumns(list(plain))):
        assert list(figures_of(columns, Random(seed))) == expected
    assert [type(one.others) for one in ours] == [type(one.others) for one in plain]
    assert [loads.load(worker.endpoint, now) for worker in WORKERS] == list(plain)


@given(st.integers(0, 2**32))
def test_evicted_tokens_are_the_same_compiled_and_in_python(seed: int) -> None:
    rng = Random(seed)
    saved = rng.choice((TOKENS, {}))
    occupied = [3_000 * rng.random() for _ in WORKERS]
    capacities = [rng.choice((0.0, 500.0, 2_000.0)) for _ in WORKERS]
    weighed, shared = 1_000 * rng.random(), 800 * rng.random()
    asked = WORKERS, saved, occupied, capacities, weighed, shared
    assert evicted(*asked) == plain_evicted(*asked)


def test_evicted_tokens_are_refused_for_other_workers() -> None:
    wrong: list[Any] = ["x"] * len(WORKERS)
    for occupied, capacities in (([], EMPTY), (EMPTY, [])):
        with pytest.raises(ValueError, match="other workers"):
            evicted(WORKERS, TOKENS, occupied, capacities, 1.0, 0.0)
    with pytest.raises(TypeError):
        evicted(WORKERS, TOKENS, wrong, EMPTY, 1.0, 0.0)
    with pytest.raises(AttributeError):
        evicted(wrong, TOKENS, EMPTY, EMPTY, 1.0, 0.0)
    with pytest.raises(TypeError):
        evicted(3, TOKENS, EMPTY, EMPTY, 1.0, 0.0)  # type: ignore[arg-type]


def test_compiled_columns_refuse_what_they_do_not_have() -> None:
    columns = Loads({}).columns(WORKERS, 0.0)
    with pytest.raises(IndexError):
        columns[len(WORKERS)]
    with pytest.raises(ValueError, match="not so many workers"):
        columns.affinity(len(WORKERS) + 1, Cost())
    with pytest.raises(ValueError, match="other workers"):
        columns.costs([], TOKENS, 1.0, 1.0, 1.0)
    with pytest.raises(AttributeError):
        Loads({}).columns(["no worker"], 0.0)  # type: ignore[list-item]
    other: Any = SimpleNamespace(numbers=None)
    with pytest.raises(TypeError, match="not the numbers of a load"):
        Loads({WORKERS[0].endpoint: other}).columns(WORKERS, 0.0)
    with pytest.raises(TypeError, match="not the numbers of a load"):
        Loads({WORKERS[0].endpoint: other}).load(WORKERS[0].endpoint, 0.0)
    with pytest.raises(AttributeError):
        LoadColumns([Load(), other])
    with pytest.raises(TypeError, match="wants 5 numbers"):
        load_of(Load, {}, "", 0.0, (1.0,))  # type: ignore[arg-type]


RANKS = st.one_of(
    st.lists(st.integers(0, 3).map(float), max_size=20),
    st.lists(st.integers(0, 90).map(float), max_size=20),
)


@given(RANKS, st.integers(0, 5), st.integers(0, 2**32))
def test_draws_are_the_same_compiled_and_in_python(
    ranks: list[float], count: int, seed: int
) -> None:
    rngs = Random(seed), Random(seed)
    ours = lowest(ranks, count, rngs[0].random)
    assert ours == plain_lowest(ranks, count, rngs[1].random)
    assert rngs[0].random() == rngs[1].random()
    few, many = min(count, len(ranks)), len(ranks)
    for places in (range(many), range(5, 5 + many), range(0, 2 * many, 2), [*range(many)]):
        found = drawn(places, few, Random(seed).random)
        assert found == plain_drawn(places, few, Random(seed).random)
        assert len(set(found)) == few
        assert set(found) <= set(places)


def _no_chance() -> float:
    raise AssertionError("a random number was drawn")


@given(RANKS, st.integers(0, 25), st.integers(0, 2**32))
def test_lowest_are_at_most_so_many_and_the_lowest(
    ranks: list[float], count: int, seed: int
) -> None:
    found = lowest(ranks, count, Random(seed).random)
    assert len(set(found)) == len(found) == min(count, len(ranks))
    assert [ranks[at] for at in found] == sorted(ranks)[:count]


@given(st.sets(st.integers(-90, 90)), st.integers(0, 25), st.randoms(use_true_random=False))
def test_lowest_of_different_ranks_need_no_chance(
    different: set[int], count: int, rng: Random
) -> None:
    ranks = [float(one) for one in different]
    rng.shuffle(ranks)
    assert [ranks[at] for at in lowest(ranks, count, _no_chance)] == sorted(ranks)[:count]


def test_numbers_are_those_of_the_source() -> None:
    numbers = plain_numbers(1234567)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [next(numbers) for _ in expected] == expected


@given(st.integers(0, 2**32))
def test_every_place_is_drawn_about_as_often(seed: int) -> None:
    random, times = Random(seed).random, [0] * 8
    for _ in range(400):
        for place in drawn(range(8), 2, random):
            times[place] += 1
    assert 50 < min(times) < max(times) < 160


@pytest.mark.parametrize("count", [-1, 4])
def test_draws_refuse_more_than_there_is(count: int) -> None:
    for draw in (drawn, plain_drawn):
        with pytest.raises(ValueError, match="not so many places"):
            draw(range(3), count, Random(1).random)


def test_draws_refuse_what_is_no_chance_and_what_has_no_rank() -> None:
    with pytest.raises(ValueError, match="not from 0 to below 1"):
        lowest([1.0, 1.0], 1, lambda: 2.0)
    ranks: Any
    for ranks in (["a"], (1.0,)):
        with pytest.raises(TypeError):
            lowest(ranks, 1, lambda: 0.0)


def test_spread_has_a_value_for_each_worker_that_was_compared() -> None:
    spread = Spread([3, 1], ["c", "a"], 5)
    assert len(spread) == 5
    assert list(spread) == [None, "a", None, "c", None]
    assert spread == [None, "a", None, "c", None]
    assert spread != 5
