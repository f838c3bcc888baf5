import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from kvstate.errors import ReplayError
from kvstate.events import Batch, EngineLoad, EventBatch
from kvstate.feeds import grpc_transport
from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_sources import GrpcSource, Recovery
from kvstate.feeds.grpc_limits import GrpcLimits
from kvstate.feeds.grpc_transport import SERVICES, grpc_transports
from kvstate.feeds.queue_limits import QueueLimits
from kvstate.feeds.shared_connection import RankTransport
from kvstate.feeds.transport import (
    Connected,
    Disconnected,
    LoadReport,
    Malformed,
    Refused,
    Signal,
    SnapshotBegun,
)
from kvstate.fleet import FollowedWorkers
from kvstate.pb.kvsteer_kv_events_pb2 import (
    EngineLoad as LoadRecord,
)
from kvstate.pb.kvsteer_kv_events_pb2 import (
    KvCacheCleared,
    KvCacheEvent,
    KvEventBatch,
    KvSnapshotChunk,
)
from kvstate.steps import finished
from kvstate.wire.grpc_wire import decoding
from tests.kvstate.grpc_publisher import GrpcPublisher, batch, received, serving, store
from tests.kvstate.publishing import chain
from tests.ports import free_port
from tests.waiting import until

IMPATIENT_SECONDS = 0.05


# Retries at once, and hands out one signal at a time.
HASTY = GrpcLimits(
    retry_seconds=(0.001, 0.01), unreached_seconds=0.0, queue=QueueLimits(signals_at_once=1)
)


@pytest.fixture
def publisher() -> GrpcPublisher:
    return GrpcPublisher()


@asynccontextmanager
async def following(
    port: int, ranks: int = 1, service: str = "vllm", **limits: Any
) -> AsyncIterator[Any]:
    """The transports of a worker, or the transport itself if it has one rank.

    limits: those in which the connection differs from `HASTY`.
    """
    source = GrpcSource(f"127.0.0.1:{port}", service, ranks)
    transports = grpc_transports(source, lambda: 0.5, replace(HASTY, **limits))
    try:
        yield transports[0] if ranks == 1 else transports
    finally:
        for transport in transports:
            await transport.close()


def handed(*messages: KvEventBatch) -> list[Signal]:
    return [Batch(message.sequence_number, finished(decoding(message))) for message in messages]


def reasons(signals: Iterable[Signal]) -> list[str]:
    return [signal.reason for signal in signals if isinstance(signal, Disconnected | Refused)]


async def ended(transport: RankTransport) -> str:
    """Why the stream ended; fails if any other signal came."""
    (signal,) = await received(transport, 1)
    assert isinstance(signal, Disconnected)
    return signal.reason


@pytest.mark.parametrize("service", SERVICES)
async def test_batches_follow_their_connection(publisher: GrpcPublisher, service: str) -> None:
    sent = batch(0, store(1)), batch(1, store(2, 1))
    publisher.publish(*sent)
    async with serving(publisher) as port, following(port, service=service) as transport:
        assert await received(transport, 3) == [Connected(), *handed(*sent)]
        assert transport.recovery is Recovery.RESUME
    assert publisher.starts == [0]


async def test_replay_is_refused(publisher: GrpcPublisher) -> None:
    async with serving(publisher) as port, following(port) as transport:
        with pytest.raises(ReplayError, match="no replay from batch 3"):
            await anext(transport.replay(3))


