"""What an engine's gRPC stream may send: nobody else waits for it, and it is asked again slowly."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count, repeat
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstate.feeds.grpc_limits import USUAL
from kvstate.feeds.grpc_transport import SERVICES
from kvstate.pb.kvsteer_kv_events_pb2 import KvEventBatch, SubscribeKvEventsRequest
from tests.kvstate.grpc_publisher import batch, store
from tests.system.attacks.victim import MAX_HELD_SECONDS, MIB, running_victim

MAX_LATENCY_SECONDS = 10.0  # on a machine that does other work, too
MAX_GROWN_BYTES = 256 * MIB

Stream = Callable[[int], Iterator[bytes]]


def _raw(number: int, *tokens: int, **fields: Any) -> bytes:
    return batch(number, store(number, None, tokens or (number,)), **fields).SerializeToString()


def huge(_: int) -> Iterator[bytes]:
    """Batches of almost the longest message, each with one block that is too large."""
    tokens = tuple(range(1_000_000, 1_000_000 + USUAL.max_message_bytes // 4))
    return (_raw(number, *tokens) for number in repeat(1))


def too_long(_: int) -> Iterator[bytes]:
    return repeat(bytes(USUAL.max_message_bytes + 1))


def empty_events(_: int) -> Iterator[bytes]:
    head = KvEventBatch(sequence_number=1, timestamp=1.0).SerializeToString()
    return repeat(head + b"\x1a\x00" * 1_000_000)


def valid(_: int) -> Iterator[bytes]:
    return (_raw(number) for number in count())


def other_ranks(_: int) -> Iterator[bytes]:
    return (_raw(1, dp_rank=number % 2**31) for number in count(1))


def no_messages(_: int) -> Iterator[bytes]:
    return repeat(b"\xff" * 1_000)


def far_numbers(_: int) -> Iterator[bytes]:
    return (batch(number % 2 * (2**64 - 1), store(1)).SerializeToString() for number in count())


def snapshots(_: int) -> Iterator[bytes]:
    for number in count():
        message = batch(number, store(number))
        message.snapshot.count = 1_000_000
        yield message.SerializeToString()


def other_publishers(start: int) -> Iterator[bytes]:
    """What has a number that was had comes again with other content; then the stream ends."""
    return iter([_raw(start, life=time.monotonic_ns()), _raw(start + 1, life=1)])


def ends(_: int) -> Iterator[bytes]:
    return iter(())


def one_and_end(start: int) -> Iterator[bytes]:
    return iter([_raw(start + 1)])


FLOODS: dict[str, Stream] = {
    one.__name__: one
    for one in (
        huge,
        empty_events,
        valid,
        other_ranks,
        no_messages,
        far_numbers,
        snapshots,
    )
}
STORMS: dict[str, Stream] = {
    one.__name__: one for one in (too_long, ends, one_and_end, other_publishers)
}


class Engine:
    """Answers each subscription with a stream. starts: those asked for."""

    def __init__(self, stream: Stream, code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        self._stream, self._code = stream, code
        self.starts: list[int] = []
        self.flooding = asyncio.Event()

    async def subscribe(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        start = SubscribeKvEventsRequest.FromString(raw).start_sequence_number
        self.starts.append(start)
        await context.send_initial_metadata(())
        await self.flooding.wait()
        for message in self._stream(start):
            yield message
        if self._code is not grpc.StatusCode.OK:
            await context.abort(self._code, "")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        """Serves until the block ends; yields the port."""
        options = (("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0))
        server = grpc.aio.server(options=options)
        method = {"SubscribeKvEvents": grpc.unary_stream_rpc_method_handler(self.subscribe)}
        handler = grpc.method_handlers_generic_handler(SERVICES["vllm"], method)
        server.add_generic_rpc_handlers([handler])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield port
        finally:
            await server.stop(None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FLOODS)
async def test_hostile_engine_stream_blocks_neither_loop_nor_log(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine(FLOODS[kind])
    async with engine.running() as port:
        with running_victim(tmp_path, f"events: {{grpc: '127.0.0.1:{port}'}}") as victim:
            async with victim.probed(at_least=40) as harm:
                engine.flooding.set()
            (feed,) = await victim.feeds()
            log = victim.log_text()
    with capsys.disabled():
        print(f"\n{kind}: {harm}; {feed['state']}: {feed['reason']}; {len(engine.starts)} streams")
    assert harm.worst_held < MAX_HELD_SECONDS, harm
    assert harm.quantile(1.0) < MAX_LATENCY_SECONDS, harm
    assert harm.grown_bytes < MAX_GROWN_BYTES, harm
    assert "Traceback" not in log
    assert log.count("\n") < 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code"),
    [
        *((kind, grpc.StatusCode.OK) for kind in STORMS),
        ("one_and_end", grpc.StatusCode.OUT_OF_RANGE),
        ("ends", grpc.StatusCode.OUT_OF_RANGE),
        ("other_publishers", grpc.StatusCode.DATA_LOSS),
        ("ends", grpc.StatusCode.UNIMPLEMENTED),
    ],
)
async def test_engine_whose_streams_end_at_once_is_asked_again_slowly(
    kind: str, code: grpc.StatusCode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine(STORMS[kind], code)
    async with engine.running() as port:
        with running_victim(tmp_path, f"events: {{grpc: '127.0.0.1:{port}'}}") as victim:
            began = time.monotonic()
            async with victim.probed(at_least=40) as harm:
                engine.flooding.set()
            (feed,) = await victim.feeds()
            log = victim.log_text()
            asked, seconds = len(engine.starts), time.monotonic() - began
    with capsys.disabled():
        print(f"\n{kind}, {code.name}: {asked} streams in {seconds:.1f} s; {harm};")
        print(f"{feed['state']}: {feed['reason']}; {log.count(chr(10))} lines")
    assert asked <= 5 + 25 * seconds
    assert harm.worst_held < MAX_HELD_SECONDS, harm
    assert "Traceback" not in log
    assert log.count("\n") < 200
