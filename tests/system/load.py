"""Requests under load, and the outcome of each."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.system.system import CHAT, chat, long_text
from tests.waiting import until

OK = 200
CLIENTS = 8
REQUESTS_PER_SECOND = 60
TIMEOUT_SECONDS = 60.0

# Envoy's words for an upstream that accepted the request and went away before it answered
# (StreamResetReason in source/common/http/utility.cc); what it never accepted, Envoy sends
# elsewhere.
_BEGUN = ("reset reason: connection termination", "reset reason: remote reset")

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request.

    status: 0 where no response came. fault: Envoy's words, or the exception, where it was not
    answered in full. started, ended: in seconds, by the monotonic clock.
    """

    status: int
    worker: str
    fault: str
    started: float
    ended: float

    @property
    def is_answered(self) -> bool:
        """Whether a worker answered it in full."""
        return self.status == OK and not self.fault

    @property
    def was_begun(self) -> bool:
        """Whether a worker had begun it, and then failed."""
        return not self.is_answered and (
            self.status == OK or any(words in self.fault for words in _BEGUN)
        )


Send = Callable[[], Awaitable[Outcome]]


def body() -> dict[str, Any]:
    """A request with a new prompt."""
    return chat(long_text(f"number {next(_numbers)}"))


def client() -> aiohttp.ClientSession:
    """An HTTP/1.1 client without a limit of connections."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def post(session: aiohttp.ClientSession, url: str, prompt: dict[str, Any]) -> Outcome:
    """Sends one chat request, and reads its whole answer."""
    started = time.monotonic()
    status, worker, fault = 0, "", ""
    try:
        async with session.post(f"{url}{CHAT}", json=prompt) as response:
            status, worker = response.status, response.headers.get("x-worker", "")
            text = await response.text()
            fault = "" if status == OK else text
    except (aiohttp.ClientError, OSError) as error:
        fault = f"{type(error).__name__}: {error}"
    return Outcome(status, worker, fault, started, time.monotonic())


@dataclass
class Load:
    """Sends requests until it is stopped, and records outcomes."""

    outcomes: list[Outcome] = field(default_factory=list)
    is_stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def goes_on(self, more: int) -> None:
        """Waits for this many more outcomes."""
        goal = len(self.outcomes) + more
        await until(
            lambda: len(self.outcomes) >= goal, f"{more} more answers", seconds=TIMEOUT_SECONDS
        )

    async def send(self, send: Send) -> None:
        """Sends one request and records its outcome."""
        self.outcomes.append(await send())


@contextlib.asynccontextmanager
async def closed_loop(send: Send, clients: int = CLIENTS) -> AsyncIterator[Load]:
    """This many clients, each of which waits for its answer before it sends again."""
    load = Load()

    async def one_client() -> None:
        while not load.is_stopped.is_set():
            await load.send(send)

    async with _running(load, [one_client() for _ in range(clients)]):
        yield load


@contextlib.asynccontextmanager
async def open_loop(send: Send, rate: float = REQUESTS_PER_SECOND) -> AsyncIterator[Load]:
    """This many requests per second, however long the answers take."""
    load = Load()

    async def arrivals() -> None:
        due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while not load.is_stopped.is_set():
                group.create_task(load.send(send))
                due += 1 / rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    async with _running(load, [arrivals()]):
        yield load


LOOPS = {"closed": closed_loop, "open": open_loop}


@contextlib.asynccontextmanager
async def _running(load: Load, tasks: Iterable[Any]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        for task in tasks:
            group.create_task(task)
        try:
            yield
        finally:
            load.is_stopped.set()


def counted(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Counts unanswered requests: before a worker had begun, and after."""
    begun = sum(one.was_begun for one in outcomes)
    return sum(not one.is_answered for one in outcomes) - begun, begun
