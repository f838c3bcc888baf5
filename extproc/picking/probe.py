"""Asks workers for GET /health: those in doubt, or all of them where that is configured."""

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence

import aiohttp

from extproc.picking.outliers import Pulse, Vitals
from extproc.picking.placing import Placing
from extproc.picking.rounds import Place, Rounds

log = logging.getLogger("kvsteer.health")

# Probes in a row that must fail before a worker is left out; one success brings it back.
FAILURES_UNTIL_UNHEALTHY = 2

_UNHEALTHY = "fails its health probe"

# How often workers are looked at for a reason to ask them; and how long one in doubt may take to
# answer: with all its other signs of life missing, longer than that is no pause.
LOOK_SECONDS = 0.25
ANSWER_SECONDS = 1.0

# An answer that is late by more than this was missed by us: something held the router up.
_HELD_UP_SECONDS = 0.5

# Questions to workers in doubt that are under way at once.
_MAX_QUESTIONS = 64

# Nobody listens there, or nothing leads there. Any other fault of a connection may be our own.
_NOBODY = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})

_SERVER_ERROR = 500

DEAD = "does not answer"
REFUSED = "it cannot be connected to"
SILENT = f"not a byte within {ANSWER_SECONDS:g} s"


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
        self._monotonic = monotonic
        self._failures: dict[str, int] = {}
        self._rounds = Rounds(interval_seconds, places, self._forget_others, self.ask, chance)

    async def start(self) -> None:
        """Begins to ask, if that is configured."""
        await self._rounds.start()

    async def close(self) -> None:
        """Ends all questions."""
        await self._rounds.close()

    def _forget_others(self, endpoints: set[str]) -> None:
        for known in (self._failures, self._placing.unhealthy):
            for endpoint in known.keys() - endpoints:
                del known[endpoint]

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
        was_unhealthy = self._placing.unhealthy.pop(endpoint, None) is not None
        if was_unhealthy and endpoint not in self._placing.unfit:  # else its scrapes tell
            log.info("worker %s is well again", name)

    def _note_failure(self, name: str, endpoint: str, fault: str) -> None:
        failures = self._failures[endpoint] = self._failures.get(endpoint, 0) + 1
        if failures >= FAILURES_UNTIL_UNHEALTHY and endpoint not in self._placing.unhealthy:
            self._placing.unhealthy[endpoint] = _UNHEALTHY
            self._placing.sent.forget(name, self._monotonic())
            if endpoint not in self._placing.unfit:
                log.warning("worker %s %s: %s", name, _UNHEALTHY, fault)


class Doubts:
    """Asks workers whether they live while there is reason to doubt it, and leaves out the dead.

    places: of all workers, as they are resolved now. sign_of_life: of a worker, by its name:
    whether its feed has no connection, and how many batches came of it so far. monotonic: the clock
    that the load is kept in.
    """

    def __init__(
        self,
        placing: Placing,
        places: Callable[[], Sequence[Place]],
        sign_of_life: Callable[[str], tuple[bool, int]],
        monotonic: Callable[[], float],
    ) -> None:
        self._placing = placing
        self._places = places
        self._sign_of_life = sign_of_life
        self._monotonic = monotonic
        self._vitals = Vitals()
        self._questions = asyncio.Semaphore(_MAX_QUESTIONS)
        self._asking: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to look for reasons."""
        self._task = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """Ends all questions."""
        tasks = [*self._asking, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_looking(self) -> None:
        limit = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        async with aiohttp.ClientSession(
            timeout=limit, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            while True:
                try:
                    self._look(session)
                except Exception:  # one worker must not end the looking at all
                    log.exception("workers in doubt could not be asked")
                await asyncio.sleep(LOOK_SECONDS)

    def _look(self, session: aiohttp.ClientSession) -> None:
        places, placing, now = self._places(), self._placing, self._monotonic()
        there = {endpoint for _, endpoint in places}
        self._vitals.keep(there)
        for endpoint in placing.dead.keys() - there:
            del placing.dead[endpoint]
        placing.doubted &= there
        for place in places:
            if self._vitals.is_due(place[1], self._pulse(place), now):
                task = asyncio.create_task(self._ask(session, place))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)

    def _pulse(self, place: Place) -> Pulse:
        name, endpoint = place
        is_cut, batches = self._sign_of_life(name)
        in_flight = self._placing.loads.in_flight(endpoint)
        return Pulse(is_cut, batches, in_flight, self._placing.is_doubted(endpoint))

    async def _ask(self, session: aiohttp.ClientSession, place: Place) -> None:
        async with self._questions:
            asked_at, batches = self._monotonic(), self._sign_of_life(place[0])[1]
            fault = await _fault(session, place[1])
        now = self._monotonic()
        was_held_up = now - asked_at > ANSWER_SECONDS + _HELD_UP_SECONDS
        lives = was_held_up or self._sign_of_life(place[0])[1] != batches
        if fault and not (fault == SILENT and lives):
            self._note_failure(place, fault, now)
            return
        self._placing.doubted.discard(place[1])
        if self._vitals.alive(place[1], now):
            self._placing.dead.pop(place[1], None)
            log.info("worker %s is well again", place[0])

    def _note_failure(self, place: Place, fault: str, now: float) -> None:
        name, endpoint = place
        is_certain = fault in (REFUSED, SILENT)
        if not self._vitals.failed(endpoint, now, is_certain=is_certain):
            return
        self._placing.dead[endpoint] = f"{DEAD}: {fault}"
        if fault == REFUSED:
            self._placing.sent.forget(name, now)
        log.warning("worker %s %s: %s; left out where others are left", name, DEAD, fault)


async def _fault(session: aiohttp.ClientSession, endpoint: str) -> str:
    """What is wrong with a worker in doubt, "" if it lives.

    It lives if it answers anything but a fault of its own, be it no HTTP: that says no more than
    that it has no such path.
    """
    try:
        async with session.get(f"http://{endpoint}/health", allow_redirects=False) as response:
            fails = response.status >= _SERVER_ERROR
            return f"GET /health has status {response.status}" if fails else ""
    except TimeoutError:
        return SILENT
    except aiohttp.ClientConnectorError as error:
        return REFUSED if error.os_error.errno in _NOBODY else ""
    except (aiohttp.ClientError, OSError):
        return ""
