"""Asks workers for their load: feeds that carry it are read, others' /metrics is scraped."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import aiohttp

from extproc.picking.placing import Placing
from extproc.picking.reports import MAX_METRICS_BYTES, report_of_feeds, report_of_metrics
from extproc.picking.rounds import Place, Rounds
from kvstate.feeds.engine_load import EngineLoad

log = logging.getLogger("kvsteer.load")

# How often feeds are read for the load that they carry.
FEED_INTERVAL_SECONDS = 0.25

# Connections in a row that must fail before a worker is left out.
FAILURES_UNTIL_UNFIT = 3

_UNFIT = "does not answer on its endpoint"


class LoadReports:
    """Keeps the load of all workers current.

    places: of all workers, as they are resolved now. feed_loads: what a worker's feeds said, each
    with its age in seconds. interval_seconds: between two questions to a worker; 0 asks none.
    chance: 0 to 1, for jitter. monotonic: the clock that the load is kept in.
    """

    def __init__(
        self,
        placing: Placing,
        places: Callable[[], Sequence[Place]],
        feed_loads: Callable[[str], Sequence[tuple[EngineLoad, float]]],
        interval_seconds: float,
        chance: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._placing = placing
        self._places = places
        self._feed_loads = feed_loads
        self._monotonic = monotonic
        self._failures: dict[str, int] = {}
        self._rounds = Rounds(interval_seconds, places, self._forget_others, self.ask, chance)
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to read feeds, and to ask if that is configured."""
        self._reading = asyncio.create_task(self._keep_reading())
        await self._rounds.start()

    async def close(self) -> None:
        """Ends all questions."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._rounds.close()

    async def _keep_reading(self) -> None:
        while True:
            try:
                self._read()
            except Exception:  # one feed's load must not end the reading of all
                log.exception("the load of feeds could not be read")
            await asyncio.sleep(FEED_INTERVAL_SECONDS)

    def _read(self) -> None:
        places = self._places()
        # an answer, or a request, may be later than the end of its worker
        self._placing.loads.keep([endpoint for _, endpoint in places])
        for name, endpoint in places:
            now = self._monotonic()
            report = report_of_feeds(self._feed_loads(name), now)
            if report is not None:
                self._placing.loads.report(endpoint, report, now)

    def _forget_others(self, endpoints: set[str]) -> None:
        for known in (self._failures, self._placing.unfit):
            for endpoint in known.keys() - endpoints:
                del known[endpoint]

    async def ask(self, session: aiohttp.ClientSession, place: Place) -> None:
        """Scrapes one worker; what cannot be reached again and again is unfit until it can be."""
        name, endpoint = place
        asked_at = self._monotonic()
        try:
            text = await _metrics(session, endpoint)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._note_failure(name, endpoint, error)
            return
        self._failures.pop(endpoint, None)
        was_unfit = self._placing.unfit.pop(endpoint, None) is not None
        if was_unfit and endpoint not in self._placing.unhealthy:  # else its health probe tells
            log.info("worker %s answers again", name)
        if text is None or self._feed_loads(name):
            return
        report = report_of_metrics(text, asked_at)
        if report is not None:
            self._placing.loads.report(endpoint, report, self._monotonic())

    def _note_failure(self, name: str, endpoint: str, error: Exception) -> None:
        failures = self._failures[endpoint] = self._failures.get(endpoint, 0) + 1
        if failures >= FAILURES_UNTIL_UNFIT and endpoint not in self._placing.unfit:
            self._placing.unfit[endpoint] = _UNFIT
            self._placing.sent.forget(name, self._monotonic())
            if endpoint not in self._placing.unhealthy:
                log.warning("worker %s %s: %s", name, _UNFIT, type(error).__name__)


async def _metrics(session: aiohttp.ClientSession, endpoint: str) -> bytes | None:
    """The text of /metrics; None if the worker answers something else."""
    url = f"http://{endpoint}/metrics"
    async with session.get(url, allow_redirects=False) as response:
        if response.status != 200:  # noqa: PLR2004 - OK
            return None
        try:
            return await response.content.readexactly(MAX_METRICS_BYTES)
        except asyncio.IncompleteReadError as whole:
            return whole.partial
