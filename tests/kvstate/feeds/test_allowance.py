"""What one worker may take of the loop, and what a flood of valid events does to others."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from kvstate.events import Batch
from kvstate.feeds import allowance as allowance_module
from kvstate.feeds.allowance import Allowance
from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_news import BEHIND
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.feed_times import FeedTimes
from kvstate.feeds.transport import Connected, Malformed, Signal
from kvstate.fleet import FollowedWorkers
from tests.kvstate.publishing import block, chain, payload
from tests.memory_transport import MemoryTransport
from tests.waiting import until

SHARE, BURST, DEBT = (
    allowance_module.SHARE_OF_LOOP,
    allowance_module.BURST_SECONDS,
    allowance_module.MAX_DEBT_SECONDS,
)


def test_allowance_lets_a_worker_run_until_its_burst_is_spent() -> None:
    allowance = Allowance(0.0)
    allowance.spend(BURST - 0.5, 0.0)
    assert (allowance.wait_seconds(0.0), allowance.is_behind(1_000.0)) == (0.0, False)


def test_allowance_that_is_spent_waits_until_it_is_refilled() -> None:
    allowance = Allowance(0.0)
    allowance.spend(BURST, 0.0)
    wait_seconds = allowance.wait_seconds(0.0)
    assert wait_seconds == pytest.approx(allowance_module.RESUME_SECONDS / SHARE)
    assert allowance.wait_seconds(wait_seconds) == 0.0


def test_allowance_bounds_the_debt_of_a_stopped_process() -> None:
    allowance = Allowance(0.0)
    allowance.spend(3_600.0, 0.0)
    assert allowance.wait_seconds(0.0) <= (DEBT + allowance_module.RESUME_SECONDS) / SHARE


def test_allowance_is_behind_from_lasting_load_until_a_calm_period() -> None:
    allowance = Allowance(0.0)
    allowance.spend(BURST, 0.0)
    for tenth in range(1, 31):
        assert allowance.is_behind(tenth / 10) == (tenth / 10 >= allowance_module.BEHIND_SECONDS)
        allowance.spend(SHARE / 10, tenth / 10)
    assert allowance.is_behind(3.0)
    assert not allowance.is_behind(3.0 + allowance_module.CALM_SECONDS / SHARE + 0.1)


STORE_AND_REMOVE = payload(0, block(1)), payload(0, ["BlockRemoved", [1]])


class Flood:
    """A transport whose publisher always has one more batch, until it is told to stop."""

    recovery = Recovery.NONE
    why_lost = "no replay"

    def __init__(self) -> None:
        self.sent = 0
        self.is_over = False
        self._over = asyncio.Event()

    async def receive(self) -> list[Signal]:
        await asyncio.sleep(0)
        if self.is_over:
            await self._over.wait()
        signals: list[Signal] = [] if self.sent else [Connected()]
        for _ in range(64):
            signals.append(Batch(self.sent, STORE_AND_REMOVE[self.sent % 2]))
            self.sent += 1
        return signals

    async def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        if start >= 0:
            raise AssertionError(start)
        yield Malformed()

    async def close(self) -> None:
        """Has nothing to close."""


@asynccontextmanager
async def flooded() -> AsyncIterator[tuple[FollowedWorkers, Flood]]:
    """A fleet with an honest worker, and one that has been sending too much for a while."""
    times = FeedTimes(burst_seconds=0.2, behind_seconds=0.3)
    fleet, flood = FollowedWorkers(12345678, lambda: 0.0, times=times), Flood()
    fleet.add("flood", "m", [flood])
    await until(lambda: fleet.feeds.statuses("flood")[0].reason == BEHIND)
    yield fleet, flood
    await fleet.close()


async def test_flooding_feed_is_uncertain_and_keeps_to_its_share_of_the_loop() -> None:
    async with flooded() as (fleet, flood):
        status, sent = fleet.feeds.statuses("flood")[0], flood.sent
        assert (status.state, status.uncertain_blocks) == (FeedState.LIVE, status.blocks)
        assert status.counts["behind"] == 1
        cpu_seconds, began_at = time.thread_time(), time.monotonic()
        await until(lambda: time.thread_time() - cpu_seconds > 0.2)
        share = (time.thread_time() - cpu_seconds) / (time.monotonic() - began_at)
        assert share < 3 * SHARE  # this includes the flood's own share
        assert flood.sent > sent  # it is still read


def has_taken(fleet: FollowedWorkers, number: int) -> bool:
    return fleet.feeds.statuses("honest")[0].last_sequence == number


async def test_events_of_other_workers_are_applied_during_a_flood() -> None:
    async with flooded() as (fleet, flood):
        honest = MemoryTransport({})
        honest.put(Connected())
        fleet.add("honest", "m", [honest])
        await until(lambda: fleet.feeds.state("honest") is FeedState.LIVE)
        for number in range(50):
            before = flood.sent
            honest.put(Batch(number, payload(number, block(number + 1, number or None))))
            await until(partial(has_taken, fleet, number), pause=0)
            assert flood.sent - before <= 256, "it waited for the flood"
        await until(lambda: sum(fleet.blocks.overlaps(chain(50))["honest"].tiers) == 50)
        assert fleet.feeds.statuses("honest")[0].reason == ""


async def test_flooding_feed_is_applied_whole_and_certain_after_the_flood() -> None:
    async with flooded() as (fleet, flood):
        flood.is_over = True
        await until(lambda: fleet.feeds.statuses("flood")[0].reason == "")
        status = fleet.feeds.statuses("flood")[0]
        assert (status.state, status.last_sequence, status.gaps) == (
            FeedState.LIVE,
            flood.sent - 1,
            0,
        )
        assert status.uncertain_blocks == 0
