"""Blocks expire between changes, in a task that runs beside the feeds."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

from kvstate.feeds.turns import Turns
from kvstate.following.expiry import Expiry
from kvstate.following.rank_table import RankTable
from kvstate.index.index import Index
from kvstate.index.owner import Owner
from kvstate.steps import finished
from kvstate.stores.stores import StoreRules, Stores
from tests.kvstate.publishing import payload
from tests.waiting import until

AGE_SECONDS = 3_600.0


def stored(count: int) -> bytes:
    """A message by which a worker stores blocks, each on its own, in the store that it mounts."""
    return payload(0, *(["BlockStored", [n], None, [n], 1, None, "CPU"] for n in range(count)))


class Sweeping:
    """A worker that mounts a store, whose blocks are one age older at each sweep."""

    def __init__(self) -> None:
        index, turns, unchanged = Index(12345678), Turns(), asyncio.Lock()
        rules = StoreRules("s", None, AGE_SECONDS, frozenset({"CPU"}))
        self.stores = Stores(index, [rules])
        self.rank = index.add("w", 0, "m")
        self.stores.attach("w", self.rank)
        ages = itertools.count(0.0, AGE_SECONDS)
        self.expiry = Expiry(
            index, RankTable(), self.stores, turns, unchanged, lambda: next(ages), 0.0
        )

    @property
    def store(self) -> Owner:
        owner = self.stores.owner("s", "m")
        assert owner is not None
        return owner


@pytest.fixture
async def sweeping() -> AsyncIterator[Sweeping]:
    sweeping = Sweeping()
    yield sweeping
    await sweeping.expiry.close()


async def test_blocks_of_a_store_expire(sweeping: Sweeping) -> None:
    finished(sweeping.rank.applying(stored(3)))
    assert sweeping.store.blocks == 3
    sweeping.expiry.start()
    await until(lambda: sweeping.store.blocks == 0)


async def test_blocks_of_a_store_expire_between_two_batches_that_change_it(
    sweeping: Sweeping,
) -> None:
    batch = sweeping.rank.applying(stored(3))
    while sweeping.store.blocks == 0:
        next(batch)
    sweeping.expiry.start()
    for _ in range(100):
        await asyncio.sleep(0)
    assert sweeping.store.blocks == 1
    for _ in batch:
        pass
    assert sweeping.store.blocks == 3
    await until(lambda: sweeping.store.blocks == 0)
