"""The loop that runs one feed: passes it the transport's signals and carries out its effects."""

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from kvstate.errors import ReplayError, WireError
from kvstate.events import Batch, EngineLoad
from kvstate.feeds.allowance import Allowance
from kvstate.feeds.backoff import Backoff, FailureWaits
from kvstate.feeds.effects import Effects, NoWitness, Sink, Visit, Witness
from kvstate.feeds.feed import Effect, Feed, FeedState, Restoration
from kvstate.feeds.feed_news import Call, FeedNews, NoteLoss
from kvstate.feeds.feed_times import USUAL, FeedTimes
from kvstate.feeds.replays import Replays, ReplaySlots
from kvstate.feeds.transport import (
    Connected,
    Disconnected,
    FeedTransport,
    LoadReport,
    Malformed,
    RankName,
    Refused,
    Signal,
    SnapshotBegun,
)
from kvstate.feeds.turns import Turns
from kvstate.rows.format import SavedFeed
from kvstate.steps import Steps
from kvstate.wire.zmq_wire import stamp_of

log = logging.getLogger("kvsteer.feed")


class SharedByFeeds(NamedTuple):
    """Objects shared by all subscribers of a process, and by those of a worker.

    allowance: of the worker; None if unlimited. clock: seconds, for lag; comparable with the
    publishers' time stamps (time.time). chance: 0 to 1, for jitter. times: of all feeds.
    """

    turns: Turns
    replay_slots: ReplaySlots
    clock: Callable[[], float]
    chance: Callable[[], float]
    allowance: Allowance | None = None
    times: FeedTimes = USUAL


