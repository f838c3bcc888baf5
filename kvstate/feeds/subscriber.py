"""The loop that runs one feed: transport in, sink out."""

import asyncio
import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from kvstate.errors import ReplayError, WireError
from kvstate.feeds.backoff import Backoff
from kvstate.feeds.engine_load import EngineLoad
from kvstate.feeds.feed import Apply, Demote, Effect, Feed, Forget, Numbered, Replay, State
from kvstate.feeds.sink import Body, Sink
from kvstate.feeds.transport import (
    Batch,
    Connected,
    Disconnected,
    LoadReport,
    Malformed,
    Refused,
    Signal,
    Snapshot,
    Transport,
)
from kvstate.feeds.turns import Turns
from kvstate.wire.zmq_wire import stamp_of

log = logging.getLogger("kvsteer.feed")

# A feed that fell silent for so long asks whether a last batch was lost, once and then seldom.
QUIET_SECONDS = 1.0
QUIET_FOR_LONG_SECONDS = 30.0

# A whole replay; engines send them from the thread that publishes.
MAX_REPLAY_SECONDS = 60.0
# Two publishers on one wire seem to restart all the time; they are not asked all the time.
REPLAY_SPACING_SECONDS = 0.5
REPLAYS_AT_ONCE = 20
RETRY_SECONDS = (1.0, 60.0)


class Place(NamedTuple):
    """Whose feed it is, for messages."""

    worker: str
    rank: int


class Shared(NamedTuple):
    """What all subscribers of a process share.

    replay_slots: engines answer replays from their publishing thread. clock: seconds, for lag;
    comparable with the publishers' time stamps (time.time). chance: 0 to 1, for jitter.
    """

    turns: Turns
    replay_slots: asyncio.Semaphore
    clock: Callable[[], float]
    chance: Callable[[], float]


