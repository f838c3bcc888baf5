import socket
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import grpc
import pytest

from extproc.config.reader import parse
from extproc.errors import StartError
from extproc.metrics import Metrics
from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingMode, ProcessingRequest, ProcessingResponse
from extproc.pb.kvsteer_health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.router import Router
from extproc.serving.exchange import Service
from extproc.serving.grpc_server import GrpcServer
from extproc.workers.workers import Workers
from kvstate.fleet import Fleet
from tests.e2e.envoy_process import free_port
from tests.extproc.messages import body, head

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
PROMPT = b'{"model": "m", "prompt": [1, 2, 3]}'


class Running:
    """A server, the router behind it, and a channel to it."""

    def __init__(self, listen: str) -> None:
        served = "models: [{name: m}]\nworkers: [{endpoint: '10.0.0.1:1'}]"
        text = f"extproc: {{listen: '{listen}'}}\n{served}"
        config = parse(text, "c")
        workers = Workers(config, Fleet(12345678, lambda: 0.0), lambda _: [])
        self.ready = True
        self.metrics = Metrics()
        self.router = Router(config, workers, {}, self.metrics, Random(0))
        self.server = GrpcServer(Service(config, self.router, self.metrics), lambda: self.ready)
        self.channel = grpc.aio.insecure_channel(listen)

    def process(self) -> grpc.aio.StreamStreamCall:
        return self.channel.stream_stream(
            PROCESS,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )()

    async def health(self, service: str) -> int:
        check = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        status: int = (await check(HealthCheckRequest(service=service))).status
        return status


@pytest.fixture(params=["tcp", "unix"])
async def running(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Running]:
    listen = f"127.0.0.1:{free_port()}" if request.param == "tcp" else f"unix:{tmp_path}/socket"
    one = Running(listen)
    await one.server.start()
    yield one
    await one.channel.close()
    await one.server.stop()
    one.router.close()


async def test_a_stream_places_a_request_and_holds_its_load_until_it_ends(running: Running) -> None:
    call = running.process()
    await call.write(head("/v1/completions"))
    assert (await call.read()).WhichOneof("response") == "request_headers"
    await call.write(body(PROMPT))
    answer = await call.read()
    assert (
        answer.request_body.response.header_mutation.set_headers[0].header.raw_value
        == b"10.0.0.1:1"
    )
    assert running.router.in_flight("10.0.0.1:1") == 1
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert running.router.in_flight("10.0.0.1:1") == 0


async def test_a_cancelled_stream_releases_its_load(running: Running) -> None:
    call = running.process()
    await call.write(head("/metrics"))
    await call.read()
    assert running.router.in_flight("10.0.0.1:1") == 1
    call.cancel()
    async with running.channel:
        while running.router.in_flight("10.0.0.1:1"):
            await running.health("liveness")


async def test_another_dialect_is_refused_and_counted(running: Running) -> None:
    call = running.process()
    await call.write(head(mode=ProcessingMode.FULL_DUPLEX_STREAMED))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert b"kvsteer_protocol_errors_total 1.0" in running.metrics.exposition()


async def test_health_follows_readiness(running: Running) -> None:
    for service in ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        running.ready = True
        assert await running.health(service) == HealthCheckResponse.SERVING
        running.ready = False
        assert await running.health(service) == HealthCheckResponse.NOT_SERVING
    assert await running.health("liveness") == HealthCheckResponse.SERVING


async def test_health_of_an_unknown_service_is_not_found(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.health("nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_can_be_watched(running: Running) -> None:
    watch = running.channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=HealthCheckRequest.SerializeToString,
        response_deserializer=HealthCheckResponse.FromString,
    )(HealthCheckRequest())
    assert (await watch.read()).status == HealthCheckResponse.SERVING
    running.ready = False
    assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
    watch.cancel()


async def test_a_taken_port_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        one = Running(f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(StartError, match=r"extproc\.listen: cannot listen on"):
            await one.server.start()
        one.router.close()


async def test_a_socket_left_behind_is_replaced_but_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    one = Running(f"unix:{path}")
    await one.server.start()
    with pytest.raises(StartError, match="another server listens"):
        await Running(f"unix:{path}").server.start()
    await one.server.stop()
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(StartError, match="is no socket"):
        await Running(f"unix:{file}").server.start()
    assert file.read_text() == "precious"
