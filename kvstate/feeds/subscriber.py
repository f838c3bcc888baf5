"""The loop that runs one feed: passes it the transport's signals and carries out its effects."""

import asyncio
import contextlib
import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol

from kvstate.errors import ReplayError, WireError
from kvstate.events import Batch, Body, EngineLoad, EventBatch, Taken
from kvstate.feeds.backoff import Backoff
from kvstate.feeds.feed import Demote, Effect, Feed, Forget, Replay, State
from kvstate.feeds.replays import Replays, ReplaySlots
from kvstate.feeds.transport import (
    SLICE_SECONDS,
    Connected,
    Disconnected,
    LoadReport,
    Malformed,
    Place,
    Refused,
    Signal,
    Snapshot,
    Transport,
)
from kvstate.wire.zmq_wire import stamp_of

log = logging.getLogger("kvsteer.feed")

# Larger batches are not passed to listeners, which process each without pauses.
MAX_SHOWN_BYTES = 128 * 1024
MAX_SHOWN_EVENTS = 1_024

# Called with the batches of a rank.
Listener = Callable[[Body], None]

Call = Callable[[], None]

# Feeds that continue in one round of the loop, each with at least one batch.
MAX_TURNS_AT_ONCE = 8

# The most loop time that the feeds of one worker may use, in seconds per second, and in one burst:
# a start with vLLM's full buffer takes 1.3 s. Reading messages, and decoding those of gRPC, is not
# included.
SHARE_OF_LOOP = 0.2
BURST_SECONDS = 4.0
# The most time that a worker can owe: after an hour's stop of the process, it must not wait five.
MAX_DEBT_SECONDS = 0.1
# A worker that used up its time waits until it has this much again; otherwise it would wait for
# every message.
RESUME_SECONDS = 0.01
# A worker is behind with its events if it had less than CALM_SECONDS left for BEHIND_SECONDS.
CALM_SECONDS = 0.1
BEHIND_SECONDS = 2.0

BEHIND = "behind: events arrive faster than they are applied"

# After this much silence a feed checks whether the last batch was lost, once and then seldom.
QUIET_SECONDS = 1.0
QUIET_FOR_LONG_SECONDS = 30.0

RETRY_SECONDS = (1.0, 60.0)


class Sink(Protocol):
    """The target of one rank's feed: the index, or a bridge's mirror of the worker.

    Long operations are iterators of short steps; if they are stopped early, the rest stays undone.
    """

    def applying(self, body: Body) -> Generator[None, None, Taken]:
        """Applies one batch.

        Raises:
            WireError: it is not an event batch; nothing was changed.
        """

    def forgetting(self) -> Generator[None, None, None]:
        """Forgets all blocks: the publisher restarted."""

    def demoting(self) -> Generator[None, None, None]:
        """Makes the blocks held uncertain: there is a hole."""

    def trust(self, trusted: bool) -> None:  # noqa: FBT001 - a fact, not a mode
        """Sets whether certain blocks count as certain now."""


class Turns:
    """The time slices of all feeds of a process.

    A feed checks `is_over` before each step, and if so waits for the `next` slice. Between two
    slices everything else in the process can run, however many feeds have work. Workers take turns,
    so none waits for all ranks of another.
    """

    def __init__(self) -> None:
        self._ends = 0.0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_scheduled = False

    def is_over(self) -> bool:
        """Whether the present slice is used up."""
        return asyncio.get_running_loop().time() >= self._ends

    async def next(self, worker: str = "") -> None:
        """Waits for a slice: workers take turns, and a worker's feeds queue in order.

        worker: the feed's worker; "" for work of no worker.
        """
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(worker, deque()).append(turn)
        self._schedule()
        await turn

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._is_scheduled = False
        self._ends = asyncio.get_running_loop().time() + SLICE_SECONDS
        for _ in range(MAX_TURNS_AT_ONCE):
            if not self._waiting:
                break
            worker, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[worker] = turns
            if not turn.done():  # unless its feed was cancelled
                turn.set_result(None)
        if self._waiting:
            self._schedule()


