"""Against SMG's own relay, which reads ZMQ publishers and serves SubscribeKvEvents."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import zmq
import zmq.asyncio
from msgspec.structs import replace

from kvstate.events import Batch, BlocksStored, EngineLoad, EventBatch
from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_sources import GrpcSource
from kvstate.feeds.grpc_limits import GrpcLimits
from kvstate.feeds.grpc_transport import SERVICES, grpc_transports
from kvstate.feeds.queue_limits import QueueLimits
from kvstate.feeds.transport import Connected, LoadReport, Refused
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Prompt, Tokens
from kvstate.pb.kvsteer_kv_events_pb2 import SubscribeKvEventsRequest
from tests.kvstate.grpc_publisher import received
from tests.kvstate.publishing import block, chain, frames, payload
from tests.waiting import until

WHY = "the real relay needs smg-grpc-servicer 0.14 and smg-grpc-proto 0.4.28"
kv_relay = pytest.importorskip("smg_grpc_servicer.kv_relay", reason=WHY)
common_pb2 = pytest.importorskip("smg_grpc_proto.generated.common_pb2", reason=WHY)


# Retries at once, and hands out one signal at a time.
HASTY = GrpcLimits(retry_seconds=(0.001, 0.01), queue=QueueLimits(signals_at_once=1))


class Engine:
    """The engine's ZMQ sockets, and the relay beside it."""

    def __init__(self, *, replays: bool = False, publishes: bool = True) -> None:
        self.context = zmq.asyncio.Context()
        self.starts: list[int] = []
        self.load: Any = None
        self.publishes = publishes
        self.replayed: list[list[bytes]] = []
        self.socket, self.address = self._bind(zmq.XPUB)
        self.socket.set(zmq.XPUB_VERBOSE, 1)  # reports a relay's subscription beside an old one
        self.router: zmq.asyncio.Socket | None = None
        self.replay_address = None
        if replays:
            self.router, self.replay_address = self._bind(zmq.ROUTER)

    def _bind(self, kind: int) -> tuple[zmq.asyncio.Socket, str]:
        socket = self.context.socket(kind)
        socket.bind("tcp://127.0.0.1:0")
        return socket, socket.get_string(zmq.LAST_ENDPOINT)

    async def subscribed(self) -> None:
        """Waits for the next subscription of a relay."""
        while not (await self.socket.recv()).startswith(b"\1"):
            pass

    async def publish(self, *messages: list[bytes]) -> None:
        for message in messages:
            await self.socket.send_multipart(message)

    async def answer_replay(self, *messages: list[bytes]) -> list[bytes]:
        assert self.router
        sender, *request = await self.router.recv_multipart()
        for message in [*messages, [b"", b"\xff" * 8, b""]]:
            await self.router.send_multipart([sender, b"", *message])
        return request

    async def relay(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        start = SubscribeKvEventsRequest.FromString(raw).start_sequence_number
        self.starts.append(start)
        source = kv_relay.RankSource(0, self.address, self.replay_address)
        batches = kv_relay.relay(
            [source] if self.publishes else [],
            kv_relay.Engine.VLLM,
            start,
            context,
            topic="kv",
            zmq_context=self.context,
            load_source=None if self.load is None else lambda _rank: self.load,
            load_tick=0.01,
            recv_timeout=0.01,
        )
        async for each in batches:
            yield each.SerializeToString()

    def close(self) -> None:
        self.context.destroy(linger=0)


@asynccontextmanager
async def relaying(engine: Engine, port: int = 0) -> AsyncIterator[int]:
    """Serves the relay on 127.0.0.1; yields the port."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    method = {"SubscribeKvEvents": grpc.unary_stream_rpc_method_handler(engine.relay)}
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(SERVICES["vllm"], method)]
    )
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@asynccontextmanager
async def relayed(engine: Engine) -> AsyncIterator[GrpcSource]:
    async with relaying(engine) as port:
        yield GrpcSource(f"127.0.0.1:{port}", "vllm")
    engine.close()


@asynccontextmanager
async def followed(engine: Engine) -> AsyncIterator[FollowedWorkers]:
    async with relayed(engine) as source:
        fleet = FollowedWorkers(1, lambda: 0.0)
        fleet.add("w", "m", grpc_transports(source, lambda: 0.5, HASTY))
        try:
            await engine.subscribed()
            yield fleet
        finally:
            await fleet.close()


def held(fleet: FollowedWorkers, prompt: Prompt | None = None) -> tuple[int, int]:
    """Certain and uncertain blocks."""
    overlap = fleet.blocks.overlaps(prompt or chain(5)).get("w")
    return (0, 0) if overlap is None else (sum(overlap.tiers), overlap.uncertain)


async def test_relayed_blocks_are_certain() -> None:
    engine = Engine()
    async with followed(engine) as fleet:
        await engine.publish(frames(0, block(1)), frames(1, block(2, 1)))
        await until(lambda: held(fleet) == (2, 0))
        assert fleet.feeds.state("w") is FeedState.LIVE
        await engine.publish(frames(2, ["BlockRemoved", [2], "GPU"]))
        await until(lambda: held(fleet) == (1, 0))


async def test_namespaces_and_media_survive_the_relay() -> None:
    salted = ["BlockStored", [1], None, [5], 1, None, "CPU", "ad", [["ad", "s"]]]
    child = ["BlockStored", [-2], 1, [6], 1, None, "CPU", "ad", [["ad"]]]
    engine = Engine()
    async with followed(engine) as fleet:
        removal = ["BlockRemoved", [9], "CPU"]  # this engine announces them
        await engine.publish(frames(0, salted, removal), frames(1, child))
        prompt = Prompt("m", Tokens("I", [5, 6, 7]), lora="ad", salt="s")
        await until(lambda: held(fleet, prompt) == (2, 0))
        assert fleet.blocks.overlaps(prompt)["w"].tiers == (0, 2, 0, 0)
        assert held(fleet, replace(prompt, salt=None)) == (0, 0)


async def test_gap_replayed_by_the_relay_is_invisible() -> None:
    engine = Engine(replays=True)
    async with followed(engine) as fleet:
        await engine.publish(frames(0, block(1)), frames(2, block(3, 2)))
        request = await engine.answer_replay(
            [(1).to_bytes(8, "big"), payload(1, block(2, 1))],
            [(2).to_bytes(8, "big"), payload(2, block(3, 2))],
        )
        await until(lambda: held(fleet) == (3, 0))
        assert request == [b"", (1).to_bytes(8, "big")]
        assert fleet.feeds.state("w") is FeedState.LIVE


async def test_gap_without_a_replay_of_the_relay_is_a_hole() -> None:
    engine = Engine()
    async with followed(engine) as fleet:
        await engine.publish(frames(0, block(1), block(2, 1)), frames(2, block(3, 2)))
        await engine.subscribed()
        assert engine.starts == [0, 0]  # DATA_LOSS: it does not resume where we were
        await engine.publish(frames(3, block(1)))
        await until(lambda: held(fleet) == (1, 1))
        assert fleet.feeds.state("w") is FeedState.DEGRADED


async def test_restarted_publisher_is_followed_from_its_start() -> None:
    engine = Engine()
    async with followed(engine) as fleet:
        await engine.publish(frames(0, block(1)), frames(1, block(2, 1)))
        await until(lambda: held(fleet) == (2, 0))
        await engine.publish(frames(0, block(1), life=1))
        await engine.subscribed()
        await engine.publish(frames(1, block(1), life=1))
        await until(lambda: held(fleet) == (1, 0))
        assert fleet.feeds.statuses("w")[0].restarts == 1


async def test_relay_that_cannot_resume_is_asked_from_0() -> None:
    engine = Engine()
    async with relaying(engine) as port:
        source = GrpcSource(f"127.0.0.1:{port}", "vllm")
        (transport,) = grpc_transports(source, lambda: 0.5, HASTY)
        receiving = asyncio.create_task(received(transport, 2))
        await engine.subscribed()
        await engine.publish(frames(4, block(1)))
        await receiving
    async with relaying(engine, port):
        while Connected() not in await transport.receive():
            pass
        await transport.close()
    engine.close()
    assert engine.starts == [0, 4, 0]


async def test_undecodable_payload_hidden_by_the_relay_counts_as_a_lost_removal() -> None:
    engine = Engine()
    async with relayed(engine) as source:
        (transport,) = grpc_transports(source, lambda: 0.5, HASTY)
        receiving = asyncio.create_task(received(transport, 2))
        await engine.subscribed()
        await engine.publish([b"kv", (0).to_bytes(8, "big"), b"\xc1"])
        lost = EventBatch(0.0, [], 0, ("undecodable_batch",), removal_lost=True)
        assert await receiving == [Connected(), Batch(0, lost)]
        await transport.close()


async def test_engine_without_a_publisher_is_refused() -> None:
    engine = Engine(publishes=False)
    async with relayed(engine) as source:
        (transport,) = grpc_transports(source, lambda: 0.5, HASTY)
        (signal,) = await received(transport, 1)
        await transport.close()
    assert isinstance(signal, Refused)


async def test_load_is_received_beside_the_batches() -> None:
    engine = Engine()
    engine.load = common_pb2.EngineLoad(running_requests=3, token_usage=0.5)
    async with relayed(engine) as source:
        (transport,) = grpc_transports(source, lambda: 0.5, HASTY)
        receiving = asyncio.create_task(received(transport, 3))
        await engine.subscribed()
        await engine.publish(frames(0, block(1)))
        connected, load, batch = await receiving
        await transport.close()
    assert (connected, load) == (
        Connected(),
        LoadReport(EngineLoad(3, 0, cache_usage=0.5)),
    )
    assert isinstance(batch, Batch)
    assert isinstance(batch.body, EventBatch)
    assert isinstance(batch.body.events[0], BlocksStored)
