import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvstate.events import Batch, EventBatch
from kvstate.feeds import shared_connection
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.queue_limits import USUAL_QUEUE, QueueLimits
from kvstate.feeds.shared_connection import Mark, SharedConnection
from kvstate.feeds.transport import Connected, Disconnected, Signal
from tests.kvstate.feeds.test_grpc_transport import following
from tests.kvstate.grpc_publisher import GrpcPublisher, batch, received, serving, store
from tests.waiting import until

# The most signals that are queued.
MAX_SIGNALS = USUAL_QUEUE.max_signals


def numbered(number: int) -> Batch:
    return Batch(number, EventBatch(float(number), []))


@asynccontextmanager
async def connection(
    follow: Callable[[SharedConnection], Awaitable[None]], ranks: int = 1, **limits: Any
) -> AsyncIterator[SharedConnection]:
    """A connection whose loop runs `follow`, and then waits forever.

    limits: those in which its queues differ from the usual ones.
    """

    async def loop() -> None:
        await follow(shared)
        await asyncio.Event().wait()

    shared = SharedConnection("w", ranks, Recovery.RESUME, "gone", loop, QueueLimits(**limits))
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
    count = 2 * MAX_SIGNALS
    async with connection(lambda shared: sends(shared, count)) as shared:
        (transport,) = shared.transports
        first = await transport.receive()
        await until(lambda: transport.queued == MAX_SIGNALS)
        rest = await received(transport, count - len(first))
    assert len(first) <= USUAL_QUEUE.signals_at_once
    assert numbers(first + rest) == list(range(count))
    assert transport.last_taken == Mark(count - 1, count - 1.0)


async def test_queue_is_bounded_in_bytes() -> None:
    async with connection(lambda shared: sends(shared, 9, size_bytes=4), max_bytes=10) as shared:
        (transport,) = shared.transports
        shared.start()
        await until(lambda: transport.queued == 3)
        assert numbers(await received(transport, 9)) == list(range(9))


async def test_stalled_rank_does_not_block_the_others(caplog: pytest.LogCaptureFixture) -> None:
    count = MAX_SIGNALS + 9
    async with connection(
        lambda shared: sends(shared, count), ranks=2, stall_seconds=0.01
    ) as shared:
        dead, alive = shared.transports
        assert numbers(await received(alive, count)) == list(range(count))
        late = await received(dead, MAX_SIGNALS)
        await dead.hand(numbered(count))
        late += await dead.receive()
    assert numbers(late) == [*range(MAX_SIGNALS), count]  # a gap, which its feed sees
    assert [record.getMessage() for record in caplog.records] == [
        "a feed has not been read for 0.01 s: its batches are dropped"
    ]


async def test_queue_stays_bounded_while_the_connection_flaps() -> None:
    async def flaps(shared: SharedConnection) -> None:
        for _ in range(MAX_SIGNALS):
            shared.tell(Connected())
            shared.tell(Disconnected())

    async with connection(flaps) as shared:
        (transport,) = shared.transports
        shared.start()
        await until(lambda: transport.queued > 0)
        assert transport.queued <= MAX_SIGNALS


async def test_closing_rank_unblocks_the_others() -> None:
    count = MAX_SIGNALS + 9
    async with connection(lambda shared: sends(shared, count), ranks=2) as shared:
        closing, other = shared.transports
        shared.start()
        await until(lambda: closing.queued == MAX_SIGNALS)
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


async def test_back_pressure_reaches_the_server() -> None:
    queue = QueueLimits(max_signals=4, signals_at_once=1)
    publisher = GrpcPublisher()
    large = tuple(range(65_536, 2 * 65_536))
    publisher.publish(*(batch(number, store(1, tokens=large)) for number in range(100)))
    async with serving(publisher) as port, following(port, queue=queue) as transport:
        await transport.receive()
        await until(lambda: transport.queued == 4)
        for _ in range(100):
            await asyncio.sleep(0)
        assert publisher.sent < 100
        assert numbers(await received(transport, 100))[-1] == 99
