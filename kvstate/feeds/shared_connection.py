"""One connection that carries all ranks of a worker, with one transport for each rank.

The connection's loop (`follow`) signals connections to every rank and hands each its batches. A
rank's queue is bounded: if it is full, the loop waits, and so does the server. A rank that reads
nothing for long must not hold up the others: its batches are then dropped, which its feed detects
by their numbers.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import NamedTuple

from kvstate.errors import ReplayError
from kvstate.events import Batch, EventBatch
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.queue_limits import USUAL_QUEUE, QueueLimits
from kvstate.feeds.transport import Connected, Disconnected, Malformed, Refused, Signal

log = logging.getLogger("kvsteer.feed")

# A broken server may name any number of ranks; at most this many are logged.
MAX_UNKNOWN_RANKS = 64


class Mark(NamedTuple):
    """The identity of a batch."""

    sequence: int
    stamp: float


class RankTransport:
    """One rank's end of a shared connection; a `FeedTransport`.

    last_taken: the last batch that the rank's subscriber received, None before the first.
    """

    def __init__(
        self,
        shared: "SharedConnection",
        recovery: Recovery,
        why_lost: str,
        limits: QueueLimits = USUAL_QUEUE,
    ) -> None:
        self.last_taken: Mark | None = None
        self.is_closed = False
        self._shared = shared
        self._recovery = recovery
        self._why_lost = why_lost
        self._limits = limits
        self._signals: deque[tuple[Signal, int]] = deque()
        self._queued_bytes = 0
        self._is_stalled = False
        self._filled = asyncio.Event()
        self._room = asyncio.Event()

    @property
    def recovery(self) -> Recovery:
        """The recovery of the connection."""
        return self._recovery

    @property
    def why_lost(self) -> str:
        """What the connection says of batches that are lost."""
        return self._why_lost

    @property
    def queued(self) -> int:
        """How many signals wait for the rank's subscriber."""
        return len(self._signals)

    async def receive(self) -> list[Signal]:
        """Waits for signals, and returns up to `QueueLimits.signals_at_once` of them."""
        self._shared.start()
        await self._filled.wait()
        signals: list[Signal] = []
        while self._signals and len(signals) < self._limits.signals_at_once:
            signal, size_bytes = self._signals.popleft()
            self._queued_bytes -= size_bytes
            signals.append(signal)
            if isinstance(signal, Batch) and isinstance(signal.body, EventBatch):
                self.last_taken = Mark(signal.sequence, signal.body.timestamp)
        if not self._signals:
            self._filled.clear()
        self._is_stalled = False
        self._room.set()
        return signals

    async def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        """Always fails: this transport has no replays."""
        no_batches: tuple[Batch, ...] = ()
        for batch in no_batches:
            yield batch
        raise ReplayError(f"no replay from batch {start}: the connection itself resumes")

    async def close(self) -> None:
        """Closes this rank, and with the last rank the connection."""
        self.is_closed = True
        self._signals.clear()
        self._room.set()
        await self._shared.release()

    def tell(self, signal: Connected | Disconnected | Refused) -> None:
        """Queues a signal of the connection itself, at once."""
        if self._is_full:
            self._drop_all()
        self._put(signal, 0)

    async def hand(self, signal: Signal, size_bytes: int = 0) -> None:
        """Queues a signal once there is room; drops it if the rank is stalled or closed."""
        if self._is_full and not self._is_stalled:
            await self._wait_for_room()
        if not self._is_stalled and not self.is_closed:
            self._put(signal, size_bytes)

    @property
    def _is_full(self) -> bool:
        limits = self._limits
        return self.queued >= limits.max_signals or self._queued_bytes >= limits.max_bytes

    async def _wait_for_room(self) -> None:
        self._room.clear()
        try:
            async with asyncio.timeout(self._limits.stall_seconds):
                await self._room.wait()
        except TimeoutError:
            self._is_stalled = True
            message = "a feed has not been read for %g s: its batches are dropped"
            log.warning(message, self._limits.stall_seconds)

    def _put(self, signal: Signal, size_bytes: int) -> None:
        self._signals.append((signal, size_bytes))
        self._queued_bytes += size_bytes
        self._filled.set()

    def _drop_all(self) -> None:
        """Drops all queued signals: the next connection repeats them, or numbers reveal the gap."""
        self._signals.clear()
        self._queued_bytes = 0


class SharedConnection:
    """The transports of a worker's ranks, and the loop that serves them.

    name: of the worker's server, for messages. recovery, why_lost: those of each `FeedTransport`.
    follow: connects repeatedly, and is called again if it returns or fails; it is started when the
    first rank receives, and cancelled when the last one closes.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        recovery: Recovery,
        why_lost: str,
        follow: Callable[[], Awaitable[None]],
        limits: QueueLimits = USUAL_QUEUE,
    ) -> None:
        self.transports = [RankTransport(self, recovery, why_lost, limits) for _ in range(ranks)]
        self._limits = limits
        self.unknown_ranks: set[int] = set()
        self._name = name
        self._follow = follow
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the loop, once."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def release(self) -> None:
        """Ends the loop if no rank is left."""
        if self._task is not None and all(each.is_closed for each in self.transports):
            self._task.cancel()
            await asyncio.wait([self._task])

    def of_rank(self, rank: int) -> RankTransport | None:
        """Returns the transport of a rank; None, logged once, if the rank is not configured."""
        if 0 <= rank < len(self.transports):
            return self.transports[rank]
        if rank not in self.unknown_ranks and len(self.unknown_ranks) < MAX_UNKNOWN_RANKS:
            self.unknown_ranks.add(rank)
            log.warning(
                "%s publishes events of rank %d; only ranks 0 to %d are configured: dropped",
                self._name,
                rank,
                len(self.transports) - 1,
            )
        return None

    def tell(self, signal: Connected | Disconnected | Refused) -> None:
        """Sends a signal to every rank."""
        for transport in self.transports:
            transport.tell(signal)

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except Exception:
                log.exception("the connection to %s ends", self._name)
                self.tell(Disconnected("an internal error, see the log"))
                await asyncio.sleep(self._limits.retry_seconds)
