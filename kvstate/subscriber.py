"""The loop that runs one feed: transport in, index out."""

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable

from kvstate.errors import ReplayError, WireError
from kvstate.feed import Apply, Demote, Effect, Feed, Forget, Numbered, Replay
from kvstate.index import Index, Owner
from kvstate.transport import Connected, Disconnected, Message, Signal, Transport
from kvstate.zmq_wire import parse_frames, stamp_of

log = logging.getLogger("kvsteer.feed")

# Events are applied in slices of this length, so that a pick never waits behind a replay.
SLICE_SECONDS = 0.001

# A feed that fell silent for so long asks once whether a last batch was lost.
QUIET_SECONDS = 1.0


class Subscriber:
    """Runs one rank's feed until it is cancelled.

    replay_slots: shared by all subscribers; engines answer replays from their publishing thread.
    clock: seconds, for lag; comparable with the publishers' time stamps (time.time).
    """

    def __init__(
        self,
        index: Index,
        owner: Owner,
        transport: Transport,
        replay_slots: asyncio.Semaphore,
        clock: Callable[[], float],
    ) -> None:
        self.owner = owner
        self.feed: Feed[bytes] = Feed(can_replay=transport.can_replay)
        self.counts: Counter[str] = Counter()
        self.lag_seconds = 0.0
        self._index = index
        self._transport = transport
        self._replay_slots = replay_slots
        self._clock = clock
        self._replay: asyncio.Task[None] | None = None
        self._slice_ends = 0.0
        self._heard = False
        self._told = self.feed.state, self.feed.reason

    async def run(self) -> None:
        """Follows the publisher until it is cancelled, or until an error that nobody foresaw."""
        try:
            while True:
                await self._step()
        except Exception:
            log.exception("feed of %s rank %d ends", self.owner.worker, self.owner.rank)
            self._distrust()
        finally:
            self.owner.trusted = False

    async def close(self) -> None:
        """Gives up the connection, after `run` was cancelled or even before it began."""
        replay = self._replay
        self._stop_replay()
        if replay is not None:
            await asyncio.wait([replay])
        await self._transport.close()

    async def _step(self) -> None:
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                signals = await self._transport.receive()
        except TimeoutError:
            if self._heard and self._replay is None:
                self._heard = False
                self._do(self.feed.probe())
            return
        for signal in signals:
            self._do(self._take(signal))
            await self._yield_to_picks()

    def _take(self, signal: Signal) -> list[Effect[bytes]]:
        match signal:
            case Connected():
                return self.feed.connected()
            case Disconnected():
                self._stop_replay()
                return self.feed.disconnected()
            case Message():
                self._heard = True
                batch = self._decode(signal)
                return [] if batch is None else self.feed.received(batch)

    def _decode(self, message: Message) -> Numbered[bytes] | None:
        """A message as the feed wants it; None, and counted, if not even its number can be read."""
        try:
            frames = parse_frames(message.frames)
        except WireError:
            self.counts["malformed_message"] += 1
            return None
        self.counts["batches"] += 1
        self.counts["bytes"] += len(frames.payload)
        try:
            stamp = stamp_of(frames.payload)
        except WireError as error:
            self._tell_undecodable(error)
            return Numbered(frames.sequence, -math.inf, None)
        self.lag_seconds = max(0.0, self._clock() - stamp)
        return Numbered(frames.sequence, stamp, frames.payload)

    def _tell_undecodable(self, error: WireError) -> None:
        self.counts["undecodable_batch"] += 1
        log.warning("%s rank %d: %s", self.owner.worker, self.owner.rank, error)

    def _do(self, effects: Iterable[Effect[bytes]]) -> None:
        """Carries out what the feed asks for, then lets the index know what it may credit."""
        healed = False
        for effect in effects:
            match effect:
                case Apply():
                    healed |= self._apply(effect.body)
                case Forget():
                    self._index.clear(self.owner)
                    healed = False  # what the feed misses now, it misses since
                case Demote():
                    self._index.demote(self.owner)
                    healed = False
                case Replay():
                    self._start_replay(effect.start)
        if healed:
            self.feed.healed()
        self.owner.trusted = self.feed.certain
        self._tell_change()

    def _apply(self, payload: bytes) -> bool:
        """Applies a batch; whether nothing uncertain is left since."""
        before = self.owner.status
        had_uncertain = self.owner.uncertain_blocks > 0
        try:
            applied = self._index.apply_message(self.owner, payload)
        except WireError as error:
            self._tell_undecodable(error)
            self._index.demote(self.owner)
            self.feed.miss("a batch could not be decoded")
            return False
        self.counts.update(applied.faults)
        after = self.owner.status
        if after["block_size"] != before["block_size"]:
            log.info("%s: block size learned: %s", self.owner.worker, after["block_size"])
        if applied.removal_lost:
            self.feed.miss("an event that may have been a removal could not be read")
            return False
        if after["over_limit"] != before["over_limit"]:
            self.feed.miss("it holds more than the index keeps of one rank")
            return False
        return (applied.clears or had_uncertain) and not self.owner.uncertain_blocks

    def _tell_change(self) -> None:
        state, reason = self.feed.state, self.feed.reason
        if (state, reason) != self._told:
            self._told = state, reason
            where = (self.owner.worker, self.owner.rank)
            log.info("feed of %s rank %d: %s%s", *where, state, f" ({reason})" if reason else "")

    def _distrust(self) -> None:
        """What is held may be wrong: uncertain, until the next connection tells."""
        self._stop_replay()
        self._index.demote(self.owner)
        self._do(self.feed.disconnected("an internal error, see the log"))

    def _start_replay(self, start: int) -> None:
        self._stop_replay()
        self._replay = asyncio.create_task(self._run_replay(start))

    def _stop_replay(self) -> None:
        """Ends a replay under way; one that replaces itself sees that it is no longer the one."""
        replay, self._replay = self._replay, None
        if replay is not None and replay is not asyncio.current_task():
            replay.cancel()

    async def _run_replay(self, start: int) -> None:
        try:
            async with self._replay_slots:
                await self._receive_replay(start)
            if self._is_current():
                self._finish_replay(self.feed.replay_ended())
        except ReplayError as error:
            self._finish_replay(self.feed.replay_failed(str(error)))
        except Exception:
            log.exception("replay of %s rank %d failed", self.owner.worker, self.owner.rank)
            self._distrust()

    async def _receive_replay(self, start: int) -> None:
        async with contextlib.aclosing(self._transport.replay(start)) as messages:
            async for message in messages:
                batch = self._decode(message)
                if batch is not None:
                    self._do(self.feed.replayed(batch))
                if not self._is_current():
                    return
                await self._yield_to_picks()

    def _is_current(self) -> bool:
        """Whether this replay is still the one that the feed asked for last."""
        return self._replay is asyncio.current_task()

    def _finish_replay(self, effects: list[Effect[bytes]]) -> None:
        self._replay = None
        self._do(effects)

    async def _yield_to_picks(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._slice_ends:
            await asyncio.sleep(0)
            self._slice_ends = asyncio.get_running_loop().time() + SLICE_SECONDS
