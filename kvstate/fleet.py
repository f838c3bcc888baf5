"""All workers' caches and feeds: the one object that the request side asks."""

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kvstate.events import Body, EngineLoad
from kvstate.feeds.feed import Feed, State
from kvstate.feeds.replays import ReplaySlots
from kvstate.feeds.subscriber import Allowance, Shared, Subscriber, Turns
from kvstate.feeds.transport import Place, Transport
from kvstate.index import Index
from kvstate.overlap import Overlap, Prompt
from kvstate.owner import Owner

log = logging.getLogger("kvsteer.feed")

# How long a block on a doubted medium (`kvstate.overlap`) is believed after it was stored last: so
# long at least, and twice as long at most.
DOUBTED_SECONDS = 300.0

# Places of a table that are looked at in one go for what is too old: some 0.2 ms.
EXPIRED_AT_ONCE = 2_000

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
class ReportedLoad:
    """What an engine said of its load, and how long ago."""

    load: EngineLoad
    age_seconds: float


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """One rank's feed, for people and metrics; lag is in seconds, the rest are counts."""

    rank: int
    state: State
    reason: str
    last_sequence: int | None
    blocks: int
    uncertain_blocks: int
    orphans: int
    gaps: int
    replays: int
    restarts: int
    lag_seconds: float
    load: ReportedLoad | None
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Followed:
    """One rank that is followed."""

    owner: Owner
    subscriber: Subscriber
    task: asyncio.Task[None]


