"""A real engine for one test: Debian's redis-server, set up to store nothing on disk."""

import asyncio
import contextlib
import shutil
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.waiting import until

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")

needs_engine = pytest.mark.skipif(
    SERVER is None, reason="neither redis-server nor valkey-server is installed"
)

_PLAIN = ("--save", "", "--appendonly", "no", "--daemonize", "no", "--loglevel", "warning")


class EngineProcess:
    """An engine that can be killed, and started again at the same address."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self.options = ("--bind", "127.0.0.1", "--dir", str(folder), *_PLAIN, *options)
        self._process: Process | None = None

    @property
    def process(self) -> Process:
        assert self._process is not None
        return self._process

    async def start(self) -> None:
        """Starts the engine; returns when it accepts connections."""
        assert SERVER is not None
        ports = () if "--tls-port" in self.options else ("--port", str(self.port))
        self._process = await asyncio.create_subprocess_exec(
            SERVER, *ports, *self.options, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL
        )
        await until(self._accepts)

    async def _accepts(self) -> bool:
        assert self._process is not None
        assert self._process.returncode is None, "the engine ended"
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    async def end(self) -> None:
        """Kills the engine."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def ask(self, *words: str) -> str:
        """Returns what its command line client prints for a command."""
        client = shutil.which("redis-cli") or shutil.which("valkey-cli")
        assert client is not None
        process = await asyncio.create_subprocess_exec(
            client, "-p", str(self.port), *words, stdin=DEVNULL, stdout=PIPE
        )
        said, _ = await process.communicate()
        return said.decode()


@contextlib.asynccontextmanager
async def running_engine(folder: Path, *options: str) -> AsyncIterator[EngineProcess]:
    """Runs an engine with these command line options."""
    engine = EngineProcess(folder, *options)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.end()
