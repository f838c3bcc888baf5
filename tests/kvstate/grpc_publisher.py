"""A server of SubscribeKvEvents for tests, with a history to resume from."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvstate.feeds.grpc_transport import SERVICES
from kvstate.feeds.transport import FeedTransport, Signal
from kvstate.pb.kvsteer_kv_events_pb2 import (
    KvBlock,
    KvBlocksStored,
    KvCacheEvent,
    KvEventBatch,
    SubscribeKvEventsRequest,
)
from tests.kvstate.publishing import PATIENCE_SECONDS


def store(number: int, parent: int | None = None, tokens: tuple[int, ...] = ()) -> KvCacheEvent:
    """The event that stores block `number`; without `tokens`, of one token, its number."""
    tokens = tokens or (number,)
    block = KvBlock(block_hash=number, token_ids=tokens, block_size=len(tokens))
    return KvCacheEvent(stored=KvBlocksStored(blocks=[block], parent_block_hash=parent))


def batch(number: int, *events: KvCacheEvent, life: int = 0, **fields: Any) -> KvEventBatch:
    """Batch `number` of a publisher's life-th incarnation."""
    stamp = 1000.0 * life + number + 1
    return KvEventBatch(sequence_number=number, timestamp=stamp, events=events, **fields)


class GrpcPublisher:
    """A publisher whose fields control its behaviour, at any time.

    history: the messages to send. kept_from: a start below it, except 0, is out of range.
    refusal: a status and words for every new stream. starts: the requested starts so far.
    """

    def __init__(self) -> None:
        self.history: list[KvEventBatch | bytes] = []
        self.kept_from = 0
        self.answers = True
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.starts: list[int] = []
        self.sent = 0
        self._changed = asyncio.Event()
        self._streams = 0
        self._end: tuple[grpc.StatusCode, str] | None = None

    def publish(self, *messages: KvEventBatch | bytes) -> None:
        """Sends to all streams, and to those that come later."""
        self.history += messages
        self._wake()

    def end(self, code: grpc.StatusCode = grpc.StatusCode.OK, words: str = "") -> None:
        """Ends the present streams."""
        self._end = code, words
        self._streams += 1
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def subscribe(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        """Serves one stream."""
        request = SubscribeKvEventsRequest.FromString(raw)
        assert request.load_records_before_first_batch
        start = request.start_sequence_number
        self.starts.append(start)
        if not self.answers:
            await asyncio.Event().wait()
        if self.refusal is not None:
            await context.abort(*self.refusal)
        if 0 < start < self.kept_from:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "no longer kept")
        await context.send_initial_metadata(())
        stream, position = self._streams, 0
        while stream == self._streams:
            while stream == self._streams and position < len(self.history):
                message = self.history[position]
                position += 1
                if isinstance(message, bytes):
                    yield message
                elif message.sequence_number >= start:
                    self.sent += 1
                    yield message.SerializeToString()
            if stream == self._streams:
                await self._changed.wait()
        if self._end is not None and self._end[0] is not grpc.StatusCode.OK:
            await context.abort(*self._end)


@asynccontextmanager
async def serving(
    publisher: GrpcPublisher, port: int = 0, options: tuple[tuple[str, int], ...] = ()
) -> AsyncIterator[int]:
    """Serves under all service names on 127.0.0.1; yields the port."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0), *options))
    method = {"SubscribeKvEvents": grpc.unary_stream_rpc_method_handler(publisher.subscribe)}
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, method) for name in SERVICES.values()]
    )
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def received(transport: FeedTransport, count: int) -> list[Signal]:
    """The next `count` signals, and those that the transport hands on together with the last."""
    signals: list[Signal] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(signals) < count:
            signals += await transport.receive()
    return signals
