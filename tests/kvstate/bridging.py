"""A bridge that is fed from memory, and subscribers that reconstruct its state."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import grpc

from kvstate.bridge.bridge import Bridge, BridgeServer
from kvstate.bridge.rank import BridgedRank, BridgeLimits
from kvstate.events import Batch
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.grpc_transport import SERVICES
from kvstate.feeds.transport import Connected
from kvstate.pb.kvsteer_kv_events_pb2 import (
    KvCacheEvent,
    KvEventBatch,
    SubscribeKvEventsRequest,
)
from kvstate.wire.zmq_wire import stamp_of
from tests.kvstate.publishing import PATIENCE_SECONDS, payload
from tests.memory_transport import MemoryTransport
from tests.waiting import until

START_SECONDS = 1_000.0
FIRST = 1_000_000_000  # the number of the first batch after a start at that time

# Hash, medium, attention group.
Lying = tuple[int, str, int | None]


@dataclass
class Account:
    """A subscriber's state of one rank after some batches without gaps."""

    copies: Counter[Lying] = field(default_factory=Counter)
    parents: dict[int, int | None] = field(default_factory=dict)
    last: int | None = None

    def take(self, batch: KvEventBatch) -> None:
        assert self.last is None or batch.sequence_number == self.last + 1
        assert len(batch.events) <= 1024
        self.last = batch.sequence_number
        for event in batch.events:
            self._apply(event)

    def _apply(self, event: KvCacheEvent) -> None:
        match event.WhichOneof("data"):
            case "stored":
                group = event.stored.group_idx if event.stored.HasField("group_idx") else None
                parent = event.stored.parent_block_hash
                known: int | None = parent if event.stored.HasField("parent_block_hash") else None
                for block in event.stored.blocks:
                    self.copies[block.block_hash, event.stored.medium, group] += 1
                    self.parents[block.block_hash] = known
                    known = block.block_hash
            case "removed":
                group = event.removed.group_idx if event.removed.HasField("group_idx") else None
                for number in event.removed.block_hashes:
                    place = (number, event.removed.medium, group)
                    self.copies[place] -= self.copies[place] > 0
            case "cleared":
                self.copies.clear()
                self.parents.clear()


class Subscriber:
    """A gateway: one stream, and an account of each rank."""

    def __init__(self, port: int, start: int = 0, service: str = SERVICES["vllm"]) -> None:
        self.accounts: dict[int, Account] = {}
        self.batches: list[KvEventBatch] = []
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        call = self.channel.unary_stream(
            f"/{service}/SubscribeKvEvents",
            request_serializer=SubscribeKvEventsRequest.SerializeToString,
            response_deserializer=KvEventBatch.FromString,
        )
        self.stream = call(SubscribeKvEventsRequest(start_sequence_number=start))

    def held(self, rank: int = 0) -> Counter[Lying]:
        return +self.accounts.get(rank, Account()).copies

    def numbers(self, rank: int = 0) -> list[int]:
        return [batch.sequence_number for batch in self.batches if batch.dp_rank == rank]

    async def read(self, batches: int = 1) -> list[KvEventBatch]:
        """Reads the next batches, and returns them."""
        for _ in range(batches):
            async with asyncio.timeout(PATIENCE_SECONDS):
                batch = await self.stream.read()
            assert isinstance(batch, KvEventBatch), "the stream ended"
            self.batches.append(batch)
            self.accounts.setdefault(batch.dp_rank, Account()).take(batch)
        return self.batches[-batches:]

    async def read_until(self, number: int, rank: int = 0) -> None:
        """Reads all batches up to this number."""
        while (account := self.accounts.get(rank)) is None or (account.last or 0) < number:
            await self.read()

    async def end(self) -> tuple[str, str]:
        """Reads to the end of the stream; returns the status and reason with which it ends."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while isinstance(batch := await self.stream.read(), KvEventBatch):
                    self.batches.append(batch)
            return "OK", ""
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""


class Engine:
    """An engine with some ranks behind a bridge that serves."""

    def __init__(self, ranks: int, limits: BridgeLimits | None, recovery: Recovery) -> None:
        self.transports = [MemoryTransport(recovery=recovery) for _ in range(ranks)]
        self.bridge = Bridge(self.transports, lambda: START_SECONDS, lambda: 0.5, limits)
        self.server = BridgeServer(self.bridge, "127.0.0.1:0")
        self._subscribers: list[Subscriber] = []
        self._next = [0] * ranks
        self._stamps = [0.0] * ranks  # of the last batches

    def publish(self, *events: object, rank: int = 0, life: int = 0) -> None:
        """Publishes the rank's next batch."""
        number = self._next[rank]
        self._next[rank] += 1
        body = payload(number, *events, life=life + 1)
        self._stamps[rank] = stamp_of(body)
        transport = self.transports[rank]
        if transport.history is not None:
            transport.history[number] = body
        transport.put(Batch(number, body))

    def restart(self, rank: int = 0) -> None:
        """Makes a rank count from 0 again."""
        self._next[rank] = 0
        if self.transports[rank].history is not None:
            self.transports[rank].history = {}

    def lose(self, batches: int = 1, rank: int = 0) -> None:
        """Skips batch numbers, as if batches were lost."""
        self._next[rank] += batches

    async def follows(self) -> None:
        """Waits until the bridge accepts subscribers and has numbered all that was published."""
        await until(lambda: self.bridge.fault is None)
        for bridged, stamp in zip(self.bridge.ranks, self._stamps, strict=True):
            await until(partial(_has_taken, bridged, stamp))
            bridged.flush()

    @property
    def last(self) -> int:
        """Number of the bridge's last batch of rank 0."""
        return self.bridge.ranks[0].history.last

    def subscribe(self, start: int = 0, service: str = SERVICES["vllm"]) -> Subscriber:
        self._subscribers.append(Subscriber(self.server.port, start, service))
        return self._subscribers[-1]

    async def close(self) -> None:
        for subscriber in self._subscribers:
            await subscriber.channel.close()


def _has_taken(rank: BridgedRank, stamp: float) -> bool:
    return rank.timestamp == stamp


@asynccontextmanager
async def engine(
    ranks: int = 1,
    limits: BridgeLimits | None = None,
    *,
    connected: bool = True,
    recovery: Recovery = Recovery.REPLAY,
) -> AsyncIterator[Engine]:
    """An engine whose ranks are connected, behind a bridge that serves."""
    running = Engine(ranks, limits, recovery)
    follows = asyncio.create_task(running.bridge.run())
    await running.server.start()
    try:
        if connected:
            for transport in running.transports:
                transport.put(Connected())
            await running.follows()
        yield running
    finally:
        await running.close()
        await running.server.stop()
        follows.cancel()
        await asyncio.gather(follows, return_exceptions=True)
