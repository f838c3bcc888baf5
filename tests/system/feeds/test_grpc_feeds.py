"""The same faults behind servers that stream SubscribeKvEvents: our bridge, and SMG's own relay."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvstate.bridge.bridge import Bridge, BridgeServer
from kvstate.events import Batch, EventBatch
from kvstate.feeds.feed import SNAPSHOT_LATE, FeedState
from kvstate.feeds.feed_sources import GrpcSource, ZmqSource
from kvstate.feeds.feed_times import FeedTimes
from kvstate.feeds.grpc_limits import GrpcLimits
from kvstate.feeds.grpc_transport import SERVICES, grpc_transports
from kvstate.feeds.transport import Connected, Disconnected, Signal
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.fleet import FollowedWorkers
from kvstate.pb.kvsteer_kv_events_pb2 import KvSnapshotChunk, SubscribeKvEventsRequest
from tests.kvstate.grpc_publisher import GrpcPublisher, batch, serving, store
from tests.system.feeds.engine import MODEL, Engine
from tests.system.feeds.watch import WORKER, Row, Watch, Watched
from tests.waiting import until

A, B, C = (1, 2, 3, 4), (1, 2, 9), (20, 21)
PROBES = (A, B, C, (1, 2))


SOON = GrpcLimits(retry_seconds=(0.01, 0.05))


class BridgeBeside:
    """Our bridge beside an engine."""

    kind = "grpc, bridge"

    def __init__(self, engine: Engine) -> None:
        self._source = ZmqSource(engine.events, engine.replay, "kv")
        self.target = "127.0.0.1:0"

    async def start(self) -> None:
        transport = ZmqTransport(self._source)
        bridge = Bridge([transport], lambda: asyncio.get_running_loop().time(), lambda: 0.5)
        self._server = BridgeServer(bridge, self.target)
        await self._server.start()
        self.target = f"127.0.0.1:{self._server.port}"
        self._running = asyncio.create_task(bridge.run())

    async def stop(self) -> None:
        await self._server.stop()
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


class RelayBeside:
    """SMG's relay beside an engine."""

    kind = "grpc, SMG relay"

    def __init__(self, engine: Engine) -> None:
        reason = "needs smg-grpc-servicer"
        self._relay: Any = pytest.importorskip("smg_grpc_servicer.kv_relay", reason=reason)
        self._source = self._relay.RankSource(0, engine.events, engine.replay)
        self.target = "127.0.0.1:0"

    async def start(self) -> None:
        handler = grpc.unary_stream_rpc_method_handler(self._stream)
        methods = {"SubscribeKvEvents": handler}
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICES["vllm"], methods)]
        )
        port = self._server.add_insecure_port(self.target)
        self.target = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def _stream(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        start = SubscribeKvEventsRequest.FromString(raw).start_sequence_number
        engine = self._relay.Engine.VLLM
        async for each in self._relay.relay([self._source], engine, start, context, topic="kv"):
            yield each.SerializeToString()


Beside = BridgeBeside | RelayBeside
both = pytest.mark.parametrize("beside", [BridgeBeside, RelayBeside])


@asynccontextmanager
async def following(fault: str, engine: Engine, server: Beside) -> AsyncIterator[Watch]:
    """A router that follows an engine through a server from now on."""
    (inner,) = grpc_transports(GrpcSource(server.target, "vllm"), lambda: 0.5, SOON)
    transport = Watched(inner)
    fleet = FollowedWorkers(0xC0FFEE, lambda: engine.clock, times=FeedTimes(quiet_seconds=0.1))
    fleet.add(WORKER, MODEL, [transport])
    watch = Watch(fault, server.kind, engine, transport, fleet, PROBES, renumbered=True)
    try:
        yield watch
    finally:
        await watch.close()
        await server.stop()


async def subscribed(engine: Engine) -> None:
    """Waits until what the engine publishes reaches the server beside it."""
    await until(lambda: engine.is_subscribed, pause=0.001)


@asynccontextmanager
async def warm(
    fault: str, engine: Engine, beside: Callable[[Engine], Beside]
) -> AsyncIterator[tuple[Watch, Beside]]:
    """The same, followed from the engine's first batch on, with something cached."""
    server = beside(engine)
    await server.start()
    async with following(fault, engine, server) as watch:
        await in_state(watch, FeedState.LIVE, FeedState.DEGRADED)
        await subscribed(engine)
        engine.publish(engine.store(A))
        engine.publish(engine.store(B, known=2))
        await watch.settled(FeedState.LIVE, FeedState.DEGRADED)
        await until(watch.is_exact, pause=0.001)
        yield watch, server


async def in_state(watch: Watch, *states: FeedState) -> None:
    await until(lambda: watch.state in states, pause=0.001)


def a_batch(signal: Signal) -> bool:
    """Evidence: something was published after the fault."""
    return isinstance(signal, Batch)


def a_clear(signal: Signal) -> bool:
    """Evidence: everything is gone."""
    return isinstance(signal, Batch) and isinstance(signal.body, EventBatch) and signal.body.clears


def the_end(signal: Signal) -> bool:
    """Evidence: the stream ended."""
    return isinstance(signal, Disconnected)


@both
async def test_lost_batch_is_replayed_by_the_server(
    table: list[Row], beside: Callable[[Engine], Beside]
) -> None:
    async with warm("lost batch", Engine(), beside) as (watch, _):
        engine = watch.engine
        watch.happens(a_batch)
        engine.lose(engine.remove(A))
        engine.publish(engine.store(C))
        await watch.settled()
        table.append(await watch.row("the server's replay"))
        assert watch.is_exact()


async def test_hole_of_the_bridge_degrades_the_feed_and_brings_a_snapshot(table: list[Row]) -> None:
    async with warm("batch lost for good", Engine(replays=False), BridgeBeside) as (watch, _):
        engine = watch.engine
        watch.happens(the_end)
        engine.lose(engine.remove(A))
        engine.publish(engine.store(C))
        await until(watch.transport.handled.is_set, pause=0.001)
        await in_state(watch, FeedState.DEGRADED)
        table.append(await watch.row("DATA_LOSS, snapshot of what is certain"))
        assert watch.certain() == [0, 0, 2, 0]


async def test_hole_of_the_relay_makes_the_past_uncertain(table: list[Row]) -> None:
    async with warm("batch lost for good", Engine(replays=False), RelayBeside) as (watch, _):
        engine = watch.engine
        watch.happens(the_end)
        engine.lose(engine.remove(A))
        engine.publish(engine.store(C))
        await until(watch.transport.handled.is_set, pause=0.001)
        await in_state(watch, FeedState.DEGRADED)
        table.append(await watch.row("DATA_LOSS: all before is uncertain"))
        assert watch.is_honest()


@both
async def test_restarted_engine_is_detected_behind_a_server(
    table: list[Row], beside: Callable[[Engine], Beside]
) -> None:
    async with warm("engine restarts at 0", Engine(), beside) as (watch, _):
        engine = watch.engine
        watch.happens(a_clear if beside is BridgeBeside else the_end)
        await engine.restart()
        await subscribed(engine)  # the relay notices a restart only by the first number
        engine.publish(engine.store(C))
        await until(watch.transport.handled.is_set, pause=0.001)
        await in_state(watch, FeedState.LIVE, FeedState.DEGRADED)
        table.append(await watch.row("cleared, or DATA_LOSS"))
        assert watch.is_honest()


async def restarted_while_a_block_goes(watch: Watch, server: Beside) -> None:
    """Starts the server beside an engine again, which removed a block in between."""
    engine = watch.engine
    watch.happens(the_end)
    await server.stop()
    engine.lose(engine.remove(A))
    await server.start()
    await until(watch.transport.handled.is_set, pause=0.001)


async def test_restarted_bridge_sends_a_snapshot(table: list[Row]) -> None:
    async with warm("bridge restarts", Engine(), BridgeBeside) as (watch, server):
        await restarted_while_a_block_goes(watch, server)
        await in_state(watch, FeedState.LIVE)
        await watch.settled()
        table.append(await watch.row("OUT_OF_RANGE, snapshot"))
        assert watch.is_exact()


async def test_restarted_relay_leaves_a_hole(table: list[Row]) -> None:
    async with warm("relay restarts", Engine(), RelayBeside) as (watch, server):
        await restarted_while_a_block_goes(watch, server)
        await in_state(watch, FeedState.DEGRADED)
        table.append(await watch.row("OUT_OF_RANGE: all before is uncertain"))
        assert watch.is_honest()


async def test_restarted_router_gets_the_whole_state_from_the_bridge(table: list[Row]) -> None:
    engine = Engine()
    engine.lose(engine.store(A))
    engine.lose(engine.store(B, known=2), engine.remove(A))
    server = BridgeBeside(engine)
    await server.start()
    async with following("router restart, warm worker", engine, server) as watch:
        watch.happens(lambda signal: isinstance(signal, Connected), to_the_engine=False)
        await in_state(watch, FeedState.LIVE)
        await watch.settled()
        table.append(await watch.row("snapshot"))
        assert (watch.is_exact(), sum(watch.certain())) == (True, 8)


async def test_server_whose_snapshots_do_not_end_is_named_until_one_does() -> None:
    publisher = GrpcPublisher()
    publisher.publish(batch(0, store(1), snapshot=KvSnapshotChunk(count=3)))
    async with serving(publisher) as port:
        fleet = FollowedWorkers(0xC0FFEE, lambda: 0.0, times=FeedTimes(snapshot_seconds=0.2))
        source = GrpcSource(f"127.0.0.1:{port}", "vllm")
        fleet.add(WORKER, MODEL, grpc_transports(source, lambda: 0.5, SOON))
        try:
            await until(lambda: SNAPSHOT_LATE in fleet.feeds.statuses(WORKER)[0].reason)
            assert fleet.feeds.state(WORKER) is FeedState.DEGRADED
            publisher.publish(batch(1, store(2, 1), snapshot=KvSnapshotChunk(index=1, count=3)))
            publisher.publish(batch(2, store(3, 2), snapshot=KvSnapshotChunk(index=2, count=3)))
            await until(lambda: fleet.feeds.state(WORKER) is FeedState.LIVE)
        finally:
            await fleet.close()
