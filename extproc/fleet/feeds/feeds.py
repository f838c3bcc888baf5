"""Follows the workers' feeds, and asks workers where they publish if that is configured."""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from extproc.base.errors import StartError
from extproc.base.fault import Fault
from extproc.config.feed_kinds import configured
from extproc.config.schema import WorkerEvents
from extproc.fleet.asking.polling import MAX_QUESTIONS, Polling, Question
from extproc.fleet.feeds.feed_plans import feed_plan
from extproc.fleet.feeds.rank_pins import RankPins
from extproc.fleet.feeds.reported_sources import SourcePlaces, permitted, places
from extproc.fleet.feeds.reuse import Reuse
from extproc.fleet.records.shared import SharedByFleet
from extproc.fleet.records.worker import FeedPlan, Place, PlannedFeed, Worker
from kvstate.errors import printable
from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_news import UNSEQUENCED
from kvstate.feeds.feed_sources import FeedSource, ranks_of
from kvstate.feeds.transport import FeedTransport
from kvstate.following.worker_feeds import FeedStatus, ReportedLoad

log = logging.getLogger("kvsteer.workers")

_DISABLED = "disabled: requests are routed by load and by earlier requests"

# Most feeds that are started or ended without a pause: the same event loop also picks.
AT_ONCE = 8

OpenTransports = Callable[[FeedSource], Sequence[FeedTransport]]


