"""A publisher that does its worst to one connection: nothing aborts, nothing grows."""

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop

from kvstate.feeds import zmtp_connection
from kvstate.feeds.zmq_limits import USUAL, ZmqLimits
from kvstate.feeds.zmtp_connection import ZmtpAddress, ZmtpConnection, place_of
from kvstate.wire.zmtp import GREETING, message

READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB"
PING = b"\x04\x07\x04PING\0\x01"


@asynccontextmanager
async def opened(
    first: bytes, limits: ZmqLimits = USUAL
) -> AsyncIterator[tuple[ZmtpConnection, socket.socket]]:
    """A connection, and the publisher's end of it, which has sent these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connection = ZmtpConnection(b"SUB", lambda _: None, limits=limits)
        opening = asyncio.create_task(connection.open(ZmtpAddress(*listening.getsockname())))
        peer, _ = await asyncio.to_thread(listening.accept)
        with peer:
            await asyncio.to_thread(peer.sendall, first)
            await opening
            yield connection, peer
            connection.give_up("the test is over")
            await connection.lost.wait()


async def sent(peer: socket.socket) -> int:
    """Sends messages until none is accepted for a while; returns the number of bytes sent.

    Time is the subject: nothing says that the other side will read no more.
    """
    peer.settimeout(0)
    count = 0
    batch = message([b"", bytes(8), b"x" * 4096])
    left, waited = batch, 0
    while waited < 50:
        try:
            sent_bytes = peer.send(left)
        except BlockingIOError:
            waited += 1
            await asyncio.sleep(0.002)
            continue
        count, waited = count + sent_bytes, 0
        left = left[sent_bytes:] or batch
        await asyncio.sleep(0)
    return count


async def test_full_queue_pauses_reading_until_there_is_room() -> None:
    async with opened(GREETING + READY) as (connection, peer):
        await sent(peer)
        waiting = connection.session.size_bytes
        assert USUAL.queue_bytes <= waiting < 2 * USUAL.queue_bytes
        while connection.take(10_000):
            await asyncio.sleep(0)
        assert await sent(peer) > 0


@pytest.mark.parametrize("heartbeat", [b"", PING])
async def test_publisher_that_dies_while_the_queue_is_full_is_lost(heartbeat: bytes) -> None:
    async with opened(GREETING + READY + 100 * heartbeat) as (connection, peer):
        await sent(peer)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        async with asyncio.timeout(60):
            while not connection.is_lost:
                connection.take(64)
                await asyncio.sleep(0)
        assert not connection.is_ready


async def ended_publisher_that_asks() -> list[list[bytes]]:
    """What is taken of a publisher that ended, when its questions cannot be answered any more."""
    async with opened(GREETING + READY) as (connection, peer):
        await asyncio.to_thread(peer.sendall, PING + message([b"", bytes(8), b"x"]) + PING)
        peer.close()
        await asyncio.wait_for(connection.lost.wait(), 30)
        connection.send([b"too late"])
        return connection.take(10)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_publisher_that_ended_is_not_answered(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    faults: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.get_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        taken = runner.run(ended_publisher_that_asks())
    assert (taken, faults) == ([[b"", bytes(8), b"x"]], [])


class CancelledAtOnce(ZmtpConnection):
    """A connection whose opening is cancelled when it is made."""

    opening: asyncio.Task[None]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.opening.cancel()


async def fault_after_a_cancelled_opening() -> str:
    """What a connection says to be closed for that nobody awaits any more."""
    limits = ZmqLimits(handshake_seconds=0.01)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connection = CancelledAtOnce(b"SUB", lambda _: None, limits=limits)
        place = ZmtpAddress(*listening.getsockname())
        connection.opening = asyncio.create_task(connection.open(place))
        await asyncio.gather(connection.opening, return_exceptions=True)
        assert connection.opening.cancelled()
        later = ZmtpConnection(b"SUB", lambda _: None, limits=limits)
        with contextlib.suppress(OSError):
            await later.open(place)  # nobody answers, so that its timer ends it
        assert later.fault  # as the timer of the first would have, which began before
        return connection.fault


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_cancelled_opening_leaves_no_timer(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(fault_after_a_cancelled_opening()) == ""


async def test_silent_publisher_is_lost() -> None:
    async with opened(GREETING + READY, ZmqLimits(heartbeat_seconds=0.02)) as (connection, _):
        await asyncio.wait_for(connection.lost.wait(), 30)
        assert connection.fault == "no answer to heartbeats"


async def test_publisher_blocked_by_a_full_queue_is_not_lost() -> None:
    async with opened(GREETING + READY, ZmqLimits(heartbeat_seconds=0.1)) as (connection, peer):
        await sent(peer)
        peer.settimeout(30)
        heartbeats = 0
        while heartbeats < 3 * zmtp_connection.MAX_SILENT_HEARTBEATS:
            said = await asyncio.to_thread(peer.recv, 65_536)
            assert said
            heartbeats += said.count(b"PING")
        assert connection.is_ready


async def test_peer_without_a_handshake_is_disconnected() -> None:
    async with opened(b"", ZmqLimits(handshake_seconds=0.02)) as (connection, _):
        assert (connection.is_lost, connection.fault) == (True, "no handshake")


async def test_publisher_that_pings_without_reading_is_disconnected() -> None:
    limits = ZmqLimits(max_commands=sys.maxsize, commands_at_once=sys.maxsize)
    async with opened(GREETING + READY, limits) as (connection, peer):
        peer.settimeout(0)
        async with asyncio.timeout(60):
            while not connection.is_lost:
                with suppress(BlockingIOError, ConnectionError):
                    peer.send(PING * 8192)
                connection.take(64)
                await asyncio.sleep(0)
        assert connection.fault == "it does not read the data that it requested"


async def test_publisher_that_sends_endless_commands_is_disconnected() -> None:
    async with opened(GREETING + READY) as (connection, peer):
        peer.settimeout(0)
        async with asyncio.timeout(60):
            while not connection.is_lost:
                with suppress(BlockingIOError, ConnectionError):
                    peer.send(b"\x04\x02\x01?" * 8192)
                assert connection.take(64) == []
                await asyncio.sleep(0)
        assert connection.fault == "more than 256 commands in 2 s"


async def test_message_behind_many_commands_is_taken() -> None:
    commands = b"\x04\x02\x01?" * 200
    async with opened(GREETING + READY + commands + b"\x00\x02hi") as (connection, _):
        taken: list[list[bytes]] = []
        async with asyncio.timeout(60):
            while not taken:
                taken += connection.take(64)
                await asyncio.sleep(0)
        assert (taken, connection.is_lost) == ([[b"hi"]], False)


async def test_broken_message_ends_the_connection() -> None:
    async with opened(GREETING + READY + message([b"good"]) + b"\xff\0") as (connection, _):
        taken: list[list[bytes]] = []
        async with asyncio.timeout(60):
            while not connection.is_lost:
                taken += connection.take(64)
                await asyncio.sleep(0)
        assert (taken, connection.fault) == ([[b"good"]], "frame with unknown flags")


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [
        ("tcp://127.0.0.1:5557", ZmtpAddress("127.0.0.1", 5557)),
        ("tcp://*:5557", ZmtpAddress("*", 5557)),
        ("tcp://[::1]:5557", ZmtpAddress("::1", 5557)),
        ("ipc:///run/events", ZmtpAddress("", 0, "/run/events")),
        ("ipc://@events", ZmtpAddress("", 0, "\0events")),
        ("tcp://host", None),
        ("tcp://host:99999", None),
        ("tcp://host:x", None),
        ("udp://host:1", None),
        ("ipc://", None),
    ],
)
def test_endpoints_are_read_as_zmq_writes_them(endpoint: str, place: ZmtpAddress | None) -> None:
    assert place_of(endpoint) == place
