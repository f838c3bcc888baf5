import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvstate.errors import ReplayError
from kvstate.events import Batch, Body, EngineLoad
from kvstate.feeds.feed import OTHER_PUBLISHER, SNAPSHOT_LATE, Effect, Feed, FeedState
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.feed_times import USUAL, FeedTimes
from kvstate.feeds.replays import ReplaySlots
from kvstate.feeds.subscriber import SharedByFeeds, Subscriber
from kvstate.feeds.transport import (
    Connected,
    Disconnected,
    LoadReport,
    Malformed,
    RankName,
    Signal,
    SnapshotBegun,
)
from kvstate.feeds.turns import Turns
from kvstate.index.index import Index
from kvstate.index.owner import BYTES_PER_BLOCK, IndexLimits
from kvstate.overlap import Overlap
from kvstate.steps import Steps
from tests.event_loops import SkippingLoop, run_in
from tests.kvstate.publishing import block, chain, payload
from tests.memory_transport import MemoryTransport
from tests.waiting import until

CLEAR = ["AllBlocksCleared"]


class Following:
    """A subscriber that runs, and the index that it fills."""

    def __init__(
        self,
        transport: MemoryTransport,
        clock: Callable[[], float],
        limits: IndexLimits | None,
        times: FeedTimes,
        turns: Turns,
        feed: Feed,
    ) -> None:
        self.index = Index(12345678, limits)
        self.transport = transport
        self.owner = self.index.add("w", 0, "m")
        self.subscriber = Subscriber(
            RankName("w", 0),
            feed,
            self.owner,
            transport,
            SharedByFeeds(turns, ReplaySlots(), clock, chance=lambda: 0.5, times=times),
        )
        self.feed = feed
        self.task = asyncio.create_task(self.subscriber.run())

    def publish(self, number: int, *events: object, life: int = 0) -> None:
        body = payload(number, *events, life=life)
        if self.transport.history is not None:
            self.transport.history[number] = body
        self.transport.put(Batch(number, body))

    async def state(self, state: FeedState) -> None:
        await until(lambda: self.feed.state is state)

    def overlap(self, length: int = 9) -> Overlap:
        return self.index.overlaps(chain(length)).get("w", Overlap(1))


@asynccontextmanager
async def following(
    transport: MemoryTransport | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    limits: IndexLimits | None = None,
    times: FeedTimes = USUAL,
    turns: Turns | None = None,
    feed: Feed | None = None,
) -> AsyncIterator[Following]:
    transport = transport or MemoryTransport()
    feed = feed or Feed(transport.recovery)
    followed = Following(transport, clock, limits, times, turns or Turns(), feed)
    yield followed
    followed.task.cancel()
    await asyncio.gather(followed.task, return_exceptions=True)
    await followed.subscriber.close()
    followed.index.check()


async def connected(followed: Following) -> None:
    followed.transport.put(Connected())
    await until(lambda: followed.feed.state in (FeedState.LIVE, FeedState.DEGRADED))


async def test_subscriber_replays_then_follows() -> None:
    history: dict[int, Body] = {0: payload(0, block(1))}
    async with following(MemoryTransport(history)) as followed:
        await connected(followed)
        assert followed.overlap() == Overlap(1, (1, 0, 0, 0))
        followed.publish(1, block(2, 1))
        await until(lambda: followed.overlap() == Overlap(1, (2, 0, 0, 0)))
        assert followed.subscriber.counts["batches"] == 2


async def test_disconnection_makes_all_blocks_uncertain() -> None:
    async with following(MemoryTransport({0: payload(0, block(1))})) as followed:
        await connected(followed)
        followed.transport.put(Disconnected())
        await followed.state(FeedState.STALE)
        assert followed.overlap() == Overlap(1, uncertain=1)


async def test_reconnection_to_a_restarted_publisher_forgets_its_blocks() -> None:
    transport = MemoryTransport({0: payload(0, block(1)), 1: payload(1, block(2, 1))})
    async with following(transport) as followed:
        await connected(followed)
        transport.history = {
            number: payload(number, block(number + 7), life=1) for number in range(5)
        }
        transport.put(Disconnected())
        await followed.state(FeedState.STALE)
        await connected(followed)
        assert (followed.overlap(), followed.owner.blocks) == (Overlap(1), 5)
        assert (transport.replays, followed.feed.reason) == ([0, 1, 0], "")


