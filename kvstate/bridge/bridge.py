"""The bridge: reads the feed of one engine, once, for any number of subscribers.

Transports and subscribers are those of the router; in the index's place is `kvstate.bridge.rank`.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstate.bridge.history import History
from kvstate.bridge.mirror import Mirror
from kvstate.bridge.rank import BridgedRank
from kvstate.bridge.status import Ended, Status
from kvstate.bridge.stream import Subscription, subscribe
from kvstate.feeds.feed_news import Place
from kvstate.feeds.replays import ReplaySlots
from kvstate.feeds.subscriber import Shared, Subscriber
from kvstate.feeds.transport import Transport
from kvstate.feeds.turns import Turns

# Numbers begin at the microseconds since 1970: no feed has a million batches a second, so no
# earlier run of this bridge has come so far.
_NUMBERS_A_SECOND = 1_000_000

_STOPPED = Ended(Status.UNAVAILABLE, "the bridge stops")


@dataclass(frozen=True, slots=True)
class BridgeLimits:
    """What one rank may make us keep: batches that can be had again, and the live blocks."""

    history_batches: int = 10_000
    history_bytes: int = 256 * 1024 * 1024
    mirror_bytes: int = 1024 * 1024 * 1024


class Bridge:
    """All ranks of one engine, and those who listen.

    transports: one a rank, in the order of ranks. clock: seconds since the epoch. chance: 0 to 1,
    for jitter.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        clock: Callable[[], float],
        chance: Callable[[], float],
        limits: BridgeLimits | None = None,
    ) -> None:
        limits = limits or BridgeLimits()
        now = clock()
        self.ranks = [
            BridgedRank(
                History(
                    rank,
                    int(now * _NUMBERS_A_SECOND),
                    now,
                    max_batches=limits.history_batches,
                    max_bytes=limits.history_bytes,
                ),
                Mirror(limits.mirror_bytes),
                self._ring,
            )
            for rank in range(len(transports))
        ]
        self._subscribers = []
        shared = Shared(Turns(), ReplaySlots(len(transports), len(transports)), clock, chance)
        for bridged, transport in zip(self.ranks, transports, strict=True):
            place = Place("the engine", bridged.history.rank)
            subscriber = Subscriber(place, bridged, transport, shared)
            bridged.feed = subscriber.feed
            self._subscribers.append(subscriber)
        self.is_stopped = False
        self._rung = False
        self._bell = asyncio.Event()

    @property
    def fault(self) -> Ended | None:
        """Why it cannot be subscribed to now, if so."""
        if self.is_stopped:
            return _STOPPED
        faults = (rank.standing.fault for rank in self.ranks)
        return next((fault for fault in faults if fault is not None), None)

    async def run(self) -> None:
        """Follows the engine until it is cancelled."""
        tasks = [asyncio.create_task(subscriber.run()) for subscriber in self._subscribers]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for subscriber in self._subscribers:
                await subscriber.close()

    def stop(self) -> None:
        """Ends all streams."""
        self.is_stopped = True
        self._ring()

    def subscribe(self, start: int) -> Subscription | Ended:
        """Begins a stream at this number, or says why not; see `kvstate.bridge.stream`."""
        return _STOPPED if self.is_stopped else subscribe(self.ranks, start)

    async def next_message(self, subscription: Subscription) -> bytes | Ended:
        """What a stream says next; waits for it."""
        while True:
            bell = self._bell
            message = _STOPPED if self.is_stopped else subscription.take()
            if message is not None:
                return message
            await bell.wait()

    def _ring(self) -> None:
        """Wakes the streams, soon: what comes until then goes into one batch."""
        if not self._rung:
            self._rung = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._rung = False
        for rank in self.ranks:
            rank.flush()
        self._bell.set()
        self._bell = asyncio.Event()
