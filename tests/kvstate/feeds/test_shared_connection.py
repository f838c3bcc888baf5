import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kvstate.events import Batch, EventBatch
from kvstate.feeds import shared_connection
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.shared_connection import MAX_QUEUED_SIGNALS, MAX_SIGNALS, Mark, SharedConnection
from kvstate.feeds.transport import Connected, Disconnected, Signal
from tests.kvstate.feeds.test_grpc_transport import following
from tests.kvstate.grpc_publisher import GrpcPublisher, batch, received, serving, store
from tests.waiting import until


def numbered(number: int) -> Batch:
    return Batch(number, EventBatch(float(number), []))


@asynccontextmanager
async def connection(
    follow: Callable[[SharedConnection], Awaitable[None]], ranks: int = 1
) -> AsyncIterator[SharedConnection]:
    """A connection whose loop runs `follow`, and then waits forever."""

    async def loop() -> None:
        await follow(shared)
        await asyncio.Event().wait()

    shared = SharedConnection("w", ranks, Recovery.RESUME, loop)
    yield shared
    for transport in shared.transports:
        await transport.close()


async def sends(shared: SharedConnection, count: int, size_bytes: int = 0) -> None:
    for number in range(count):
        for transport in shared.transports:
            await transport.hand(numbered(number), size_bytes)


def numbers(signals: list[Signal]) -> list[int]:
    return [signal.sequence for signal in signals if isinstance(signal, Batch)]


async def test_slow_subscriber_pauses_the_connection_and_loses_nothing() -> None:
    count = 2 * MAX_QUEUED_SIGNALS
    async with connection(lambda shared: sends(shared, count)) as shared:
        (transport,) = shared.transports
        first = await transport.receive()
        await until(lambda: transport.queued == MAX_QUEUED_SIGNALS)
        rest = await received(transport, count - len(first))
    assert len(first) <= MAX_SIGNALS
    assert numbers(first + rest) == list(range(count))
    assert transport.last_taken == Mark(count - 1, count - 1.0)


async def test_queue_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_connection, "MAX_QUEUED_BYTES", 10)
    async with connection(lambda shared: sends(shared, 9, size_bytes=4)) as shared:
        (transport,) = shared.transports
        shared.start()
        await until(lambda: transport.queued == 3)
        assert numbers(await received(transport, 9)) == list(range(9))


async def test_stalled_rank_does_not_block_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_connection, "STALL_SECONDS", 0.01)
    count = MAX_QUEUED_SIGNALS + 9
    async with connection(lambda shared: sends(shared, count), ranks=2) as shared:
        dead, alive = shared.transports
        assert numbers(await received(alive, count)) == list(range(count))
        late = await received(dead, MAX_QUEUED_SIGNALS)
        await dead.hand(numbered(count))
        late += await dead.receive()
    assert numbers(late) == [*range(MAX_QUEUED_SIGNALS), count]  # a gap, which its feed sees
    assert [record.getMessage() for record in caplog.records] == [
        "a feed has not been read for 0.01 s: its batches are dropped"
    ]


async def test_queue_stays_bounded_while_the_connection_flaps() -> None:
    async def flaps(shared: SharedConnection) -> None:
        for _ in range(MAX_QUEUED_SIGNALS):
            shared.tell(Connected())
            shared.tell(Disconnected())

    async with connection(flaps) as shared:
        (transport,) = shared.transports
        shared.start()
        await until(lambda: transport.queued > 0)
        assert transport.queued <= MAX_QUEUED_SIGNALS


async def test_closing_rank_unblocks_the_others() -> None:
    count = MAX_QUEUED_SIGNALS + 9
    async with connection(lambda shared: sends(shared, count), ranks=2) as shared:
        closing, other = shared.transports
        shared.start()
        await until(lambda: closing.queued == MAX_QUEUED_SIGNALS)
        await closing.close()
        assert numbers(await received(other, count)) == list(range(count))


async def test_unknown_ranks_are_logged_once_each_up_to_a_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connection(lambda shared: sends(shared, 0)) as shared:
        for _ in range(2):
            assert all(shared.of_rank(rank) is None for rank in range(1, 100))
        assert shared.of_rank(-1) is None
    assert len(caplog.records) == shared_connection.MAX_UNKNOWN_RANKS


async def test_back_pressure_reaches_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_connection, "MAX_QUEUED_SIGNALS", 4)
    publisher = GrpcPublisher()
    large = tuple(range(65_536, 2 * 65_536))
    publisher.publish(*(batch(number, store(1, tokens=large)) for number in range(100)))
    async with serving(publisher) as port, following(port) as transport:
        await transport.receive()
        await until(lambda: transport.queued == 4)
        for _ in range(100):
            await asyncio.sleep(0)
        assert publisher.sent < 100
        assert numbers(await received(transport, 100))[-1] == 99
