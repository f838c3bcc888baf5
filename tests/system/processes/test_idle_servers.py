"""The idle servers that benchmarks compare the router with: they have to answer like it."""

import asyncio
import sys
from pathlib import Path

import grpc
import pytest

from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from tests.extproc.messages import body, head
from tests.extproc.serving.running import PROCESS, PROMPT
from tests.ports import free_port

IDLE = Path(__file__).parents[3] / "benchmarks" / "extproc_idle.py"


@pytest.mark.parametrize("server", ["lean", "grpc.aio"])
async def test_idle_server_lets_every_message_continue(server: str) -> None:
    listen = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(sys.executable, str(IDLE), server, listen)
    try:
        async with grpc.aio.insecure_channel(listen) as channel:
            call = channel.stream_stream(
                PROCESS,
                request_serializer=ProcessingRequest.SerializeToString,
                response_deserializer=ProcessingResponse.FromString,
            )(wait_for_ready=True, timeout=60)
            for message, wanted in (
                (head("/v1/completions"), "request_headers"),
                (body(PROMPT), "request_body"),
            ):
                await call.write(message)
                assert (await call.read()).WhichOneof("response") == wanted
            call.cancel()
    finally:
        process.terminate()
        await process.wait()
