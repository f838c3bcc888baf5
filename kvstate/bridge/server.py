"""The bridge's gRPC server, on grpc.aio.

SubscribeKvEvents is served under the name of every engine's service (smg-grpc-proto 0.4.28), so
that a gateway finds it under the one that it asks for. Beside it, grpc.health.v1.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import NoReturn

import grpc
from google.protobuf.message import DecodeError

from kvstate.bridge.bridge import Bridge
from kvstate.bridge.rank import Ended
from kvstate.feeds.grpc_transport import SERVICES
from kvstate.pb.kvsteer_kv_events_pb2 import SubscribeKvEventsRequest

log = logging.getLogger("kvsteer.bridge")

# More than any fleet of gateways; a newcomer's snapshot takes memory while it is sent.
MAX_STREAMS = 1_024

DRAIN_SECONDS = 5.0
_HEALTH_SECONDS = 0.5

# HealthCheckResponse of grpc.health.v1: field 1, the status, is 1 (SERVING) or 2 (NOT_SERVING).
_SERVING = b"\x08\x01"
_NOT_SERVING = b"\x08\x02"


class BridgeServer:
    """Serves one bridge on host:port; port 0 takes a free one."""

    def __init__(self, bridge: Bridge, listen: str) -> None:
        self.port = 0
        self._bridge = bridge
        self._listen = listen
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=MAX_STREAMS,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_ping_strikes", 0),
            ],
        )
        self._server.add_generic_rpc_handlers(handlers(bridge))

    async def start(self) -> None:
        """Listens.

        Raises:
            OSError: the address cannot be bound.
        """
        try:
            self.port = self._server.add_insecure_port(self._listen)
        except RuntimeError:
            raise OSError(f"cannot listen on {self._listen}: is it taken?") from None
        await self._server.start()

    async def stop(self) -> None:
        """Ends the streams with UNAVAILABLE, then the server."""
        self._bridge.stop()
        await self._server.stop(DRAIN_SECONDS)


def handlers(bridge: Bridge) -> Sequence[grpc.GenericRpcHandler]:
    """The bridge's services, for a grpc.aio server of your own."""
    subscribe = grpc.unary_stream_rpc_method_handler(_Subscribe(bridge).stream)
    health = _Health(bridge)
    checks = {
        "Check": grpc.unary_unary_rpc_method_handler(health.check),
        "Watch": grpc.unary_stream_rpc_method_handler(health.watch),
    }
    services = {name: {"SubscribeKvEvents": subscribe} for name in SERVICES.values()}
    return [
        grpc.method_handlers_generic_handler(name, methods)
        for name, methods in {**services, "grpc.health.v1.Health": checks}.items()
    ]


class _Subscribe:
    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    async def stream(
        self, request: bytes, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        try:
            start = SubscribeKvEventsRequest.FromString(request).start_sequence_number
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no SubscribeKvEventsRequest")
            return
        stream = self._bridge.subscribe(start)
        if isinstance(stream, Ended):  # before the metadata: subscribers tell refusal from failure
            await _end(context, stream)
        log.info("stream to %s begins at %s", context.peer(), start or "the state of now")
        await context.send_initial_metadata(())
        try:
            while isinstance(message := await self._bridge.next_message(stream), bytes):
                yield message
        except asyncio.CancelledError:
            log.info("stream to %s ends: it went away", context.peer())
            raise
        await _end(context, message)


async def _end(context: grpc.aio.ServicerContext, ended: Ended) -> NoReturn:
    log.info("stream to %s ends: %s: %s", context.peer(), ended.status, ended.reason)
    await context.abort(grpc.StatusCode[ended.status], ended.reason)
    raise AssertionError  # abort raises


class _Health:
    """Serving while the bridge can be subscribed to, under whatever name is asked for."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    @property
    def _status(self) -> bytes:
        return _SERVING if self._bridge.fault is None else _NOT_SERVING

    async def check(self, _request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        return self._status

    async def watch(
        self, _request: bytes, _context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        told = b""
        while not self._bridge.is_stopped:
            if self._status != told:
                told = self._status
                yield told
            await asyncio.sleep(_HEALTH_SECONDS)
