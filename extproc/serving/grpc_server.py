"""The gRPC server on grpc.aio: passes messages between Envoy and `extproc.serving.stream`."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import grpc
from google.protobuf.message import DecodeError

from extproc.base import headers
from extproc.base.errors import ProtocolError, StartError
from extproc.base.logs import tell_fault
from extproc.config.schema import ExtProc
from extproc.http2.grpc_messages import joined
from extproc.pb.kvsteer_health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.serving.certificates import Certificates, Material
from extproc.serving.exchange import Service
from extproc.serving.health_service import EXT_PROC, HEALTH, WATCH_SECONDS, Health
from extproc.serving.listening import (
    cannot_listen,
    max_message_bytes,
    place_for,
    proxy_connections,
    socket_path,
    try_address,
)
from extproc.serving.long_message import decoded

log = logging.getLogger("kvsteer.extproc")

# Every request in flight has one open stream; grpc's own limit is effectively none.
_MAX_STREAMS = 100_000

# An idle connection is closed after this time, so that silent ones do not use up the limit of
# connections; a proxy opens another. One that does not complete its handshake is closed sooner.
_IDLE_MS = 120_000
_GREETING_MS = 10_000

# Most calls that may wait to be accepted; beyond this, grpc core cancels some at random. A proxy on
# a busy machine reaches grpc's default limit of a thousand. Each call takes about 30 KB.
_MAX_PENDING = 2_000


class GrpcServer:
    """Serves ext_proc and gRPC health."""

    def __init__(
        self,
        service: Service,
        is_ready: Callable[[], bool],
        certificates: Certificates | None = None,
    ) -> None:
        self._service = service
        self._config = service.config
        self._health = Health(is_ready)
        self._certificates = certificates
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_message_bytes(service.config)),
                ("grpc.max_concurrent_streams", _MAX_STREAMS),
                ("grpc.server.max_pending_requests", _MAX_PENDING),
                ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_PENDING),
                ("grpc.max_allowed_incoming_connections", min(2**31 - 1, proxy_connections())),
                ("grpc.max_connection_idle_ms", _IDLE_MS),
                ("grpc.server_handshake_timeout_ms", _GREETING_MS),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_ping_strikes", 0),
            ]
        )
        self._server.add_generic_rpc_handlers((self._ext_proc_handler(), self._health_handler()))

    async def start(self) -> None:
        """Starts listening.

        Raises:
            StartError: the address cannot be bound.
        """
        options = self._config.extproc
        path = socket_path(options)
        try:
            if path is not None:
                with place_for(path, options):
                    self._server.add_insecure_port(options.listen)
            elif self._certificates is not None:
                self._server.add_secure_port(options.listen, _credentials(self._certificates))
            else:
                self._server.add_insecure_port(options.listen)
        except RuntimeError as error:
            raise _start_error(options, error) from None
        await self._server.start()

    async def stop(self) -> None:
        """Accepts no new streams, and waits up to `extproc.drain_ms` for open ones."""
        self._health.is_stopping = True
        await self._server.stop(self._config.extproc.drain_ms / 1000)

    async def process(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Serves one ext_proc stream, which lasts as long as the HTTP request and its response.

        requests: messages as they came; grpc would decode long ones on the event loop. The answers
        are encoded, too.
        """
        service = self._service
        decoder, thread = service.decoder, service.joining
        exchange = service.open(self._traceparent(context))
        try:
            async for message in requests:
                decoding = decoded(message, decoder, thread)
                del message  # a long one is copied, and would be kept until it is answered
                for answer in await exchange.receive(await decoding):
                    yield answer if isinstance(answer, bytes) else joined(answer)
        except ProtocolError as error:
            self._service.metrics.protocol_errors.inc()
            log.warning("stream ended: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except DecodeError:
            self._service.metrics.protocol_errors.inc()
            log.warning("stream ended: malformed message")
            await context.abort(grpc.StatusCode.INTERNAL, "malformed message")
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - grpcio would log its message
            tell_fault(log, "stream ended by an internal error: %s", error)
            await context.abort(grpc.StatusCode.INTERNAL)
        finally:
            exchange.close()

    def _traceparent(self, context: grpc.aio.ServicerContext) -> str:
        """Returns the trace in the stream's metadata; "" if requests are not traced."""
        if not self._service.is_traced:
            return ""
        told = dict(context.invocation_metadata() or ()).get(headers.TRACEPARENT, "")
        return told if isinstance(told, str) else ""

    def _ext_proc_handler(self) -> grpc.GenericRpcHandler:
        process = grpc.stream_stream_rpc_method_handler(self.process)
        return grpc.method_handlers_generic_handler(EXT_PROC, {"Process": process})

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
        return grpc.method_handlers_generic_handler(HEALTH, handlers)

    async def _check(
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> HealthCheckResponse:
        status = self._health.status_of(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return HealthCheckResponse(status=status)

    async def _watch(
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[HealthCheckResponse]:
        last = None
        while True:
            status = self._health.status_of(request.service)
            if status != last:
                last = status
                yield HealthCheckResponse(status=status)
            if self._health.is_stopping:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "stopping")
            await asyncio.sleep(WATCH_SECONDS)


def _start_error(options: ExtProc, error: RuntimeError) -> StartError:
    """Returns why the server cannot listen; grpc does not report it, so the address is tried."""
    try:
        try_address(options)
    except OSError as refusal:
        return cannot_listen("extproc.listen", options.listen, refusal)
    return StartError(f"extproc.listen: cannot listen on {options.listen}: {error}")


def _credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Returns credentials that use the current files for each new connection."""
    told = certificates.current

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Returns the new files if they changed, else None; grpc calls it for each connection,
        in its own thread."""
        nonlocal told
        if told is certificates.current:
            return None
        told = certificates.current
        return _configuration(told)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(told), renewed, require_client_authentication=told.client_ca is not None
    )


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    pairs = [(material.key, material.certificate)]
    return grpc.ssl_server_certificate_configuration(pairs, material.client_ca)