class Subscriber:
    """Runs one rank's feed until it is cancelled.

    feed: created with the transport's recovery. emptied, cut: see `FeedNews`. restoring: puts what
    was saved of the rank into the sink, in steps, and returns where its feed was; None if it could
    not. witness: sees all effects on the sink. has_begun: set once that is done.
    """

    def __init__(
        self,
        place: RankName,
        feed: Feed,
        sink: Sink,
        transport: FeedTransport,
        shared: SharedByFeeds,
        emptied: NoteLoss = lambda _: None,
        cut: Call = lambda: None,
        restoring: Callable[[], Steps[SavedFeed | None]] | None = None,
        witness: Witness | None = None,
    ) -> None:
        self.place = place
        self.feed = feed
        self.news = FeedNews(place, feed, emptied, cut)
        self.counts = self.news.counts
        self.lag_seconds = 0.0
        self.load: EngineLoad | None = None
        self.load_at = -math.inf
        self.has_begun = asyncio.Event()
        self._witness = witness or NoWitness()
        self._sink = sink
        self._transport = transport
        self._shared = shared
        self._restoring = restoring
        self._replays = Replays(
            place,
            transport,
            shared.replay_slots,
            shared.times,
            take=self._take_replayed,
            end=self._end_replay,
            fail=self._distrust,
        )
        self._effects = Effects(
            self.feed,
            sink,
            shared.turns,
            self.news,
            self._replays,
            shared.allowance,
            self._witness,
        )
        self._retries = Backoff(*shared.times.retry_seconds, shared.chance)
        self._retry_at = 0.0
        self._is_connected = False
        self._failures = FailureWaits(*shared.times.retry_seconds, shared.chance)
        self.again_at = math.inf  # when a failed feed continues
        self._signals: deque[Signal] = deque()
        self._quiet_since = self._quiet_logged_at = 0.0
        self._snapshot_since = 0.0  # of the first of those that did not end

    async def run(self) -> None:
        """Follows the publisher until it is cancelled.

        After an unexpected error nothing is certain; the subscriber continues after a while.
        """
        try:
            await self._restore()
            self.has_begun.set()
            while True:
                try:
                    await self._step()
                except Exception:
                    log.exception("feed of %s rank %d failed", *self.place)
                    self._distrust()
                    await asyncio.sleep(self.again_at - asyncio.get_running_loop().time())
        finally:
            self._sink.trust(trusted=False)

    async def visit(self, steps: Callable[[], Steps[None]]) -> None:
        """Does some work on the sink after all batches that came so far, and before the next.

        If the feed fails or is closed meanwhile, or the caller is cancelled, the steps end early or
        never begin.
        """
        made = steps()
        try:
            await self._effects.carry_out([Visit(lambda: made)])
        except BaseException:
            made.close()  # not later, by whoever carries out what comes next
            raise

    async def save(self, steps: Callable[[], Steps[None]]) -> SavedFeed | None:
        """Visits the sink to save it; returns where the feed is then.

        None if the publisher could not be proven later; then it does nothing.
        """
        at = self.feed.saved()
        if at is None:
            return None
        await self.visit(steps)
        # what a batch that was still to be applied then lacks, is missing too
        return replace(at, incomplete=at.incomplete or self.feed.incomplete)

    async def close(self) -> None:
        """Closes the connection, after `run` was cancelled or even before it began."""
        self._effects.drop()  # a replaced replay may still wait for its turn
        await self._replays.close()
        await self._transport.close()

    @property
    def reason(self) -> str:
        """Why the feed is in its state."""
        return self.news.reason

    @property
    def unapplied(self) -> int:
        """How many effects of batches that came are not carried out yet."""
        return len(self._effects)

    @property
    def restoration(self) -> Restoration:
        """Whether what was restored is proven; UNPROVEN also before it is restored."""
        return self.feed.restoration if self._restoring is None else Restoration.UNPROVEN

    async def _restore(self) -> None:
        """Begins with what was saved, if anything was, before the first signal."""
        restoring = self._restoring
        if restoring is None:
            return
        at: list[SavedFeed | None] = []

        def steps() -> Steps[None]:
            at.append((yield from restoring()))

        try:
            await self.visit(steps)
        except Exception:  # it begins with nothing, then
            log.exception("%s rank %d: what was saved cannot be restored", *self.place)
            await self.visit(self._sink.forgetting)
        for saved in filter(None, at):
            self.feed.restore(saved)
            self._witness.note_restored(*saved.stamps[-1])
        self._restoring = None

    async def _step(self) -> None:
        await self._effects.await_allowance()
        came: list[Signal] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._shared.times.quiet_seconds):
                came = await self._transport.receive()
        self._signals.extend(came)
        now = asyncio.get_running_loop().time()
        if not all(isinstance(one, LoadReport) for one in came):
            self._quiet_since = self._quiet_logged_at = now
        elif not came or now - self._quiet_logged_at >= self._shared.times.quiet_seconds:
            self._quiet_logged_at = now
            await self._effects.carry_out(self.feed.quiet(for_long=self._is_quiet_for_long()))
        most_seconds = self._shared.times.snapshot_seconds
        if self.feed.is_in_snapshot and now - self._snapshot_since >= most_seconds:
            await self._effects.carry_out(self.feed.note_late_snapshot())
        await self._go_on()
        wants_replay = self.feed.wants_everything or self.feed.wants_retry
        if wants_replay and asyncio.get_running_loop().time() >= self._retry_at:
            await self._effects.carry_out(self.feed.ask_again() or self.feed.ask_everything())
        while self._signals:
            began_at = asyncio.get_running_loop().time()
            await self._effects.carry_out(self._take(self._signals.popleft()), began_at)

    async def _go_on(self) -> None:
        """Continues some time after a failure, as with a new connection."""
        if asyncio.get_running_loop().time() >= self.again_at:
            self.again_at = math.inf
            if self._is_connected:
                await self._effects.carry_out(self.feed.connect())

    def _is_quiet_for_long(self) -> bool:
        now = asyncio.get_running_loop().time()
        if now - self._quiet_since < self._shared.times.quiet_for_long_seconds:
            return False
        self._quiet_since = now
        return True

    def _take(self, signal: Signal) -> list[Effect]:
        match signal:
            case Batch():
                self.news.note_batch()
                batch = self._stamped(signal)
                if not batch.fault and self.feed.state is not FeedState.REPLAYING:
                    # a snapshot, too, brings what happened long before
                    self.lag_seconds = max(0.0, self._shared.clock() - batch.stamp)
                return self.feed.receive(batch)
            case Connected():
                self._is_connected = True
                return self.feed.connect()
            case Disconnected(reason):
                self._is_connected = False
                self._replays.stop()
                return self.feed.disconnect(reason)
            case Refused(reason):
                self._is_connected = False
                self._replays.stop()
                return self.feed.refuse(reason)
            case SnapshotBegun(first, last, unknown_before):
                if not self.feed.is_in_snapshot:
                    self._snapshot_since = asyncio.get_running_loop().time()
                return self.feed.snapshot(first, last, unknown_before)
            case LoadReport(load):
                self.counts["loads"] += 1
                self.load, self.load_at = load, self._shared.clock()
            case Malformed(is_load):
                self.news.note_malformed(is_load=is_load)
        return []

    def _stamped(self, batch: Batch) -> Batch:
        """Completes a batch for the feed; leaves out the body if it is not an event batch."""
        body = batch.body
        self.counts["batches"] += 1
        if isinstance(body, bytes):
            batch.size_bytes = len(body)
            self.counts["bytes"] += len(body)
            try:
                batch.stamp = stamp_of(body)
            except WireError as error:
                self.news.tell_undecodable(error)
                return Batch(batch.sequence, b"", fault=str(error))
        else:
            batch.stamp = body.timestamp
        return batch

    def _distrust(self) -> None:
        """Makes everything uncertain until a complete replay, because it may be wrong.

        The feed continues after a wait, which grows with each failure until the feed has worked
        again for the longest wait.
        """
        now = asyncio.get_running_loop().time()
        self.again_at = self._failures.again_at(now, worked=self.feed.certain)
        self._replays.stop()
        self._effects.drop()
        self._effects.put_off(self.feed.fail("an internal error, see the log"))
        self.news.tell_change()

    async def _take_replayed(self, message: Batch | Malformed) -> None:
        if isinstance(message, Malformed):
            self.counts["malformed_message"] += 1
        else:
            self.counts["replayed_batch"] += 1
            await self._effects.carry_out(self.feed.receive_replayed(self._stamped(message)))

    async def _end_replay(self, error: ReplayError | None) -> None:
        if error is None:
            self._retries.reset()
            self.news.tell_replay()
            await self._effects.carry_out(self.feed.end_replay())
            return
        self.counts["failed_replay"] += 1
        self.news.tell_replay(f"replay failed: {error}")
        self._retry_at = asyncio.get_running_loop().time() + self._retries.next_seconds()
        await self._effects.carry_out(self.feed.fail_replay(str(error)))
