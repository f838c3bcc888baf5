"""The workers' feeds: which are followed, found out from the workers where that is configured."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from extproc.config import AUTO, Config, Worker, WorkerEvents
from extproc.workers.asking import Asking
from extproc.workers.feed_discovery import Told, told
from extproc.workers.feed_sources import Place, configured, places
from kvstate.errors import printable
from kvstate.feeds.feed_sources import FeedSource, ZmqSource
from kvstate.feeds.feed_terms import State
from kvstate.feeds.transport import Transport
from kvstate.fleet import Fleet

log = logging.getLogger("kvsteer.workers")

# A worker that told where its feed is, is asked again: soon while the feed is away, since a worker
# that restarted may publish elsewhere, and seldom while all is well.
ASK_SOON_SECONDS = 5.0
ASK_SELDOM_SECONDS = 60.0

_DISABLED = "disabled: requests are routed by load and by what was sent where"

# Feeds that are begun or ended in one go, on the loop that picks.
AT_ONCE = 8

OpenTransports = Callable[[FeedSource], Sequence[Transport]]


class Wanted(NamedTuple):
    """A feed that is to be followed; whatever of this changes, it is begun anew.

    identity: of the engine, where another one may have got its address.
    """

    model: str
    events: WorkerEvents | str
    identity: str = ""
    adapters: tuple[tuple[int, str], ...] = ()


class Feeds:
    """Follows the workers' feeds while events are enabled.

    open_transports: opens a source, one transport a rank.
    """

    def __init__(self, config: Config, fleet: Fleet, open_transports: OpenTransports) -> None:
        self._events = config.events
        self._fleet = fleet
        self._open_transports = open_transports
        self._wanted: dict[str, Wanted] = wanted(
            (worker.endpoint, worker, config.model_of(worker)) for worker in config.workers
        )
        self._followed: dict[str, Wanted] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._found: dict[str, tuple[ZmqSource, ...]] = {}
        self._places: dict[str, frozenset[Place]] = {}  # of what is followed
        self._reasons: dict[str, str] = {}
        self._asking: Asking | None = None
        self._switching = asyncio.Lock()
        self.enabled = False
        self._rank_header = config.policy.rank_header
        self._note_ranks()

    async def enable(self, *, enabled: bool) -> None:
        """The kill switch: without events every worker is as one that publishes none."""
        # switched off and on at once, feeds must not be closed that were just started
        async with self._switching:
            if enabled == self.enabled:
                return
            self.enabled = enabled
            log.info("events %s", "enabled" if enabled else _DISABLED)
            await self._follow_wanted()

    async def follow(self, wanted: Mapping[str, Wanted]) -> None:
        """Follows these workers' feeds and no others; those that stay the same are not touched."""
        async with self._switching:
            self._wanted = dict(wanted)
            await self._follow_wanted()

    async def close(self) -> None:
        """Stops following the workers."""
        async with self._switching:
            self._wanted = {}
            await self._follow_wanted()
            await self._fleet.close()
            if self._asking is not None:
                await self._asking.__aexit__(None, None, None)
                self._asking = None

    def reason(self, worker: str) -> str:
        """Why a worker has no feed, "" if it has."""
        if worker in self._reasons:
            return self._reasons[worker]
        if not self.enabled:
            return "events are switched off"
        if worker not in self._wanted:
            return "no events are configured for it"
        return "" if self._fleet.ranks(worker) else "it was not asked yet where its feed is"

    async def _follow_wanted(self) -> None:
        target = self._wanted if self.enabled else {}
        changed = [name for name, one in self._followed.items() if target.get(name) != one]
        for at in range(0, len(changed), AT_ONCE):
            await asyncio.gather(*(self._unfollow(name) for name in changed[at : at + AT_ONCE]))
        begun = 0
        for name, one in target.items():
            if name in self._followed:
                continue
            begun += 1
            if begun % AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                self._begin(name, one)
            except Exception as error:  # one feed that cannot be opened must not keep others away
                log.exception("worker %s: its feed cannot be followed", name)
                self._reasons[name] = f"its feed cannot be followed: {type(error).__name__}"
            self._followed[name] = one
        self._note_ranks()

    def _note_ranks(self) -> None:
        """Whether requests may name a rank.

        Where it was not configured, of engines only that told of their ranks themselves: those
        whose releases do so heed X-data-parallel-rank.
        """
        several = [name for name in self._followed if self._fleet.ranks(name) > 1]
        is_told = bool(several) and all(name in self._found for name in several)
        header = self._rank_header
        self._fleet.names_ranks = is_told if header == AUTO else header is not None

    def _begin(self, name: str, one: Wanted) -> None:
        if isinstance(one.events, WorkerEvents):
            source = configured(one.events)
            self._places[name] = places(source) if isinstance(source, tuple) else frozenset()
            self._open(name, one, source)
        else:
            self._asking = self._asking or Asking()
            self._tasks[name] = asyncio.create_task(self._keep_asking(name, one, self._asking))

    async def _unfollow(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        del self._followed[name]
        self._found.pop(name, None)
        self._places.pop(name, None)
        self._reasons.pop(name, None)
        await self._fleet.remove(name)

    def _open(self, name: str, one: Wanted, source: FeedSource) -> None:
        self._fleet.add(name, one.model, self._open_transports(source), one.adapters)

    async def _keep_asking(self, name: str, one: Wanted, asking: Asking) -> None:
        while True:
            try:
                hosts, max_ranks = self._events.auto_hosts, self._events.auto_ranks
                await self._take(name, one, await told(asking, name, hosts, max_ranks))
            except Exception as error:  # one worker's answer must not end its asking
                log.exception("worker %s: events: auto: its feed cannot be followed", name)
                self._reasons[name] = f"its feed cannot be followed: {type(error).__name__}"
            is_well = self._fleet.state(name) in (State.LIVE, State.DEGRADED)
            await asyncio.sleep(ASK_SELDOM_SECONDS if is_well else ASK_SOON_SECONDS)

    async def _take(self, name: str, one: Wanted, answer: Told | str) -> None:
        """Follows what a worker told; keeps what is followed while it does not answer."""
        if isinstance(answer, Told) and answer.sources != self._found.get(name):
            owner = self._owner_of(answer.places, name)
            answer = f"its feed is that of worker {owner}" if owner else answer
        if isinstance(answer, str):
            answer = printable(answer)
            if name not in self._found and self._reasons.get(name) != answer:
                self._reasons[name] = answer
                log.warning("worker %s: events: auto: %s", name, answer)
            return
        if answer.sources == self._found.get(name):
            return
        self._found.pop(name, None)  # nothing is followed if the new one cannot be opened
        self._places[name] = answer.places
        await self._fleet.remove(name)
        self._open(name, one, answer.sources)
        self._found[name] = answer.sources
        self._reasons.pop(name, None)
        self._note_ranks()

    def _owner_of(self, taken: frozenset[Place], name: str) -> str:
        """Another worker that has one of these places, "" if none has: it had them first."""
        others = (other for other, own in self._places.items() if other != name and own & taken)
        return next(others, "")


def wanted(workers: Iterable[tuple[str, Worker, str]]) -> dict[str, Wanted]:
    """The feeds of workers, each with its name and model, by name."""
    return {
        name: Wanted(model, worker.events)
        for name, worker, model in workers
        if worker.events == AUTO or isinstance(worker.events, WorkerEvents)
    }
