"""The loop that runs one feed: what the transport says goes in, what the feed asks for is done."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from kvstate.errors import ReplayError, WireError
from kvstate.events import Batch, Body, EngineLoad
from kvstate.feeds.backoff import Backoff
from kvstate.feeds.feed import Demote, Effect, Feed, Forget, Replay, State
from kvstate.feeds.replays import Replays, ReplaySlots, Turns
from kvstate.feeds.sink import FeedNews, Place, Sink
from kvstate.feeds.transport import (
    Connected,
    Disconnected,
    LoadReport,
    Malformed,
    Refused,
    Signal,
    Snapshot,
    Transport,
)
from kvstate.wire.zmq_wire import stamp_of


class Effects:
    """What one feed asked for and is not done yet.

    start_replay: from this number on.
    """

    def __init__(
        self,
        feed: Feed,
        sink: Sink,
        turns: Turns,
        news: FeedNews,
        start_replay: Callable[[int], None],
    ) -> None:
        self._feed = feed
        self._sink = sink
        self._turns = turns
        self._news = news
        self._start_replay = start_replay
        self._pending: deque[Effect] = deque()
        self._work: Generator[None, None, None] | None = None  # the effect that is under way
        self._healed = False

    def __len__(self) -> int:
        return len(self._pending)

    def drop(self) -> None:
        """What was not done yet is not to be done any more."""
        if self._work is not None:
            self._work.close()
            self._work = None
        self._pending.clear()
        self._healed = False

    def put_off(self, effects: Sequence[Effect]) -> None:
        """Has them carried out with the next ones, before these; nothing is believed until then."""
        self._pending.extend(effects)
        self._sink.trust(False)  # noqa: FBT003

    async def carry_out(self, effects: Sequence[Effect]) -> None:
        """Carries them out, then lets the sink know what counts.

        Live stream and replay both come here; their effects are carried out in the order in which
        the feed gave them, whoever does it. What lowers the credit does so before its turn comes.
        """
        self._pending.extend(effects)
        if not self._feed.certain or any(isinstance(each, (Demote, Forget)) for each in effects):
            self._sink.trust(False)  # noqa: FBT003
        while self._pending or self._work is not None:
            if self._turns.is_over():
                await self._turns.next(self._news.place.worker)
            self._step()
        if self._healed:
            self._healed = False
            self._feed.healed()
        self._sink.trust(self._feed.certain)
        self._news.tell_change()

    def _step(self) -> None:
        """Does a little of what comes next, if nobody else did it meanwhile."""
        if self._work is None:
            if not self._pending:
                return
            self._work = self._carrying_out(self._pending.popleft())
        work = self._work
        try:
            next(work)
        except StopIteration:
            self._work = None
        except BaseException:
            self._work = None
            raise

    def _carrying_out(self, effect: Effect) -> Generator[None, None, None]:
        match effect:
            case Batch(body=body):
                yield from self._applying(body)
            case Forget():
                yield from self._sink.forgetting()
                self._healed = False  # what the feed misses now, it misses since
                self._news.tell_restart()
            case Demote():
                yield from self._sink.demoting()
                self._healed = False
            case Replay(start):
                self._start_replay(start)

    def _applying(self, body: Body) -> Generator[None, None, None]:
        try:
            taken = yield from self._sink.applying(body)
        except WireError as error:
            self._news.tell_undecodable(error)
            self._sink.trust(False)  # noqa: FBT003
            yield from self._sink.demoting()
            self._healed = False
            self._feed.miss(f"a batch could not be decoded: {error}")
            return
        if taken.faults:
            self._news.counts.update(taken.faults)
        if taken.missed:
            self._healed = False
            self._feed.miss(taken.missed)
        elif taken.healed:
            self._healed = True


log = logging.getLogger("kvsteer.feed")

# A feed that fell silent for so long asks whether a last batch was lost, once and then seldom.
QUIET_SECONDS = 1.0
QUIET_FOR_LONG_SECONDS = 30.0

RETRY_SECONDS = (1.0, 60.0)


class Shared(NamedTuple):
    """What all subscribers of a process share.

    clock: seconds, for lag;
    comparable with the publishers' time stamps (time.time). chance: 0 to 1, for jitter.
    """

    turns: Turns
    replay_slots: ReplaySlots
    clock: Callable[[], float]
    chance: Callable[[], float]


class Subscriber:
    """Runs one rank's feed until it is cancelled."""

    def __init__(self, place: Place, sink: Sink, transport: Transport, shared: Shared) -> None:
        self.place = place
        self.feed = Feed(transport.recovery)
        self.news = FeedNews(place, self.feed)
        self.counts = self.news.counts
        self.lag_seconds = 0.0
        self.load: EngineLoad | None = None
        self.load_at = -math.inf
        self._sink = sink
        self._transport = transport
        self._shared = shared
        self._replays = Replays(
            place,
            transport,
            shared.replay_slots,
            take=self._take_replayed,
            end=self._end_replay,
            fail=self._distrust,
        )
        self._effects = Effects(self.feed, sink, shared.turns, self.news, self._replays.start)
        self._retries = Backoff(*RETRY_SECONDS, shared.chance)
        self._retry_at = 0.0
        self._is_connected = False
        self._failures = Backoff(*RETRY_SECONDS, shared.chance)
        self._again_at = math.inf  # when a feed that failed is to go on
        self._signals: deque[Signal] = deque()
        self._quiet_since = 0.0

    async def run(self) -> None:
        """Follows the publisher until it is cancelled.

        After an error that nobody foresaw nothing is believed; after a while it goes on.
        """
        try:
            while True:
                try:
                    await self._step()
                except Exception:
                    log.exception("feed of %s rank %d failed", *self.place)
                    self._distrust()
                    await asyncio.sleep(self._again_at - asyncio.get_running_loop().time())
        finally:
            self._sink.trust(False)  # noqa: FBT003

    async def close(self) -> None:
        """Gives up the connection, after `run` was cancelled or even before it began."""
        self._effects.drop()  # a replay that was replaced may wait for its turn yet
        await self._replays.close()
        await self._transport.close()

    async def _step(self) -> None:
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                self._signals.extend(await self._transport.receive())
        except TimeoutError:
            await self._effects.carry_out(self.feed.quiet(for_long=self._is_quiet_for_long()))
        else:
            self._quiet_since = asyncio.get_running_loop().time()
        await self._go_on()
        if self.feed.wants_everything and asyncio.get_running_loop().time() >= self._retry_at:
            await self._effects.carry_out(self.feed.ask_everything())
        while self._signals:
            await self._effects.carry_out(self._take(self._signals.popleft()))

    async def _go_on(self) -> None:
        """Some time after a failure: as if the connection was a new one."""
        if asyncio.get_running_loop().time() >= self._again_at:
            self._again_at = math.inf
            if self._is_connected:
                await self._effects.carry_out(self.feed.connected())

    def _is_quiet_for_long(self) -> bool:
        now = asyncio.get_running_loop().time()
        if now - self._quiet_since < QUIET_FOR_LONG_SECONDS:
            return False
        self._quiet_since = now
        return True

    def _take(self, signal: Signal) -> list[Effect]:
        match signal:
            case Batch():
                return self.feed.received(self._stamped(signal))
            case Connected():
                self._is_connected = True
                return self.feed.connected()
            case Disconnected(reason):
                self._is_connected = False
                self._replays.stop()
                return self.feed.disconnected(reason)
            case Refused(reason):
                self._is_connected = False
                self._replays.stop()
                return self.feed.refused(reason)
            case Snapshot(first, last, unknown_before):
                return self.feed.snapshot(first, last, unknown_before)
            case LoadReport(load):
                self.load, self.load_at = load, self._shared.clock()
            case Malformed():
                self.counts["malformed_message"] += 1
        return []

    def _stamped(self, batch: Batch) -> Batch:
        """A batch as the feed wants it; without a body if that is no event batch at all."""
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
        if self.feed.state is not State.REPLAYING:  # what is repeated is as old as it is
            self.lag_seconds = max(0.0, self._shared.clock() - batch.stamp)
        return batch

    def _distrust(self) -> None:
        """What is held may be wrong: uncertain, until all of it was asked for again."""
        wait_seconds = self._failures.next_seconds()
        self._again_at = asyncio.get_running_loop().time() + wait_seconds
        self._replays.stop()
        self._effects.drop()
        self._effects.put_off(self.feed.failed("an internal error, see the log"))
        self.news.tell_change()

    async def _take_replayed(self, message: Batch | Malformed) -> None:
        if isinstance(message, Malformed):
            self.counts["malformed_message"] += 1
        else:
            await self._effects.carry_out(self.feed.replayed(self._stamped(message)))

    async def _end_replay(self, error: ReplayError | None) -> None:
        if error is None:
            self._retries.reset()
            self.news.replay_fault = ""
            await self._effects.carry_out(self.feed.replay_ended())
            return
        self.counts["failed_replay"] += 1
        self.news.replay_fault = f"replay failed: {error}"
        self._retry_at = asyncio.get_running_loop().time() + self._retries.next_seconds()
        await self._effects.carry_out(self.feed.replay_failed(str(error)))