async def test_ranks_have_batches_of_their_own(
    publisher: GrpcPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = batch(0, store(1)), batch(5, store(2), dp_rank=1)
    publisher.publish(*(batch(number, dp_rank=7) for number in range(3)), one, other)
    async with serving(publisher) as port, following(port, ranks=2) as (first, second):
        assert await received(first, 2) == [Connected(), *handed(one)]
        assert await received(second, 2) == [Connected(), *handed(other)]
    (told,) = caplog.records
    assert "rank 7; only ranks 0 to 1 are configured" in told.getMessage()


async def test_stream_resumes_at_the_last_batch_of_the_slowest_rank(
    publisher: GrpcPublisher,
) -> None:
    publisher.publish(batch(3), batch(7, dp_rank=1))
    async with serving(publisher) as port, following(port, ranks=2) as transports:
        for transport in transports:
            await received(transport, 2)
        publisher.end()
        for transport in transports:
            assert await ended(transport) == "the server ended the stream"
        assert await received(transports[0], 2) == [Connected(), *handed(batch(3))]
    assert publisher.starts[:2] == [0, 3]


async def test_rank_without_batches_resumes_the_stream_at_0(publisher: GrpcPublisher) -> None:
    publisher.publish(batch(3))
    async with serving(publisher) as port, following(port, ranks=2) as transports:
        await received(transports[0], 2)
        publisher.end()
        await until(lambda: len(publisher.starts) > 1)
    assert publisher.starts[:2] == [0, 0]


async def test_start_out_of_range_is_retried_from_0(publisher: GrpcPublisher) -> None:
    publisher.publish(batch(3))
    async with serving(publisher) as port, following(port) as transport:
        await received(transport, 2)
        publisher.kept_from = 9
        publisher.end()
        signals = await received(transport, 4)
    assert reasons(signals) == ["the server ended the stream", "OUT_OF_RANGE: no longer kept"]
    assert publisher.starts == [0, 3, 0]


async def test_stream_ended_by_data_loss_is_resumed_at_0(publisher: GrpcPublisher) -> None:
    publisher.publish(batch(3))
    async with serving(publisher) as port, following(port) as transport:
        await received(transport, 2)
        publisher.end(grpc.StatusCode.DATA_LOSS, "it is\n gone")
        assert await ended(transport) == "DATA_LOSS: it is gone"
        assert await received(transport, 2) == [Connected(), *handed(batch(3))]
    assert publisher.starts == [0, 0]


async def test_publisher_with_other_content_is_asked_from_0(
    publisher: GrpcPublisher,
) -> None:
    publisher.publish(batch(0), batch(1), batch(2))
    async with serving(publisher) as port, following(port) as transport:
        await received(transport, 4)
        publisher.history = [batch(number, life=1) for number in range(4)]
        publisher.end()
        signals = await received(transport, 8)
    assert reasons(signals)[1:] == ["batch 2 came again with different content"]
    assert signals[-4:] == handed(*(batch(number, life=1) for number in range(4)))
    assert publisher.starts == [0, 2, 0]


async def test_engine_without_events_is_refused_and_asked_again(publisher: GrpcPublisher) -> None:
    publisher.publish(batch(0))
    publisher.refusal = grpc.StatusCode.UNIMPLEMENTED, "not enabled"
    async with (
        serving(publisher) as port,
        following(port, refused_seconds=IMPATIENT_SECONDS) as transport,
    ):
        assert await received(transport, 1) == [Refused("publishes no events: not enabled")]
        publisher.refusal = None
        signals = await received(transport, 2)
    assert signals[-2:] == [Connected(), *handed(batch(0))]


async def test_snapshot_is_announced_before_its_chunks(publisher: GrpcPublisher) -> None:
    cleared = KvCacheEvent(cleared=KvCacheCleared())
    first = batch(4, cleared, store(1), snapshot=KvSnapshotChunk(count=2, unknown_before=3))
    second = batch(5, store(2, 1), snapshot=KvSnapshotChunk(index=1, count=2))
    publisher.publish(first, second, batch(6, cleared))
    async with serving(publisher) as port, following(port) as transport:
        signals = await received(transport, 5)
    assert signals[:2] == [Connected(), SnapshotBegun(4, 5, 3)]
    assert signals[2:] == handed(first, second, batch(6, cleared))


async def test_heartbeats_carry_load_and_no_number(publisher: GrpcPublisher) -> None:
    heartbeat = batch(0, load=LoadRecord(running_requests=2, load_only=True), dp_rank=0)
    loaded = batch(0, load=LoadRecord(running_requests=1))
    publisher.publish(heartbeat, loaded)
    async with serving(publisher) as port, following(port) as transport:
        assert await received(transport, 4) == [
            Connected(),
            LoadReport(EngineLoad(2, 0, cache_usage=0.0)),
            LoadReport(EngineLoad(1, 0, cache_usage=0.0)),
            *handed(loaded),
        ]


async def test_missing_heartbeats_end_the_stream(publisher: GrpcPublisher) -> None:
    publisher.publish(batch(0, load=LoadRecord(load_only=True)))
    async with (
        serving(publisher) as port,
        following(port, heartbeat_seconds=IMPATIENT_SECONDS) as transport,
    ):
        signals = await received(transport, 3)
    assert reasons(signals) == ["no heartbeat for 0.05 s"]


async def test_subscription_without_an_answer_times_out(publisher: GrpcPublisher) -> None:
    publisher.answers = False
    async with (
        serving(publisher) as port,
        following(port, subscribe_seconds=IMPATIENT_SECONDS) as transport,
    ):
        assert await ended(transport) == "no answer to the subscription in 0.05 s"


async def test_subscription_to_a_silent_socket_times_out() -> None:
    async with (
        relaying(lambda: None) as port,
        following(port, subscribe_seconds=IMPATIENT_SECONDS) as transport,
    ):
        assert await ended(transport) == "no answer to the subscription in 0.05 s"


async def test_peer_that_vanishes_is_detected_by_pings(publisher: GrpcPublisher) -> None:
    patient = (("grpc.http2.max_ping_strikes", 0),)
    target: list[int | None] = []
    async with serving(publisher, options=patient) as port:
        target.append(port)
        async with (
            relaying(lambda: target[0]) as relayed,
            following(relayed, keepalive_ms=200, keepalive_timeout_ms=200) as transport,
        ):
            assert await received(transport, 1) == [Connected()]
            target[0] = None
            assert await ended(transport) == "UNAVAILABLE: Stream removed (ping timeout)"


async def test_connection_ended_for_too_many_pings_is_reopened(publisher: GrpcPublisher) -> None:
    async with serving(publisher) as port, following(port, keepalive_ms=50) as transport:
        assert await received(transport, 1) == [Connected()]
        assert "oo many pings" in await ended(transport)
        assert await received(transport, 1) == [Connected()]
        publisher.publish(batch(0))
        assert await received(transport, 1) == handed(batch(0))


async def test_invalid_message_is_reported_as_malformed(publisher: GrpcPublisher) -> None:
    publisher.publish(b"\xff", batch(0))
    async with serving(publisher) as port, following(port) as transport:
        assert await received(transport, 3) == [Connected(), Malformed(), *handed(batch(0))]


async def test_message_beyond_the_limit_ends_the_stream(publisher: GrpcPublisher) -> None:
    publisher.publish(batch(0, *(store(number) for number in range(1000))))
    async with serving(publisher) as port, following(port, max_message_bytes=1000) as transport:
        signals = await received(transport, 2)
    assert "RESOURCE_EXHAUSTED: " in reasons(signals)[0]


async def test_returning_server_is_reconnected(publisher: GrpcPublisher) -> None:
    async with serving(publisher) as port:
        transport = grpc_transports(GrpcSource(f"127.0.0.1:{port}", "vllm"), lambda: 0.5, HASTY)[0]
        assert await received(transport, 1) == [Connected()]
    assert reasons(await received(transport, 1))
    publisher.publish(batch(0))
    async with serving(publisher, port):
        signals = await received(transport, 1)
        while handed(batch(0))[0] not in signals:
            signals += await received(transport, 1)
        await transport.close()
    assert Connected() in signals


async def test_receive_loses_no_signal_by_a_timeout(publisher: GrpcPublisher) -> None:
    async with serving(publisher) as port, following(port) as transport:
        assert await received(transport, 1) == [Connected()]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await transport.receive()
        publisher.publish(batch(0))
        assert await received(transport, 1) == handed(batch(0))


async def test_large_batch_is_decoded_in_slices(publisher: GrpcPublisher) -> None:
    large = batch(0, *(store(number) for number in range(100)))
    publisher.publish(large)
    turns = 0
    async with serving(publisher) as port, following(port, slice_seconds=0.0) as transport:
        await received(transport, 1)
        while not transport.queued:
            await asyncio.sleep(0)
            turns += 1
        assert await received(transport, 1) == handed(large)
    assert turns > 50


async def test_partial_blocks_of_tensorrt_llm_are_left_out(publisher: GrpcPublisher) -> None:
    publisher.publish(batch(0, store(1, tokens=(5, 6))), batch(1, store(2, 1, tokens=(7,))))
    async with serving(publisher) as port, following(port, service="trtllm") as transport:
        full, partial = (await received(transport, 3))[1:]
    assert isinstance(full, Batch)
    assert isinstance(full.body, EventBatch)
    assert len(full.body.events) == 1
    assert partial == Batch(1, EventBatch(2.0, [], 0))


async def test_last_rank_that_closes_ends_the_connection(publisher: GrpcPublisher) -> None:
    async with serving(publisher) as port:
        async with following(port, ranks=2) as (first, second):
            await received(first, 1)
            await first.close()
            assert await received(second, 1) == [Connected()]
            assert connections()
        assert not connections()


def connections() -> list[object]:
    """The running loops of shared connections."""
    tasks = asyncio.all_tasks()
    return [task for task in tasks if "SharedConnection" in repr(task.get_coro())]


async def test_close_ends_an_unused_transport() -> None:
    async with following(1):
        pass


async def test_unforeseen_error_disconnects_and_the_stream_resumes(
    publisher: GrpcPublisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> object:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    queue = QueueLimits(retry_seconds=0.0)
    monkeypatch.setattr(grpc_transport, "decoding", broken)
    publisher.publish(batch(0))
    with caplog.at_level(logging.ERROR):
        async with serving(publisher) as port, following(port, queue=queue) as transport:
            signals = await received(transport, 2)
    assert reasons(signals) == ["an internal error, see the log"]
    assert "a bug" in caplog.text


async def test_feed_that_resumes_stays_certain(publisher: GrpcPublisher) -> None:
    publisher.publish(batch(0, store(1)), batch(1, store(2, 1)))
    async with serving(publisher) as port:
        fleet = FollowedWorkers(1, lambda: 0.0)
        fleet.add(
            "w", "m", grpc_transports(GrpcSource(f"127.0.0.1:{port}", "vllm"), lambda: 0.5, HASTY)
        )
        await until(lambda: fleet.blocks.overlaps(chain(3)).get("w", None) is not None)
        await until(lambda: fleet.blocks.overlaps(chain(3))["w"].tiers[0] == 2)
        publisher.end()
        await until(lambda: len(publisher.starts) > 1)
        publisher.publish(batch(2, store(3, 2)))
        await until(lambda: fleet.blocks.overlaps(chain(3))["w"].tiers[0] == 3)
        assert fleet.feeds.state("w") is FeedState.LIVE
        await fleet.close()


@asynccontextmanager
async def relaying(target: Callable[[], int | None]) -> AsyncIterator[int]:
    """A TCP relay to the port that `target` names; while it names none, it swallows everything."""
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                if target() is not None:
                    writer.write(data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        port = target()
        if port is None:
            tasks.add(asyncio.create_task(copy(reader, writer)))
            return
        near, far = await asyncio.open_connection("127.0.0.1", port)
        writers.append(far)
        tasks.add(asyncio.create_task(copy(reader, far)))
        tasks.add(asyncio.create_task(copy(near, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.close()
        await asyncio.gather(*(each.wait_closed() for each in writers), return_exceptions=True)


async def test_unreached_server_is_connecting_with_a_short_reason() -> None:
    fleet = FollowedWorkers(1, lambda: 0.0)
    source = GrpcSource(f"127.0.0.1:{free_port()}", "vllm", 1)
    fleet.add("w", "m", grpc_transports(source, lambda: 0.5, HASTY))
    await until(lambda: fleet.feeds.statuses("w")[0].reason == "cannot connect: Connection refused")
    assert fleet.feeds.state("w") is FeedState.CONNECTING
    await fleet.close()


async def test_server_that_starts_late_is_connected_without_a_complaint(
    publisher: GrpcPublisher,
) -> None:
    port = free_port()
    async with following(port, unreached_seconds=1000.0) as transport:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await transport.receive()
        async with serving(publisher, port):
            assert await received(transport, 1) == [Connected()]
