"""A server with a router behind it, and a real gRPC channel to it."""

from pathlib import Path
from random import Random

import grpc

from extproc.config.reader import parse
from extproc.config.schema import Config
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from extproc.pb.kvsteer_health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.serving.certificates import Certificates
from extproc.serving.exchange import Exchange, Service
from extproc.serving.lean_server import LeanServer
from extproc.serving.router import Router
from extproc.serving.server_bounds import USUAL, ServerBounds
from kvstate.fleet import FollowedWorkers
from tests.extproc.serving.routers import Failing
from tests.ports import free_port

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
PROMPT = b'{"model": "m", "prompt": [1, 2, 3]}'
WORKER = "10.0.0.1:1"


def listen_at(transport: str, folder: Path) -> str:
    """A free address to listen on; transport: tcp or unix."""
    return f"127.0.0.1:{free_port()}" if transport == "tcp" else f"unix:{folder}/socket"


class Opening(Service):
    """Keeps the parents of the streams' traces, and may open one exchange of the test's own."""

    exchange: Exchange | None = None

    def __init__(self, config: Config, router: Router, metrics: Metrics) -> None:
        super().__init__(config, router, metrics)
        self.parents: list[str] = []

    def open(self, traceparent: str = "") -> Exchange:
        self.parents.append(traceparent)
        return self.exchange or super().open(traceparent)


class Running:
    """One server, and what is behind it."""

    def __init__(
        self,
        listen: str,
        options: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        bounds: ServerBounds = USUAL,
    ) -> None:
        served = f"models: [{{name: m}}]\nworkers: [{{endpoint: '{WORKER}'}}]"
        text = f"extproc: {{listen: '{listen}'{options}}}\n{served}"
        config = parse(text, "c")
        workers = Workers(config, FollowedWorkers(12345678, lambda: 0.0), lambda _: [])
        self.listen = listen
        self.ready = True
        self.metrics = Metrics(workers.states)
        self.router = Failing(config, workers, {}, self.metrics, Random(0))
        self.service = Opening(config, self.router, self.metrics)
        tls = config.extproc.tls
        self.certificates = None if tls is None else Certificates(tls)
        self.server = LeanServer(
            self.service, lambda: self.ready, certificates=self.certificates, bounds=bounds
        )
        self.channel = self.connect(credentials)

    def connect(self, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
        """A channel that shares its connection with no other."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        if credentials is None:
            return grpc.aio.insecure_channel(self.listen, options)
        return grpc.aio.secure_channel(self.listen, credentials, options)

    def process(self) -> grpc.aio.StreamStreamCall:
        """A new ext_proc stream."""
        return self.channel.stream_stream(
            PROCESS,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )()

    async def health(self, service: str, channel: grpc.aio.Channel | None = None) -> int:
        """The status that Check returns."""
        check = (channel or self.channel).unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        status: int = (await check(HealthCheckRequest(service=service))).status
        return status

    def watch(self, service: str = "") -> grpc.aio.UnaryStreamCall:
        """A new call of Watch."""
        return self.channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )(HealthCheckRequest(service=service))

    @property
    def in_flight(self) -> int:
        """The requests booked on the worker."""
        return self.router.in_flight(WORKER)

    async def stop(self) -> None:
        """Stops everything."""
        await self.channel.close()
        await self.server.stop()
        self.router.close()
