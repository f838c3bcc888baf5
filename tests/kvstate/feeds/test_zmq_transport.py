import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvstate.events import Batch, EngineLoad
from kvstate.feeds import zmq_transport
from kvstate.feeds.feed_sources import Recovery, ZmqSource
from kvstate.feeds.transport import Connected, Disconnected, LoadReport, Malformed, Signal
from kvstate.feeds.zmq_limits import USUAL, ZmqLimits
from kvstate.feeds.zmq_transport import ZmqTransport
from tests.kvstate.publishing import frames, payload
from tests.kvstate.zmq_publisher import Publisher
from tests.ports import free_port
from tests.waiting import until


@pytest.fixture
async def engine() -> AsyncIterator[Publisher]:
    engine = Publisher()
    yield engine
    engine.close()


@asynccontextmanager
async def subscribed(
    events: str, replay: str | None = None, topic: str = "kv", limits: ZmqLimits = USUAL
) -> AsyncIterator[ZmqTransport]:
    transport = ZmqTransport(ZmqSource(events, replay, topic), limits=limits)
    yield transport
    await transport.close()


async def published(publisher: zmq.asyncio.Socket, *messages: list[bytes]) -> None:
    """Publishes once the subscription is in place."""
    assert (await publisher.recv()).startswith(b"\1")
    for message in messages:
        await publisher.send_multipart(message)


async def test_messages_follow_their_connection(engine: Publisher) -> None:
    publisher, address = engine.bind(zmq.XPUB)
    async with subscribed(address) as transport:
        await published(publisher, frames(0), [b"another topic"], frames(1))
        signals: list[Signal] = []
        while len(signals) < 3:
            signals += await transport.receive()
    assert signals == [Connected(), Batch(0, payload(0)), Batch(1, payload(1))]
    assert transport.recovery is Recovery.NONE


async def test_reconnection_is_signalled_and_drops_messages_of_the_lost_connection(
    engine: Publisher,
) -> None:
    publisher, address = engine.bind(zmq.XPUB)
    async with subscribed(address) as transport:
        assert await transport.receive() == [Connected()]
        await published(publisher, frames(0))
        publisher.close(linger=0)  # what came from it is dropped, if it was not taken yet
        signals = await transport.receive()
        while Disconnected() not in signals:
            signals = await transport.receive()
        assert signals[-1] == Disconnected()
        publisher, _ = engine.bind(zmq.XPUB, address)
        assert await transport.receive() == [Connected()]
        await published(publisher, frames(0, life=1))
        assert await transport.receive() == [Batch(0, payload(0, life=1))]


async def test_waiting_messages_are_received_together(engine: Publisher) -> None:
    publisher, address = engine.bind(zmq.XPUB)
    async with subscribed(address) as transport:
        assert await transport.receive() == [Connected()]
        await published(publisher, *(frames(number) for number in range(100)))
        taken = [await transport.receive()]
        while sum(map(len, taken)) < 100:
            taken.append(await transport.receive())
    assert max(map(len, taken)) <= zmq_transport.MAX_SIGNALS
    numbers = [Batch(number, payload(number)) for number in range(100)]
    assert [signal for signals in taken for signal in signals] == numbers


async def test_receive_loses_no_signal_by_a_timeout(engine: Publisher) -> None:
    publisher, address = engine.bind(zmq.XPUB)
    async with subscribed(address) as transport:
        assert await transport.receive() == [Connected()]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await transport.receive()
        await published(publisher, frames(0))
        assert await transport.receive() == [Batch(0, payload(0))]


@asynccontextmanager
async def bound(port: int, limits: ZmqLimits = USUAL) -> AsyncIterator[ZmqTransport]:
    source = ZmqSource(f"tcp://127.0.0.1:{port}", None, "", binds=True)
    transport = ZmqTransport(source, chance=lambda: 0.0, limits=limits)
    yield transport
    await transport.close()


