"""An engine that breaks the protocol, or sends without end: the router drops it and goes on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from itertools import chain, repeat
from typing import Any

import pytest

from extproc.base import address
from extproc.sharing.carriers import MAX_UNREAD_BYTES, ValkeyAccess, ValkeyConnection
from tests.waiting import until

HELLO = b"%1\r\n+proto\r\n:3\r\n"
SUBSCRIBED = b">3\r\n$9\r\nsubscribe\r\n$7\r\nkvsteer\r\n:1\r\n"
NOT_ASKED = "the server answers what it was not asked"
NO_MESSAGE = "the server sent something that is no message"
TOO_LONG = "the server sent a message that is too long"
LONG_GREETING = "the server sent a greeting that is too long"

# By the fault that the router reports: what the engine sends once it is asked to subscribe.
ATTACKS = {
    "answers": (NOT_ASKED, repeat(b":1\r\n" * 10_000)),
    "statuses": (NOT_ASKED, repeat(b"+OK\r\n" * 10_000)),
    "nulls": (NOT_ASKED, repeat(b"_\r\n" * 10_000)),
    "maps": (NOT_ASKED, repeat(b"%1\r\n+a\r\n+b\r\n" * 10_000)),
    "kinds": (NO_MESSAGE, repeat(b">2\r\n$10\r\ninvalidate\r\n_\r\n" * 1_000)),
    "numbers": (NO_MESSAGE, repeat(b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n:5\r\n" * 1_000)),
    "lists": (NO_MESSAGE, repeat(b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n*0\r\n" * 1_000)),
    "subscriptions": (NO_MESSAGE, repeat(SUBSCRIBED * 1_000)),
    "bulk": (TOO_LONG, chain([b"$4000000000\r\n"], repeat(bytes(65_536)))),
    "line": (TOO_LONG, repeat(b"+" * 65_536)),
    "array": (TOO_LONG, chain([b"*4000000\r\n"], repeat(b"*0\r\n" * 10_000))),
    "map": (TOO_LONG, chain([b"%1000000\r\n"], repeat(b":1\r\n*0\r\n" * 10_000))),
    "nested": ("Max nesting depth exceeded", repeat(b"*1\r\n" * 10_000)),
    "count": ("Multi-bulk length out of range", repeat(b"*400000000\r\n" * 1_000)),
    "error": ("no more", repeat(b"-ERR no more\r\n" * 1_000)),
    "noise": ("Protocol error", repeat(bytes(range(256)) * 100)),
}


class HostileEngine:
    """Attacks whoever connects, and is a good engine once `attack` is None.

    greeting: what it answers to the sign-on. sent_bytes: how much the present connection was sent.
    """

    def __init__(self, greeting: Iterator[bytes], attack: Iterator[bytes] | None) -> None:
        self.greeting = greeting
        self.attack = attack
        self.sent_bytes = 0
        self.serving: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.add(writer)
        with contextlib.suppress(OSError, EOFError):
            await self._serve(reader, writer)
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self.serving.remove(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sent_bytes = 0
        await reader.readuntil(b"HELLO")
        await self._send(writer, self.greeting)
        await reader.readuntil(b"SUBSCRIBE")
        writer.write(SUBSCRIBED)
        if self.attack is not None:
            await self._send(writer, self.attack)
        while True:
            await reader.readuntil(b"PUBLISH")
            writer.write(b":1\r\n")

    async def _send(self, writer: asyncio.StreamWriter, pieces: Iterator[bytes]) -> None:
        for piece in pieces:
            writer.write(piece)
            self.sent_bytes += len(piece)
            await writer.drain()


@contextlib.asynccontextmanager
async def attacked(hostile: HostileEngine) -> AsyncIterator[tuple[ValkeyConnection, list[object]]]:
    """A router's connection to a hostile engine, and what it hears."""
    server = await asyncio.start_server(hostile.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    heard: list[Any] = []

    def hear(message: bytes) -> float:
        heard.append(message)
        return 0.0

    access = ValkeyAccess(address.parse_rendezvous(f"redis://127.0.0.1:{port}"), "kvsteer")
    # on a busy machine the bounds must be met before the time limit is
    engine = ValkeyConnection(access, hear, lambda: None, 5.0, connect_seconds=60.0)
    running = asyncio.create_task(engine.run())
    try:
        yield engine, heard
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        server.close()
        await until(lambda: not hostile.serving, "its connections are closed")


def shares(hostile: HostileEngine, engine: ValkeyConnection) -> bool:
    """Lets a new connection be greeted, and returns whether what is published is confirmed."""
    hostile.greeting = iter([HELLO])
    engine.send([b"news"])
    return not engine.fault


@pytest.mark.parametrize("kind", ATTACKS)
async def test_engine_that_breaks_the_protocol_is_dropped(kind: str) -> None:
    fault, attack = ATTACKS[kind]
    hostile = HostileEngine(iter([HELLO]), attack)
    async with attacked(hostile) as (engine, heard):
        await until(lambda: fault in engine.fault, "it says why")
        assert hostile.sent_bytes < 4 * MAX_UNREAD_BYTES
        assert heard == []
        hostile.attack = None
        await until(lambda: shares(hostile, engine), "confirmed again")


@pytest.mark.parametrize(
    "greeting",
    [
        chain([b"$4000000000\r\n"], repeat(bytes(65_536))),
        chain([b"*1000000\r\n"], repeat(b"*0\r\n" * 10_000)),
        repeat(b"+" * 65_536),
    ],
    ids=["bulk", "array", "line"],
)
async def test_endless_greeting_is_dropped(greeting: Iterator[bytes]) -> None:
    hostile = HostileEngine(greeting, None)
    async with attacked(hostile) as (engine, _):
        await until(lambda: LONG_GREETING in engine.fault, "it says why")
        assert hostile.sent_bytes < 4 * MAX_UNREAD_BYTES
        await until(lambda: shares(hostile, engine), "confirmed again")