class Fleet:
    """The workers' caches as their events tell.

    secret: 64 random bits for the block keys of this process. clock: seconds since the epoch.
    chance: 0 to 1, for jitter. emptied: is called with the name of a worker one of whose ranks lost
    all that it held, by a restart or by clearing its cache. cut: is called with the name of a
    worker whose feed lost its connection. names_ranks: whether requests can name
    the rank of a worker that is to compute them; if not, certain is only what all its ranks hold.
    """

    def __init__(
        self,
        secret: int,
        clock: Callable[[], float],
        chance: Callable[[], float] = lambda: 0.5,
        emptied: Callable[[str], None] = lambda _: None,
        cut: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.names_ranks = False
        self._index = Index(secret)
        self._emptied = emptied
        self._cut = cut
        self._clock = clock
        self._shared = Shared(Turns(), ReplaySlots(), clock, chance)
        self._followed: dict[str, list[_Followed]] = {}
        self._adapters: dict[str, dict[int, set[str]]] = {}  # workers by name and number
        self._releasing: set[asyncio.Task[None]] = set()
        self._expiring: asyncio.Task[None] | None = None

    def add(
        self,
        worker: str,
        model: str,
        transports: Sequence[Transport],
        adapters: Sequence[tuple[int, str]] = (),
    ) -> None:
        """Follows a worker that is not followed yet, one transport a rank, in the order of ranks.

        adapters: number and name of those that its events have by number only.

        Raises:
            ValueError: it is followed already.
        """
        if worker in self._followed:
            raise ValueError(f"{worker} is followed already")
        for number, name in adapters:
            self._adapters.setdefault(name, {}).setdefault(number, set()).add(worker)
        if self._expiring is None:
            self._expiring = asyncio.create_task(self._keep_expiring())
        log.info("feed started: worker %s, model %s, ranks %d", worker, model, len(transports))
        shared = self._shared._replace(allowance=Allowance(asyncio.get_running_loop().time()))
        self._followed[worker] = [
            self._follow(self._index.add(worker, rank, model, len(transports)), transport, shared)
            for rank, transport in enumerate(transports)
        ]

    def _follow(self, owner: Owner, transport: Transport, shared: Shared) -> _Followed:
        place = Place(owner.worker, owner.rank)
        emptied, cut = (
            functools.partial(tell, place.worker) for tell in (self._emptied, self._cut)
        )
        feed = Feed(transport.recovery)
        subscriber = Subscriber(place, feed, owner, transport, shared, emptied, cut)
        return _Followed(owner, subscriber, asyncio.create_task(subscriber.run()))

    async def _keep_expiring(self) -> None:
        """Forgets blocks of which nobody may ever announce the removal."""
        while True:
            await asyncio.sleep(DOUBTED_SECONDS)
            for worker in list(self._followed):
                await self._expire(worker)

    async def _expire(self, worker: str) -> None:
        followed = self._followed.get(worker, [])
        for each in followed:
            is_done = False
            while not is_done:
                if self._shared.turns.is_over():
                    await self._shared.turns.next()
                if self._followed.get(worker) is not followed:
                    return  # it went meanwhile
                is_done = self._index.expire(each.owner, EXPIRED_AT_ONCE)

    def listen(self, worker: str, listener: Callable[[int, Body], None] | None) -> None:
        """Shows every batch of a worker to a listener, with its rank, after it was applied.

        None ends it, as does the worker's removal, or the listener itself by failing.
        """
        for rank, each in enumerate(self._followed.get(worker, [])):
            shown = None if listener is None else functools.partial(listener, rank)
            each.subscriber.news.listener = shown

    async def remove(self, worker: str) -> None:
        """Stops following a worker and forgets its blocks."""
        followed = self._followed.pop(worker, [])  # before the wait: it may be added again
        self._forget_adapters(worker)
        if followed:
            releasing = asyncio.create_task(self._release(followed))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)
            await asyncio.shield(releasing)  # it is done even if whoever waits is cancelled

    def _forget_adapters(self, worker: str) -> None:
        for name, numbers in list(self._adapters.items()):
            for number, workers in list(numbers.items()):
                workers.discard(worker)
                if not workers:
                    del numbers[number]
            if not numbers:
                del self._adapters[name]

    async def _release(self, followed: Sequence[_Followed]) -> None:
        for each in followed:
            each.task.cancel()
        await asyncio.gather(*(each.task for each in followed), return_exceptions=True)
        for each in followed:
            try:
                await each.subscriber.close()
            except Exception:  # what it held must be forgotten all the same
                log.exception("feed of %s rank %d: cannot be closed", *each.subscriber.place)
            for _ in each.owner.forgetting():
                await asyncio.sleep(0)  # so much at a time that nobody waits for it
            self._index.remove(each.owner)

    async def close(self) -> None:
        """Stops following all workers."""
        if self._expiring is not None:
            self._expiring.cancel()
            await asyncio.gather(self._expiring, return_exceptions=True)
            self._expiring = None
        for worker in list(self._followed):
            await self.remove(worker)
        await asyncio.gather(*self._releasing)

    def overlaps(self, prompt: Prompt) -> dict[str, Overlap]:
        """The overlap of every worker that holds the prompt's first block.

        A worker whose events have adapters by number only, and whose numbers nobody told, may hold
        what lies under any of them: uncertain.
        """
        found = self._index.overlaps(prompt, names_ranks=self.names_ranks)
        if isinstance(prompt.lora, str):
            for number, workers in self._adapters.get(prompt.lora, {}).items():
                numbered = replace(prompt, lora=number)
                by_number = self._index.overlaps(numbered, names_ranks=self.names_ranks)
                found |= {name: by_number[name] for name in workers & by_number.keys()}
            unsure = self._index.overlaps_by_number(prompt)
            if unsure:
                told = self._with_told_adapters()
                found = {name: unsure[name] for name in unsure.keys() - told} | found
        return found

    def _with_told_adapters(self) -> set[str]:
        """The workers of which it was told whose number an adapter has."""
        return set().union(*(set().union(*each.values()) for each in self._adapters.values()))

    def state(self, worker: str) -> State:
        """A worker's worst feed state; unsupported if it has no feeds."""
        followed = self._followed.get(worker, ())
        if len(followed) == 1:  # as mostly; it is asked for at every pick
            return followed[0].subscriber.feed.state
        states = {each.subscriber.feed.state for each in followed}
        return next((state for state in _STATES_WORST_FIRST if state in states), State.UNSUPPORTED)

    def ranks(self, worker: str) -> int:
        """How many ranks of a worker are followed; 0 if it has no feeds."""
        return len(self._followed.get(worker, ()))

    def batches(self, worker: str) -> int:
        """How many batches came of a worker so far, on all its feeds."""
        return sum([each.subscriber.counts["batches"] for each in self._followed.get(worker, ())])

    def block_size(self, worker: str) -> int | None:
        """Tokens in a block, as learned from the worker's events."""
        for each in self._followed.get(worker, ()):
            if each.owner.block_size is not None:
                return each.owner.block_size
        return None

    def blocks_by_tier(self, worker: str) -> tuple[int, int, int, int]:
        """Blocks that a worker holds on device, host, disk and remote."""
        return self._index.blocks_by_tier(worker)

    def index_bytes(self) -> int:
        """Memory of the block index."""
        return self._index.memory()

    def feeds(self, worker: str) -> list[FeedStatus]:
        """The state of a worker's feeds, in the order of ranks."""
        return [self._status(each) for each in self._followed.get(worker, [])]

    def loads(self, worker: str) -> list[ReportedLoad | None]:
        """What each rank's feed said last of its load; None where it says nothing of it."""
        return [self._load(each.subscriber) for each in self._followed.get(worker, [])]

    def _load(self, subscriber: Subscriber) -> ReportedLoad | None:
        if subscriber.load is None:
            return None
        return ReportedLoad(subscriber.load, max(0.0, self._clock() - subscriber.load_at))

    def _status(self, followed: _Followed) -> FeedStatus:
        feed, owner = followed.subscriber.feed, followed.owner
        return FeedStatus(
            rank=owner.rank,
            state=feed.state,
            reason=followed.subscriber.news.reason,
            last_sequence=feed.last_sequence,
            blocks=owner.blocks,
            uncertain_blocks=owner.uncertain_blocks + owner.doubted_blocks
            if owner.trusted
            else owner.blocks,
            orphans=len(owner.orphans),
            gaps=feed.gaps,
            replays=feed.replays,
            restarts=feed.restarts,
            lag_seconds=followed.subscriber.lag_seconds,
            load=self._load(followed.subscriber),
            counts={**followed.subscriber.counts, **owner.counts},
        )
