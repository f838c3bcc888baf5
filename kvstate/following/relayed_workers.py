"""Workers whose feeds another process of this host follows, until this one takes over."""

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence

from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.transport import FeedTransport
from kvstate.feeds.turns import Turns
from kvstate.following.rank_table import FollowedRank, RankTable
from kvstate.following.subscriptions import Restoring, Subscriptions
from kvstate.index.index import Index
from kvstate.index.owner import Owner
from kvstate.relay.reading import Reading
from kvstate.relay.records import Hello
from kvstate.relay.relayed import RelayedRank
from kvstate.rows.format import SavedFeed
from kvstate.steps import Steps
from kvstate.stores.stores import Stores

log = logging.getLogger("kvsteer.feed")

# Connects to a worker; returns one transport for each rank.
OpenTransports = Callable[[], Sequence[FeedTransport]]


class RelayedWorkers:
    """The workers that another process follows.

    ranks: those that are followed here or there. subscriptions: follow them here after `take_over`.
    """

    def __init__(
        self,
        ranks: RankTable,
        subscriptions: Subscriptions,
        index: Index,
        stores: Stores,
        turns: Turns,
    ) -> None:
        self._ranks = ranks
        self._subscriptions = subscriptions
        self._index = index
        self._stores = stores
        self._turns = turns
        self._reading: Reading | None = None
        self._sources: dict[str, OpenTransports] = {}  # how workers are followed here if need be

    @property
    def is_reading(self) -> bool:
        """Whether another process follows the workers that are added now."""
        return self._reading is not None

    def read(self, hello: Hello) -> Reading:
        """Has another process follow the workers that are added from then on; see `take_over`.

        hello: who reads. Returns what has to be run for that.
        """
        self._reading = Reading(self._index, self._stores, self._turns, hello)
        return self._reading

    def add(
        self, worker: str, model: str, owners: Sequence[Owner], open_transports: OpenTransports
    ) -> list[FollowedRank]:
        """Reads a worker's ranks from now on, while `is_reading`."""
        news = self._subscriptions.news_of(worker)
        relayed = [RelayedRank(owner, *news) for owner in owners]
        self._sources[worker] = open_transports
        if self._reading is not None:
            self._reading.add(worker, model, relayed)
        return [FollowedRank(one.owner, one) for one in relayed]

    def remove(self, worker: str) -> None:
        """Does not read a worker's ranks any more."""
        self._sources.pop(worker, None)
        if self._reading is not None:
            self._reading.remove(worker)

    async def save(self, rank: RelayedRank, steps: Callable[[], Steps[None]]) -> SavedFeed | None:
        """Visits a rank to save it, while nothing changes; returns where its feed is then.

        None if that is not known, or if another process does not follow it any more.
        """
        return None if self._reading is None else await self._reading.save(rank, steps)

    async def take_over(self) -> None:
        """Follows all workers here from now on; what `read` returned must have ended.

        Each rank continues where the other process was, once its publisher proves that it is the
        same one.
        """
        reading, self._reading = self._reading, None
        if reading is None:
            return
        for worker, open_transports in list(self._sources.items()):
            ranks = self._ranks.of(worker)
            if not ranks or self._sources.get(worker) is not open_transports:
                continue  # it was removed meanwhile
            try:
                transports = open_transports()
            except Exception:
                log.exception("worker %s: its feed cannot be followed", worker)
                continue
            del self._sources[worker]
            owners = [each.owner for each in ranks]
            restoring = [
                _continuing_of(each, transport, reading)
                for each, transport in zip(ranks, transports, strict=True)
            ]
            self._ranks.put(worker, self._subscriptions.follow(owners, transports, restoring))
            for each in ranks:
                if isinstance(each.subscriber, RelayedRank):
                    each.subscriber.remove()
            reading.remove(worker)
            await asyncio.sleep(0)


def _continuing_of(rank: FollowedRank, transport: FeedTransport, reading: Reading) -> Restoring:
    """Returns what continues with a rank that another process followed."""
    relayed, at = rank.subscriber, None
    if isinstance(relayed, RelayedRank) and transport.recovery is Recovery.REPLAY:
        at = reading.position(relayed)
    return functools.partial(_continuing, rank.owner, at)


def _continuing(owner: Owner, at: SavedFeed | None) -> Steps[SavedFeed | None]:
    """Begins with what a rank holds; if that cannot be proven, forgets it."""
    if at is None:
        yield from owner.forgetting()
    owner.resume()
    return at
