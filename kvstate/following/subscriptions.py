"""Follows feeds here: one subscriber for each rank, in a task of its own."""

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence

from kvstate.events import Loss
from kvstate.feeds.allowance import Allowance
from kvstate.feeds.feed import Feed
from kvstate.feeds.feed_news import NoteLoss
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.subscriber import SharedByFeeds, Subscriber
from kvstate.feeds.transport import FeedTransport, RankName
from kvstate.following.rank_table import FollowedRank
from kvstate.index.index import Index
from kvstate.index.owner import Owner
from kvstate.relay.relayed import RelayedRank
from kvstate.relay.taps import Taps
from kvstate.rows.format import SavedFeed, SavedRows
from kvstate.steps import Steps

log = logging.getLogger("kvsteer.feed")

# Puts into a rank what is known of it; returns where its feed was, None if nothing is known.
Restoring = Callable[[], Steps[SavedFeed | None]]

# Returns what was saved of a worker's ranks, once, by rank. Its arguments: the worker's name, its
# model, and how many ranks it has.
TakeSaved = Callable[[str, str, int], Mapping[int, SavedRows]]

# Is called with the name of a worker of which something is new.
Notify = Callable[[str], None]
NotifyLoss = Callable[[str, Loss], None]


def _nothing_saved(_worker: str, _model: str, _ranks: int) -> Mapping[int, SavedRows]:
    return {}


class Subscriptions:
    """The feeds that this process follows itself.

    shared: by all feeds of the process. emptied, cut: see `kvstate.fleet.FollowedWorkers`.
    take_saved: workers that are followed from then on begin with what it returns. taps: of the
    ranks that are followed from then on, None if no other process may read them.
    """

    def __init__(
        self, index: Index, shared: SharedByFeeds, emptied: NotifyLoss, cut: Notify
    ) -> None:
        self.take_saved: TakeSaved = _nothing_saved
        self.taps: Taps | None = None
        self._index = index
        self._shared = shared
        self._emptied = emptied
        self._cut = cut
        self._releasing: set[asyncio.Task[None]] = set()

    def news_of(self, worker: str) -> tuple[NoteLoss, Callable[[], None]]:
        """Returns what is called when a worker has lost all blocks, and when its feed was cut."""
        return functools.partial(self._emptied, worker), functools.partial(self._cut, worker)

    def begin(
        self, owners: Sequence[Owner], transports: Sequence[FeedTransport]
    ) -> list[FollowedRank]:
        """Follows the ranks of one worker, which begin with what was saved of them."""
        first = owners[0] if owners else None
        saved = {} if first is None else self.take_saved(first.worker, first.model, len(owners))
        restoring = [
            _restoring_of(owner, transport, saved.get(owner.rank))
            for owner, transport in zip(owners, transports, strict=True)
        ]
        return self.follow(owners, transports, restoring)

    def follow(
        self,
        owners: Sequence[Owner],
        transports: Sequence[FeedTransport],
        restoring: Sequence[Restoring | None],
    ) -> list[FollowedRank]:
        """Follows the ranks of one worker. restoring: puts into each what is known of it."""
        now, times = asyncio.get_running_loop().time(), self._shared.times
        allowance = Allowance(now, times.burst_seconds, times.behind_seconds)
        shared = self._shared._replace(allowance=allowance)
        return [
            self._follow(owner, transport, shared, one)
            for owner, transport, one in zip(owners, transports, restoring, strict=True)
        ]

    def _follow(
        self,
        owner: Owner,
        transport: FeedTransport,
        shared: SharedByFeeds,
        restoring: Restoring | None,
    ) -> FollowedRank:
        place = RankName(owner.worker, owner.rank)
        emptied, cut = self.news_of(owner.worker)
        feed = Feed(transport.recovery, why_lost=transport.why_lost)
        tap = None if self.taps is None else self.taps.add(owner.worker)
        subscriber = Subscriber(
            place, feed, owner, transport, shared, emptied, cut, restoring, witness=tap
        )
        if tap is not None:
            tap.watch(subscriber, owner.number)
        return FollowedRank(owner, subscriber, asyncio.create_task(subscriber.run()), tap)

    def remove_taps(self, worker: str) -> None:
        """Notes that a worker's events are not passed on any more."""
        if self.taps is not None:
            self.taps.remove(worker)

    async def release(self, ranks: Sequence[FollowedRank]) -> None:
        """Ends the feeds of a worker and forgets its blocks, even if the caller is cancelled."""
        releasing = asyncio.create_task(self._release(ranks))
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)
        await asyncio.shield(releasing)

    async def _release(self, ranks: Sequence[FollowedRank]) -> None:
        tasks = [one.task for one in ranks if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # at once: what is under way on one of them may keep other workers from a store
        followed = [one.subscriber for one in ranks if isinstance(one.subscriber, Subscriber)]
        await asyncio.gather(*map(_close, followed))
        for each in ranks:
            if isinstance(each.subscriber, RelayedRank):
                each.subscriber.remove()
        for each in ranks:
            for _ in each.owner.forgetting():
                await asyncio.sleep(0)  # in steps so small that nothing waits for them
            self._index.remove(each.owner)

    async def close(self) -> None:
        """Waits until all that is being released is forgotten."""
        await asyncio.gather(*self._releasing)


async def _close(subscriber: Subscriber) -> None:
    try:
        await subscriber.close()
    except Exception:  # its blocks must be forgotten all the same
        log.exception("feed of %s rank %d: cannot be closed", *subscriber.place)


def _restoring_of(
    owner: Owner, transport: FeedTransport, saved: SavedRows | None
) -> Restoring | None:
    """Returns what puts into a rank what was saved of it, None if nothing that can be proven."""
    if saved is None or transport.recovery is not Recovery.REPLAY:
        return None
    return functools.partial(_restoring, owner, saved)


def _restoring(owner: Owner, saved: SavedRows) -> Steps[SavedFeed | None]:
    """Puts what was saved into a rank; returns where its feed was, None if it failed."""
    is_whole = yield from owner.restoring(saved.rank.owner, saved.rows)
    return saved.rank.feed if is_whole else None
