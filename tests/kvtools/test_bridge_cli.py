"""`kvsteer bridge` as a process, between engines' real sockets and real gRPC."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from extproc.__main__ import main
from kvstate.pb.kvsteer_kv_events_pb2 import KvEventBatch, SubscribeKvEventsRequest

PATIENCE_SECONDS = 60.0
LISTENING = re.compile(r"kvsteer bridge: serving SubscribeKvEvents on 127\.0\.0\.1:(\d+)\n")
NOT_SERVING = b"\x08\x02"
SERVING = b"\x08\x01"


class Bridge:
    """A running bridge, and a channel to it."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")

    async def serves(self) -> None:
        """Waits until the bridge has reached its engine."""
        watch = self.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await watch.read() != SERVING:
                pass
        watch.cancel()

    def subscribe(self, start: int = 0) -> grpc.aio.UnaryStreamCall:
        call = self.channel.unary_stream(
            "/trtllm.TrtllmService/SubscribeKvEvents",
            request_serializer=SubscribeKvEventsRequest.SerializeToString,
            response_deserializer=KvEventBatch.FromString,
        )
        return call(SubscribeKvEventsRequest(start_sequence_number=start))

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.process.wait()


@asynccontextmanager
async def bridge(*options: str) -> AsyncIterator[Bridge]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "extproc",
        "bridge",
        "--listen",
        "127.0.0.1:0",
        *options,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            line = await process.stdout.readline()
        listening = LISTENING.fullmatch(line.decode())
        assert listening is not None, line
        running = Bridge(process, int(listening[1]))
        yield running
        await running.channel.close()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def read(stream: grpc.aio.UnaryStreamCall) -> KvEventBatch:
    async with asyncio.timeout(PATIENCE_SECONDS):
        batch = await stream.read()
    assert isinstance(batch, KvEventBatch)
    return batch


async def end(stream: grpc.aio.UnaryStreamCall) -> str:
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
    return str(caught.value.code().name)


async def test_engine_over_zmq_is_bridged_until_the_bridge_gets_a_signal() -> None:
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.PUB)
    publisher.set(zmq.LINGER, 0)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    try:
        async with bridge("--zmq", f"tcp://127.0.0.1:{port}", "--topic", "kv") as running:
            await running.serves()
            stream = running.subscribe()
            assert (await read(stream)).snapshot.unknown_before == 1
            payload = msgspec.msgpack.encode([1.0, [["BlockStored", [7], None, [3], 1]], 0])
            await publisher.send_multipart([b"kv", (5).to_bytes(8, "big"), payload])
            (event,) = (await read(stream)).events
            assert [block.block_hash for block in event.stored.blocks] == [7]
            running.process.send_signal(signal.SIGTERM)
            assert await end(stream) == "UNAVAILABLE"
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert await running.process.wait() == 0
    finally:
        context.destroy()


@asynccontextmanager
async def tensorrt_llm(status: int, *drains: object) -> AsyncIterator[str]:
    """Runs a server whose events can be drained; yields its URL."""
    waiting = list(drains)

    async def drain(_: web.Request) -> web.Response:
        body = json.dumps(waiting.pop(0) if waiting else [])
        return web.Response(status=status, text=body, content_type="application/json")

    application = web.Application()
    application.router.add_post("/kv_cache_events", drain)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def test_drained_engine_is_bridged_to_two_gateways() -> None:
    tokens = [{"token_id": token, "token_extra_id": 0} for token in (1, 2)]
    blocks = [{"block_hash": 2**64 - 1, "tokens": tokens, "cache_level": 0}]
    stored = {"type": "stored", "parent_hash": None, "blocks": blocks}
    events = [{"event_id": 0, "data": {"type": "created"}}, {"event_id": 1, "data": stored}]
    async with tensorrt_llm(200, events) as url, bridge("--trtllm", f"{url}/") as running:
        await running.serves()
        for stream in (running.subscribe(), running.subscribe()):
            shown: list[int] = []
            while not shown:
                batch = await read(stream)
                shown = [b.block_hash for event in batch.events for b in event.stored.blocks]
            assert shown == [-1]
        assert await running.stop() == 0


async def test_server_without_events_is_unimplemented() -> None:
    async with tensorrt_llm(404) as url, bridge("--trtllm", url) as running:
        status = "UNAVAILABLE"
        async with asyncio.timeout(PATIENCE_SECONDS):
            while status == "UNAVAILABLE":  # the engine was not asked yet
                status = await end(running.subscribe())
        assert status == "UNIMPLEMENTED"
        assert await running.stop() == 0


async def test_unreachable_engine_is_unavailable() -> None:
    async with bridge("--zmq", "tcp://127.0.0.1:9", "--replay", "tcp://127.0.0.1:10") as running:
        assert await end(running.subscribe()) == "UNAVAILABLE"
        check = running.channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"") == NOT_SERVING
        assert await running.stop() == 0


ZMQ = ["--zmq", "tcp://127.0.0.1:5557"]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--zmq", "5557"], "--zmq: must be tcp://host:port, is '5557'"),
        ([*ZMQ, "--replay", "udp://x:1"], "--replay: must be tcp://host:port, is 'udp://x:1'"),
        (["--trtllm", "https://x:1"], "--trtllm: must be http://host:port, is 'https://x:1'"),
        ([*ZMQ, "--listen", "x"], "--listen: must be host:port, is 'x'"),
        (["--trtllm", "http://x:1", "--replay", "tcp://x:1"], "--replay: needs --zmq"),
        ([*ZMQ, "--replay", ZMQ[1]], "--replay: has the port of --zmq"),
        (
            [*ZMQ, "--replay", "tcp://127.0.0.1:5558", "--ranks", "2"],
            "--ranks: with 2 ranks the ports of --zmq and --replay overlap",
        ),
        (
            ["--zmq", "tcp://127.0.0.1:65535", "--ranks", "2"],
            "--ranks: with 2 ranks a port is above 65535",
        ),
    ],
)
def test_unusable_options_are_named(
    options: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bridge", *options]) == 2
    assert capsys.readouterr().err == f"kvsteer: bridge: {shown}\n"


def test_bridge_reports_all_faults_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bridge", "--zmq", "1", "--listen", "2"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "one of the arguments --zmq --trtllm is required"),
        ([*ZMQ, "--ranks", "0"], "--ranks: must be a whole number above 0, is '0'"),
        ([*ZMQ, "--history-bytes", "x"], "--history-bytes: must be a whole number above 0, is 'x'"),
    ],
)
def test_options_that_argparse_refuses_end_with_2(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bridge", *options])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "extproc", "bridge", *ZMQ, "--listen", listen]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    fault = f"kvsteer: --listen: cannot listen on {listen}: is it taken?"
    assert run.stderr.splitlines()[-1] == fault
