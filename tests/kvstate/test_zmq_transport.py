import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from kvstate import zmq_transport
from kvstate.errors import ReplayError
from kvstate.transport import Connected, Disconnected, Message, Signal
from kvstate.zmq_transport import ZmqSource, ZmqTransport
from tests.kvstate.publishing import frames

END = [b"", b"", b"\xff" * 8, b""]


class Publisher:
    """The engine's side: sockets bound to 127.0.0.1, closed with the test."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []

    def bind(self, kind: int, address: str = "tcp://127.0.0.1:0") -> tuple[zmq.asyncio.Socket, str]:
        socket = self.context.socket(kind)
        self._sockets.append(socket)
        socket.bind(address)
        return socket, socket.get_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
async def engine() -> AsyncIterator[Publisher]:
    engine = Publisher()
    yield engine
    engine.close()


@asynccontextmanager
async def subscribed(
    engine: Publisher, events: str, replay: str | None = None, topic: str = "kv"
) -> AsyncIterator[ZmqTransport]:
    transport = ZmqTransport(engine.context, ZmqSource(events, replay, topic))
    yield transport
    await transport.close()


async def published(publisher: zmq.asyncio.Socket, *messages: list[bytes]) -> None:
    """Publishes once the subscription is in place."""
    assert (await publisher.recv()).startswith(b"\1")
    for message in messages:
        await publisher.send_multipart(message)


async def test_messages_follow_their_connection(engine: Publisher) -> None:
    publisher, address = engine.bind(zmq.XPUB)
    async with subscribed(engine, address) as transport:
        await published(publisher, frames(0), [b"another topic"], frames(1))
        signals: list[Signal] = []
        while len(signals) < 3:
            signals += await transport.receive()
    assert signals == [Connected(), Message(frames(0)), Message(frames(1))]
    assert not transport.can_replay


async def test_reconnection_is_told_and_what_the_lost_one_left_is_dropped(
    engine: Publisher,
) -> None:
    publisher, address = engine.bind(zmq.XPUB)
    async with subscribed(engine, address) as transport:
        assert await transport.receive() == [Connected()]
        await published(publisher, frames(0))
        assert await transport._socket.poll(5000)  # it arrived, and nobody took it yet
        publisher.close()
        assert await transport._monitor.poll(5000)
        assert await transport.receive() == [Disconnected()]
        publisher, _ = engine.bind(zmq.XPUB, address)
        assert await transport.receive() == [Connected()]
        await published(publisher, frames(0, life=1))
        assert await transport.receive() == [Message(frames(0, life=1))]


async def test_messages_that_wait_are_taken_together(engine: Publisher) -> None:
    publisher, address = engine.bind(zmq.XPUB)
    async with subscribed(engine, address) as transport:
        assert await transport.receive() == [Connected()]
        await published(publisher, *(frames(number) for number in range(100)))
        taken = [await transport.receive()]
        while sum(map(len, taken)) < 100:
            taken.append(await transport.receive())
    assert max(map(len, taken)) <= zmq_transport.MAX_SIGNALS
    numbers = [Message(frames(number)) for number in range(100)]
    assert [signal for signals in taken for signal in signals] == numbers


async def test_timeout_while_waiting_loses_nothing(engine: Publisher) -> None:
    publisher, address = engine.bind(zmq.XPUB)
    async with subscribed(engine, address) as transport:
        assert await transport.receive() == [Connected()]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await transport.receive()
        await published(publisher, frames(0))
        assert await transport.receive() == [Message(frames(0))]


async def answer(router: zmq.asyncio.Socket, *messages: list[bytes]) -> list[bytes]:
    """Answers one replay; the request less its sender."""
    sender, *request = await router.recv_multipart()
    for message in messages:
        await router.send_multipart([sender, *message])
    return request


async def replayed(transport: ZmqTransport, start: int = 0) -> list[Message]:
    return [message async for message in transport.replay(start)]


@pytest.mark.parametrize("end", [END, END[1:]])
async def test_replay_is_asked_from_a_number_and_ends(engine: Publisher, end: list[bytes]) -> None:
    router, address = engine.bind(zmq.ROUTER)
    messages = [[b"", *frames(number)] for number in (5, 6)]
    async with subscribed(engine, "tcp://127.0.0.1:1", address) as transport:
        replay = asyncio.create_task(replayed(transport, 5))
        assert await answer(router, *messages, end) == [b"", (5).to_bytes(8, "big")]
        assert [message.frames for message in await replay] == messages


async def test_replay_that_nobody_answers_fails(
    engine: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_transport, "REPLAY_TIMEOUT_SECONDS", 0.02)
    _, address = engine.bind(zmq.ROUTER)
    async with subscribed(engine, "tcp://127.0.0.1:1", address) as transport:
        with pytest.raises(ReplayError, match=r"no answer within 0\.02 s"):
            await replayed(transport)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([[b"", *frames(5)], [b"", *frames(5)]], "its numbers do not ascend"),
        ([[b"", b"junk"]], "message of 2 frames has no sequence number"),
    ],
)
async def test_answer_that_is_no_replay_fails(
    engine: Publisher, messages: list[list[bytes]], reason: str
) -> None:
    router, address = engine.bind(zmq.ROUTER)
    async with subscribed(engine, "tcp://127.0.0.1:1", address) as transport:
        replay = asyncio.create_task(replayed(transport))
        await answer(router, *messages)
        with pytest.raises(ReplayError, match=reason):
            await replay


@pytest.mark.parametrize(
    ("address", "reason"),
    [(None, "no replay endpoint"), ("tcp://nowhere", "Invalid argument")],
)
async def test_replay_that_cannot_be_asked_for_fails(
    engine: Publisher, address: str | None, reason: str
) -> None:
    async with subscribed(engine, "tcp://127.0.0.1:1", address) as transport:
        with pytest.raises(ReplayError, match=reason):
            await replayed(transport)
