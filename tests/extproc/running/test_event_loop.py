"""When the oldest generation is collected: in idle moments, or when it can wait no longer."""

import gc
import weakref
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.running.event_loop import (
    BUSY_PARTS,
    IDLE_PARTS,
    LOOK_AGAIN_SECONDS,
    LOOK_SECONDS,
    MOST_PENDING,
    PATIENCE_SECONDS,
    Sweeper,
)
from tests.waiting import until

IDLE, BUSY = 0.0, 0.01


class Trial:
    """A sweeper with a clock and a collector that the test controls."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pending = 1
        self.takes = 0.0
        self.collected = 0
        self.sweeper = Sweeper(lambda: self.pending, self.collect, lambda: self.now)

    def collect(self) -> None:
        self.collected += 1
        self.now += self.takes


def test_sweeper_collects_in_an_idle_moment() -> None:
    trial = Trial()
    assert trial.sweeper.look(IDLE) == LOOK_SECONDS
    assert trial.collected == 1


def test_sweeper_collects_only_pending_objects() -> None:
    trial = Trial()
    trial.pending = 0
    assert trial.sweeper.look(IDLE) == LOOK_SECONDS
    assert trial.collected == 0


def test_sweeper_waits_for_a_busy_loop_to_become_idle() -> None:
    trial = Trial()
    for _ in range(9):
        assert trial.sweeper.look(BUSY) == LOOK_AGAIN_SECONDS
    assert trial.collected == 0
    trial.sweeper.look(IDLE)
    assert trial.collected == 1


def test_sweeper_interrupts_a_loop_that_is_never_idle() -> None:
    trial = Trial()
    trial.now += PATIENCE_SECONDS
    trial.sweeper.look(BUSY)
    assert trial.collected == 1
    trial.sweeper.look(BUSY)
    assert trial.collected == 1


def test_sweeper_collects_a_flood_in_a_busy_loop() -> None:
    trial = Trial()
    trial.pending = MOST_PENDING
    trial.sweeper.look(BUSY)
    assert trial.collected == 1


@pytest.mark.parametrize(("pending", "parts"), [(1, IDLE_PARTS), (MOST_PENDING, BUSY_PARTS)])
def test_sweeper_takes_a_bounded_share_of_the_time(pending: int, parts: int) -> None:
    trial = Trial()
    trial.takes, trial.pending = 0.1, pending
    trial.sweeper.look(IDLE)
    ended = trial.now
    trial.now = ended + 0.1 * parts - 0.05
    trial.sweeper.look(IDLE)
    assert trial.collected == 1
    trial.now = ended + 0.1 * parts + 0.05
    trial.sweeper.look(IDLE)
    assert trial.collected == 2


class Knot:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("thresholds")
async def test_sweeper_alone_collects_old_cycles() -> None:
    knot = Knot()
    gone = weakref.ref(knot)
    sweeper = Sweeper(pending=lambda: 1, look_seconds=0.01)
    gc.collect(1)
    sweeper.start()
    assert gc.get_threshold()[2] > 1_000_000
    fresh = Knot()
    kept = weakref.ref(fresh)
    for generation in (0, 1):
        gc.collect(generation)  # moves it to the oldest generation
    del knot, fresh
    gc.collect(1)
    assert kept() is not None
    await until(lambda: kept() is None, "the knot is collected")
    assert gone() is not None  # frozen, with everything that existed at the start
    sweeper.close()
    gc.collect()
    assert gone() is None


ticks = st.integers(0, 32).map(lambda number: number / 64)  # sums of these are exact
looks = st.tuples(
    ticks | ticks.map(lambda one: 80 * one),
    st.sampled_from([IDLE, BUSY]),
    st.integers(0, 99),
    ticks,
)


@given(st.lists(looks, max_size=40))
def test_sweeper_rests_many_times_the_length_of_a_collection(
    timeline: list[tuple[float, float, int, float]],
) -> None:
    trial, ended, took = Trial(), -1e9, 0.0
    for passed, late, trial.pending, trial.takes in timeline:
        trial.now += passed
        began, before = trial.now, trial.collected
        trial.sweeper.look(late)
        if trial.collected > before:
            assert began - ended >= BUSY_PARTS * took
            ended, took = trial.now, trial.takes
