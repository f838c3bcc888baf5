"""Asks workers over HTTP: one client, and one schedule for regular questions."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

import aiohttp

from extproc.base.logs import log_fault

log = logging.getLogger("kvsteer.workers")

# How often checks run that name no other time: of loads from feeds, and for reasons for doubt.
CHECK_SECONDS = 0.25

# For what workers report about themselves: the time limit of an answer, and how much is read.
TIMEOUT_SECONDS = 5.0
MAX_ANSWER_BYTES = 1024 * 1024

# Questions of one kind under way at once, over the fleet.
MAX_QUESTIONS = 64

_OK = 200
_READ = (_OK, 501)
_JSON = {"Content-Type": "application/json"}


class Client:
    """The HTTP client for all questions to workers; made in a running event loop.

    Each kind of question has its own limit of those under way, so that none waits for another kind.
    """

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(),
            # without a cache: a worker that moved must not be asked at its old address
            connector=aiohttp.TCPConnector(limit=0, use_dns_cache=False),
        )

    async def close(self) -> None:
        """Closes its connections."""
        await self._session.close()

    async def get(
        self, endpoint: str, path: str, seconds: float, max_bytes: int = 0
    ) -> tuple[int, bytes]:
        """Returns an answer's status, and at most this many bytes of its body.

        The body is read if the status is 200, or 501, where engines say what they lack.

        endpoint: host:port of the worker's HTTP server. seconds: the limit for the whole answer.

        Raises:
            OSError, aiohttp.ClientError, TimeoutError: it does not answer.
        """
        return await self._answer("GET", endpoint, path, seconds, max_bytes)

    async def post(
        self, endpoint: str, path: str, body: bytes, seconds: float, max_bytes: int
    ) -> tuple[int, bytes]:
        """Returns the same for a POST of JSON.

        Raises:
            OSError, aiohttp.ClientError, TimeoutError: it does not answer.
        """
        return await self._answer("POST", endpoint, path, seconds, max_bytes, body)

    async def _answer(
        self,
        method: str,
        endpoint: str,
        path: str,
        seconds: float,
        max_bytes: int,
        asked: bytes | None = None,
    ) -> tuple[int, bytes]:
        limit = aiohttp.ClientTimeout(total=seconds)
        async with self._session.request(
            method,
            f"http://{endpoint}{path}",
            allow_redirects=False,
            timeout=limit,
            data=asked,
            headers=None if asked is None else _JSON,
        ) as response:
            body = bytearray()
            if response.status in _READ and max_bytes:
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) >= max_bytes:
                        break
            return response.status, bytes(body[:max_bytes])


class Question(NamedTuple):
    """A question to workers.

    name: one of a few fixed names. at_once: how many workers are asked at the same time; a null
    context if all may be. retry_seconds: when a worker is asked again after an internal error.
    """

    name: str
    at_once: AbstractAsyncContextManager[None]
    retry_seconds: float


class PeriodicCheck(NamedTuple):
    """A check of workers that runs regularly and awaits no answer.

    run: does it once. fault: logged if it fails, with the type of the error. seconds: between two.
    """

    run: Callable[[], None]
    fault: str
    seconds: float = CHECK_SECONDS


class Poll:
    """One question to one worker, asked regularly until it is cancelled.

    worker: its name. ask: asks once, and returns the seconds until the next question.
    """

    __slots__ = (
        "_ask",
        "_is_cancelled",
        "_is_wanted",
        "_polling",
        "_question",
        "_task",
        "_timer",
        "_worker",
    )

    def __init__(
        self,
        polling: "Polling",
        question: Question,
        worker: str,
        ask: Callable[[], Awaitable[float]],
    ) -> None:
        self._polling = polling
        self._question = question
        self._worker = worker
        self._ask = ask
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_wanted = False
        self._is_cancelled = False

    def begin(self, seconds: float) -> None:
        """Asks after this many seconds."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, seconds), self._start)

    def ask_now(self) -> None:
        """Asks at once, or again as soon as the question under way ends."""
        if self._task is not None:
            self._is_wanted = True
        elif self._timer is not None:
            self._timer.cancel()
            self._start()

    def cancel(self) -> None:
        """Stops asking, and ignores an answer that arrives later; its question may call this."""
        self._is_cancelled = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def _start(self) -> None:
        self._timer = None
        self._task = self._polling.run(self._ask_once())

    async def _ask_once(self) -> None:
        try:
            async with self._question.at_once:
                self._is_wanted = False
                seconds = await self._ask()
        except Exception:  # one worker's answer must not end the asking
            log.exception("worker %s could not be asked", self._worker)
            seconds = self._question.retry_seconds
        self._task = None
        if not self._is_cancelled:
            self.begin(0.0 if self._is_wanted else seconds)


class Polling:
    """All questions to workers.

    make_client: makes the client for them, at the first question.
    """

    def __init__(self, make_client: Callable[[], Client] = Client) -> None:
        self._make_client = make_client
        self._client: Client | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def client(self) -> Client:
        """The client for all questions."""
        if self._client is None:
            self._client = self._make_client()
        return self._client

    def start(self, checks: Sequence[PeriodicCheck]) -> None:
        """Starts checks; one that fails ends neither itself nor the others."""
        for check in checks:
            self.run(_repeat(check))

    def poll(
        self,
        question: Question,
        worker: str,
        ask: Callable[[], Awaitable[float]],
        seconds: float = 0.0,
    ) -> Poll:
        """Starts to ask a worker regularly, the first time after this many seconds."""
        made = Poll(self, question, worker, ask)
        made.begin(seconds)
        return made

    def run(self, asking: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a question beside others until it ends, or `close` cancels it; returns its task."""
        task = asyncio.get_running_loop().create_task(asking)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a question to a worker failed", exc_info=error)

    async def close(self) -> None:
        """Ends all questions under way, and the client; polls must be cancelled before."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
            self._client = None


async def _repeat(check: PeriodicCheck) -> None:
    """Checks until it is cancelled."""
    while True:
        await asyncio.sleep(check.seconds)
        try:
            check.run()
        except Exception as error:  # noqa: BLE001 - a failed check must not end the later ones
            log_fault(log, f"{check.fault}: %s", error)


async def fetch_report(client: Client, endpoint: str, path: str) -> bytes | str:
    """Returns the body of what a worker reports about itself, or why there is none.

    endpoint: host:port of the worker's HTTP server.

    Raises:
        OSError, aiohttp.ClientError, TimeoutError: it does not answer.
    """
    limit = MAX_ANSWER_BYTES
    status, body = await client.get(endpoint, path, TIMEOUT_SECONDS, limit + 1)
    if status != _OK:
        return f"status {status}"
    return f"more than {limit} bytes" if len(body) > limit else body
