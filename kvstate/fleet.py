"""All workers' caches and feeds, in the one object that the request side uses.

It says which workers are followed. Everything else is a part with one job, whose state is its own:

    part            what it knows                                    module in kvstate/following/
    feeds           state, counts and reported load of the feeds     worker_feeds.py
    blocks          what workers hold, for lookups                   worker_blocks.py
    subscriptions   the feeds that this process follows itself       subscriptions.py
    relayed         the feeds that another process follows           relayed_workers.py
    pools           stores that publish events of their own          store_pools.py
    rows            copies of ranks and stores, as bytes             fleet_rows.py

A part knows the table of ranks (`rank_table.py`), the index, and what it is given; of the other
parts, only one that is above it here. None of them knows requests: a prompt arrives as the tokens
of a model. All of it belongs to one event loop. What waits looks again whether its worker is still
the same (`RankTable.has`), since a worker may be removed, and added again, at each `await`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvstate.feeds.feed_times import USUAL, FeedTimes
from kvstate.feeds.replays import MAX_REPLAYS, ReplaySlots
from kvstate.feeds.subscriber import SharedByFeeds
from kvstate.feeds.transport import FeedTransport
from kvstate.feeds.turns import Turns
from kvstate.following.expiry import DOUBTED_SECONDS, Expiry
from kvstate.following.fleet_rows import FleetRows
from kvstate.following.rank_table import RankTable
from kvstate.following.relayed_workers import OpenTransports, RelayedWorkers
from kvstate.following.store_pools import StorePools
from kvstate.following.subscriptions import Notify, NotifyLoss, Subscriptions
from kvstate.following.worker_blocks import WorkerBlocks
from kvstate.following.worker_feeds import WorkerFeeds
from kvstate.index.index import Index
from kvstate.index.owner import Owner
from kvstate.stores.stores import StoreRules, Stores

log = logging.getLogger("kvsteer.feed")


class FollowedWorkers:
    """The workers' caches, as known from their events.

    secret: 64 random bits for the block keys of this process. clock: seconds since the epoch.
    chance: 0 to 1, for jitter. emptied: is called with a worker's name, and why, when one of its
    ranks loses all blocks. cut: is called with a worker's name when its
    feed loses its connection. times: of all feeds. stores: those that workers share.
    doubted_seconds: how long a block on a doubted medium counts. replays_at_once: of all feeds.
    """

    def __init__(
        self,
        secret: int,
        clock: Callable[[], float],
        chance: Callable[[], float] = lambda: 0.5,
        emptied: NotifyLoss = lambda _, __: None,
        cut: Notify = lambda _: None,
        times: FeedTimes = USUAL,
        *,
        stores: Sequence[StoreRules] = (),
        doubted_seconds: float = DOUBTED_SECONDS,
        replays_at_once: int = MAX_REPLAYS,
    ) -> None:
        turns, unchanged = Turns(), asyncio.Lock()
        shared = SharedByFeeds(turns, ReplaySlots(replays_at_once), clock, chance, times=times)
        self.secret = secret
        self.index = index = Index(secret)
        self.stores = Stores(index, stores)
        self._ranks = ranks = RankTable()
        self.feeds = WorkerFeeds(ranks, clock)
        self.blocks = WorkerBlocks(index, ranks)
        self.subscriptions = Subscriptions(index, shared, emptied, cut)
        self.relayed = RelayedWorkers(ranks, self.subscriptions, index, self.stores, turns)
        self.pools = StorePools(self.stores, shared)
        self.rows = FleetRows(ranks, self.relayed, self.stores, turns, unchanged, clock)
        self._expiry = Expiry(index, ranks, self.stores, turns, unchanged, clock, doubted_seconds)

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
        owners = self._begin(worker, model, len(transports), adapters)
        log.info("feed started: worker %s, model %s, ranks %d", worker, model, len(transports))
        self._ranks.put(worker, self.subscriptions.begin(owners, transports))

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
        if not self.relayed.is_reading:
            self.add(worker, model, open_transports(), adapters)
            return
        owners = self._begin(worker, model, ranks, adapters)
        self._ranks.put(worker, self.relayed.add(worker, model, owners, open_transports))

    def _begin(
        self, worker: str, model: str, ranks: int, adapters: Sequence[tuple[int, str]]
    ) -> list[Owner]:
        """Returns the owners of the blocks of a worker that is followed from now on."""
        if worker in self._ranks:
            raise ValueError(f"{worker} is followed already")
        rules = self.blocks.add(worker, adapters)
        self._expiry.start()
        owners = [self.index.add(worker, rank, model, ranks) for rank in range(ranks)]
        for owner in owners:
            owner.note_rules(rules)
            self.stores.attach(worker, owner)
        return owners

    async def remove(self, worker: str) -> None:
        """Stops following a worker and forgets its blocks."""
        ranks = self._ranks.pop(worker)  # before waiting: it may be added again
        self.stores.detach(worker)
        self.relayed.remove(worker)
        self.subscriptions.remove_taps(worker)
        self.blocks.remove(worker)
        if ranks:
            await self.subscriptions.release(ranks)

    async def close(self) -> None:
        """Stops following all workers."""
        await self._expiry.close()
        for worker in self._ranks.workers():
            await self.remove(worker)
        await self.subscriptions.close()
        await self.pools.close()
        self.stores.close()