async def test_gap_is_replayed() -> None:
    async with following(MemoryTransport({0: payload(0, block(1))})) as followed:
        await connected(followed)
        assert followed.transport.history is not None
        followed.transport.history[1] = payload(1, block(2, 1))
        followed.publish(2, block(3, 2))
        await until(lambda: followed.overlap() == Overlap(1, (3, 0, 0, 0)))
        assert followed.transport.replays == [0, 0]


async def test_failed_replay_makes_earlier_blocks_uncertain() -> None:
    async with following(MemoryTransport({0: payload(0, block(1))})) as followed:
        await connected(followed)
        followed.transport.replay_error = "silent"
        followed.publish(2, block(3, 1))
        await followed.state(FeedState.DEGRADED)
        assert followed.feed.reason == "batches 1 to 1 are lost: replay failed: silent"
        assert followed.overlap() == Overlap(1, uncertain=1)


async def test_failed_probe_is_named_as_the_reason_of_a_live_feed() -> None:
    times = FeedTimes(quiet_seconds=0.01, quiet_for_long_seconds=0.01)
    async with following(MemoryTransport({0: payload(0, block(1))}), times=times) as followed:
        await connected(followed)
        followed.transport.replay_error = "silent"
        await until(lambda: followed.subscriber.news.reason == "replay failed: silent")
        assert followed.subscriber.counts["failed_replay"] >= 1
        assert followed.feed.state is FeedState.LIVE


async def test_clearing_heals_a_degraded_feed() -> None:
    async with following(MemoryTransport(history=None)) as followed:
        await connected(followed)
        followed.publish(5, block(1))
        followed.publish(6, CLEAR, block(1))
        await followed.state(FeedState.LIVE)
        assert followed.overlap() == Overlap(1, (1, 0, 0, 0))


async def test_turnover_heals_a_degraded_feed() -> None:
    async with following(MemoryTransport(history=None)) as followed:
        await connected(followed)
        followed.publish(0, block(1))
        followed.publish(2, block(2))
        await followed.state(FeedState.DEGRADED)
        followed.publish(3, ["BlockRemoved", [1]])
        await followed.state(FeedState.LIVE)


async def test_hole_after_a_clearing_in_the_same_turn_is_not_healed() -> None:
    async with following(MemoryTransport({0: payload(0, block(1))})) as followed:
        await connected(followed)
        followed.transport.replay_error = "silent"
        for number in (2, 4):
            followed.transport.put(
                Batch(number, payload(number, CLEAR if number == 2 else block(1)))
            )
        await followed.state(FeedState.DEGRADED)
        await until(lambda: followed.feed.last_sequence == 4)
        assert followed.feed.reason == "batches 3 to 3 are lost: replay failed: silent"


async def test_lost_removal_makes_earlier_blocks_uncertain() -> None:
    async with following() as followed:
        await connected(followed)
        followed.publish(0, block(1), ["BlockRemoved", "not a hash"])
        followed.publish(1, block(2))
        await until(lambda: followed.feed.last_sequence == 1)
        assert followed.overlap() == Overlap(1, uncertain=1)
        assert followed.subscriber.counts["bad_hash"] == 1


async def test_undecodable_batch_is_a_hole(caplog: pytest.LogCaptureFixture) -> None:
    async with following() as followed:
        await connected(followed)
        followed.publish(0, block(1))
        followed.transport.put(Batch(1, b"\xc1"))
        await followed.state(FeedState.DEGRADED)
        assert followed.overlap() == Overlap(1, uncertain=1)
        assert followed.subscriber.counts["undecodable_batch"] == 1
        assert "w rank 0: payload is not msgpack" in caplog.text


class Numberless(MemoryTransport):
    """The last answer to a replay cannot be read."""

    async def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        async for batch in super().replay(start):
            yield batch
        yield Malformed()


async def test_message_without_a_number_is_counted() -> None:
    async with following(Numberless({0: payload(0, block(1))})) as followed:
        await connected(followed)
        followed.transport.put(Malformed())
        await until(lambda: followed.subscriber.counts["malformed_message"] == 2)


