"""The gRPC server on grpc.aio: carries messages between Envoy and `extproc.serving.stream`."""

import asyncio
import logging
import socket
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc

from extproc import address
from extproc.config import Config
from extproc.errors import ProtocolError, StartError
from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from extproc.pb.kvsteer_health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.serving.exchange import Service

log = logging.getLogger("kvsteer.extproc")

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

# Names under which health is asked for; "" is the whole server.
LIVENESS = "liveness"
READINESS = "readiness"

# What a message carries besides the body: headers, which Envoy limits to 60 KiB by default.
_MESSAGE_OVERHEAD_BYTES = 1024 * 1024

# One open stream for every request in flight; grpc's own limit is as good as none.
_MAX_STREAMS = 100_000

DRAIN_SECONDS = 5.0


class GrpcServer:
    """Serves ext_proc and gRPC health."""

    def __init__(self, service: Service, is_ready: Callable[[], bool]) -> None:
        self._service = service
        self._config = service.config
        self._is_ready = is_ready
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", _max_message_bytes(service.config)),
                ("grpc.max_concurrent_streams", _MAX_STREAMS),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_ping_strikes", 0),
            ]
        )
        self._server.add_generic_rpc_handlers((self._ext_proc_handler(), self._health_handler()))

    async def start(self) -> None:
        """Listens.

        Raises:
            StartError: the address cannot be bound.
        """
        listen = self._config.extproc.listen
        if listen.startswith(address.UNIX_PREFIX):
            _remove_stale_socket(Path(listen.removeprefix(address.UNIX_PREFIX)))
        try:
            self._server.add_insecure_port(listen)
        except RuntimeError:
            raise StartError(f"extproc.listen: cannot listen on {listen}: is it taken?") from None
        await self._server.start()

    async def stop(self) -> None:
        """Takes no new streams and gives those under way a moment."""
        await self._server.stop(DRAIN_SECONDS)

    async def process(
        self, requests: AsyncIterator[ProcessingRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[ProcessingResponse]:
        """One ext_proc stream: as long as the HTTP request and its response."""
        exchange = self._service.open()
        try:
            async for message in requests:
                answers = exchange.receive(message)
                for answer in answers if isinstance(answers, list) else await answers:
                    yield answer
        except ProtocolError as error:
            self._service.metrics.protocol_errors.inc()
            log.warning("stream ended: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            exchange.close()

    def _ext_proc_handler(self) -> grpc.GenericRpcHandler:
        process = grpc.stream_stream_rpc_method_handler(
            self.process,
            request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})

    def _health_handler(self) -> grpc.GenericRpcHandler:
        handlers = {
            "Check": grpc.unary_unary_rpc_method_handler(
                self._check,
                request_deserializer=HealthCheckRequest.FromString,
                response_serializer=HealthCheckResponse.SerializeToString,
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                self._watch,
                request_deserializer=HealthCheckRequest.FromString,
                response_serializer=HealthCheckResponse.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers)

    def _health(self, service: str) -> HealthCheckResponse.ServingStatus:
        if service == LIVENESS:
            return HealthCheckResponse.SERVING
        if service in ("", READINESS, SERVICE):
            ready = self._is_ready()
            return HealthCheckResponse.SERVING if ready else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse.SERVICE_UNKNOWN

    async def _check(
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> HealthCheckResponse:
        status = self._health(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return HealthCheckResponse(status=status)

    async def _watch(
        self, request: HealthCheckRequest, _: grpc.aio.ServicerContext
    ) -> AsyncIterator[HealthCheckResponse]:
        last = None
        while True:
            status = self._health(request.service)
            if status != last:
                last = status
                yield HealthCheckResponse(status=status)
            await asyncio.sleep(0.5)


def _max_message_bytes(config: Config) -> int:
    """Room for Envoy's largest body: a longer one than we read is still answered, by load."""
    limit = max(config.extproc.max_body_bytes, config.envoy.request_body_buffer_limit_bytes)
    return limit + _MESSAGE_OVERHEAD_BYTES


def _remove_stale_socket(path: Path) -> None:
    """Removes a socket that a killed router left behind; never one that is served, nor a file."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise StartError(f"extproc.listen: {path} is there already and is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise StartError(f"extproc.listen: another server listens on {path}")
        path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StartError(f"extproc.listen: {path}: {error.strerror}") from None
