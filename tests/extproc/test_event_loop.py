"""When the oldest generation is collected: in idle moments, or when it can wait no longer."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from extproc import event_loop
from extproc.event_loop import (
    BUSY_PARTS,
    IDLE_PARTS,
    LOOK_AGAIN_SECONDS,
    LOOK_SECONDS,
    MOST_PENDING,
    PATIENCE_SECONDS,
    Sweeper,
)

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


def test_an_idle_moment_is_taken() -> None:
    trial = Trial()
    assert trial.sweeper.look(IDLE) == LOOK_SECONDS
    assert trial.collected == 1


def test_nothing_is_collected_where_nothing_is_to_be() -> None:
    trial = Trial()
    trial.pending = 0
    assert trial.sweeper.look(IDLE) == LOOK_SECONDS
    assert trial.collected == 0


def test_a_busy_loop_is_left_alone_until_it_is_idle() -> None:
    trial = Trial()
    for _ in range(9):
        assert trial.sweeper.look(BUSY) == LOOK_AGAIN_SECONDS
    assert trial.collected == 0
    trial.sweeper.look(IDLE)
    assert trial.collected == 1


def test_a_loop_that_is_never_idle_is_interrupted_in_the_end() -> None:
    trial = Trial()
    trial.now += PATIENCE_SECONDS
    trial.sweeper.look(BUSY)
    assert trial.collected == 1
    trial.sweeper.look(BUSY)
    assert trial.collected == 1


def test_a_flood_is_collected_however_busy_the_loop_is() -> None:
    trial = Trial()
    trial.pending = MOST_PENDING
    trial.sweeper.look(BUSY)
    assert trial.collected == 1


@pytest.mark.parametrize(("pending", "parts"), [(1, IDLE_PARTS), (MOST_PENDING, BUSY_PARTS)])
def test_long_collections_take_a_bounded_share_of_the_time(pending: int, parts: int) -> None:
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
async def test_old_cycles_are_collected_by_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "LOOK_SECONDS", 0.01)
    knot = Knot()
    gone = weakref.ref(knot)
    sweeper = Sweeper(pending=lambda: 1)
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
    async with asyncio.timeout(30):
        while kept() is not None:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    assert gone() is not None  # frozen, with everything that existed at the start
    sweeper.close()
    gc.collect()
    assert gone() is None