class Feeds:
    """Follows the workers' feeds while events are enabled.

    model_of: returns the model that a worker serves, None while it is unknown. polling: carries out
    the questions where workers publish. open_transports: opens a source; returns one transport for
    each rank. pins: is notified of changes. reuse: applies the rules of a worker's engine to its
    feed.
    """

    def __init__(
        self,
        shared: SharedByFleet,
        model_of: Callable[[Worker], str | None],
        polling: Polling,
        open_transports: OpenTransports,
        pins: RankPins,
        reuse: Reuse,
    ) -> None:
        self._times = times = shared.times
        self._events = shared.config.events
        self.are_configured = shared.config.events.enabled
        self._fleet = shared.followed
        self._table = shared.table
        self._model_of = model_of
        self._polling = polling
        self._open_transports = open_transports
        self._question = Question("feed", asyncio.Semaphore(MAX_QUESTIONS), times.feed_soon_seconds)
        self._removed_workers: list[Worker] = []  # their feeds are still to be ended
        self._switching = asyncio.Lock()
        self._is_due = False  # feeds have to be followed again
        self._following_again: asyncio.Task[None] | None = None
        self.enabled = False
        self._pins = pins
        self._reuse = reuse

    async def enable(self, *, enabled: bool) -> None:
        """Switches events on or off: without them, every worker counts as publishing none."""
        # if events are switched off and on quickly, feeds just started must not be closed
        async with self._switching:
            if enabled == self.enabled:
                return
            self.enabled = enabled
            log.info("events %s", "enabled" if enabled else _DISABLED)
            await self._follow_wanted()

    async def follow(self, gone: Sequence[Worker] = ()) -> None:
        """Follows the current workers' feeds; unchanged ones are not touched.

        gone: workers removed since the last call.
        """
        self._removed_workers += gone
        async with self._switching:
            await self._follow_wanted()

    def follow_soon(self) -> None:
        """Does as `follow`, in a task of its own: something was learned of a worker."""
        self._is_due = True
        if self._following_again is None or self._following_again.done():
            self._following_again = asyncio.create_task(self._follow_again())

    async def _follow_again(self) -> None:
        while self._is_due:
            self._is_due = False
            await self.follow()

    async def close(self) -> None:
        """Stops following the workers."""
        if self._following_again is not None:
            self._following_again.cancel()
            await asyncio.gather(self._following_again, return_exceptions=True)
        async with self._switching:
            self.enabled = False
            await self._follow_wanted()
            await self._fleet.close()

    def faults(self) -> Iterator[Fault]:
        """Yields a fault for each worker whose feed's messages have no sequence numbers."""
        for worker in self._table:
            if self._fleet.feeds.is_unsequenced(worker.name):
                yield Fault("feed-unsequenced", f"worker {worker.name}", f"its feed: {UNSEQUENCED}")

    def reason(self, worker: Worker) -> str:
        """Returns why a worker has no feed, "" if it has one."""
        if worker.feed.reason:
            return worker.feed.reason
        if not self.enabled:
            return "events are switched off"
        if worker.upstream is None:
            return "its host name could not be resolved"
        if self._plan_of(worker) is None:
            return "no events are configured for it"
        is_followed = self._fleet.feeds.ranks(worker.name) > 0
        return "" if is_followed else "it has not been asked yet where it publishes"

    def _plan_of(self, worker: Worker) -> FeedPlan | None:
        return feed_plan(worker, self._model_of(worker))

    def _target(self, worker: Worker) -> FeedPlan | None:
        return self._plan_of(worker) if self.enabled else None

    async def _follow_wanted(self) -> None:
        # a copy: a worker added meanwhile may have the name of one whose feed is still to be ended
        workers = list(self._table)
        changed = [
            *self._removed_workers,
            *(one for one in workers if one.feed.plan != self._target(one)),
        ]
        self._removed_workers.clear()
        for at in range(0, len(changed), AT_ONCE):
            await asyncio.gather(*(self._unfollow(one) for one in changed[at : at + AT_ONCE]))
        begun = 0
        for worker in workers:
            target = self._target(worker)
            if target is None or worker.feed.plan is not None:
                continue
            begun += 1
            if begun % AT_ONCE == 0:
                await asyncio.sleep(0)
            if not self._table.has(worker):
                continue  # it was removed meanwhile
            worker.feed.plan = target
            try:
                self._begin(worker, target)
            except StartError as error:  # the router is already running, and continues
                log.error("worker %s: %s", worker.name, error)
                worker.feed.reason = str(error)
            except Exception as error:  # a feed that cannot be opened must not prevent others
                log.exception("worker %s: its feed cannot be followed", worker.name)
                worker.feed.reason = f"its feed cannot be followed: {type(error).__name__}"
        self._pins.note_change()

    def _begin(self, worker: Worker, one: FeedPlan) -> None:
        if isinstance(one.events, WorkerEvents):
            source = configured(one.events)
            if isinstance(source, tuple):
                worker.feed.places = places(source)
            self._open(worker, one, source)
            return

        async def ask() -> float:
            return await self._ask(worker, one)

        name = self._question.name
        worker.polls[name] = self._polling.poll(self._question, worker.name, ask)

    async def _unfollow(self, worker: Worker) -> None:
        worker.stop_asking(self._question.name)
        if worker.feed.plan is not None:
            worker.feed = PlannedFeed()
            await self._fleet.remove(worker.name)

    def _open(self, worker: Worker, one: FeedPlan, source: FeedSource) -> None:
        connect = functools.partial(self._open_transports, source)
        self._fleet.add_source(worker.name, one.model, ranks_of(source), connect, one.adapters)
        self._reuse.note_followed(worker)

    async def _ask(self, worker: Worker, one: FeedPlan) -> float:
        """Asks a worker where it publishes; returns the seconds until the next question."""
        name, client = worker.name, self._polling.client
        try:
            events, host = self._events, worker.place.host
            answer = await permitted(
                client, worker.endpoint, host, events.auto_hosts, events.auto_ranks
            )
            await self._take(worker, one, answer)
        except Exception as error:  # a bad answer must not end the asking
            log.exception("worker %s: events: auto: its feed cannot be followed", name)
            worker.feed.reason = f"its feed cannot be followed: {type(error).__name__}"
        is_well = self._fleet.feeds.state(name) in (FeedState.LIVE, FeedState.DEGRADED)
        times = self._times
        return times.feed_seldom_seconds if is_well else times.feed_soon_seconds

    async def _take(self, worker: Worker, one: FeedPlan, answer: SourcePlaces | str) -> None:
        """Follows the feed that a worker reported; keeps the old one while it does not answer."""
        name, feed = worker.name, worker.feed
        if isinstance(answer, SourcePlaces) and answer.sources != feed.sources:
            owner = self._owner_of(answer.places, worker)
            answer = f"its feed is that of worker {owner}" if owner else answer
        if isinstance(answer, str):
            answer = printable(answer)
            if feed.sources is None and feed.reason != answer:
                feed.reason = answer
                log.warning("worker %s: events: auto: %s", name, answer)
            return
        if answer.sources == feed.sources:
            return
        feed.sources = None  # until the new one is open
        feed.places = answer.places
        await self._fleet.remove(name)
        self._open(worker, one, answer.sources)
        feed.sources = answer.sources
        feed.reason = ""
        self._pins.note_change()

    def _owner_of(self, taken: frozenset[Place], worker: Worker) -> str:
        """Returns another worker that already has one of these places, "" if none has."""
        others = (one for one in self._table if one is not worker and one.feed.places & taken)
        return next((one.name for one in others), "")


def feed_as_json(status: FeedStatus, disbelief: str) -> dict[str, Any]:
    """Returns one rank's feed for GET /workers. disbelief: why nothing it shows is certain."""
    return {
        "rank": status.rank,
        "state": status.state.value,
        "reason": "; ".join(filter(None, (disbelief, status.reason))),
        "last_sequence": status.last_sequence,
        "blocks": status.blocks,
        "uncertain_blocks": status.uncertain_blocks,
        "orphans": status.orphans,
        "gaps": status.gaps,
        "replays": status.replays,
        "restarts": status.restarts,
        "lag_seconds": round(status.lag_seconds, 6),
        "load": None if status.load is None else _load(status.load),
        "counts": dict(status.counts),
    }


def _load(reported: ReportedLoad) -> dict[str, Any]:
    return {**msgspec.to_builtins(reported.load), "age_seconds": round(reported.age_seconds, 3)}
