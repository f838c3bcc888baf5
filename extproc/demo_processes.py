"""The processes of the demo: started, watched until they are ready, and stopped."""

import asyncio
import contextlib
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from typing import NoReturn

import aiohttp

from extproc.errors import StartError

READY_TIMEOUT_SECONDS = 30.0
STOP_TIMEOUT_SECONDS = 5.0

# Long enough for the page, the metrics and the log to show a worker that is gone.
AGAIN_SECONDS = 15.0


class Part:
    """One process of the demo; the last lines it wrote are kept for when it dies.

    decisions: whether those that it logs are printed. comes_back: whether the demo goes on without
    it, and starts it again.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, decisions: bool, comes_back: bool = False
    ) -> None:
        self.name = name
        self.comes_back = comes_back
        self._command = command
        self._decisions = decisions
        self._lines: deque[str] = deque(maxlen=8)
        self._process: Process
        self._following: asyncio.Task[None]

    async def start(self) -> None:
        """Starts the process, for the first time or again."""
        self._lines.clear()
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdout=PIPE, stderr=STDOUT
        )
        self._following = asyncio.create_task(self._follow(self._process))

    async def ended(self) -> str:
        """Waits until the process has ended; how it did, with the last lines that it wrote."""
        await self._process.wait()
        await self._following
        return self._end()

    async def stop(self) -> None:
        """Ends the process."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_SECONDS)
        except TimeoutError:
            self._process.kill()
        await self._following

    def raise_if_dead(self) -> None:
        """Raises StartError, with the last lines, if the process has ended."""
        if self._process.returncode is not None:
            raise StartError(f"demo: {self._end()}")

    def said(self) -> str:
        """The last lines that it wrote, each on a line of its own."""
        return "".join(f"\n  {line}" for line in self._lines)

    def _end(self) -> str:
        return f"{self.name} ended with {self._process.returncode}{self.said()}"

    async def _follow(self, process: Process) -> None:
        """Reads what the process writes until it ends."""
        assert process.stdout is not None  # noqa: S101 - it was started with a pipe
        async for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            _, marker, decision = line.partition("decision: ")
            if marker and self._decisions:
                print(f"-> {decision}", flush=True)


@contextlib.asynccontextmanager
async def started(part: Part) -> AsyncIterator[Part]:
    """Starts a part; stops it at the end."""
    await part.start()
    try:
        yield part
    finally:
        await part.stop()


async def keep_running(parts: Sequence[Part], again_seconds: float = AGAIN_SECONDS) -> NoReturn:
    """Starts those that come back again, some time after they ended, until it is cancelled.

    Raises:
        StartError: one without which nothing works has ended.
    """
    watching = [asyncio.create_task(_watch(part, again_seconds)) for part in parts]
    try:
        await asyncio.gather(*watching)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.wait(watching)
    raise AssertionError  # each is watched for good


async def _watch(part: Part, again_seconds: float) -> NoReturn:
    while True:
        end = await part.ended()
        if not part.comes_back:
            raise StartError(f"demo: {end}")
        print(f"{end}\n  it is started again in {again_seconds:g} s", flush=True)
        await asyncio.sleep(again_seconds)
        await part.start()
        print(f"{part.name} is started again", flush=True)


async def ready(urls: Sequence[str], parts: Sequence[Part]) -> None:
    """Waits until all answer that they are ready.

    Raises:
        StartError: one does not in time, or a part has ended, whoever answers in its place.
    """
    deadline = time.monotonic() + READY_TIMEOUT_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        for url in urls:
            while fault := await _fault(session, url):
                _raise_if_dead(parts)
                if time.monotonic() > deadline:
                    raise StartError(_not_ready(url, fault, parts))
                await asyncio.sleep(0.05)
    _raise_if_dead(parts)


def _raise_if_dead(parts: Sequence[Part]) -> None:
    for part in parts:
        part.raise_if_dead()


def _not_ready(url: str, fault: str, parts: Sequence[Part]) -> str:
    said = "".join(f"\n{part.name} said last:{part.said()}" for part in parts if part.said())
    return f"demo: {url} is not ready after {READY_TIMEOUT_SECONDS:g} s: {fault}{said}"


async def _fault(session: aiohttp.ClientSession, url: str) -> str:
    """Why a URL does not say that it is ready, "" if it does."""
    try:
        async with session.get(url) as response:
            if response.status == HTTPStatus.OK:
                return ""
            return f"{response.status} {(await response.text())[:200].strip()}".rstrip()
    except (aiohttp.ClientError, TimeoutError) as error:
        return str(error) or "it does not answer"
