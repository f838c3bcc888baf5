"""All workers' caches and feeds, in the one object that the request side uses."""

import asyncio
import functools
import logging
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from msgspec.structs import replace

from kvstate.events import EngineLoad
from kvstate.feeds.allowance import Allowance
from kvstate.feeds.feed import Feed, FeedState, Restoration
from kvstate.feeds.feed_news import UNSEQUENCED
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.feed_times import USUAL, FeedTimes
from kvstate.feeds.replays import MAX_REPLAYS, ReplaySlots
from kvstate.feeds.subscriber import SharedByFeeds, Subscriber
from kvstate.feeds.transport import FeedTransport, RankName
from kvstate.feeds.turns import Turns
from kvstate.index import Index
from kvstate.media import MediaFold, StoreListener
from kvstate.overlap import Overlap, Prompt, Tier, of_any_rank, within
from kvstate.owner import Owner
from kvstate.pools import Pool
from kvstate.relay.holdings import Holding, copying
from kvstate.relay.passing import StorePlace, TakeRank, TakeStore
from kvstate.relay.reading import Reading
from kvstate.relay.records import Beginning, Hello, StoreBeginning
from kvstate.relay.relayed import RelayedFeed, RelayedRank
from kvstate.relay.taps import Tap, Taps
from kvstate.reuse import NO_RULES, OtherGroups, ReuseRules
from kvstate.rows.format import SavedFeed, SavedOwner, SavedRank, SavedRows, SavedStoreRows
from kvstate.steps import Steps
from kvstate.stores import SharedBlocks, StoreRules, Stores

log = logging.getLogger("kvsteer.feed")

# How long a block on a doubted medium (`kvstate.overlap`) counts after it was last stored: at least
# this long, and until the second sweep, about twice as long.
DOUBTED_SECONDS = 300.0

# Table slots checked for expired blocks in one step: about 0.2 ms.
EXPIRED_AT_ONCE = 2_000

# From the worst state to the best; a worker's state is that of its worst rank.
_STATES_WORST_FIRST = (
    FeedState.UNSUPPORTED,
    FeedState.CONNECTING,
    FeedState.STALE,
    FeedState.REPLAYING,
    FeedState.DEGRADED,
    FeedState.LIVE,
)


_WORST_FIRST = (Restoration.LOST, Restoration.UNPROVEN, Restoration.NONE, Restoration.PROVEN)


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """An engine's load report, and its age."""

    load: EngineLoad
    age_seconds: float


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """One rank's feed, for display and metrics; lag is in seconds, the rest are counts.

    unapplied: effects of batches that came and are not carried out yet.
    """

    rank: int
    state: FeedState
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
    unapplied: int


# Puts into a rank what is known of it, in steps; returns where its feed was, None if nothing is.
Restoring = Callable[[], Steps[SavedFeed | None]]

# Connects to a worker; returns one transport for each rank.
OpenTransports = Callable[[], Sequence[FeedTransport]]


@dataclass(frozen=True, slots=True)
class _Followed:
    """One rank that is followed."""

    owner: Owner
    subscriber: Subscriber
    task: asyncio.Task[None]
    tap: Tap | None


@dataclass(frozen=True, slots=True)
class _Relayed:
    """One rank that another process follows."""

    owner: Owner
    subscriber: RelayedRank


class _FollowedPool(NamedTuple):
    """A store that publishes events itself."""

    pool: Pool
    subscriber: Subscriber
    task: asyncio.Task[None]


class _Source(NamedTuple):
    """How a worker that another process follows is followed here if need be."""

    model: str
    open_transports: OpenTransports


# Returns what was saved of a worker's ranks, once, by rank. Its arguments: the worker's name, its
# model, and how many ranks it has.
TakeSaved = Callable[[str, str, int], Mapping[int, SavedRows]]


def _nothing_saved(_worker: str, _model: str, _ranks: int) -> Mapping[int, SavedRows]:
    return {}