async def test_load_reports_do_not_end_the_silence_of_a_feed() -> None:
    async with following(times=FeedTimes(quiet_seconds=0.05)) as followed:
        await connected(followed)
        followed.publish(0, block(1))
        await until(lambda: followed.feed.last_sequence == 0)
        replays = len(followed.transport.replays)

        def is_asked_again() -> bool:
            followed.transport.put(LoadReport(EngineLoad(1, 0)))  # loads come all the time
            return len(followed.transport.replays) > replays

        await until(is_asked_again, pause=0.001)
        assert followed.subscriber.load == EngineLoad(1, 0)
        assert followed.subscriber.counts["loads"] > 1


async def test_lag_is_the_age_of_the_last_batch() -> None:
    async with following(clock=lambda: 1002.5) as followed:
        await connected(followed)
        followed.publish(0, life=1)
        await until(lambda: followed.feed.last_sequence == 0)
        assert followed.subscriber.lag_seconds == 2.5


async def test_lag_is_not_of_batches_that_are_replayed_later() -> None:
    transport = MemoryTransport({0: payload(0, block(1), life=1)}, replay_error="silent")
    times = FeedTimes(retry_seconds=(0.02, 0.02))
    async with following(transport, clock=lambda: 2000.0, times=times) as followed:
        await connected(followed)
        assert followed.feed.state is FeedState.DEGRADED
        transport.replay_error = None
        await until(lambda: followed.subscriber.counts["replayed_batch"] > 0)
        assert followed.subscriber.lag_seconds == 0.0


async def test_changes_of_state_and_block_size_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvsteer.feed")
    async with following(MemoryTransport(history=None)) as followed:
        await connected(followed)
        followed.publish(0, block(1))
        await followed.state(FeedState.LIVE)
    assert "feed of w rank 0: live" in caplog.messages
    assert "w: block size learned: 1" in caplog.messages


class CountingFeed(Feed):
    """Counts how often silence is noted."""

    silences = 0

    def quiet(self, *, for_long: bool = False) -> list[Effect]:
        self.silences += 1
        return super().quiet(for_long=for_long)


async def test_silence_is_probed_once() -> None:
    feed = CountingFeed(Recovery.REPLAY)
    async with following(times=FeedTimes(quiet_seconds=0.02), feed=feed) as followed:
        await connected(followed)
        followed.publish(0, block(1))
        await until(lambda: followed.feed.last_sequence == 0)
        assert followed.transport.history is not None
        followed.transport.history[1] = payload(1, block(2, 1))  # it was lost on its way
        await until(lambda: followed.overlap() == Overlap(1, (2, 0, 0, 0)))
        probed = list(followed.transport.replays)  # on a busy machine before the first batch, too
        assert probed[:2] == [0, 0]
        before = feed.silences
        await until(lambda: feed.silences > before + 3)
        assert followed.transport.replays == probed


class Unending(MemoryTransport):
    """Its replays never come to an end."""

    ended = False

    async def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        self.replays.append(start)
        try:
            await asyncio.Event().wait()
            yield Malformed()
        finally:
            self.ended = True


async def test_disconnection_ends_a_replay() -> None:
    transport = Unending()
    async with following(transport) as followed:
        transport.put(Connected())
        await until(lambda: transport.replays == [0])
        transport.put(Disconnected())
        await until(lambda: transport.ended)
        assert followed.feed.state is FeedState.STALE


async def test_replay_ends_with_the_subscriber() -> None:
    transport = Unending()
    async with following(transport) as followed:
        transport.put(Connected())
        await until(lambda: transport.replays == [0])
        followed.task.cancel()
        await asyncio.gather(followed.task, return_exceptions=True)
        await followed.subscriber.close()
        assert transport.ended


async def test_rank_that_holds_more_than_its_bound_is_degraded() -> None:
    async with following(limits=IndexLimits(bytes=2 * BYTES_PER_BLOCK)) as followed:
        await connected(followed)
        followed.publish(0, block(1), block(2, 1), block(3, 2))
        await followed.state(FeedState.DEGRADED)
        assert followed.feed.reason == "it holds more blocks than the index keeps for one rank"
        assert followed.overlap() == Overlap(1, (2, 0, 0, 0))
        followed.publish(1, CLEAR)
        await followed.state(FeedState.LIVE)