async def reached(port: int) -> socket.socket:
    """A connection to a transport that binds soon."""
    made: list[socket.socket] = []

    def connected() -> bool:
        with suppress(ConnectionRefusedError):
            made.append(socket.create_connection(("127.0.0.1", port)))
        return bool(made)

    await until(connected)
    return made[0]


async def received(transport: ZmqTransport, count: int) -> list[Signal]:
    signals: list[Signal] = []
    while len(signals) < count:
        signals += await transport.receive()
    return signals


async def test_bound_transport_receives_from_a_worker_that_connects(engine: Publisher) -> None:
    port = free_port()
    async with bound(port) as transport:
        # a bound SUB subscribes when it is read
        taken = asyncio.create_task(received(transport, 2))
        publisher = engine.connect(zmq.XPUB, f"tcp://127.0.0.1:{port}")
        await published(publisher, frames(0))
        assert await taken == [Connected(), Batch(0, payload(0))]


async def test_second_worker_on_a_bound_endpoint_disconnects_the_feed(engine: Publisher) -> None:
    port = free_port()
    async with bound(port) as transport:
        engine.connect(zmq.XPUB, f"tcp://127.0.0.1:{port}")
        assert await transport.receive() == [Connected()]
        second = engine.connect(zmq.XPUB, f"tcp://127.0.0.1:{port}")
        reason = "2 publishers connect to this endpoint; each rank needs its own"
        assert await transport.receive() == [Disconnected(reason)]
        second.close(linger=0)
        assert await transport.receive() == [Connected()]


async def test_stranger_on_a_bound_endpoint_changes_nothing(engine: Publisher) -> None:
    port = free_port()
    async with bound(port) as transport:
        with await reached(port) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        taken = asyncio.create_task(received(transport, 2))
        publisher = engine.connect(zmq.XPUB, f"tcp://127.0.0.1:{port}")
        await published(publisher, frames(0))
        assert await taken == [Connected(), Batch(0, payload(0))]


async def test_stranger_beside_the_worker_changes_nothing(engine: Publisher) -> None:
    port = free_port()
    async with bound(port) as transport:
        publisher = engine.connect(zmq.XPUB, f"tcp://127.0.0.1:{port}")
        assert await transport.receive() == [Connected()]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"\x16\x03\x01" + bytes(200))  # TLS: it gets no handshake at all
            assert await asyncio.to_thread(until_closed, stranger)
        await published(publisher, frames(0))
        assert await transport.receive() == [Batch(0, payload(0))]


def until_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


async def test_endpoint_in_use_is_reported_and_tried_again(engine: Publisher) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    async with bound(port, ZmqLimits(bind_retry_seconds=(0.01, 0.01))) as transport:
        (told,) = await transport.receive()
        assert isinstance(told, Disconnected)
        assert told.reason.startswith(f"cannot bind tcp://127.0.0.1:{port}: Address")
        taken.close()
        engine.connect(zmq.XPUB, f"tcp://127.0.0.1:{port}")
        while Connected() not in (signals := await transport.receive()):
            assert signals == [told]


async def test_invalid_address_is_reported() -> None:
    async with subscribed("tcp://nowhere") as transport:
        (told,) = await transport.receive()
        assert told == Disconnected("tcp://nowhere is neither tcp://host:port nor ipc://path")


async def test_message_without_a_number_is_reported_as_malformed(engine: Publisher) -> None:
    publisher, address = engine.bind(zmq.XPUB)
    async with subscribed(address) as transport:
        await published(publisher, [b"kv", b"no number", b"x"])
        assert await received(transport, 2) == [Connected(), Malformed()]