class FollowedWorkers:
    """The workers' caches, as known from their events.

    secret: 64 random bits for the block keys of this process. clock: seconds since the epoch.
    chance: 0 to 1, for jitter. emptied: is called with a worker's name when one of its ranks loses
    all blocks, by a restart or by clearing its cache. cut: is called with a worker's name when its
    feed loses its connection. times: of all feeds. names_ranks: whether requests can name the rank
    of a worker that computes them; if not, only blocks that all its ranks hold are certain. stores:
    those that workers share. take_saved: workers added from then on begin with what it returns.
    taps: of the ranks that are followed from then on, None if no other process may read them.
    doubted_seconds: how long a block on a doubted medium counts. replays_at_once: of all feeds.
    """

    def __init__(
        self,
        secret: int,
        clock: Callable[[], float],
        chance: Callable[[], float] = lambda: 0.5,
        emptied: Callable[[str], None] = lambda _: None,
        cut: Callable[[str], None] = lambda _: None,
        times: FeedTimes = USUAL,
        *,
        stores: Sequence[StoreRules] = (),
        doubted_seconds: float = DOUBTED_SECONDS,
        replays_at_once: int = MAX_REPLAYS,
    ) -> None:
        self.secret = secret
        self.names_ranks = False
        self.take_saved: TakeSaved = _nothing_saved
        self.index = Index(secret)
        self.stores = Stores(self.index, stores)
        self._emptied = emptied
        self._cut = cut
        self._clock = clock
        self._doubted_seconds = doubted_seconds
        slots = ReplaySlots(replays_at_once)
        self._shared = SharedByFeeds(Turns(), slots, clock, chance, times=times)
        self.taps: Taps | None = None
        self._reading: Reading | None = None
        self._followed: dict[str, Sequence[_Followed | _Relayed]] = {}
        self._sources: dict[str, _Source] = {}
        self._adapters: dict[str, dict[int, set[str]]] = {}  # workers by name and number
        self._rules: dict[str, ReuseRules] = {}
        self._uncertain: set[str] = set()  # of which nothing is certain, by their rules
        self._pools: dict[str, _FollowedPool] = {}
        self._releasing: set[asyncio.Task[None]] = set()
        self._unchanged = asyncio.Lock()  # a rank is saved, or blocks of it expire
        self._expiring: asyncio.Task[None] | None = None

    @property
    def fold(self) -> MediaFold:
        """What brings media into the ids of tokens, for prompts that are looked up."""
        return self.index.fold

    def listen(self, listener: StoreListener) -> None:
        """Has the stores of all workers told to a listener."""
        self.index.listen(listener)

    def add(
        self,
        worker: str,
        model: str,
        transports: Sequence[FeedTransport],
        adapters: Sequence[tuple[int, str]] = (),
    ) -> None:
        """Follows a worker that is not followed yet, with one transport for each rank, in order.

        adapters: numbers and names of adapters that its events name by number only.

        Raises:
            ValueError: it is followed already.
        """
        self._begin(worker, adapters)
        log.info("feed started: worker %s, model %s, ranks %d", worker, model, len(transports))
        saved = self.take_saved(worker, model, len(transports))
        owners = self._owners(worker, model, len(transports))
        self._followed[worker] = [
            self._follow(owner, transport, shared, _begun(owner, transport, saved.get(owner.rank)))
            for owner, transport, shared in zip(
                owners, transports, repeat(self._shared_by_worker()), strict=False
            )
        ]

    def add_source(
        self,
        worker: str,
        model: str,
        ranks: int,
        open_transports: OpenTransports,
        adapters: Sequence[tuple[int, str]] = (),
    ) -> None:
        """Does as `add`, but connects only if no other process follows the workers.

        Raises:
            ValueError: it is followed already.
        """
        reading = self._reading
        if reading is None:
            self.add(worker, model, open_transports(), adapters)
            return
        self._begin(worker, adapters)
        owners = self._owners(worker, model, ranks)
        relayed = [RelayedRank(owner, *self._news_of(worker)) for owner in owners]
        self._sources[worker] = _Source(model, open_transports)
        self._followed[worker] = list(map(_Relayed, owners, relayed))
        reading.add(worker, model, relayed)

    def follow_store(self, store: str, transport: FeedTransport) -> None:
        """Follows the events that a store publishes itself, in each process.

        Raises:
            ValueError: it is followed already.
        """
        if store in self._pools:
            raise ValueError(f"store {store} is followed already")
        pool = self.stores.pool(store)
        place = RankName(f"store {store}", 0)
        feed = Feed(transport.recovery, why_lost=transport.why_lost)
        subscriber = Subscriber(place, feed, pool, transport, self._shared)
        task = asyncio.create_task(subscriber.run())
        self._pools[store] = _FollowedPool(pool, subscriber, task)
        log.info("feed started: store %s", store)

    def store_events(self) -> Iterator[tuple[str, Mapping[str, int]]]:
        """Yields the name of each store that publishes events, and how many of which kind came.

        Besides those of `Pool.counts`: gaps in their numbers, restarts, and malformed messages.
        """
        for name, each in self._pools.items():
            feed, counts = each.subscriber.feed, each.subscriber.counts
            seen = {"gap": feed.gaps, "restart": feed.restarts}
            malformed = counts.get("malformed_message", 0) + counts.get("undecodable_batch", 0)
            yield name, {**each.pool.counts, **seen, "malformed": malformed}

    def read(self, hello: Hello) -> Reading:
        """Has another process follow the workers that are added from then on; see `take_over`.

        hello: who reads. Returns what has to be run for that.
        """
        self._reading = Reading(self.index, self.stores, self._shared.turns, hello)
        return self._reading

    async def take_over(self) -> None:
        """Follows all workers here from now on; what `read` returned must have ended.

        Each rank continues where the other process was, once its publisher proves that it is the
        same one.
        """
        reading, self._reading = self._reading, None
        if reading is None:
            return
        for worker, source in list(self._sources.items()):
            followed = self._followed.get(worker)
            if followed is None or self._sources.get(worker) is not source:
                continue  # it was removed meanwhile
            try:
                transports = source.open_transports()
            except Exception:
                log.exception("worker %s: its feed cannot be followed", worker)
                continue
            del self._sources[worker]
            shared, pairs = self._shared_by_worker(), zip(followed, transports, strict=True)
            self._followed[worker] = [
                self._follow(each.owner, transport, shared, _continued(each, transport, reading))
                for each, transport in pairs
            ]
            reading.remove(worker)
            await asyncio.sleep(0)

    def _begin(self, worker: str, adapters: Sequence[tuple[int, str]]) -> None:
        if worker in self._followed:
            raise ValueError(f"{worker} is followed already")
        self._rules.setdefault(worker, NO_RULES)
        for number, name in adapters:
            self._adapters.setdefault(name, {}).setdefault(number, set()).add(worker)
        if self._expiring is None:
            self._expiring = asyncio.create_task(self._keep_expiring())

    def _shared_by_worker(self) -> SharedByFeeds:
        now, times = asyncio.get_running_loop().time(), self._shared.times
        allowance = Allowance(now, times.burst_seconds, times.behind_seconds)
        return self._shared._replace(allowance=allowance)

    def _owners(self, worker: str, model: str, ranks: int) -> list[Owner]:
        owners = [self.index.add(worker, rank, model, ranks) for rank in range(ranks)]
        for owner in owners:
            owner.note_rules(self._rules[worker])
            self.stores.attach(worker, owner)
        return owners

    def _news_of(self, worker: str) -> tuple[Callable[[], None], Callable[[], None]]:
        return functools.partial(self._emptied, worker), functools.partial(self._cut, worker)

    def _follow(
        self,
        owner: Owner,
        transport: FeedTransport,
        shared: SharedByFeeds,
        restoring: Restoring | None,
    ) -> _Followed:
        place = RankName(owner.worker, owner.rank)
        emptied, cut = self._news_of(place.worker)
        feed = Feed(transport.recovery, why_lost=transport.why_lost)
        tap = None if self.taps is None else self.taps.add(owner.worker)
        subscriber = Subscriber(
            place, feed, owner, transport, shared, emptied, cut, restoring, witness=tap
        )
        if tap is not None:
            tap.watch(subscriber, owner.number)
        return _Followed(owner, subscriber, asyncio.create_task(subscriber.run()), tap)

    async def hand_over(self, worker: str, take: TakeRank) -> bool:
        """Passes a worker's ranks to a function, each as it is between two batches.

        Returns whether it could: they are followed here, and hold what they began with.
        """
        followed = self._followed.get(worker, ())
        is_done = [False] * len(followed)
        for number, each in enumerate(followed):
            if not isinstance(each, _Followed) or not each.subscriber.has_begun.is_set():
                return False

            def steps(each: _Followed = each, number: int = number) -> Steps[None]:
                owner, tap, holding = each.owner, each.tap, Holding([], [])
                saved = yield from copying(owner, holding)
                if tap is not None and self._followed.get(worker) is followed:
                    ranks, rank = len(followed), owner.rank
                    beginning = Beginning(worker, rank, ranks, owner.model, saved, owner.shares)
                    yield from take(tap, beginning, holding, lambda: owner.trusted)
                    is_done[number] = self._followed.get(worker) is followed

            async with self._unchanged:
                await each.subscriber.visit(steps)
        return bool(followed) and all(is_done)

    async def hand_over_stores(
        self, workers: Collection[str], known: Collection[StorePlace], take: TakeStore
    ) -> None:
        """Passes the stores that workers mount to a function, each between two changes of it.

        known: those that need not be passed. One that publishes its own events is: which workers
        can name its blocks depends on when each process got to know them.
        """
        for shared in self.stores.of_workers(workers):
            if (shared.store, shared.model) in known and shared.store not in self._pools:
                continue

            def steps(shared: SharedBlocks = shared) -> Steps[None]:
                holding = Holding([], [])
                saved = yield from copying(shared.owner, holding)
                yield from take(StoreBeginning(shared.store, shared.model, saved), holding)

            async with self._unchanged:
                await self._shared.turns.run(self.stores.gate.copying(steps()))

    async def saved(self, identity: Callable[[str], str]) -> AsyncIterator[SavedRows]:
        """Yields what is to be saved of every rank that can be proven later, one after the other.

        identity: returns that of a worker's engine. It pauses between short steps; meanwhile only
        the rank that is being saved waits with its events.
        """
        for worker in list(self._followed):
            for each in self._followed.get(worker, ()):
                async with self._unchanged:
                    saved = await self._saved(each, identity(worker))
                if saved is not None:
                    yield saved

    async def _saved(self, followed: _Followed | _Relayed, identity: str) -> SavedRows | None:
        owner = followed.owner
        rows: list[bytes] = []
        made: list[SavedOwner] = []

        def steps() -> Steps[None]:
            made.append((yield from owner.saving(rows)))

        if isinstance(followed, _Followed):
            at = await followed.subscriber.save(steps)
        else:
            at = await self._reading.save(followed.subscriber, steps) if self._reading else None
        if at is None or not made:  # its feed failed, or it was removed
            return None
        ranks = len(self._followed.get(owner.worker, ()))
        rank = SavedRank(owner.worker, identity, owner.model, owner.rank, ranks, at, made[0])
        return SavedRows(rank, rows) if rank.is_sound else None

    async def saved_stores(self) -> AsyncIterator[SavedStoreRows]:
        """Yields what is to be saved of every store, after the ranks: what these sent later is told
        again. Pauses as `saved` does; meanwhile changes of the store wait.
        """
        if self._reading is not None:  # what other processes apply would be told to them alone
            return
        for steps in self.stores.saving(self._clock()):
            async with self._unchanged:
                yield await self._shared.turns.run(steps)

    async def restore_stores(self, saved: Iterable[SavedStoreRows]) -> None:
        """Takes what was saved of stores, before any worker is followed."""
        for one in saved:
            name, why = one.store.store, self.stores.why_refused(one.store, self._clock())
            if not why and not await self._shared.turns.run(self.stores.restoring(one)):
                why = "it is damaged"
            if why:
                log.warning("state: what was saved of store %s is not used: %s", name, why)

    async def forget_lost_stores(self) -> None:
        """Forgets the stores that cannot be proven any more."""
        async with self._unchanged:
            await self._shared.turns.run(self.stores.forgetting())

    def restoration(self, worker: str) -> Restoration:
        """Returns whether what was restored of a worker is proven; of its ranks, the worst."""
        found = {each.subscriber.restoration for each in self._followed.get(worker, ())}
        return next((one for one in _WORST_FIRST if one in found), Restoration.NONE)

    def is_certain(self, worker: str) -> bool:
        """Returns whether what all ranks of a worker have stored of late counts as certain now.

        While a replay runs, none of it does.
        """
        return all(each.owner.trusted for each in self._followed.get(worker, ()))

    async def _keep_expiring(self) -> None:
        """Forgets blocks whose removal may never be announced."""
        while True:
            await asyncio.sleep(self._doubted_seconds)
            for worker in list(self._followed):
                async with self._unchanged:
                    await self._expire(worker)
            for store in list(self.stores.due(self._clock())):
                async with self._unchanged:
                    await self._expire_of(store)

    async def _expire_of(self, store: Owner) -> None:
        while not self.index.expire(store, EXPIRED_AT_ONCE):
            await self._shared.turns.next()

    async def _expire(self, worker: str) -> None:
        followed = self._followed.get(worker, ())
        for each in followed:
            is_done = False
            while not is_done:
                if self._shared.turns.is_over():
                    await self._shared.turns.next()
                if self._followed.get(worker) is not followed:
                    return  # it was removed meanwhile
                is_done = self.index.expire(each.owner, EXPIRED_AT_ONCE)

    async def remove(self, worker: str) -> None:
        """Stops following a worker and forgets its blocks."""
        followed = self._followed.pop(worker, ())  # before waiting: it may be added again
        self.stores.detach(worker)
        self._sources.pop(worker, None)
        if self._reading is not None:
            self._reading.remove(worker)
        if self.taps is not None:
            self.taps.remove(worker)
        self._rules.pop(worker, None)
        self._uncertain.discard(worker)
        self._forget_adapters(worker)
        if followed:
            releasing = asyncio.create_task(self._release(followed))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)
            await asyncio.shield(releasing)  # it is completed even if the caller is cancelled

    def _forget_adapters(self, worker: str) -> None:
        for name, numbers in list(self._adapters.items()):
            for number, workers in list(numbers.items()):
                workers.discard(worker)
                if not workers:
                    del numbers[number]
            if not numbers:
                del self._adapters[name]

    async def _release(self, followed: Sequence[_Followed | _Relayed]) -> None:
        own = [each for each in followed if isinstance(each, _Followed)]
        for one in own:
            one.task.cancel()
        await asyncio.gather(*(one.task for one in own), return_exceptions=True)
        for one in own:
            try:
                await one.subscriber.close()
            except Exception:  # its blocks must be forgotten all the same
                log.exception("feed of %s rank %d: cannot be closed", *one.subscriber.place)
        for each in followed:
            for _ in each.owner.forgetting():
                await asyncio.sleep(0)  # in steps so small that nothing waits for them
            self.index.remove(each.owner)

    async def close(self) -> None:
        """Stops following all workers."""
        if self._expiring is not None:
            self._expiring.cancel()
            await asyncio.gather(self._expiring, return_exceptions=True)
            self._expiring = None
        for worker in list(self._followed):
            await self.remove(worker)
        await asyncio.gather(*self._releasing)
        for each in self._pools.values():
            each.task.cancel()
            await asyncio.gather(each.task, return_exceptions=True)
            await each.subscriber.close()
        self._pools.clear()
        self.stores.close()

    def overlaps(self, prompt: Prompt) -> dict[str, Overlap]:
        """Returns the overlap of every worker that holds the prompt's first block.

        If a worker's events name adapters by unknown numbers only, the blocks of any of them may
        match: they count as uncertain.
        """
        found = self._found(prompt)
        if self._uncertain:
            for worker in self._uncertain & found.keys():
                found[worker] = of_any_rank(found[worker])
        return found

    def _found(self, prompt: Prompt) -> dict[str, Overlap]:
        found = self.index.overlaps(prompt, names_ranks=self.names_ranks)
        if isinstance(prompt.lora, str):
            for number, workers in self._adapters.get(prompt.lora, {}).items():
                numbered = replace(prompt, lora=number)
                by_number = self.index.overlaps(numbered, names_ranks=self.names_ranks)
                found |= {name: by_number[name] for name in workers & by_number.keys()}
            unsure = self.index.overlaps_by_number(prompt)
            if unsure:
                told = self._with_known_adapters()
                found = {name: unsure[name] for name in unsure.keys() - told} | found
        sure = prompt.sure_tokens
        return found if sure is None else {name: within(one, sure) for name, one in found.items()}

    def tokens_on(self, prompt: Prompt, tier: Tier) -> dict[str, int]:
        """Returns how many first tokens of a prompt workers certainly hold on one tier, by name."""
        found = self.index.tokens_on(prompt, tier)
        sure = prompt.sure_tokens
        return found if sure is None else {name: min(one, sure) for name, one in found.items()}

    def overlap_of_rank(self, worker: str, rank: int, prompt: Prompt) -> Overlap | None:
        """Returns the overlap of one rank of a worker, None if it lacks the first block."""
        return self.index.overlap_of_rank(worker, rank, prompt)

    def _with_known_adapters(self) -> set[str]:
        """Returns the workers for which an adapter's number is known."""
        return set().union(*(set().union(*each.values()) for each in self._adapters.values()))

    def state(self, worker: str) -> FeedState:
        """Returns a worker's worst feed state; unsupported if it has no feeds."""
        followed = self._followed.get(worker, ())
        if len(followed) == 1:  # the usual case; this is called at every pick
            return followed[0].subscriber.feed.state
        states = {each.subscriber.feed.state for each in followed}
        return next(
            (state for state in _STATES_WORST_FIRST if state in states), FeedState.UNSUPPORTED
        )

    def ranks(self, worker: str) -> int:
        """Returns how many ranks of a worker are followed; 0 if it has no feeds."""
        return len(self._followed.get(worker, ()))

    def note_rules(self, worker: str, rules: ReuseRules) -> None:
        """Notes how a worker's engine announces and reuses blocks, if the worker is followed."""
        if self._rules.get(worker, rules) != rules:
            self._rules[worker] = rules
            self._uncertain.discard(worker)
            if not rules.is_certain:
                self._uncertain.add(worker)
            for each in self._followed[worker]:
                each.owner.note_rules(rules)

    def other_groups(self, worker: str) -> OtherGroups:
        """Returns what is known of the other attention groups of a worker's first rank."""
        followed = self._followed.get(worker)
        return followed[0].owner.other_groups() if followed else OtherGroups()

    def batches(self, worker: str) -> int:
        """Returns how many batches a worker has sent so far, on all its feeds."""
        return sum(
            [each.subscriber.counts.get("batches", 0) for each in self._followed.get(worker, ())]
        )

    def live_batches(self, worker: str) -> int:
        """Returns how many of its batches came live, not in a replay."""
        return sum(
            [
                each.subscriber.counts.get("batches", 0)
                - each.subscriber.counts.get("replayed_batch", 0)
                for each in self._followed.get(worker, ())
            ]
        )

    def watch(self, worker: str, slot: int, prompt: Prompt, block_size: int) -> bool:
        """Watches from now on whether a worker stores a prompt whole, as `Owner.watch` does.

        Returns False if any of its ranks cannot.
        """
        known = self._adapters.get(prompt.lora, {}) if isinstance(prompt.lora, str) else {}
        numbers = [number for number, workers in known.items() if worker in workers]
        followed = self._followed.get(worker, ())
        watched = [each.owner.watch(slot, prompt, block_size, numbers) for each in followed]
        return bool(watched) and all(watched)

    def has_removed(self, worker: str) -> bool:
        """Returns whether a worker has ever announced the removal of a block."""
        return any(each.owner.has_removed for each in self._followed.get(worker, ()))

    def was_stored(self, worker: str, slot: int) -> bool:
        """Returns whether any rank has stored the prompt watched in a slot since."""
        return any(each.owner.was_stored(slot) for each in self._followed.get(worker, ()))

    def lag_seconds(self, worker: str) -> float:
        """Returns how long before they came a worker's last batches were stamped, at most."""
        lags = [each.subscriber.lag_seconds for each in self._followed.get(worker, ())]
        return max(lags, default=0.0)

    def block_size(self, worker: str) -> int | None:
        """Returns the tokens per block, learned from the worker's events; None if not known yet."""
        for each in self._followed.get(worker, ()):
            if each.owner.block_size is not None:
                return each.owner.block_size
        return None

    def blocks_by_tier(self, worker: str) -> tuple[int, int, int, int]:
        """Returns how many blocks a worker holds on device, host, disk and remote."""
        return self.index.blocks_by_tier(worker)

    def index_bytes(self) -> int:
        """Returns the memory of the block index, in bytes."""
        return self.index.memory()

    def feeds(self, worker: str) -> list[FeedStatus]:
        """Returns the status of a worker's feeds, in order of rank."""
        return [self._status(each) for each in self._followed.get(worker, [])]

    def is_unsequenced(self, worker: str) -> bool:
        """Returns whether the messages of any of a worker's feeds have no sequence numbers."""
        return any(
            each.subscriber.reason.startswith(UNSEQUENCED)
            for each in self._followed.get(worker, ())
        )

    def loads(self, worker: str) -> list[ReportedLoad | None]:
        """Returns each rank's last load report, in order of rank; None without one."""
        return [self._load(each.subscriber) for each in self._followed.get(worker, [])]

    def _load(self, subscriber: Subscriber | RelayedRank) -> ReportedLoad | None:
        if subscriber.load is None:
            return None
        return ReportedLoad(subscriber.load, max(0.0, self._clock() - subscriber.load_at))

    def _status(self, followed: _Followed | _Relayed) -> FeedStatus:
        feed, owner = followed.subscriber.feed, followed.owner
        return FeedStatus(
            rank=owner.rank,
            state=feed.state,
            reason=followed.subscriber.reason,
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
            counts={**followed.subscriber.counts, **owner.counts, **_dropped(feed)},
            unapplied=followed.subscriber.unapplied,
        )


