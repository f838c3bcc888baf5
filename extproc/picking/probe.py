"""Asks workers whether they are well, where that is configured: GET /health."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import aiohttp

from extproc.picking.placing import Placing
from extproc.picking.scrape import Place

log = logging.getLogger("kvsteer.health")

# Answers awaited at once; a fleet is asked over the whole interval, not in one burst.
MAX_QUESTIONS = 16

# A worker that takes longer to say that it is well is not.
MAX_ANSWER_SECONDS = 2.0

# Probes in a row that must fail before a worker is left out; one success brings it back.
FAILURES_UNTIL_UNHEALTHY = 2

_UNHEALTHY = "fails its health probe"


class HealthProbe:
    """Keeps what is known of the workers' health current.

    places: of all workers, as they are resolved now. interval_seconds: between two questions to a
    worker; 0 asks none. chance: 0 to 1, for jitter. monotonic: the clock that the load is kept in.
    """

    def __init__(
        self,
        placing: Placing,
        places: Callable[[], Sequence[Place]],
        interval_seconds: float,
        chance: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._placing = placing
        self._places = places
        self._interval_seconds = interval_seconds
        self._chance = chance
        self._monotonic = monotonic
        self._questions = asyncio.Semaphore(MAX_QUESTIONS)
        self._failures: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Begins to ask, if that is configured."""
        if self._interval_seconds > 0:
            limit = min(MAX_ANSWER_SECONDS, self._interval_seconds)
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=limit), cookie_jar=aiohttp.DummyCookieJar()
            )
            self._task = asyncio.create_task(self._keep_asking(self._session))

    async def close(self) -> None:
        """Ends all questions."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _keep_asking(self, session: aiohttp.ClientSession) -> None:
        while True:
            places = self._places()
            self._forget_others({endpoint for _, endpoint in places})
            asked = [self._ask_later(session, place) for place in places]
            pause = asyncio.sleep(self._interval_seconds * (0.9 + 0.2 * self._chance()))
            await asyncio.gather(pause, *asked)

    def _forget_others(self, endpoints: set[str]) -> None:
        for known in (self._failures, self._placing.unhealthy):
            for endpoint in known.keys() - endpoints:
                del known[endpoint]

    async def _ask_later(self, session: aiohttp.ClientSession, place: Place) -> None:
        await asyncio.sleep(self._interval_seconds * 0.5 * self._chance())
        async with self._questions:
            await self.ask(session, place)

    async def ask(self, session: aiohttp.ClientSession, place: Place) -> None:
        """Asks one worker; vLLM and SGLang answer 200 without a body where they are well."""
        name, endpoint = place
        try:
            url = f"http://{endpoint}/health"
            async with session.get(url, allow_redirects=False) as response:
                is_well = 200 <= response.status < 300  # noqa: PLR2004 - as HTTP has it
                fault = "" if is_well else f"HTTP status {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            fault = type(error).__name__
        if fault:
            self._note_failure(name, endpoint, fault)
            return
        self._failures.pop(endpoint, None)
        if self._placing.unhealthy.pop(endpoint, None) is not None:
            log.info("worker %s is well again", name)

    def _note_failure(self, name: str, endpoint: str, fault: str) -> None:
        failures = self._failures[endpoint] = self._failures.get(endpoint, 0) + 1
        if failures >= FAILURES_UNTIL_UNHEALTHY and endpoint not in self._placing.unhealthy:
            self._placing.unhealthy[endpoint] = _UNHEALTHY
            self._placing.sent.forget(name, self._monotonic())
            log.warning("worker %s %s: %s", name, _UNHEALTHY, fault)