# Short pauses before retries, and before silence is noticed.
HASTY = FeedTimes(quiet_seconds=0.01, retry_seconds=(0.02, 0.02))


async def begin_snapshot(followed: Following, first: int) -> None:
    """Sends the first of ten batches of a snapshot."""
    followed.transport.put(SnapshotBegun(first, first + 9))
    followed.publish(first, block(1))
    await until(lambda: followed.feed.last_sequence == first)


@pytest.mark.parametrize("most", [1, 2_000])
async def test_snapshots_that_do_not_end_degrade_the_feed_until_one_does(most: int) -> None:
    times = replace(HASTY, snapshot_seconds=0.1)
    transport = MemoryTransport(None, recovery=Recovery.RESUME)
    async with following(transport, times=times) as followed:
        await connected(followed)
        for first in range(most):
            await begin_snapshot(followed, first)
            if followed.feed.reason == SNAPSHOT_LATE:
                break
        await until(lambda: followed.feed.reason == SNAPSHOT_LATE)
        assert followed.feed.state is FeedState.DEGRADED
        assert followed.overlap() == Overlap(1, uncertain=1)
        followed.transport.put(SnapshotBegun(5_000, 5_001))
        followed.publish(5_000, block(1))
        followed.publish(5_001, block(2, 1))
        await followed.state(FeedState.LIVE)
        assert followed.overlap() == Overlap(1, (2, 0, 0, 0))


class Faulty(MemoryTransport):
    """Raises errors that nobody foresaw, those of replays until it is mended."""

    is_mended = False

    async def receive(self) -> list[Signal]:
        signals = await super().receive()
        if Malformed() in signals:
            raise RuntimeError("nobody foresaw this")
        return signals

    async def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        async for message in super().replay(start):
            yield message
        if not self.is_mended and (start or len(self.replays) > 1):
            raise RuntimeError("cannot replay")


async def test_unforeseen_error_makes_all_blocks_uncertain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with following(Faulty({0: payload(0, block(1))})) as followed:
        await connected(followed)
        followed.transport.put(Malformed())
        await followed.state(FeedState.STALE)
        assert followed.overlap() == Overlap(1, uncertain=1)
        assert followed.feed.reason == "an internal error, see the log"
        assert "feed of w rank 0 failed" in caplog.messages


async def test_failed_feed_replays_from_0_until_it_is_mended() -> None:
    async with following(Faulty({0: payload(0, block(1))}), times=HASTY) as followed:
        await connected(followed)
        assert followed.transport.history is not None
        followed.transport.history[1] = payload(1, block(2, 1))  # dies with the error
        followed.transport.put(Malformed())
        await until(lambda: len(followed.transport.replays) > 3)
        assert sum(followed.overlap().tiers) == 0
        followed.transport.is_mended = True  # type: ignore[attr-defined]
        await followed.state(FeedState.LIVE)
        assert followed.overlap() == Overlap(1, (2, 0, 0, 0))


async def test_failed_feed_without_a_connection_requests_nothing() -> None:
    async with following(Faulty({0: payload(0, block(1))}), times=HASTY) as followed:
        await connected(followed)
        followed.transport.put(Disconnected())
        await followed.state(FeedState.STALE)
        followed.transport.put(Malformed())
        await until(lambda: followed.feed.reason.startswith("an internal error"))
        await until(lambda: followed.subscriber.again_at == math.inf)
        assert (followed.feed.state, followed.transport.replays) == (FeedState.STALE, [0])


class Unanswered(MemoryTransport):
    """Its first replay is empty, the second fails, then there is no answer."""

    async def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        self.replays.append(start)
        if start or self.replays == [0, 0]:
            raise ReplayError("silent")
        if len(self.replays) > 2:
            await asyncio.Event().wait()
        no_batches: tuple[Batch, ...] = ()
        for batch in no_batches:
            yield batch


async def test_replay_from_0_is_not_requested_again_before_its_answer() -> None:
    async with following(Unanswered(), times=HASTY) as followed:
        await connected(followed)
        followed.publish(3, block(1))
        await until(lambda: followed.transport.replays.count(0) == 3)
        for number in range(4, 40):
            followed.publish(number, block(number, number - 1))
            await until(lambda number=number: followed.feed.last_sequence == number)  # type: ignore[misc]
        assert followed.transport.replays.count(0) == 3


