"""gRPC feeds: one `SubscribeKvEvents` stream per worker, for all its ranks.

The request names the first batch wanted. A new stream starts at the last batch that every rank has
received, so that this batch, coming again, proves that the publisher is the same. SMG's Rust
servicer keeps a history for that. Its Python relay keeps none and answers OUT_OF_RANGE; then the
stream starts at 0, which returns a snapshot or the whole history from the servicer, and only live
batches from the relay. OUT_OF_RANGE and DATA_LOSS both mean: subscribe again from 0.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc

from kvstate.errors import WireError
from kvstate.events import Batch, BlocksStored
from kvstate.feeds.backoff import Backoff
from kvstate.feeds.feed_sources import GrpcSource, Recovery
from kvstate.feeds.grpc_limits import USUAL, GrpcLimits
from kvstate.feeds.shared_connection import Mark, RankTransport, SharedConnection
from kvstate.feeds.slices import sliced
from kvstate.feeds.transport import (
    Connected,
    Disconnected,
    LoadReport,
    Malformed,
    Refused,
    SnapshotBegun,
)
from kvstate.pb.kvsteer_kv_events_pb2 import KvEventBatch, SubscribeKvEventsRequest
from kvstate.wire.grpc_wire import decoding, load_of, parsing, rank_of, snapshot_of

# The gRPC service that has the method, by engine.
SERVICES = {
    "vllm": "vllm.grpc.engine.VllmEngine",
    "sglang": "sglang.grpc.scheduler.SglangScheduler",
    "trtllm": "trtllm.TrtllmService",
    "tokenspeed": "tokenspeed.grpc.scheduler.TokenSpeedScheduler",
}

_OPTIONS = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # an idle engine sends none
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # the longest time of one attempt
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # workers are near: ignore a proxy set in the environment
)


# The call of a subscription; its messages stay serialized. grpc.aio is not typed.
Subscribe = Callable[[SubscribeKvEventsRequest], Any]


@contextlib.asynccontextmanager
async def subscribing(
    source: GrpcSource, keepalive_ms: int, limits: GrpcLimits
) -> AsyncIterator[Subscribe]:
    """Opens a channel to a source, pinged at this interval, and yields its subscription call."""
    options = (
        *_OPTIONS,
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", limits.keepalive_timeout_ms),
        (
            "grpc.http2.ping_timeout_ms",
            limits.keepalive_timeout_ms,
        ),  # the option that gRPC 1.85 follows
        ("grpc.max_receive_message_length", limits.max_message_bytes),
    )
    async with grpc.aio.insecure_channel(source.target, options=options) as channel:
        yield channel.unary_stream(
            f"/{SERVICES[source.service]}/SubscribeKvEvents",
            request_serializer=SubscribeKvEventsRequest.SerializeToString,
        )


_SKIPPED = "the publisher skipped them"

# The server cannot continue from our position.
_STARTS_OVER = (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DATA_LOSS)
_TOO_MANY_PINGS = "oo many pings"
_MAX_DETAILS = 1000  # characters examined, not necessarily shown

# The prefix of gRPC's connection errors; the text of the system or the peer follows it.
_NOT_CONNECTED = re.compile(
    r"failed to connect to all addresses; last error: \w+: (?:ipv4|ipv6|unix):\S+: "
    r"(?:Failed to connect to remote host: )?"
)


class _Lost(Exception):
    """The stream can no longer be used, for this reason.

    starts_over: earlier batches cannot be trusted either, so the next stream requests everything,
    at once.
    """

    def __init__(self, reason: str, *, starts_over: bool = False) -> None:
        super().__init__(reason)
        self.starts_over = starts_over


class _GrpcFeeds:
    """Serves the feeds of one worker's ranks over one stream."""

    def __init__(self, source: GrpcSource, chance: Callable[[], float], limits: GrpcLimits) -> None:
        self._source = source
        self._chance = chance
        self._limits = limits
        self._shared = SharedConnection(
            source.target, source.ranks, Recovery.RESUME, _SKIPPED, self._follow, limits.queue
        )
        self._retries = Backoff(*limits.retry_seconds, chance)
        self._keepalive_ms = limits.keepalive_ms
        self._from_zero = False
        self._had: dict[int, Mark] = {}  # by rank: the last batch before a stream that resumes
        self._has_heartbeats = False
        self._full_block_size = 0
        self._was_connected = False
        self._began_at: float | None = None

    @property
    def transports(self) -> list[RankTransport]:
        """One for each rank, in order."""
        return self._shared.transports

    async def _follow(self) -> None:
        """Subscribes again and again, over one channel for as long as it works."""
        keepalive_ms = self._keepalive_ms
        self._began_at = self._began_at or asyncio.get_running_loop().time()
        async with subscribing(self._source, keepalive_ms, self._limits) as subscribe:
            while keepalive_ms == self._keepalive_ms:
                seconds = await self._stream(subscribe)
                await asyncio.sleep(seconds)

    async def _stream(self, subscribe: Subscribe) -> float:
        """Follows one stream to its end; returns the seconds until the next."""
        start = self._start()
        request = SubscribeKvEventsRequest(
            start_sequence_number=start, load_records_before_first_batch=True
        )
        call = subscribe(request)
        try:
            await self._begin(call)
            await self._read(call)
        except grpc.aio.AioRpcError as error:
            return self._refused_or_lost(error.code(), error.details() or "", start)
        except _Lost as lost:
            self._from_zero = lost.starts_over
            self._tell_lost(str(lost))
            return 0.0 if lost.starts_over else self._retries.next_seconds()
        finally:
            call.cancel()

    def _start(self) -> int:
        """The number to start from: the last batch that all ranks have, 0 for everything."""
        marks = [each.last_taken for each in self.transports if not each.is_closed]
        had = [mark.sequence for mark in marks if mark is not None]
        start = 0 if self._from_zero or len(had) < len(marks) else min(had)
        self._had = {
            rank: each.last_taken
            for rank, each in enumerate(self.transports)
            if start and each.last_taken is not None
        }
        return start

    async def _begin(self, call: Any) -> None:
        try:
            async with asyncio.timeout(self._limits.subscribe_seconds):
                await call.wait_for_connection()
        except TimeoutError:
            seconds = self._limits.subscribe_seconds
            raise _Lost(f"no answer to the subscription in {seconds:g} s") from None
        self._from_zero = False
        self._has_heartbeats = False
        self._was_connected = True
        self._shared.tell(Connected())

    async def _read(self, call: Any) -> NoReturn:
        """Processes the stream's messages until it ends with an exception."""
        while True:
            patience_seconds = self._limits.heartbeat_seconds if self._has_heartbeats else None
            try:
                async with asyncio.timeout(patience_seconds):
                    raw = await call.read()
            except TimeoutError:
                raise _Lost(f"no heartbeat for {patience_seconds:g} s") from None
            if raw is grpc.aio.EOF:
                raise _Lost("the server ended the stream")
            await self._take(raw)

    async def _take(self, raw: bytes) -> None:
        try:
            message = await sliced(parsing(raw), self._limits.slice_seconds)
        except WireError:  # the next number shows which rank it was for
            await self.transports[0].hand(Malformed())
            return
        rank = rank_of(message)
        transport = self._shared.of_rank(rank)
        if transport is None:
            return
        load = load_of(message)
        if load is not None:
            await transport.hand(LoadReport(load))
        if message.load.load_only:
            self._has_heartbeats = True
            return
        span = snapshot_of(message)
        if span is not None:
            await transport.hand(SnapshotBegun(*span))
        self._prove(rank, message)
        batch = await self._batch(message)
        await transport.hand(batch, len(raw))

    async def _batch(self, message: KvEventBatch) -> Batch:
        """Decodes a batch; TensorRT-LLM's batches show the size of a full block."""
        events = await sliced(decoding(message, self._full_block_size), self._limits.slice_seconds)
        if self._source.service == "trtllm":
            sizes = (each.block_size for each in events.events if isinstance(each, BlocksStored))
            self._full_block_size = max(self._full_block_size, *sizes, 0)
        return Batch(message.sequence_number, events)

    def _prove(self, rank: int, message: KvEventBatch) -> None:
        """Compares a repeated batch with the one received before; a new one resets the backoff."""
        if message.HasField("snapshot"):
            self._had.pop(rank, None)
        had = self._had.get(rank)
        if had is None or message.sequence_number > had.sequence:
            self._retries.reset()
        elif message.sequence_number == had.sequence and message.timestamp != had.stamp:
            raise _Lost(f"batch {had.sequence} came again with different content", starts_over=True)

    def _refused_or_lost(self, code: grpc.StatusCode, details: str, start: int) -> float:
        """Handles a status other than OK; returns the seconds until the next try."""
        words = " ".join(details[:_MAX_DETAILS].split())
        if code is grpc.StatusCode.UNIMPLEMENTED:
            self._from_zero = True
            self._shared.tell(Refused(f"publishes no events: {words}"))
            return self._limits.refused_seconds * (0.5 + self._chance())
        if code in _STARTS_OVER:
            self._from_zero = True
        if _TOO_MANY_PINGS in words:
            self._keepalive_ms = self._limits.long_keepalive_ms
        not_connected = _NOT_CONNECTED.match(words)
        if not_connected is None:
            self._tell_lost(f"{code.name}: {words}")
        else:
            self._tell_lost(f"cannot connect: {words[not_connected.end() :]}")
        return (
            0.0 if start and code is grpc.StatusCode.OUT_OF_RANGE else self._retries.next_seconds()
        )

    def _tell_lost(self, reason: str) -> None:
        """Reports that there is no connection; with a delay if there never was one."""
        since = asyncio.get_running_loop().time() - (self._began_at or 0.0)
        if self._was_connected or since >= self._limits.unreached_seconds:
            self._shared.tell(Disconnected(reason))


def grpc_transports(
    source: GrpcSource, chance: Callable[[], float], limits: GrpcLimits = USUAL
) -> list[RankTransport]:
    """Returns the transports of one worker's ranks, in order, over one stream.

    chance: 0 to 1, for the jitter of tries.
    """
    return _GrpcFeeds(source, chance, limits).transports
