"""What all workers and stores hold, as rows: for the state file, and for other processes.

Each rank and each store is copied as it is between two changes. Meanwhile only that rank, or what
changes that store, waits with its events; everything else goes on between short steps.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence

from kvstate.feeds.subscriber import Subscriber
from kvstate.feeds.turns import Turns
from kvstate.following.rank_table import FollowedRank, RankTable
from kvstate.following.relayed_workers import RelayedWorkers
from kvstate.relay.holdings import Holding, copying
from kvstate.relay.passing import StorePlace, TakeRank, TakeStore
from kvstate.relay.records import Beginning, StoreBeginning
from kvstate.rows.format import SavedOwner, SavedRank, SavedRows, SavedStoreRows
from kvstate.steps import Steps
from kvstate.stores.stores import SharedBlocks, Stores

log = logging.getLogger("kvsteer.feed")


class FleetRows:
    """Copies ranks and stores, and has stores begin with what was saved of them.

    ranks: those that are followed. relayed: those of them that another process follows. unchanged:
    held while something is copied, so that its blocks do not expire. clock: seconds since the
    epoch.
    """

    def __init__(
        self,
        ranks: RankTable,
        relayed: RelayedWorkers,
        stores: Stores,
        turns: Turns,
        unchanged: asyncio.Lock,
        clock: Callable[[], float],
    ) -> None:
        self._ranks = ranks
        self._relayed = relayed
        self._stores = stores
        self._turns = turns
        self._unchanged = unchanged
        self._clock = clock

    async def saved_ranks(self, identity: Callable[[str], str]) -> AsyncIterator[SavedRows]:
        """Yields what is to be saved of every rank that can be proven later, one after the other.

        identity: returns that of a worker's engine.
        """
        for worker in self._ranks.workers():
            ranks = self._ranks.of(worker)
            for each in ranks:
                async with self._unchanged:
                    if not self._ranks.has(worker, ranks):
                        break  # it was removed while the one before was written
                    saved = await self._saved_rank(each, identity(worker), len(ranks))
                if saved is not None and self._ranks.has(worker, ranks):
                    yield saved

    async def _saved_rank(
        self, followed: FollowedRank, identity: str, ranks: int
    ) -> SavedRows | None:
        owner, subscriber = followed.owner, followed.subscriber
        rows: list[bytes] = []
        made: list[SavedOwner] = []

        def steps() -> Steps[None]:
            made.append((yield from owner.saving(rows)))

        if isinstance(subscriber, Subscriber):
            at = await subscriber.save(steps)
        else:
            at = await self._relayed.save(subscriber, steps)
        if at is None or not made:  # its feed failed, or it was removed
            return None
        rank = SavedRank(owner.worker, identity, owner.model, owner.rank, ranks, at, made[0])
        return SavedRows(rank, rows) if rank.is_sound else None

    async def saved_stores(self) -> AsyncIterator[SavedStoreRows]:
        """Yields what is to be saved of every store, to be called after `saved_ranks`.

        What ranks send after they were saved is sent again after a restart.
        """
        if self._relayed.is_reading:  # what other processes apply would be sent to them alone
            return
        for steps in self._stores.saving(self._clock()):
            async with self._unchanged:
                saved = await self._turns.run(steps)
            yield saved

    async def copy_ranks(self, worker: str, take: TakeRank) -> bool:
        """Passes a worker's ranks to a function, each as it is between two batches.

        Returns whether it could: they are followed here, and hold what they began with.
        """
        ranks = self._ranks.of(worker)
        are_copied = []
        for each in ranks:
            if not isinstance(each.subscriber, Subscriber):
                return False
            if not each.subscriber.has_begun.is_set():
                return False
            are_copied.append(await self._copy_rank(ranks, each, each.subscriber, take))
        return bool(ranks) and all(are_copied)

    async def _copy_rank(
        self,
        ranks: Sequence[FollowedRank],
        rank: FollowedRank,
        subscriber: Subscriber,
        take: TakeRank,
    ) -> bool:
        """Passes one of a worker's ranks to a function; returns whether it is still followed."""
        owner, tap, is_copied = rank.owner, rank.tap, False
        worker = owner.worker

        def steps() -> Steps[None]:
            nonlocal is_copied
            holding = Holding([], [])
            saved = yield from copying(owner, holding)
            if tap is not None and self._ranks.has(worker, ranks):
                beginning = Beginning(
                    worker, owner.rank, len(ranks), owner.model, saved, owner.shares
                )
                yield from take(tap, beginning, holding, lambda: owner.trusted)
                is_copied = self._ranks.has(worker, ranks)

        async with self._unchanged:
            await subscriber.visit(steps)
        return is_copied

    async def copy_stores(
        self, workers: Collection[str], known: Collection[StorePlace], take: TakeStore
    ) -> None:
        """Passes the stores that workers mount to a function, each between two changes of it.

        known: those that need not be passed. One that publishes its own events is: which workers
        can name its blocks depends on when each process got to know them.
        """
        for shared in self._stores.of_workers(workers):
            if (shared.store, shared.model) in known and not self._stores.is_pooled(shared.store):
                continue

            def steps(shared: SharedBlocks = shared) -> Steps[None]:
                holding = Holding([], [])
                saved = yield from copying(shared.owner, holding)
                yield from take(StoreBeginning(shared.store, shared.model, saved), holding)

            async with self._unchanged:
                await self._turns.run(self._stores.gate(shared.store).passing(steps()))

    async def restore_stores(self, saved: Iterable[SavedStoreRows]) -> None:
        """Takes what was saved of stores, before any worker is followed."""
        for one in saved:
            name, why = one.store.store, self._stores.why_refused(one.store, self._clock())
            if not why and not await self._turns.run(self._stores.restoring(one)):
                why = "it is damaged"
            if why:
                log.warning("state: what was saved of store %s is not used: %s", name, why)

    async def forget_lost_stores(self) -> None:
        """Forgets the stores that cannot be proven any more."""
        async with self._unchanged:
            await self._turns.run(self._stores.forgetting())