class Subscriber:
    """Runs one rank's feed until it is cancelled.

    emptied: is called when the publisher restarted, and so holds nothing of what it held.
    """

    def __init__(self, place: Place, sink: Sink, transport: Transport, shared: Shared) -> None:
        self.place = place
        self.feed: Feed[Body] = Feed(transport.recovery)
        self.counts: Counter[str] = Counter()
        self.lag_seconds = 0.0
        self.load: EngineLoad | None = None
        self.load_at = -math.inf
        self.emptied: Callable[[], None] | None = None
        self._sink = sink
        self._transport = transport
        self._shared = shared
        self._replay: asyncio.Task[None] | None = None
        self._retries = Backoff(*RETRY_SECONDS, shared.chance)
        self._retry_at = 0.0
        self._replay_due = -math.inf
        self._is_connected = False
        self._failures = Backoff(*RETRY_SECONDS, shared.chance)
        self._again_at = math.inf  # when a feed that failed is to go on
        self._signals: deque[Signal] = deque()
        self._pending: deque[Effect[Body]] = deque()
        self._healed = False
        self._quiet_since = 0.0
        self._told = self.feed.state, self.feed.reason
        self._restarts_told = 0
        self._replay_fault = ""

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
        replay = self._replay
        self._stop_replay()
        self._pending.clear()  # a replay that was replaced may wait for its turn yet
        if replay is not None:
            await asyncio.wait([replay])
        await self._transport.close()

    async def _step(self) -> None:
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                self._signals.extend(await self._transport.receive())
        except TimeoutError:
            await self._do(self.feed.quiet(for_long=self._is_quiet_for_long()))
        else:
            self._quiet_since = asyncio.get_running_loop().time()
        await self._go_on()
        if self.feed.wants_everything and asyncio.get_running_loop().time() >= self._retry_at:
            await self._do(self.feed.ask_everything())
        while self._signals:
            await self._do(self._take(self._signals.popleft()))

    async def _go_on(self) -> None:
        """Some time after a failure: as if the connection was a new one."""
        if asyncio.get_running_loop().time() >= self._again_at:
            self._again_at = math.inf
            if self._is_connected:
                await self._do(self.feed.connected())

    def _is_quiet_for_long(self) -> bool:
        now = asyncio.get_running_loop().time()
        if now - self._quiet_since < QUIET_FOR_LONG_SECONDS:
            return False
        self._quiet_since = now
        return True

    def _take(self, signal: Signal) -> list[Effect[Body]]:
        match signal:
            case Batch():
                return self.feed.received(self._numbered(signal))
            case Connected():
                self._is_connected = True
                return self.feed.connected()
            case Disconnected(reason):
                self._is_connected = False
                self._stop_replay()
                return self.feed.disconnected(reason)
            case Refused(reason):
                self._is_connected = False
                self._stop_replay()
                return self.feed.refused(reason)
            case Snapshot(first, last, unknown_before):
                return self.feed.snapshot(first, last, unknown_before)
            case LoadReport(load):
                self.load, self.load_at = load, self._shared.clock()
            case Malformed():
                self.counts["malformed_message"] += 1
        return []

    def _numbered(self, batch: Batch) -> Numbered[Body]:
        """A batch as the feed wants it; without a body if that is no event batch at all."""
        body = batch.body
        self.counts["batches"] += 1
        size_bytes = 0
        if isinstance(body, bytes):
            size_bytes = len(body)
            self.counts["bytes"] += size_bytes
            try:
                stamp = stamp_of(body)
            except WireError as error:
                self._tell_undecodable(error)
                return Numbered(batch.sequence, -math.inf, None)
        else:
            stamp = body.timestamp
        if self.feed.state is not State.REPLAYING:  # what is repeated is as old as it is
            self.lag_seconds = max(0.0, self._shared.clock() - stamp)
        return Numbered(batch.sequence, stamp, body, size_bytes)

    def _tell_undecodable(self, error: WireError) -> None:
        """Counts it; tells of the 1st, 2nd, 4th ..., or a broken publisher would fill the log."""
        self.counts["undecodable_batch"] += 1
        count = self.counts["undecodable_batch"]
        if count & (count - 1) == 0:
            log.warning("%s rank %d: %s (%d so far)", *self.place, error, count)

    async def _do(self, effects: Sequence[Effect[Body]]) -> None:
        """Carries out what the feed asks for, in slices, then lets the sink know what counts.

        Live stream and replay both come here; their effects are carried out in the order in which
        the feed gave them, whoever does it. What lowers the credit does so before its turn comes.
        """
        self._pending.extend(effects)
        if not self.feed.certain or any(isinstance(each, (Demote, Forget)) for each in effects):
            self._sink.trust(False)  # noqa: FBT003
        while self._pending:
            if self._shared.turns.is_over():
                await self._shared.turns.next()
            if self._pending:  # nobody else did it meanwhile
                self._carry_out(self._pending.popleft())
        if self._healed:
            self._healed = False
            self.feed.healed()
        self._sink.trust(self.feed.certain)
        self._tell_change()

    def _carry_out(self, effect: Effect[Body]) -> None:
        match effect:
            case Apply(body):
                self._apply(body)
            case Forget():
                self._sink.forget()
                self._healed = False  # what the feed misses now, it misses since
                self._tell_restart()
            case Demote():
                self._sink.demote()
                self._healed = False
            case Replay(start):
                self._start_replay(start)

    def _apply(self, body: Body) -> None:
        try:
            taken = self._sink.apply(body)
        except WireError as error:
            self._tell_undecodable(error)
            self._sink.demote()
            self._healed = False
            self.feed.miss("a batch could not be decoded")
            return
        self.counts.update(taken.faults)
        if taken.missed:
            self._healed = False
            self.feed.miss(taken.missed)
        elif taken.healed:
            self._healed = True

    def _tell_restart(self) -> None:
        if self.feed.restarts > self._restarts_told:
            self._restarts_told = self.feed.restarts
            if self.emptied is not None:
                self.emptied()

    @property
    def reason(self) -> str:
        """Why the feed is in its state; of one in which all is well, what it would lack."""
        return self.feed.reason or self._replay_fault

    def _tell_change(self) -> None:
        state, reason = self.feed.state, self.reason
        if (state, reason) != self._told:
            self._told = state, reason
            shown = f" ({reason})" if reason else ""
            log.info("feed of %s rank %d: %s%s", *self.place, state, shown)

    def _distrust(self) -> None:
        """What is held may be wrong: uncertain, until all of it was asked for again."""
        wait_seconds = self._failures.next_seconds()
        self._again_at = asyncio.get_running_loop().time() + wait_seconds
        self._stop_replay()
        self._pending.clear()
        self._healed = False
        self.feed.failed("an internal error, see the log")
        self._sink.demote()
        self._sink.trust(False)  # noqa: FBT003
        self._tell_change()

    def _start_replay(self, start: int) -> None:
        self._stop_replay()
        now = asyncio.get_running_loop().time()
        credit_seconds = REPLAYS_AT_ONCE * REPLAY_SPACING_SECONDS
        self._replay_due = max(self._replay_due + REPLAY_SPACING_SECONDS, now - credit_seconds)
        self._replay = asyncio.create_task(self._run_replay(start, self._replay_due - now))

    def _stop_replay(self) -> None:
        """Ends a replay under way; one that replaces itself sees that it is no longer the one."""
        replay, self._replay = self._replay, None
        if replay is not None and replay is not asyncio.current_task():
            replay.cancel()

    async def _run_replay(self, start: int, wait_seconds: float) -> None:
        try:
            await asyncio.sleep(wait_seconds)
            async with self._shared.replay_slots, _limited(MAX_REPLAY_SECONDS):
                await self._receive_replay(start)
            if self._is_current():
                self._retries.reset()
                self._replay = None
                self._replay_fault = ""
                await self._do(self.feed.replay_ended())
        except ReplayError as error:
            self.counts["failed_replay"] += 1
            self._replay_fault = f"replay failed: {error}"
            self._retry_at = asyncio.get_running_loop().time() + self._retries.next_seconds()
            self._replay = None
            await self._do(self.feed.replay_failed(str(error)))
        except Exception:
            log.exception("replay of %s rank %d failed", *self.place)
            self._distrust()

    async def _receive_replay(self, start: int) -> None:
        async with contextlib.aclosing(self._transport.replay(start)) as batches:
            async for batch in batches:
                if isinstance(batch, Malformed):
                    self.counts["malformed_message"] += 1
                else:
                    await self._do(self.feed.replayed(self._numbered(batch)))
                if not self._is_current():
                    return

    def _is_current(self) -> bool:
        """Whether this replay is still the one that the feed asked for last."""
        return self._replay is asyncio.current_task()


@contextlib.asynccontextmanager
async def _limited(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ReplayError(f"it took longer than {seconds:g} s") from None
