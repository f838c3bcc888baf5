"""The processes of the demo: started, watched until they are ready, and stopped."""

import asyncio
import contextlib
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus

import aiohttp

from extproc.errors import StartError

READY_TIMEOUT_SECONDS = 30.0
STOP_TIMEOUT_SECONDS = 5.0


class Part:
    """One process of the demo; the last lines it wrote are kept for when it dies."""

    def __init__(self, name: str, process: Process, *, decisions: bool) -> None:
        self.name = name
        self.process = process
        self._decisions = decisions
        self._lines: deque[str] = deque(maxlen=8)

    async def follow(self) -> None:
        """Reads what the process writes until it ends."""
        assert self.process.stdout is not None  # noqa: S101 - it was started with a pipe
        async for raw in self.process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            _, marker, decision = line.partition("decision: ")
            if marker and self._decisions:
                print(f"-> {decision}", flush=True)

    def raise_if_dead(self) -> None:
        """Raises StartError, with the last lines, if the process has ended."""
        if self.process.returncode is not None:
            said = "".join(f"\n  {line}" for line in self._lines)
            raise StartError(f"demo: {self.name} ended with {self.process.returncode}{said}")


@contextlib.asynccontextmanager
async def started(name: str, command: Sequence[str], *, decisions: bool) -> AsyncIterator[Part]:
    """Starts a part; stops it at the end.

    decisions: whether those that it logs are printed.
    """
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
    part = Part(name, process, decisions=decisions)
    following = asyncio.create_task(part.follow())
    try:
        yield part
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_SECONDS)
        except TimeoutError:
            process.kill()
        await following


async def ready(urls: Sequence[str], parts: Sequence[Part]) -> None:
    """Waits until all answer that they are ready.

    Raises:
        StartError: one does not in time, or a part has ended.
    """
    deadline = time.monotonic() + READY_TIMEOUT_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        for url in urls:
            while not await _answers(session, url):
                for part in parts:
                    part.raise_if_dead()
                if time.monotonic() > deadline:
                    raise StartError(f"demo: {url} is not ready after {READY_TIMEOUT_SECONDS:g} s")
                await asyncio.sleep(0.05)


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == HTTPStatus.OK
    except (aiohttp.ClientError, TimeoutError):
        return False
