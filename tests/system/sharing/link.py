"""A connection between two ports that can be slowed down, or cut silently.

It is a process of its own: the tests' own event loop is as busy as their load.
"""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

CHUNK_BYTES = 64 * 1024
LOOK_SECONDS = 0.01

# A state: nothing passes, and all stays open. Other states are the seconds that each piece takes.
CUT = "cut"


class Carrier:
    """Forwards connections; runs in the link's process."""

    def __init__(self, to_port: int) -> None:
        self.state = "0"
        self._to_port = to_port

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one connection."""
        with contextlib.suppress(OSError):
            there = await asyncio.open_connection("127.0.0.1", self._to_port)
            pumps = [self._pump(reader, there[1]), self._pump(there[0], writer)]
            tasks = [asyncio.create_task(pump) for pump in pumps]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            there[1].close()
        writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                while self.state == CUT:
                    await asyncio.sleep(LOOK_SECONDS)
                await asyncio.sleep(float(self.state))
                writer.write(data)
                await writer.drain()


async def carry(from_port: int, to_port: int) -> None:
    """Forwards until standard input ends; answers each line, a new state, with an empty line."""
    carrier = Carrier(to_port)
    server = await asyncio.start_server(carrier.carry, "127.0.0.1", from_port)
    print(flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        carrier.state = line.strip()
        print(flush=True)
    server.close()


class Link:
    """Passes everything at once, until changed."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def become(self, state: str) -> None:
        """Cuts the link, or delays each piece by this many seconds."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{state}\n".encode())
        assert await self._process.stdout.readline()


@contextlib.asynccontextmanager
async def linked(from_port: int, to_port: int) -> AsyncIterator[Link]:
    """A link for as long as the block runs."""
    command = [sys.executable, __file__, str(from_port), str(to_port)]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdout
    try:
        assert await process.stdout.readline()
        yield Link(process)
    finally:
        process.kill()
        await process.wait()


if __name__ == "__main__":
    asyncio.run(carry(*map(int, sys.argv[1:])))