async def test_unforeseen_error_in_a_replay_is_logged_and_makes_blocks_uncertain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with following(Faulty({0: payload(0, block(1))})) as followed:
        await connected(followed)
        followed.publish(5, block(2))
        await followed.state(FeedState.STALE)
        assert followed.overlap() == Overlap(1, uncertain=1)
        assert "replay of w rank 0 failed" in caplog.messages


async def test_publisher_that_restarts_endlessly_is_asked_for_few_replays() -> None:
    times = FeedTimes(replays_at_once=4, replay_spacing_seconds=100.0)
    async with following(times=times) as followed:
        await connected(followed)
        followed.transport.replay_error = "silent"
        for number in range(50):
            followed.transport.put(Batch(0, payload(0, block(1), life=number)))
            await until(followed.transport.signals.empty)
        await until(lambda: followed.feed.replays > 5)
        assert len(followed.transport.replays) <= 5
        assert followed.overlap().tiers == (0, 0, 0, 0)


async def test_replays_of_another_worker_degrade_the_feed_and_end() -> None:
    other: dict[int, Body] = {number: payload(number, block(7), life=9) for number in range(20)}
    async with following(MemoryTransport(other)) as followed:
        await connected(followed)
        for number in range(20):
            body = payload(number, block(number + 1, number or None))
            followed.transport.put(Batch(number, body))
            await until(followed.transport.signals.empty)
        await until(lambda: followed.feed.reason == OTHER_PUBLISHER)
        await until(lambda: followed.feed.last_sequence == 19)
        assert (followed.feed.state, followed.feed.restarts) == (FeedState.DEGRADED, 3)
        assert len(followed.transport.replays) == 3
        assert followed.owner.blocks >= 1


async def test_error_while_applying_makes_all_blocks_uncertain() -> None:
    async with following() as followed:
        await connected(followed)
        followed.publish(0, block(1))
        await until(lambda: followed.owner.blocks == 1)
        followed.transport.put(Batch(1, None))  # type: ignore[arg-type]
        await followed.state(FeedState.STALE)
        assert followed.overlap() == Overlap(1, uncertain=1)


async def test_replay_yields_the_loop_between_slices() -> None:
    history: dict[int, Body] = {number: payload(number, block(number + 1)) for number in range(50)}
    seen: set[int] = set()
    async with following(MemoryTransport(history), turns=Turns(0.0)) as followed:
        followed.transport.put(Connected())
        while followed.feed.state is not FeedState.LIVE:
            seen.add(followed.owner.blocks)
            await asyncio.sleep(0)
    assert len(seen) > 25


async def test_visit_whose_caller_is_cancelled_does_not_go_on_later() -> None:
    done: list[str] = []

    def steps() -> Steps[None]:
        try:
            for _ in range(1_000):
                done.append("step")
                yield
        finally:
            done.append("closed")

    async with following(turns=Turns(0.0)) as followed:
        await connected(followed)
        visit = asyncio.create_task(followed.subscriber.visit(steps))
        await until(lambda: done)
        visit.cancel()
        await asyncio.gather(visit, return_exceptions=True)
        assert done[-1] == "closed"
        seen = len(done)
        followed.publish(0, block(1))
        await until(lambda: followed.owner.blocks == 1)
        assert len(done) == seen


def test_errors_far_apart_are_followed_by_equal_waits(caplog: pytest.LogCaptureFixture) -> None:
    # so long that no wait ends by itself
    times = FeedTimes(quiet_seconds=0.01, retry_seconds=(1_000.0, 60_000.0))
    transport = Faulty({0: payload(0, block(1))})
    transport.is_mended = True

    loop = SkippingLoop()

    async def scenario() -> None:
        async with following(transport, times=times) as followed:
            await connected(followed)
            for errors in range(1, 4):
                transport.put(Malformed())
                await until(lambda errors=errors: caplog.text.count("nobody foresaw") >= errors)  # type: ignore[misc]
                loop.skipped_seconds += 1_000  # the first wait
                await followed.state(FeedState.LIVE)
                loop.skipped_seconds += 60_000
                await until(lambda: followed.feed.certain)

    run_in(loop, scenario())
