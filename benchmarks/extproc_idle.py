"""ext_proc servers that decide nothing, each in its own process.

python benchmarks/extproc_idle.py {grpc.aio,grpclib,lean} IP:PORT
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import uvloop

# The benchmark's own name would hide the package of our messages.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from extproc._core import Budget
from extproc.config.schema import Config, ExtProc
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.pb.kvsteer_ext_proc_pb2 import (
    BodyResponse,
    HeadersResponse,
    ProcessingRequest,
    ProcessingResponse,
    TrailersResponse,
)
from extproc.serving.proxy_decoder import ProxyDecoder
from extproc.serving.proxy_message import NAMES, ProxyMessage
from extproc.serving.stream import StreamSettings
from kvstate.fleet import FollowedWorkers

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
MAX_BYTES = 8 * 1024 * 1024

GO_ON = {
    "request_headers": ProcessingResponse(request_headers=HeadersResponse()),
    "request_body": ProcessingResponse(request_body=BodyResponse()),
    "request_trailers": ProcessingResponse(request_trailers=TrailersResponse()),
    "response_trailers": ProcessingResponse(response_trailers=TrailersResponse()),
}


LEAN_GO_ON = {NAMES[name]: answer.SerializeToString() for name, answer in GO_ON.items()}


def answer(message: ProcessingRequest) -> ProcessingResponse:
    """Answers CONTINUE."""
    return GO_ON[message.WhichOneof("request")]


async def process(requests: AsyncIterator[ProcessingRequest], _: Any) -> AsyncIterator[Any]:
    """Serves one stream of grpc.aio."""
    async for message in requests:
        yield answer(message)


async def serve_grpc_aio(listen: str) -> None:
    """Serves on grpc.aio."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MAX_BYTES),
            ("grpc.max_concurrent_streams", 100_000),
        ]
    )
    handler = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=ProcessingRequest.FromString,
        response_serializer=ProcessingResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),)
    )
    server.add_insecure_port(listen)
    await server.start()
    await server.wait_for_termination()


async def serve_grpclib(listen: str) -> None:
    """Serves on grpclib."""
    from grpclib.const import Cardinality, Handler
    from grpclib.server import Server

    async def grpclib_process(stream: Any) -> None:
        async for message in stream:
            await stream.send_message(answer(message))

    class Service:
        def __mapping__(self) -> dict[str, Any]:
            handler = Handler(
                grpclib_process, Cardinality.STREAM_STREAM, ProcessingRequest, ProcessingResponse
            )
            return {f"/{SERVICE}/Process": handler}

    server = Server([Service()])
    host, _, port = listen.rpartition(":")
    await server.start(host, int(port))
    await server.wait_closed()


class IdleExchange:
    """A stream on the lean server that always answers CONTINUE."""

    def step(self, message: ProxyMessage) -> list[bytes]:
        return [LEAN_GO_ON[message.kind]]

    def close(self) -> None:
        pass


class IdleService:
    """The service that the lean server needs, without a router."""

    is_traced = False
    joining = None  # no message is long

    def __init__(self, listen: str) -> None:
        self.config = Config(extproc=ExtProc(listen=listen))
        self.stream_settings = StreamSettings(MAX_BYTES, Budget(MAX_BYTES))
        self.decoder = ProxyDecoder(self.stream_settings.header_names())
        self.metrics = Metrics(
            Workers(self.config, FollowedWorkers(1, lambda: 0.0), lambda _: []).states
        )

    def open(self, _: str = "") -> IdleExchange:
        return IdleExchange()


async def serve_lean(listen: str) -> None:
    """Serves on the lean server."""
    from extproc.serving.lean_server import LeanServer

    server = LeanServer(cast("Any", IdleService(listen)), lambda: True)
    await server.start()
    await asyncio.Event().wait()


SERVERS = {"grpc.aio": serve_grpc_aio, "grpclib": serve_grpclib, "lean": serve_lean}


def main() -> None:
    """Serves until the process is ended."""
    name, listen = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(SERVERS[name](listen))


if __name__ == "__main__":
    main()
