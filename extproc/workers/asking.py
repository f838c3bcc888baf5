"""Asks workers over HTTP what they are: one client for all of them."""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

import aiohttp

from extproc.picking.load import MAX_METRICS_BYTES, report_of_feeds, report_of_metrics
from extproc.picking.placing import Placing, Pulse, Vitals
from kvstate.events import EngineLoad

log = logging.getLogger("kvsteer.workers")

# Answers awaited at once; a fleet is asked over the whole interval, not in one burst.
MAX_QUESTIONS_A_ROUND = 16

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
        self._questions = asyncio.Semaphore(MAX_QUESTIONS_A_ROUND)
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


TIMEOUT_SECONDS = 5.0
MAX_ANSWER_BYTES = 1024 * 1024

# Questions under way at once, over the fleet.
MAX_QUESTIONS = 64


class Asking:
    """The client; an asynchronous context."""

    def __init__(self) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        self._client = aiohttp.ClientSession(
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            # without a cache: a worker that moved must not be asked where it was
            connector=aiohttp.TCPConnector(limit=MAX_QUESTIONS, use_dns_cache=False),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.close()

    async def get(self, endpoint: str, path: str) -> bytes | str:
        """The body of an answer, or why there is none.

        endpoint: host:port of the worker's HTTP server.

        Raises:
            OSError, aiohttp.ClientError, TimeoutError: it does not answer.
        """
        async with self._client.get(f"http://{endpoint}{path}", allow_redirects=False) as response:
            if response.status != 200:  # noqa: PLR2004 - OK
                return f"status {response.status}"
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    return f"more than {MAX_ANSWER_BYTES} bytes"
            return bytes(body)