def _begun(owner: Owner, transport: FeedTransport, saved: SavedRows | None) -> Restoring | None:
    """Returns what puts into a rank what was saved of it, None if nothing that can be proven."""
    if saved is None or transport.recovery is not Recovery.REPLAY:
        return None
    return functools.partial(_restoring, owner, saved)


def _continued(
    followed: _Followed | _Relayed, transport: FeedTransport, reading: Reading
) -> Restoring:
    """Returns what continues with a rank that another process followed."""
    rank, at = followed.subscriber, None
    if isinstance(rank, RelayedRank) and transport.recovery is Recovery.REPLAY:
        at = reading.position(rank)
    return functools.partial(_continuing, followed.owner, at)


def _restoring(owner: Owner, saved: SavedRows) -> Steps[SavedFeed | None]:
    """Puts what was saved into a rank, in steps; returns where its feed was, None if it failed."""
    is_whole = yield from owner.restoring(saved.rank.owner, saved.rows)
    return saved.rank.feed if is_whole else None


def _continuing(owner: Owner, at: SavedFeed | None) -> Steps[SavedFeed | None]:
    """Begins with what a rank holds, in steps; if that cannot be proven, forgets it."""
    if at is None:
        yield from owner.forgetting()
    owner.resume()
    return at


def _dropped(feed: Feed | RelayedFeed) -> dict[str, int]:
    return {"dropped_batch": feed.dropped} if feed.dropped else {}
