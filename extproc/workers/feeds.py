"""The workers' feeds: which are followed, found out from the workers where that is configured."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from extproc.config import AUTO, Config, Worker, WorkerEvents
from extproc.workers.feed_discovery import Discovery
from extproc.workers.feed_sources import configured
from kvstate.feeds.feed import State
from kvstate.feeds.feed_sources import FeedSource, ZmqSource
from kvstate.feeds.transport import Transport
from kvstate.fleet import Fleet

log = logging.getLogger("kvsteer.workers")

# A worker that told where its feed is, is asked again: soon while the feed is away, since a worker
# that restarted may publish elsewhere, and seldom while all is well.
ASK_SOON_SECONDS = 5.0
ASK_SELDOM_SECONDS = 60.0

OpenTransports = Callable[[FeedSource], Sequence[Transport]]


class Feeds:
    """Follows the workers' feeds while events are enabled.

    open_transports: opens a source, one transport a rank.
    """

    def __init__(self, config: Config, fleet: Fleet, open_transports: OpenTransports) -> None:
        self._config = config
        self._fleet = fleet
        self._open_transports = open_transports
        self._tasks: list[asyncio.Task[None]] = []
        self._found: dict[str, tuple[ZmqSource, ...]] = {}
        self._reasons: dict[str, str] = {}
        self._switching = asyncio.Lock()
        self.enabled = False

    async def enable(self, *, enabled: bool) -> None:
        """The kill switch: without events every worker is as one that publishes none."""
        # switched off and on at once, feeds must not be closed that were just started
        async with self._switching:
            if enabled == self.enabled:
                return
            self.enabled = enabled
            log.info("events %s", "enabled" if enabled else "disabled: requests are routed by load")
            await (self._start() if enabled else self._stop())

    async def close(self) -> None:
        """Stops following the workers."""
        async with self._switching:
            await self._stop()

    def reason(self, worker: str) -> str:
        """Why a worker has no feed, "" if it has."""
        return self._reasons.get(worker, "")

    async def _start(self) -> None:
        asked: list[Worker] = []
        for worker in self._config.workers:
            if worker.events == AUTO:
                asked.append(worker)
            elif isinstance(worker.events, WorkerEvents):
                self._follow(worker, configured(worker.events))
        if asked:
            self._tasks.append(asyncio.create_task(self._ask_all(asked)))

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._found.clear()
        self._reasons.clear()
        await self._fleet.close()

    def _follow(self, worker: Worker, source: FeedSource) -> None:
        model = self._config.model_of(worker)
        self._fleet.add(worker.endpoint, model, self._open_transports(source))

    async def _ask_all(self, workers: Sequence[Worker]) -> None:
        async with Discovery() as discovery, asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(self._keep_asking(worker, discovery.sources))

    async def _keep_asking(
        self, worker: Worker, ask: Callable[[str], Awaitable[tuple[ZmqSource, ...] | str]]
    ) -> None:
        while True:
            try:
                await self._take(worker, await ask(worker.endpoint))
            except Exception:  # one worker's answer must not end the asking of all
                log.exception(
                    "worker %s: events: auto: its feed cannot be followed", worker.endpoint
                )
            is_well = self._fleet.state(worker.endpoint) in (State.LIVE, State.DEGRADED)
            await asyncio.sleep(ASK_SELDOM_SECONDS if is_well else ASK_SOON_SECONDS)

    async def _take(self, worker: Worker, answer: tuple[ZmqSource, ...] | str) -> None:
        """Follows what a worker told; keeps what is followed while it does not answer."""
        name = worker.endpoint
        if isinstance(answer, str):
            if name not in self._found and self._reasons.get(name) != answer:
                self._reasons[name] = answer
                log.warning("worker %s: events: auto: %s", name, answer)
            return
        if answer == self._found.get(name):
            return
        await self._fleet.remove(name)
        self._follow(worker, answer)
        self._found[name] = answer
        self._reasons.pop(name, None)