class Answering(asyncio.Protocol):
    """A peer that answers any data with the same bytes, and closes the connection."""

    def __init__(self, said: bytes) -> None:
        self._said = said
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(self._said)
            self._transport.close()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n".ljust(200), "it does not speak ZMTP"),
        (b"SSH-2.0\r\n", "it ends the connection during the handshake"),
    ],
)
async def test_peer_that_is_no_publisher_is_reported_once(said: bytes, why: str) -> None:
    limits = ZmqLimits(unreached_seconds=0.2, reconnect_seconds=(0.01, 0.01))
    port, loop = free_port(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: Answering(said), "127.0.0.1", port)
    async with subscribed(f"tcp://127.0.0.1:{port}", limits=limits) as transport:
        expected = [Disconnected(f"what answers there is no ZMQ publisher: {why}")]
        assert await transport.receive() == expected
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await transport.receive()
    server.close()


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("tcp://127.0.0.1:{port}", "Connection refused"),
        ("ipc:///nowhere/at/all", "No such file or directory"),
    ],
)
async def test_unreachable_publisher_is_reported_with_its_cause(place: str, why: str) -> None:
    limits = ZmqLimits(unreached_seconds=0.05)
    async with subscribed(place.format(port=free_port()), limits=limits) as transport:
        assert await transport.receive() == [Disconnected(f"cannot connect: {why}")]


async def test_publisher_that_starts_late_is_connected_without_a_complaint(
    engine: Publisher,
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    async with subscribed(address, limits=ZmqLimits(unreached_seconds=1000.0)) as transport:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await transport.receive()
        engine.bind(zmq.XPUB, address)
        assert await transport.receive() == [Connected()]


def load_frames(running: int) -> list[bytes]:
    """A message in which SGLang publishes its load."""
    return [b"load", bytes(8), msgspec.msgpack.encode(["LoadStat", running, 0, 0, 0, 0])]


@asynccontextmanager
async def loaded(events: str, load: str) -> AsyncIterator[ZmqTransport]:
    transport = ZmqTransport(ZmqSource(events, None, "", load=load), chance=lambda: 0.0)
    yield transport
    await transport.close()


async def test_load_is_received_from_its_own_socket(engine: Publisher) -> None:
    _, events = engine.bind(zmq.XPUB)
    publisher, address = engine.bind(zmq.XPUB)
    async with loaded(events, address) as transport:
        await published(publisher, load_frames(3), [b"load", bytes(8), b"no load"], load_frames(4))
        signals: list[Signal] = []
        while LoadReport(EngineLoad(4, 0)) not in signals:
            signals += await transport.receive()
    assert set(signals) <= {
        Connected(),
        Malformed(),
        *(LoadReport(EngineLoad(running, 0)) for running in (3, 4)),
    }


async def test_load_is_received_again_after_its_publisher_restarted(engine: Publisher) -> None:
    _, events = engine.bind(zmq.XPUB)
    publisher, address = engine.bind(zmq.XPUB)
    async with loaded(events, address) as transport:
        await published(publisher, load_frames(1))
        while LoadReport(EngineLoad(1, 0)) not in await transport.receive():
            pass
        publisher.close(linger=0)
        again: list[zmq.asyncio.Socket] = []

        def bound() -> bool:
            with suppress(zmq.ZMQError):
                again.append(engine.bind(zmq.XPUB, address)[0])
            return bool(again)

        await until(bound, "its port is free again")
        await published(again[0], load_frames(2))
        while LoadReport(EngineLoad(2, 0)) not in await transport.receive():
            pass


async def test_events_are_received_without_a_load_publisher(engine: Publisher) -> None:
    publisher, events = engine.bind(zmq.XPUB)
    async with loaded(events, f"tcp://127.0.0.1:{free_port()}") as transport:
        await published(publisher, frames(0))
        assert (await received(transport, 2))[:2] == [Connected(), Batch(0, payload(0))]


async def test_events_are_received_with_an_invalid_load_endpoint(engine: Publisher) -> None:
    publisher, events = engine.bind(zmq.XPUB)
    async with loaded(events, "udp://nowhere") as transport:
        await published(publisher, frames(0))
        assert (await received(transport, 2))[:2] == [Connected(), Batch(0, payload(0))]
