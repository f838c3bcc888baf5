"""The bridge: reads the feed of one engine once, and serves it to any number of subscribers.

    mirror.py    what a rank holds, as it was published, so that a new subscriber can begin with it
    rank.py      one rank: takes the place of the index as its feed's sink, and numbers its batches
    bridge.py    the streams of subscribers, and the gRPC server around them

Transports and feeds are the router's. The bridge keeps hashes, tokens and extra keys as the engine
sent them; it computes no key of its own and knows no prompt.

The rule: a stream reports every rank without gaps, or ends with a status from the table in
`kvstate.bridge.rank`, which tells the subscriber where to begin again. A subscription knows neither
gRPC nor time: it returns the next message, or None if there is none yet.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import NoReturn

import grpc
from google.protobuf.message import DecodeError

from kvstate.bridge.mirror import Mirror
from kvstate.bridge.rank import (
    BatchHistory,
    BridgedRank,
    BridgeLimits,
    Ended,
    StateOfRank,
    StreamStatus,
)
from kvstate.feeds.feed import Feed
from kvstate.feeds.grpc_transport import SERVICES
from kvstate.feeds.replays import ReplaySlots
from kvstate.feeds.subscriber import SharedByFeeds, Subscriber
from kvstate.feeds.transport import FeedTransport, RankName
from kvstate.feeds.turns import Turns
from kvstate.pb.kvsteer_kv_events_pb2 import KvSnapshotChunk, SubscribeKvEventsRequest
from kvstate.wire.grpc_encoding import encode_cleared, encode_head

log = logging.getLogger("kvsteer.bridge")

DRAIN_SECONDS = 5.0
_HEALTH_SECONDS = 0.5

# HealthCheckResponse of grpc.health.v1: field 1, the status, is 1 (SERVING) or 2 (NOT_SERVING).
_SERVING = b"\x08\x01"
_NOT_SERVING = b"\x08\x02"


def subscribe(ranks: Sequence[BridgedRank], start: int) -> "Subscription | Ended":
    """Starts a stream, or returns why it cannot.

    start: the first batch wanted of every rank; 0 for the current state and all later batches.
    """
    for rank in ranks:
        if rank.status.fault is not None:
            return rank.status.fault
    for rank in ranks:
        rank.flush()
        history = rank.history
        if start and not history.resumable <= start <= history.next:
            others = f"{history.resumable} to {history.next} are"
            reason = f"batch {start} of rank {history.rank} is not available; {others}"
            return Ended(StreamStatus.OUT_OF_RANGE, reason)
    return Subscription(ranks, start)


class Subscription:
    """The messages of one stream; made by `subscribe`."""

    def __init__(self, ranks: Sequence[BridgedRank], start: int) -> None:
        self._ranks = ranks
        self._snapshots = iter(()) if start else _snapshots([rank.state() for rank in ranks])
        self._cursors = [_Cursor(rank.history, start or rank.history.next) for rank in ranks]

    def take(self) -> bytes | Ended | None:
        """Returns the next message, the end, or None if there is nothing to send yet."""
        fault = self._fault()
        if fault is not None:
            return fault
        piece = next(self._snapshots, None)
        return self._next_batch() if piece is None else piece

    def _fault(self) -> Ended | None:
        faults = [cursor.fault for cursor in self._cursors]
        faults += [rank.status.fault for rank in self._ranks]
        return next((fault for fault in faults if fault is not None), None)

    def _next_batch(self) -> bytes | None:
        """Returns the next batch, None if there is none yet.

        Ranks take turns, so that none waits for all batches of another.
        """
        for position, cursor in enumerate(self._cursors):
            batch = cursor.take()
            if batch is not None:
                self._cursors.append(self._cursors.pop(position))
                return batch
        return None


class _Cursor:
    """A stream's position in one rank's history."""

    def __init__(self, history: BatchHistory, start: int) -> None:
        self._history = history
        self._next = start
        self._holes = history.holes

    @property
    def fault(self) -> Ended | None:
        """Why the stream cannot continue."""
        rank = self._history.rank
        if self._history.holes != self._holes:
            return Ended(StreamStatus.DATA_LOSS, f"batches of the engine's rank {rank} were lost")
        if self._next < self._history.oldest:
            reason = f"this subscriber is too slow: batch {self._next} of rank {rank} is gone"
            return Ended(StreamStatus.DATA_LOSS, reason)
        return None

    def take(self) -> bytes | None:
        if self._next == self._history.next:
            return None
        self._next += 1
        return self._history.batch(self._next - 1)


def _snapshots(states: list[StateOfRank]) -> Iterator[bytes]:
    for state in states:
        yield from _pieces(state)


def _pieces(state: StateOfRank) -> Iterator[bytes]:
    """Yields the messages of a snapshot, numbered consecutively up to the number of the state."""
    count = len(state.pieces)
    for index, copies in enumerate(state.pieces):
        chunk = KvSnapshotChunk(
            index=index, count=count, blocks=state.blocks, unknown_before=state.unknown_before
        )
        head = state.head._replace(sequence=state.head.sequence - (count - 1 - index))
        cleared = encode_cleared(0) if index == 0 else b""
        yield b"".join([encode_head(head, chunk), cleared, *(copy.entry for copy in copies)])


# Numbers begin at the microseconds since 1970: no feed has a million batches a second, so no
# earlier run of this bridge has reached them, unless the clock was set back.
_NUMBERS_A_SECOND = 1_000_000

_STOPPED = Ended(StreamStatus.UNAVAILABLE, "the bridge is stopping")


class Bridge:
    """All ranks of one engine, and their subscribers.

    transports: one for each rank, in order. clock: seconds since the epoch. chance: 0 to 1, for
    jitter.
    """

    def __init__(
        self,
        transports: Sequence[FeedTransport],
        clock: Callable[[], float],
        chance: Callable[[], float],
        limits: BridgeLimits | None = None,
    ) -> None:
        limits = limits or BridgeLimits()
        self.max_streams = limits.streams
        now = clock()
        self.ranks = [
            BridgedRank(
                BatchHistory(
                    rank,
                    int(now * _NUMBERS_A_SECOND),
                    now,
                    max_batches=limits.history_batches,
                    max_bytes=limits.history_bytes,
                ),
                Mirror(limits.mirror_bytes),
                Feed(transport.recovery, why_lost=transport.why_lost),
                self._ring,
            )
            for rank, transport in enumerate(transports)
        ]
        shared = SharedByFeeds(
            Turns(), ReplaySlots(len(transports), len(transports)), clock, chance
        )
        self._subscribers = [
            Subscriber(RankName("the engine", rank), bridged.feed, bridged, transport, shared)
            for rank, (bridged, transport) in enumerate(zip(self.ranks, transports, strict=True))
        ]
        self.is_stopped = False
        self._rung = False
        self._bell = asyncio.Event()

    @property
    def fault(self) -> Ended | None:
        """Why it cannot be subscribed to now; None if it can."""
        if self.is_stopped:
            return _STOPPED
        faults = (rank.status.fault for rank in self.ranks)
        return next((fault for fault in faults if fault is not None), None)

    async def run(self) -> None:
        """Follows the engine until it is cancelled."""
        tasks = [asyncio.create_task(subscriber.run()) for subscriber in self._subscribers]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for subscriber in self._subscribers:
                await subscriber.close()

    def stop(self) -> None:
        """Ends all streams."""
        self.is_stopped = True
        self._ring()

    def subscribe(self, start: int) -> Subscription | Ended:
        """Starts a stream at this number, or returns why it cannot; see `subscribe` above."""
        return _STOPPED if self.is_stopped else subscribe(self.ranks, start)

    async def next_message(self, subscription: Subscription) -> bytes | Ended:
        """Waits for the next message of a stream, or its end, and returns it."""
        while True:
            bell = self._bell
            message = _STOPPED if self.is_stopped else subscription.take()
            if message is not None:
                return message
            await bell.wait()

    def _ring(self) -> None:
        """Wakes the streams soon: events that arrive until then go into one batch."""
        if not self._rung:
            self._rung = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._rung = False
        for rank in self.ranks:
            rank.flush()
        self._bell.set()
        self._bell = asyncio.Event()


class BridgeServer:
    """Serves one bridge on host:port; port 0 takes a free port."""

    def __init__(self, bridge: Bridge, listen: str) -> None:
        self.port = 0
        self._bridge = bridge
        self._listen = listen
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=bridge.max_streams,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_ping_strikes", 0),
            ],
        )
        self._server.add_generic_rpc_handlers(handlers(bridge))

    async def start(self) -> None:
        """Listens.

        Raises:
            OSError: the address cannot be bound.
        """
        try:
            self.port = self._server.add_insecure_port(self._listen)
        except RuntimeError:
            raise OSError(f"cannot listen on {self._listen}: is it taken?") from None
        await self._server.start()

    async def stop(self) -> None:
        """Ends the streams with UNAVAILABLE, then the server."""
        self._bridge.stop()
        await self._server.stop(DRAIN_SECONDS)


def handlers(bridge: Bridge) -> Sequence[grpc.GenericRpcHandler]:
    """Returns the handlers of the bridge's services, for the caller's own grpc.aio server."""
    subscribe = grpc.unary_stream_rpc_method_handler(_Subscribe(bridge).stream)
    health = _Health(bridge)
    checks = {
        "Check": grpc.unary_unary_rpc_method_handler(health.check),
        "Watch": grpc.unary_stream_rpc_method_handler(health.watch),
    }
    services = {name: {"SubscribeKvEvents": subscribe} for name in SERVICES.values()}
    return [
        grpc.method_handlers_generic_handler(name, methods)
        for name, methods in {**services, "grpc.health.v1.Health": checks}.items()
    ]


class _Subscribe:
    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    async def stream(
        self, request: bytes, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        try:
            start = SubscribeKvEventsRequest.FromString(request).start_sequence_number
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no SubscribeKvEventsRequest")
            return
        stream = self._bridge.subscribe(start)
        if isinstance(stream, Ended):  # before the metadata: a refusal, not a failure
            await _end(context, stream)
        log.info("stream to %s starts at %s", context.peer(), start or "the current state")
        await context.send_initial_metadata(())
        try:
            while isinstance(message := await self._bridge.next_message(stream), bytes):
                yield message
        except asyncio.CancelledError:
            log.info("stream to %s ends: the subscriber disconnected", context.peer())
            raise
        await _end(context, message)


async def _end(context: grpc.aio.ServicerContext, ended: Ended) -> NoReturn:
    log.info("stream to %s ends: %s: %s", context.peer(), ended.status, ended.reason)
    await context.abort(grpc.StatusCode[ended.status], ended.reason)
    raise AssertionError  # abort raises


class _Health:
    """Answers SERVING, for any service name, while the bridge can be subscribed to."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    @property
    def _status(self) -> bytes:
        return _SERVING if self._bridge.fault is None else _NOT_SERVING

    async def check(self, _request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        return self._status

    async def watch(
        self, _request: bytes, _context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        sent = b""
        while not self._bridge.is_stopped:
            if self._status != sent:
                sent = self._status
                yield sent
            await asyncio.sleep(_HEALTH_SECONDS)