class Allowance:
    """The loop time that the feeds of one worker may use: a token bucket of seconds.

    A worker that sends too many events is read later, with all its ranks; its messages wait in its
    socket, then in the publisher. now: the loop's time, in seconds.
    """

    def __init__(self, now: float) -> None:
        self._left_seconds = BURST_SECONDS
        self._filled_at = now
        self._restless_since = math.inf

    def spend(self, seconds: float, now: float) -> None:
        """Removes this many seconds from it."""
        self._left_seconds -= seconds
        if self._left_seconds > 0:
            return  # the usual case: it is refilled only when needed
        self._fill(now)
        if self._left_seconds <= 0:
            self._left_seconds = max(self._left_seconds, -MAX_DEBT_SECONDS)
            self._restless_since = min(self._restless_since, now)

    def wait_seconds(self, now: float) -> float:
        """Returns the seconds to wait before the next event; 0 if time is left, as is usual."""
        if self._left_seconds > 0:
            return 0.0
        self._fill(now)
        missing = RESUME_SECONDS - self._left_seconds
        return missing / SHARE_OF_LOOP if self._left_seconds <= 0 else 0.0

    def is_behind(self, now: float) -> bool:
        """Whether so little was left for so long that the state held is outdated."""
        if self._restless_since == math.inf:
            return False
        self._fill(now)
        return now - self._restless_since >= BEHIND_SECONDS

    def _fill(self, now: float) -> None:
        filled = self._left_seconds + (now - self._filled_at) * SHARE_OF_LOOP
        self._left_seconds = min(filled, BURST_SECONDS)
        self._filled_at = now
        if self._left_seconds >= CALM_SECONDS:
            self._restless_since = math.inf


class FeedNews:
    """The news of one feed, each reported once.

    counts: by name. replay_fault: why the last replay failed, "" if it did not. is_behind: events
    arrive faster than they are applied, so that nothing is certain. listener: is called with every
    batch after it was applied; None, the usual case, costs nothing. emptied: is called when the
    rank loses all blocks, because the publisher restarts or clears its cache. cut: is called when
    its connection is lost.
    """

    def __init__(self, place: Place, feed: Feed, emptied: Call, cut: Call) -> None:
        self.place = place
        self.counts: Counter[str] = Counter()
        self.replay_fault = ""
        self.is_behind = False
        self.listener: Listener | None = None
        self._feed = feed
        self._emptied = emptied
        self._cut = cut
        self._told = feed.state, feed.reason
        self._restarts_told = 0
        self._is_unreached_told = False

    @property
    def reason(self) -> str:
        """Why the feed is in its state; for a healthy feed, what it lacks (a replay)."""
        reason = self._feed.reason or self.replay_fault
        if not self.is_behind:
            return reason
        return f"{BEHIND}; {reason}" if reason else BEHIND

    def note_behind(self, is_behind: bool) -> None:  # noqa: FBT001 - a fact, not a mode
        """Notes whether events arrive faster than they are applied, and counts each start."""
        if is_behind and not self.is_behind:
            self.counts["behind"] += 1
        self.is_behind = is_behind

    def tell_change(self) -> None:
        """Logs a change of the state or of its reason.

        A connection that is lost, or cannot be made, is logged as a warning, once: the reason may
        change with every try. So is a feed that is behind.
        """
        state, reason, before = self._feed.state, self.reason, self._told[0]
        if (state, reason) == self._told:
            return
        self._told = state, reason
        shown = f" ({reason})" if reason else ""
        if state is State.CONNECTING:
            level = logging.DEBUG if self._is_unreached_told else logging.WARNING
            self._is_unreached_told = True
        else:
            is_cut = state is State.STALE and before is not State.STALE
            level = logging.WARNING if self.is_behind or is_cut else logging.INFO
            if is_cut:
                self._cut()
        log.log(level, "feed of %s rank %d: %s%s", *self.place, state, shown)

    def tell_restart(self) -> None:
        """Reports a restart of the publisher, if there was one."""
        if self._feed.restarts > self._restarts_told:
            self._restarts_told = self._feed.restarts
            self._emptied()

    def tell_undecodable(self, error: WireError) -> None:
        """Counts an undecodable batch; logs only the 1st, 2nd, 4th ..., to keep the log short."""
        self.counts["undecodable_batch"] += 1
        count = self.counts["undecodable_batch"]
        if count & (count - 1) == 0:
            log.warning("%s rank %d: %s (%d so far)", *self.place, error, count)

    def tell_taken(self, body: Body, taken: Taken) -> None:
        """Counts the skipped events of a batch, and passes it to the listener."""
        if taken.faults:
            self.counts.update(taken.faults)
        if taken.clears:
            self._emptied()
        if self.listener is not None and _is_shown(body):
            self._show(self.listener, body)

    def _show(self, listener: Listener, body: Body) -> None:
        """Calls the listener; one that fails is not called again, and the feed continues."""
        try:
            listener(body)
        except Exception as error:  # noqa: BLE001 - whatever it is, the feed must go on
            self.listener = None
            # without the error's text, which may quote tokens
            log.error("%s: a listener failed: %s", self.place.worker, type(error).__name__)


