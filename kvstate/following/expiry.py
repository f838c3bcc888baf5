"""Sweeps out blocks on media whose removals engines do not announce reliably."""

import asyncio
from collections.abc import Callable

from kvstate.feeds.turns import Turns
from kvstate.following.rank_table import RankTable
from kvstate.index.index import Index
from kvstate.index.owner import Owner
from kvstate.steps import Steps
from kvstate.stores.stores import Stores

# How long a block on a doubted medium (`kvstate.overlap`) counts after it was last stored: at least
# this long, and until the second sweep, about twice as long.
DOUBTED_SECONDS = 300.0

# Table slots checked for expired blocks in one step: about 0.2 ms.
EXPIRED_AT_ONCE = 2_000


class Expiry:
    """Sweeps all ranks and stores, in a task of its own.

    unchanged: held while blocks expire, so that nothing is copied meanwhile. clock: seconds since
    the epoch. seconds: between two sweeps.
    """

    def __init__(
        self,
        index: Index,
        ranks: RankTable,
        stores: Stores,
        turns: Turns,
        unchanged: asyncio.Lock,
        clock: Callable[[], float],
        seconds: float,
    ) -> None:
        self._index = index
        self._ranks = ranks
        self._stores = stores
        self._turns = turns
        self._unchanged = unchanged
        self._clock = clock
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Sweeps from now on, unless it does already."""
        if self._task is None:
            self._task = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """Sweeps no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            for worker in self._ranks.workers():
                async with self._unchanged:
                    await self._expire_worker(worker)
            for shared in list(self._stores.due(self._clock())):
                gate = self._stores.gate(shared.store)
                async with self._unchanged:
                    await self._turns.run(gate.passing(self._expiring(shared.owner)))

    async def _expire_worker(self, worker: str) -> None:
        ranks = self._ranks.of(worker)
        for each in ranks:
            is_done = False
            while not is_done:
                if self._turns.is_over():
                    await self._turns.next()
                if not self._ranks.has(worker, ranks):
                    return  # it was removed meanwhile
                is_done = self._index.expire(each.owner, EXPIRED_AT_ONCE)

    def _expiring(self, store: Owner) -> Steps[None]:
        while not self._index.expire(store, EXPIRED_AT_ONCE):
            yield
