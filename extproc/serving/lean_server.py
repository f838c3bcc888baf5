"""The lean gRPC server: HTTP/2 by `extproc.http2` on asyncio transports, for one kind of peer."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable

from extproc import address
from extproc.http2.header_blocks import BlockCache
from extproc.http2.limits import MIB, Budget, Limits
from extproc.http2.request_head import RequestHead
from extproc.observing.server_families import ServerFigures
from extproc.serving.certificates import Certificates, ChangingContext
from extproc.serving.exchange import Service
from extproc.serving.ext_proc_call import ExtProcCall
from extproc.serving.health_call import HealthCall, WatchCall
from extproc.serving.health_service import EXT_PROC, HEALTH, Health
from extproc.serving.lean_call import Call
from extproc.serving.lean_connection import LINGER_SECONDS, Host, LeanConnection
from extproc.serving.listening import (
    bound_socket,
    cannot_listen,
    max_message_bytes,
    proxy_connections,
    socket_path,
)
from extproc.tracing import traceparent

log = logging.getLogger("kvsteer.extproc")

TICK_SECONDS = 5.0

# An Envoy opens one a worker thread. For more, such as are idle are closed. Fewer where the system
# lets us have few files.
MAX_CONNECTIONS = 4096

# So many are accepted in one go, before any of them is counted.
_BACKLOG = 128

# A peer that connects and does not come to the point of TLS is let go after so long.
_HANDSHAKE_SECONDS = 10.0

# Of unfinished messages and answers that wait, at the least; and in largest messages.
_LEAST_BUDGET_BYTES = 256 * MIB
_BUDGET_MESSAGES = 4

_PROCESS = f"/{EXT_PROC}/Process".encode()
_CHECK = f"/{HEALTH}/Check".encode()
_WATCH = f"/{HEALTH}/Watch".encode()


class LeanServer:
    """Serves ext_proc and gRPC health."""

    def __init__(
        self,
        service: Service,
        is_ready: Callable[[], bool],
        limits: Limits | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        self._service = service
        self._health = Health(is_ready)
        self._certificates = certificates
        longest = max_message_bytes(service.config)
        self._host = Host(
            limits or Limits(),
            BlockCache(),
            Budget(max(_LEAST_BUDGET_BYTES, _BUDGET_MESSAGES * longest)),
            longest,
            self._route,
            self._came,
            self._left,
        )
        self._connections: dict[LeanConnection, None] = {}
        self._coming = 0
        self._is_full_told = False
        self._faults: Counter[str] = Counter()
        self._all_left = asyncio.Event()
        # uvloop closes a listening server that nobody refers to
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Listens.

        Raises:
            StartError: the address cannot be bound.
        """
        try:
            self._server = await self._listen()
        except OSError as error:
            raise cannot_listen(self._service.config.extproc, error) from None
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    async def stop(self) -> None:
        """Takes no new streams and gives those under way `extproc.drain_ms`."""
        self._health.is_stopping = True
        if self._timer is not None:
            self._timer.cancel()
        if self._server is None:
            return
        self._server.close()
        self._remove_socket()
        for connection in list(self._connections):
            connection.drain()
        with contextlib.suppress(TimeoutError):
            drain_seconds = self._service.config.extproc.drain_ms / 1000
            await asyncio.wait_for(self._empty(), drain_seconds)
        for connection in list(self._connections):
            connection.drop()
        await self._empty()

    def figures(self) -> ServerFigures:
        """For metrics."""
        faults = dict(self._faults)
        if self._certificates is not None and self._certificates.failed_handshakes:
            faults["TLS_HANDSHAKE"] = self._certificates.failed_handshakes
        return ServerFigures(len(self._connections), faults, self._host.budget.held)

    async def _listen(self) -> asyncio.Server:
        options, loop = self._service.config.extproc, asyncio.get_running_loop()
        path = socket_path(options)
        if path is not None:
            made = bound_socket(path, options)
            return await loop.create_unix_server(self._accept, sock=made, backlog=_BACKLOG)
        host, port = address.parse(options.listen)
        if self._certificates is None:
            return await loop.create_server(self._accept, host, port, backlog=_BACKLOG)
        return await loop.create_server(
            self._accept,
            host,
            port,
            backlog=_BACKLOG,
            ssl=ChangingContext(self._certificates),
            ssl_handshake_timeout=_HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=LINGER_SECONDS,
        )

    async def _empty(self) -> None:
        while self._connections:
            self._all_left.clear()
            await self._all_left.wait()

    def _accept(self) -> asyncio.Protocol:
        if len(self._connections) + self._coming >= min(MAX_CONNECTIONS, proxy_connections()):
            self._tell_full()
            idle = self._dispensable()
            # a proxy's own is not to go for one of many that come at once
            if idle is None or (self._coming and idle.has_served):
                return _Refused()
            del self._connections[idle]
            idle.drain()
        if self._certificates is None:  # with TLS some never come
            self._coming += 1
        return LeanConnection(self._host)

    def _tell_full(self) -> None:
        if self._is_full_told:
            return
        self._is_full_told = True
        log.warning(
            "%d connections are open, as many as may be: from now on one that has nothing to do"
            " is closed for each that comes; this is told once",
            len(self._connections),
        )

    def _dispensable(self) -> LeanConnection | None:
        """The oldest connection on which nothing is under way, best one that was never used."""
        used: LeanConnection | None = None
        for one in self._connections:
            if one.is_idle:
                if not one.has_served:
                    return one
                used = used or one
        return used

    def _came(self, connection: LeanConnection) -> None:
        self._coming = max(0, self._coming - 1)
        self._connections[connection] = None
        if self._health.is_stopping:  # it was shaking hands when the others were told
            connection.drain()

    def _left(self, connection: LeanConnection) -> None:
        self._connections.pop(connection, None)
        if connection.fault is not None:
            self._faults[connection.fault.name] += 1
        self._all_left.set()

    def _route(self, wire: LeanConnection, stream_id: int, head: RequestHead) -> Call | None:
        if head.path == _PROCESS:
            told = self._traceparent(head) if self._service.is_traced else ""
            return ExtProcCall(wire, stream_id, self._service, told)
        if head.path == _CHECK:
            return HealthCall(wire, stream_id, self._health)
        if head.path == _WATCH:
            return WatchCall(wire, stream_id, self._health)
        return None

    @staticmethod
    def _traceparent(head: RequestHead) -> str:
        name = traceparent.NAME.encode()
        return next((value.decode("latin-1") for key, value in head.fields if key == name), "")

    def _remove_socket(self) -> None:
        path = socket_path(self._service.config.extproc)
        if path is not None:
            path.unlink(missing_ok=True)

    def _tick(self) -> None:
        for connection in list(self._connections):
            connection.tick()
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Closes it: there are too many."""
        transport.close()
