"""All workers' caches and feeds: the one object that the request side asks."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstate.feed import State
from kvstate.index import Index
from kvstate.overlap import Overlap, Prompt
from kvstate.subscriber import Subscriber
from kvstate.transport import Transport

log = logging.getLogger("kvsteer.feed")

# Replays under way at once, over the whole fleet.
MAX_REPLAYS = 8

# From the one that says least to the one that says most; a worker's state is its worst rank's.
_STATES_WORST_FIRST = (
    State.UNSUPPORTED,
    State.CONNECTING,
    State.STALE,
    State.REPLAYING,
    State.DEGRADED,
    State.LIVE,
)


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """One rank's feed, for people and metrics; lag is in seconds, the rest are counts."""

    rank: int
    state: State
    reason: str
    last_sequence: int | None
    blocks: int
    orphans: int
    gaps: int
    replays: int
    restarts: int
    lag_seconds: float
    counts: Mapping[str, int]


class Fleet:
    """The workers' caches as their events tell.

    secret: 64 random bits for the block keys of this process.
    clock: seconds since the epoch.
    """

    def __init__(self, secret: int, clock: Callable[[], float]) -> None:
        self._index = Index(secret)
        self._clock = clock
        self._replay_slots = asyncio.Semaphore(MAX_REPLAYS)
        self._subscribers: dict[str, list[Subscriber]] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}

    def add(self, worker: str, model: str, transports: Sequence[Transport]) -> None:
        """Follows a worker, one transport a rank, in the order of ranks."""
        log.info("feed started: worker %s, model %s, ranks %d", worker, model, len(transports))
        self._subscribers[worker] = [
            Subscriber(
                self._index,
                self._index.add(worker, rank, model),
                transport,
                self._replay_slots,
                self._clock,
            )
            for rank, transport in enumerate(transports)
        ]
        self._tasks[worker] = [
            asyncio.create_task(subscriber.run()) for subscriber in self._subscribers[worker]
        ]

    async def remove(self, worker: str) -> None:
        """Stops following a worker and forgets its blocks."""
        tasks = self._tasks.pop(worker, [])
        subscribers = self._subscribers.pop(worker, [])  # before the wait: it may be added again
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for subscriber in subscribers:
            await subscriber.close()
            self._index.remove(subscriber.owner)

    async def close(self) -> None:
        """Stops following all workers."""
        for worker in list(self._subscribers):
            await self.remove(worker)

    def overlaps(self, prompt: Prompt) -> dict[str, Overlap]:
        """The overlap of every worker that holds the prompt's first block."""
        return self._index.overlaps(prompt)

    def state(self, worker: str) -> State:
        """A worker's worst feed state; unsupported if it has no feeds."""
        states = {subscriber.feed.state for subscriber in self._subscribers.get(worker, [])}
        return next((state for state in _STATES_WORST_FIRST if state in states), State.UNSUPPORTED)

    def block_size(self, worker: str) -> int | None:
        """Tokens in a block, as learned from the worker's events."""
        sizes = [subscriber.owner.block_size for subscriber in self._subscribers.get(worker, [])]
        return next((size for size in sizes if size is not None), None)

    def blocks_by_tier(self, worker: str) -> tuple[int, int, int, int]:
        """Blocks that a worker holds on device, host, disk and remote."""
        return self._index.blocks_by_tier(worker)

    def index_bytes(self) -> int:
        """Memory of the block index."""
        return self._index.memory()

    def feeds(self, worker: str) -> list[FeedStatus]:
        """The state of a worker's feeds, in the order of ranks."""
        return [_status(subscriber) for subscriber in self._subscribers.get(worker, [])]


def _status(subscriber: Subscriber) -> FeedStatus:
    feed, owner = subscriber.feed, subscriber.owner
    return FeedStatus(
        rank=owner.rank,
        state=feed.state,
        reason=feed.reason,
        last_sequence=feed.last_sequence,
        blocks=owner.blocks,
        orphans=len(owner.orphans),
        gaps=feed.gaps,
        replays=feed.replays,
        restarts=feed.restarts,
        lag_seconds=subscriber.lag_seconds,
        counts={**subscriber.counts, **owner.counts},
    )