def _is_shown(body: Body) -> bool:
    if isinstance(body, EventBatch):
        return len(body.events) <= MAX_SHOWN_EVENTS
    return len(body) <= MAX_SHOWN_BYTES


# Effects that lower the credit.
_LOWERING = frozenset({Demote, Forget})


class Effects:
    """The effects of one feed that are not carried out yet.

    start_replay: starts a replay from a number on. allowance: of the worker; None if unlimited.
    """

    def __init__(
        self,
        feed: Feed,
        sink: Sink,
        turns: Turns,
        news: FeedNews,
        start_replay: Callable[[int], None],
        allowance: Allowance | None = None,
    ) -> None:
        self._feed = feed
        self._sink = sink
        self._turns = turns
        self._news = news
        self._start_replay = start_replay
        self._allowance = allowance
        self._pending: deque[Effect] = deque()
        self._work: Generator[None, None, None] | None = None  # the effect that is under way
        self._healed = False

    def __len__(self) -> int:
        return len(self._pending)

    def drop(self) -> None:
        """Drops the effects that are not carried out yet."""
        if self._work is not None:
            self._work.close()
            self._work = None
        self._pending.clear()
        self._healed = False

    def put_off(self, effects: Sequence[Effect]) -> None:
        """Queues effects to precede the next ones; nothing is certain until they are done."""
        self._pending.extend(effects)
        self._sink.trust(False)  # noqa: FBT003

    async def rest(self) -> None:
        """Waits while the worker has used up its allowance."""
        now = asyncio.get_running_loop().time
        if self._allowance is None:
            return
        while (seconds := self._allowance.wait_seconds(now())) > 0:  # noqa: ASYNC110 - no event
            await asyncio.sleep(seconds)

    async def carry_out(self, effects: Sequence[Effect], began_at: float | None = None) -> None:
        """Carries out effects, then updates the sink's trust.

        began_at: the loop's time when work on their cause began, in seconds; None for now.

        Live stream and replay both call this; effects are carried out in the order in which the
        feed returned them, whoever carries them out. Demote and Forget withdraw trust at once,
        ahead of queued batches.
        """
        if began_at is None:
            began_at = asyncio.get_running_loop().time()
        self._pending.extend(effects)
        if not self._feed.certain or not _LOWERING.isdisjoint(map(type, effects)):
            self._sink.trust(False)  # noqa: FBT003
        while self._pending or self._work is not None:
            if self._turns.is_over():
                self._spend(began_at)
                await self._turns.next(self._news.place.worker)
                await self.rest()
                began_at = asyncio.get_running_loop().time()
            self._step()
        if self._healed:
            self._healed = False
            self._feed.healed()
        self._news.note_behind(self._spend(began_at))
        self._sink.trust(self._feed.certain and not self._news.is_behind)
        self._news.tell_change()

    def _spend(self, began_at: float) -> bool:
        """Charges the time since `began_at` to the worker; returns whether it is behind."""
        if self._allowance is None:
            return False
        now = asyncio.get_running_loop().time()
        self._allowance.spend(now - began_at, now)
        return self._allowance.is_behind(now)

    def _step(self) -> None:
        """Does one step of the next effect, unless another task did it meanwhile."""
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
                try:
                    taken = yield from self._sink.applying(body)
                except WireError as error:
                    yield from self._missing(error)
                else:
                    self._note(body, taken)
            case Forget():
                yield from self._sink.forgetting()
                self._healed = False  # a hole is noted from here on
                self._news.tell_restart()
            case Demote():
                yield from self._sink.demoting()
                self._healed = False
            case Replay(start=start):
                self._start_replay(start)

    def _missing(self, error: WireError) -> Generator[None, None, None]:
        """Handles a batch that could not be decoded: a hole."""
        self._news.tell_undecodable(error)
        self._sink.trust(False)  # noqa: FBT003
        yield from self._sink.demoting()
        self._healed = False
        self._feed.miss(f"a batch could not be decoded: {error}")

    def _note(self, body: Body, taken: Taken) -> None:
        self._news.tell_taken(body, taken)
        if taken.missed:
            self._healed = False
            self._feed.miss(taken.missed)
        elif taken.healed:
            self._healed = True


