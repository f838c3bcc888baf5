"""The compiled columns and draws against those in Python, to the last bit."""

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing import draws, load_columns
from extproc.routing.draws import plain_drawn, plain_lowest
from extproc.routing.eligibility import Candidate
from extproc.routing.load import Booking, EndpointLoad, Gauges, Load, Loads, LoadSample
from extproc.routing.load_columns import LoadColumns, PlainColumns, columns_of
from extproc.routing.spread import Spread
from tests.without_core import without_core

compiled = pytest.mark.skipif(not load_columns.IS_COMPILED, reason="no C compiler at installation")

WORKERS = [Candidate(f"w{n}", f"10.0.0.{n}:1") for n in range(6)]
TOKENS = {"w1": 100.0, "w4": 0.1, "other": 5.0}


def used(rng: Random) -> tuple[Loads, float]:
    """Loads of a fleet after a while, in which one worker has no record; and the time."""
    endpoints = {worker.endpoint: EndpointLoad() for worker in WORKERS[1:]}
    loads = Loads(endpoints, rng.choice((1_000.0, 8_000.0)), learns=True)
    open_ones: list[Booking] = []
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


def figures_of(columns: LoadColumns, rng: Random) -> Iterator[object]:
    """Everything that columns say."""
    yield list(columns), [columns[at] for at in range(len(columns))], columns.requests()
    yield columns.typical(rng.randint(1, len(columns)))
    costs = columns.costs(1_000 * rng.random(), 100 * rng.random())
    columns.add(costs, WORKERS, TOKENS, rng.random() - 0.5)
    yield costs


@compiled
@given(st.integers(0, 2**32))
def test_columns_are_the_same_compiled_and_in_python(seed: int) -> None:
    loads, now = used(Random(seed))
    ours = columns_of(loads, WORKERS, now)
    plain = PlainColumns([loads.load(worker.endpoint, now) for worker in WORKERS])
    assert not isinstance(ours, PlainColumns)
    found, expected = (list(figures_of(one, Random(seed))) for one in (ours, plain))
    assert found == expected
    assert [type(one.others) for one in ours] == [type(one.others) for one in plain]


@compiled
def test_compiled_columns_refuse_what_they_do_not_have() -> None:
    columns = columns_of(Loads({}), WORKERS, 0.0)
    with pytest.raises(IndexError):
        columns[len(WORKERS)]
    with pytest.raises(ValueError, match="not so many workers"):
        columns.typical(len(WORKERS) + 1)
    with pytest.raises(ValueError, match="other workers"):
        columns.add([0.0], WORKERS, TOKENS, 1.0)
    with pytest.raises(AttributeError):
        columns_of(Loads({}), ["no worker"], 0.0)  # type: ignore[list-item]


def test_columns_are_plain_where_none_were_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = without_core(load_columns, "extproc._core", monkeypatch)
    assert not plain.IS_COMPILED
    columns = plain.columns_of(Loads({}), WORKERS, 0.0)
    assert list(columns) == [Load()] * len(WORKERS)
    assert (len(columns), columns[0], columns.typical(2)) == (len(WORKERS), Load(), (0.0, 0.0))
    costs = columns.costs(2.0, 1.0)
    columns.add(costs, WORKERS, TOKENS, 1.0)
    assert costs == [2.0, 102.0, 2.0, 2.0, 2.1, 2.0]
    assert columns.requests() == [0.0] * len(WORKERS)


@given(
    st.lists(st.integers(0, 3).map(float), min_size=1, max_size=20),
    st.integers(0, 5),
    st.integers(0, 2**32),
)
def test_draws_are_the_same_compiled_and_in_python(
    ranks: list[float], count: int, seed: int
) -> None:
    assert draws.lowest(ranks, count, Random(seed).random) == plain_lowest(
        ranks, count, Random(seed).random
    )
    few, places = min(count, len(ranks)), range(5, 5 + len(ranks))
    drawn = draws.drawn(places, few, Random(seed).random)
    assert drawn == plain_drawn(places, few, Random(seed).random)
    assert len(set(drawn)) == few


def test_draws_are_plain_where_none_were_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = without_core(draws, "extproc._core", monkeypatch)
    assert plain.drawn is plain.plain_drawn
    assert plain.lowest is plain.plain_lowest


def test_spread_has_a_value_for_each_worker_that_was_compared() -> None:
    spread = Spread([3, 1], ["c", "a"], 5)
    assert len(spread) == 5
    assert list(spread) == [None, "a", None, "c", None]
    assert spread == [None, "a", None, "c", None]
    assert spread != 5
