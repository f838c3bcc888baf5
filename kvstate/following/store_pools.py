"""Follows the events that stores publish themselves."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvstate.feeds.feed import Feed
from kvstate.feeds.subscriber import SharedByFeeds, Subscriber
from kvstate.feeds.transport import FeedTransport, RankName
from kvstate.stores.pools import Pool
from kvstate.stores.stores import Stores

log = logging.getLogger("kvsteer.feed")


class _FollowedPool(NamedTuple):
    """A store that publishes events, and what runs its feed."""

    pool: Pool
    subscriber: Subscriber
    task: asyncio.Task[None]


class StorePools:
    """The stores whose own events are followed, in each process.

    shared: by all feeds of the process.
    """

    def __init__(self, stores: Stores, shared: SharedByFeeds) -> None:
        self._stores = stores
        self._shared = shared
        self._pools: dict[str, _FollowedPool] = {}

    def follow(self, store: str, transport: FeedTransport) -> None:
        """Follows the events of a store.

        Raises:
            ValueError: it is followed already.
        """
        if store in self._pools:
            raise ValueError(f"store {store} is followed already")
        pool = self._stores.pool(store)
        place = RankName(f"store {store}", 0)
        feed = Feed(transport.recovery, why_lost=transport.why_lost)
        subscriber = Subscriber(place, feed, pool, transport, self._shared)
        task = asyncio.create_task(subscriber.run())
        self._pools[store] = _FollowedPool(pool, subscriber, task)
        log.info("feed started: store %s", store)

    def events(self) -> Iterator[tuple[str, Mapping[str, int]]]:
        """Yields the name of each store that publishes events, and how many of which kind came.

        Besides those of `Pool.counts`: gaps in their numbers, restarts, and malformed messages.
        """
        for name, each in self._pools.items():
            feed, counts = each.subscriber.feed, each.subscriber.counts
            seen = {"gap": feed.gaps, "restart": feed.restarts}
            malformed = counts.get("malformed_message", 0) + counts.get("undecodable_batch", 0)
            yield name, {**each.pool.counts, **seen, "malformed": malformed}

    async def close(self) -> None:
        """Stops following stores."""
        for each in self._pools.values():
            each.task.cancel()
            await asyncio.gather(each.task, return_exceptions=True)
            await each.subscriber.close()
        self._pools.clear()
