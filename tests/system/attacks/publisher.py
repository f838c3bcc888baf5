"""A publisher of events that follows no rules: it implements ZMTP itself, and sends any bytes."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def frame(flags: int, body: bytes) -> bytes:
    """One frame; flags: 1 more follows, 4 a command."""
    return struct.pack(">BQ", flags | 2, len(body)) + body


def command(name: bytes, data: bytes = b"") -> bytes:
    """A command."""
    return frame(4, bytes([len(name)]) + name + data)


def message(number: int, payload: bytes) -> bytes:
    """Topic, number and payload."""
    return frame(1, b"") + frame(1, number.to_bytes(8, "big")) + frame(0, payload)


def batch(number: int, events: list[Any]) -> bytes:
    """A message of a batch of events."""
    return message(number, msgspec.msgpack.encode([float(number), events, 0]))


READY = command(b"READY", b"\x0bSocket-Type" + struct.pack(">I", 3) + b"PUB")


class Publisher:
    """Sends subscribers what comes first, and then, once `flooding` is set, the flood."""

    def __init__(self, first: Iterable[bytes], flood: Iterable[bytes]) -> None:
        self.subscribed = asyncio.Event()
        self.flooding = asyncio.Event()
        self.sent_bytes = 0
        self._first, self._flood = list(first), iter(flood)
        self._serving: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection, in a task that may be cancelled before it begins."""
        self._serving[writer] = asyncio.create_task(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._send(reader, writer)
        finally:
            await self._end(writer)

    async def _end(self, writer: asyncio.StreamWriter) -> None:
        self._serving.pop(writer, None)
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await reader.readexactly(len(GREETING))
        writer.write(READY)
        await reader.read(256)
        self.subscribed.set()
        writer.writelines(self._first)
        await self.flooding.wait()
        for part in self._flood:
            writer.write(part)
            await asyncio.wait_for(writer.drain(), 60)
            self.sent_bytes += len(part)

    @contextlib.asynccontextmanager
    async def running(self, port: int) -> AsyncIterator["Publisher"]:
        """Listens until the block ends."""
        server = await asyncio.start_server(self.accept, "127.0.0.1", port)
        try:
            yield self
        finally:
            server.close()
            await asyncio.sleep(0)  # what it has accepted by now is served
            serving = dict(self._serving)
            for one in serving.values():
                one.cancel()
            await asyncio.gather(*serving.values(), return_exceptions=True)
            for writer in serving:  # a task that was cancelled before it began has ended nothing
                await self._end(writer)
