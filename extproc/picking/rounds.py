"""Asks every worker over HTTP, round after round."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

log = logging.getLogger("kvsteer.workers")

# Answers awaited at once; a fleet is asked over the whole interval, not in one burst.
MAX_QUESTIONS = 16

# An answer that takes longer says nothing any more.
MAX_ANSWER_SECONDS = 2.0

# name and endpoint of a worker
Place = tuple[str, str]


class Rounds:
    """One question to each worker an interval, spread over it.

    interval_seconds: 0 asks none. places: of all workers, as they are resolved now. keep: is told
    before each round which endpoints there are. ask: asks one worker; what it raises is logged, and
    ends nothing. chance: 0 to 1, for jitter.
    """

    def __init__(
        self,
        interval_seconds: float,
        places: Callable[[], Sequence[Place]],
        keep: Callable[[set[str]], None],
        ask: Callable[[aiohttp.ClientSession, Place], Awaitable[None]],
        chance: Callable[[], float],
    ) -> None:
        self._interval_seconds = interval_seconds
        self._places = places
        self._keep = keep
        self._ask = ask
        self._chance = chance
        self._questions = asyncio.Semaphore(MAX_QUESTIONS)
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
            self._keep({endpoint for _, endpoint in places})
            asked = [self._ask_later(session, place) for place in places]
            pause = asyncio.sleep(self._interval_seconds * (0.9 + 0.2 * self._chance()))
            await asyncio.gather(pause, *asked)

    async def _ask_later(self, session: aiohttp.ClientSession, place: Place) -> None:
        await asyncio.sleep(self._interval_seconds * 0.5 * self._chance())
        async with self._questions:
            try:
                await self._ask(session, place)
            except Exception:  # one worker's answer must not end the asking of all
                log.exception("worker %s could not be asked", place[0])
