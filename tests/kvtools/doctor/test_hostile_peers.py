"""Whatever answers in place of an engine, the doctor ends in time and says what is wrong."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
import zmq
import zmq.asyncio

from extproc.base.address import Address
from extproc.config.schema import Envoy, WorkerEvents, WorkerSettings
from kvstate.wire.zmtp import GREETING
from kvtools.doctor.feed_visit import greet
from kvtools.doctor.findings import MAX_SAID, as_text
from kvtools.doctor.worker_visit import Bounds
from tests.kvtools.doctor.fleet import (
    SILENT_SECONDS,
    codes_of,
    findings_of,
    one_worker,
    with_events,
)

SECONDS = 0.5
PATIENCE_SECONDS = 60.0

Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def garbage(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x1b[2J\x00\xff" * 100)


async def silence(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    while await reader.read(65_536):
        pass


async def endless_body(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"[" * 65_536)
        await writer.drain()


async def a_byte_now_and_then(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for byte in b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.02)


async def nonsense_in_json(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + b"[" * 5000)


async def a_greeting_and_no_end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(GREETING + b"\x04\xff")
    while True:
        writer.write(b"\x00" * 65_536)
        await writer.drain()


@contextlib.asynccontextmanager
async def peer(speak: Speak) -> AsyncIterator[str]:
    """Runs a server that talks to every client like this; yields its host:port."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await speak(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


SMALL = Bounds(answer_bytes=1024 * 1024)

HTTP = [garbage, silence, endless_body, a_byte_now_and_then]
PORTS = [garbage, silence, endless_body, a_byte_now_and_then, nonsense_in_json]


@pytest.mark.parametrize("speak", HTTP)
@pytest.mark.slow
async def test_worker_that_is_no_http_server_is_found_in_time(
    speak: Speak,
) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), peer(speak) as endpoint:
        found = await findings_of(
            WorkerSettings(endpoint), probes=True, seconds=SECONDS, bounds=SMALL
        )
    codes = {one.code for one in found} - {""}
    assert codes
    assert codes <= {"worker-unreachable", "worker-unhealthy", "answer-unreadable"}
    assert as_text(found).replace("\n", "").isprintable()
    assert all(len(one.says) <= MAX_SAID for one in found)


@pytest.mark.slow
async def test_worker_with_malformed_answers_is_found() -> None:
    async with peer(nonsense_in_json) as endpoint:
        worker = WorkerSettings(endpoint, events="auto")
        codes = await codes_of(worker, probes=True, seconds=SILENT_SECONDS)
    assert codes == {"answer-unreadable", "events-untold"}


@pytest.mark.parametrize("speak", PORTS)
@pytest.mark.slow
async def test_port_that_is_no_feed_is_found_in_time(speak: Speak) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), peer(speak) as port, one_worker() as (_, worker):
        wrong = with_events(worker, zmq=f"tcp://{port}", replay=f"tcp://{port}")
        assert await codes_of(wrong, seconds=SILENT_SECONDS) == {"feed-not-zmq", "replay-not-zmq"}


@pytest.mark.slow
async def test_feed_that_only_greets_is_found_in_time() -> None:
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        peer(a_greeting_and_no_end) as port,
        one_worker() as (_, worker),
    ):
        wrong = with_events(worker, zmq=f"tcp://{port}", replay=f"tcp://{port}")
        assert await codes_of(wrong, seconds=SILENT_SECONDS) == {"feed-lost", "replay-silent"}


@pytest.mark.slow
async def test_silent_grpc_feed_is_found_in_time() -> None:
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        peer(silence) as port,
        one_worker() as (_, worker),
    ):
        silent = WorkerSettings(worker.endpoint, events=WorkerEvents(grpc=port))
        assert await codes_of(silent, seconds=6.0) == {"grpc-unreachable"}


@pytest.mark.slow
async def test_endless_feed_is_found_in_time() -> None:
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")

    async def flood() -> None:
        payload = msgspec.msgpack.encode([time.time(), [], 0])
        for sequence in itertools.count():
            await publisher.send_multipart([b"", sequence.to_bytes(8, "big"), payload])
            await asyncio.sleep(0)

    flooding = asyncio.create_task(flood())
    async with asyncio.timeout(PATIENCE_SECONDS), one_worker(dialect="vllm-0.24") as (_, worker):
        wrong = with_events(worker, zmq=f"tcp://127.0.0.1:{port}", replay=None)
        found = await codes_of(wrong, probes=True, seconds=6.0, bounds=Bounds(messages=500))
    flooding.cancel()
    await asyncio.gather(flooding, return_exceptions=True)
    context.destroy(0)
    assert found == {"feed-flooded", "feed-silent"}


@pytest.mark.parametrize("speak", [garbage, endless_body, nonsense_in_json])
@pytest.mark.slow
async def test_admin_server_that_is_not_envoy_ends_in_time(
    speak: Speak,
) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), peer(speak) as port, one_worker() as (_, worker):
        envoy = Envoy(admin=port)
        found = await findings_of(worker, seconds=SILENT_SECONDS, bounds=SMALL, envoy=envoy)
    about_envoy = [one for one in found if one.check == "envoy"]
    assert [one.code for one in about_envoy] in (["envoy-unreadable"], [""])


@pytest.mark.slow
async def test_unresolvable_name_is_refused() -> None:
    assert (await greet(Address("no.such.name.invalid", 1), 10.0)).reason
    assert (await greet(Address("a" * 300, 1), 10.0)).reason