class Shared(NamedTuple):
    """Objects shared by all subscribers of a process, and by those of a worker.

    allowance: of the worker; None if unlimited. clock: seconds, for lag; comparable with the
    publishers' time stamps (time.time). chance: 0 to 1, for jitter.
    """

    turns: Turns
    replay_slots: ReplaySlots
    clock: Callable[[], float]
    chance: Callable[[], float]
    allowance: Allowance | None = None


class Subscriber:
    """Runs one rank's feed until it is cancelled.

    feed: created with the transport's recovery. emptied, cut: see `FeedNews`.
    """

    def __init__(
        self,
        place: Place,
        feed: Feed,
        sink: Sink,
        transport: Transport,
        shared: Shared,
        emptied: Call = lambda: None,
        cut: Call = lambda: None,
    ) -> None:
        self.place = place
        self.feed = feed
        self.news = FeedNews(place, feed, emptied, cut)
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
        self._effects = Effects(
            self.feed, sink, shared.turns, self.news, self._replays.start, shared.allowance
        )
        self._retries = Backoff(*RETRY_SECONDS, shared.chance)
        self._retry_at = 0.0
        self._is_connected = False
        self._failures = Backoff(*RETRY_SECONDS, shared.chance)
        self._again_at = math.inf  # when a failed feed continues
        self._signals: deque[Signal] = deque()
        self._quiet_since = self._quiet_told_at = 0.0

    async def run(self) -> None:
        """Follows the publisher until it is cancelled.

        After an unexpected error nothing is certain; the subscriber continues after a while.
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
        """Closes the connection, after `run` was cancelled or even before it began."""
        self._effects.drop()  # a replaced replay may still wait for its turn
        await self._replays.close()
        await self._transport.close()

    async def _step(self) -> None:
        await self._effects.rest()
        came: list[Signal] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET_SECONDS):
                came = await self._transport.receive()
        self._signals.extend(came)
        now = asyncio.get_running_loop().time()
        if not all(isinstance(one, LoadReport) for one in came):
            self._quiet_since = self._quiet_told_at = now
        elif not came or now - self._quiet_told_at >= QUIET_SECONDS:
            self._quiet_told_at = now
            await self._effects.carry_out(self.feed.quiet(for_long=self._is_quiet_for_long()))
        await self._go_on()
        if self.feed.wants_everything and asyncio.get_running_loop().time() >= self._retry_at:
            await self._effects.carry_out(self.feed.ask_everything())
        while self._signals:
            began_at = asyncio.get_running_loop().time()
            await self._effects.carry_out(self._take(self._signals.popleft()), began_at)

    async def _go_on(self) -> None:
        """Continues some time after a failure, as with a new connection."""
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
                self.counts["loads"] += 1
                self.load, self.load_at = load, self._shared.clock()
            case Malformed():
                self.counts["malformed_message"] += 1
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
        if self.feed.state is not State.REPLAYING:  # a replayed batch has no meaningful lag
            self.lag_seconds = max(0.0, self._shared.clock() - batch.stamp)
        return batch

    def _distrust(self) -> None:
        """Makes everything uncertain until a complete replay, because it may be wrong."""
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
