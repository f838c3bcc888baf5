"""The lean gRPC server for proxies: HTTP/2 by `extproc.http2` on asyncio transports."""

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from extproc._core import Budget, Session
from extproc.base import address
from extproc.base.logs import log_fault
from extproc.base.other_end import peer_name
from extproc.features.hooks import tell
from extproc.http2.call_events import ABORTED, OPENED, CallEvent
from extproc.http2.codes import ErrorCode, Status
from extproc.http2.leftovers import FAULTY, KEPT_BACK, MORE, OVER
from extproc.http2.limits import MIB, Limits
from extproc.http2.session import Sessions
from extproc.observing.fleet_families import ServerFigures
from extproc.serving.certificates import Certificates
from extproc.serving.exchange import Service
from extproc.serving.health_service import EXT_PROC, HEALTH, Health
from extproc.serving.lean_call import Call, ExtProcCall, HealthCall, WatchCall
from extproc.serving.listening import (
    BACKLOG,
    TlsListener,
    bound_socket,
    cannot_listen,
    keep_alive,
    max_message_bytes,
    proxy_connections,
    socket_path,
)
from extproc.serving.peers import Peers
from extproc.serving.server_bounds import USUAL, ServerBounds
from kvstate.seldom import is_logged

log = logging.getLogger("kvsteer.extproc")

# Creates the call on a stream by its path and traceparent header; returns None if the path is
# unknown.
Route = Callable[["LeanConnection", int, bytes, bytes], Call | None]


@dataclass(frozen=True, slots=True)
class Host:
    """What all connections of a server share.

    sessions: opens the session of a connection. peers: whose the connections are. add, remove:
    called when a connection is established (with TLS, after its handshake), and when it is lost.
    """

    limits: Limits
    bounds: ServerBounds
    sessions: Sessions
    route: Route
    add: Callable[["LeanConnection"], None]
    remove: Callable[["LeanConnection"], None]
    peers: "Peers[LeanConnection]"


class LeanConnection(asyncio.Protocol):
    """One connection of a proxy; writes once for everything in one read.

    has_served: whether it ever had a call. rested_at: when its last call ended, in seconds of
    `time.monotonic`; 0.0 before that. transport, session, budget: from when the connection is made.
    budget: its peer's share.
    """

    def __init__(self, host: Host) -> None:
        self.has_served = False
        self.rested_at = 0.0
        self._host = host
        self.budget: Budget
        self.session: Session
        self._calls: dict[int, Call] = {}
        self._paused_calls: dict[int, Call] = {}
        self._paused_ticks: int | None = None
        self._is_closing = False
        self._ending: asyncio.TimerHandle | None = None  # writes the ends that were kept back
        self._going_on: asyncio.Handle | None = None  # writes more when others had their turn
        self.transport: asyncio.Transport
        self._write_out: Callable[[bytes], None]  # the transport's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the connection is made."""
        self.transport = cast("asyncio.Transport", transport)
        self._write_out = self.transport.write
        keep_alive(transport)
        self._peer = self._host.peers.join(peer_name(transport), self)
        self.budget = self._peer.share
        self.session = self._host.sessions.open(self.budget)
        self._host.add(self)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with bytes that were read."""
        if self._is_closing:
            return
        self._take(self.session.receive(data))
        self.flush()

    def eof_received(self) -> bool:
        """Called by asyncio at the end of input; closes, since HTTP/2 needs both directions."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the connection is lost; ends all its calls."""
        self._is_closing = True
        if self._ending is not None:
            self._ending.cancel()
        if exc is not None:
            log.debug("connection lost: %s", exc)
        for stream_id in list(self._calls):
            self._abort(stream_id)
        self.session.close()
        self.leave()
        self._host.remove(self)

    def leave(self) -> None:
        """Counts for its peer no longer."""
        self._host.peers.leave(self._peer, self)

    def pause_writing(self) -> None:
        """Called by asyncio when the peer does not read: stops reading, to bound the answers."""
        self._paused_ticks = 0
        self.session.pause_sending()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Called by asyncio when the peer reads again."""
        self._paused_ticks = None
        self.session.resume_sending()
        self.transport.resume_reading()
        self.flush()

    def tick(self) -> None:
        """Called every 5 s: closes or aborts what made no progress for too long."""
        if self._paused_ticks is not None:
            self._paused_ticks += 1
            if self._paused_ticks > self._host.limits.stall_ticks:
                self.transport.abort()
                return
        self._take(self.session.tick())
        self.flush()

    @property
    def fault(self) -> ErrorCode | None:
        """The error code with which the connection ended, None if the peer broke no rule."""
        fault = self.session.fault
        return None if fault is None else ErrorCode(fault[0])

    @property
    def is_idle(self) -> bool:
        """Whether no stream is open."""
        return not self.session.stream_count

    def drain(self) -> None:
        """Accepts no new streams, and closes when the open ones have ended."""
        self.session.drain()
        self.flush()

    def drop(self) -> None:
        """Closes at once, even with open calls."""
        self.transport.abort()

    def forget(self, stream_id: int) -> None:
        """Forgets a call that has ended."""
        if self._paused_calls:
            self._paused_calls.pop(stream_id, None)
        self._calls.pop(stream_id, None)
        if not self._calls:
            self.rested_at = time.monotonic()

    def flush(self) -> None:
        """Writes data to send if any is due, and lets calls that waited for it continue."""
        if self._is_closing:
            return
        left = self.session.send(self._write_out)
        while self._paused_calls and not left & MORE and self._release():
            left = self.session.send(self._write_out)
        # the usual rest is the end of a stream, for which a timer runs already
        if left and (left != KEPT_BACK or self._ending is None):
            self._look_after(left)

    def _look_after(self, left: int) -> None:
        """Does what is left to do after data was sent (extproc.http2.leftovers)."""
        if left & KEPT_BACK and self._ending is None:
            loop = asyncio.get_running_loop()
            self._ending = loop.call_later(self._host.bounds.end_seconds, self._write_ends)
        if left & MORE and self._going_on is None:
            self._going_on = asyncio.get_running_loop().call_soon(self._go_on)
        fault = self.session.fault if left & FAULTY else None
        if fault is not None:
            log.warning("connection ended: %s", fault[1])
            self._linger()
        elif left & OVER and not self._calls:
            self._write()
            self._is_closing = True
            self.transport.close()

    def _go_on(self) -> None:
        self._going_on = None
        self.flush()

    def _write(self) -> None:
        while data := self.session.data_to_send():
            self.transport.write(data)

    def _write_ends(self) -> None:
        self._ending = None
        if not self._is_closing:
            self._write()

    def _release(self) -> bool:
        """Lets held-back calls continue; returns whether there were any."""
        able = [(number, one) for number, one in self._paused_calls.items() if not one.is_busy]
        for stream_id, call in able:
            call.go_on()
            if not call.has_kept:
                self._paused_calls.pop(stream_id, None)
        return bool(able)

    def _linger(self) -> None:
        """Closes after a pause, so that the peer can read the reason: closing at once, with bytes
        unread, would discard it."""
        self._is_closing = True
        for stream_id in list(self._calls):
            self._abort(stream_id)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        asyncio.get_running_loop().call_later(
            self._host.bounds.linger_seconds, self.transport.abort
        )

    def _take(self, events: Sequence[CallEvent]) -> None:
        """Passes events to their calls, and opens new calls."""
        calls, route = self._calls, self._host.route
        for stream_id, kind, content in events:
            call = calls.get(stream_id)
            if call is not None:
                if kind == ABORTED:
                    self._abort(stream_id)
                elif call.receive(kind, content):
                    self._paused_calls[stream_id] = call
            elif kind == OPENED:
                path, traceparent = content
                call = route(self, stream_id, path, traceparent)
                if call is not None:
                    calls[stream_id] = call
                    self.has_served = True
                else:
                    self.session.finish(stream_id, Status.UNIMPLEMENTED, "unknown method")

    def _abort(self, stream_id: int) -> None:
        call = self._calls.get(stream_id)
        if call is not None:
            self.forget(stream_id)
            try:
                call.abort()
            except Exception as error:  # noqa: BLE001 - the connection's other calls must end, too
                log_fault(log, "ending a stream failed with %s", error)


# Memory for unfinished messages and waiting answers: at least this much, and at least this many
# messages of the largest size.
_LEAST_BUDGET_BYTES = 256 * MIB
_BUDGET_MESSAGES = 4

_PROCESS = f"/{EXT_PROC}/Process".encode()
_CHECK = f"/{HEALTH}/Check".encode()
_WATCH = f"/{HEALTH}/Watch".encode()


class LeanServer:
    """Serves ext_proc and gRPC health.

    inherited: sockets that listen already, instead of `extproc.listen`. is_handed_over: whether
    another router has the sockets, too.
    """

    def __init__(
        self,
        service: Service,
        is_ready: Callable[[], bool],
        limits: Limits | None = None,
        certificates: Certificates | None = None,
        bounds: ServerBounds = USUAL,
        inherited: Sequence[socket.socket] = (),
    ) -> None:
        self._inherited = inherited
        self.is_handed_over = False
        self._service = service
        self._bounds = bounds
        self._health = Health(is_ready)
        self._certificates = certificates
        longest = max_message_bytes(service.config)
        limits = limits or Limits()
        most = bounds.max_bytes or max(_LEAST_BUDGET_BYTES, _BUDGET_MESSAGES * longest)
        reading = service.decoder.reading(_PROCESS)
        sessions = Sessions(limits, longest, most, reading)
        peers = Peers[LeanConnection](sessions.budget)
        self._host = Host(limits, bounds, sessions, self._route, self._add, self._remove, peers)
        self.connections: dict[LeanConnection, None] = {}  # in the order in which they were made
        self._coming = 0
        self._has_warned_full = False
        self._faults: Counter[str] = Counter()
        self._all_gone = asyncio.Event()
        # uvloop closes a listening server that nothing refers to
        self._servers: list[asyncio.Server] = []
        self._tls: TlsListener | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Starts listening.

        Raises:
            StartError: the address cannot be bound.
        """
        try:
            await self._listen()
        except OSError as error:
            listen = self._service.config.extproc.listen
            raise cannot_listen("extproc.listen", listen, error) from None
        self._timer = asyncio.get_running_loop().call_later(self._bounds.tick_seconds, self.tick)

    async def stop(self) -> None:
        """Accepts no new streams, and waits up to `extproc.drain_ms` for open ones.

        What waits inside the router goes on within that time.
        """
        self._health.is_stopping = True
        if self._timer is not None:
            self._timer.cancel()
        if self._tls is not None:
            await self._tls.close()
        if self._servers and not self.is_handed_over:
            self._remove_socket()  # while it listens: later the file may be another router's
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.drain()
        drain_seconds = self._service.config.extproc.drain_ms / 1000
        tell(self._service.hooks.note_stop, drain_seconds)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty(), drain_seconds)
        for connection in list(self.connections):
            connection.drop()
        await self._empty()

    def figures(self) -> ServerFigures:
        """Returns the connections, their faults and the bytes kept, for metrics."""
        faults = dict(self._faults)
        if self._certificates is not None and self._certificates.failed_handshakes:
            faults["TLS_HANDSHAKE"] = self._certificates.failed_handshakes
        return ServerFigures(len(self.connections), faults, self._host.sessions.budget.used_bytes)

    async def _listen(self) -> None:
        options, loop = self._service.config.extproc, asyncio.get_running_loop()
        path, inherited = socket_path(options), self._inherited
        if path is not None:
            made = inherited[0] if inherited else bound_socket(path, options)
            self._servers = [
                await loop.create_unix_server(self._accept, sock=made, backlog=BACKLOG)
            ]
        elif self._certificates is not None:
            listener = TlsListener(
                self._certificates, self._has_room, self._connection, self._bounds
            )
            await listener.start(options.listen, inherited)
            self._tls = listener
        elif inherited:
            self._servers = [
                await loop.create_server(self._accept, sock=one, backlog=BACKLOG)
                for one in inherited
            ]
        else:
            host, port = address.parse(options.listen)
            self._servers = [await loop.create_server(self._accept, host, port, backlog=BACKLOG)]

    def listening(self) -> list[int]:
        """Returns the numbers of the listening sockets."""
        if self._tls is not None:
            return self._tls.listening()
        return [one.fileno() for server in self._servers for one in server.sockets]

    async def _empty(self) -> None:
        while self.connections:
            self._all_gone.clear()
            await self._all_gone.wait()

    def _accept(self) -> asyncio.Protocol:
        if not self._has_room():
            return _Refused()
        self._coming += 1
        return self._connection()

    def _connection(self) -> LeanConnection:
        return LeanConnection(self._host)

    def _has_room(self) -> bool:
        """Returns whether to accept one more connection, if necessary by closing an idle one."""
        handshakes = self._tls.handshakes if self._tls is not None else 0
        most = min(self._bounds.max_connections, proxy_connections())
        if len(self.connections) + self._coming + handshakes < most:
            return True
        self._tell_full()
        crowd = self._host.peers.crowd()
        idle = _dispensable(self.connections if crowd is None else crowd.connections)
        if idle is None and crowd is not None:  # no other peer is locked out for its calls' sake
            newest = list(crowd.connections)[-1]
            self._give_up(newest)
            newest.drop()
            return True
        if (idle is None or idle.has_served) and self._tls is not None and self._tls.drop_oldest():
            return True
        # a proxy's connection must not be closed to make room for one of many new ones
        if idle is None or (self._coming and idle.has_served):
            return False
        self._give_up(idle)
        idle.drain()
        # it does not close by itself if its peer reads nothing, and it is no longer counted
        asyncio.get_running_loop().call_later(self._bounds.linger_seconds, idle.drop)
        return True

    def _give_up(self, connection: LeanConnection) -> None:
        """Counts a connection no longer."""
        self.connections.pop(connection, None)
        connection.leave()

    def _tell_full(self) -> None:
        if self._has_warned_full:
            return
        self._has_warned_full = True
        log.warning(
            "%d connections are open, which is the limit: each new one closes an idle one"
            " from now on; this is logged once",
            len(self.connections),
        )

    def _add(self, connection: LeanConnection) -> None:
        self._coming = max(0, self._coming - 1)
        self.connections[connection] = None
        if self._health.is_stopping:  # its handshake was not done when the others were drained
            connection.drain()

    def _remove(self, connection: LeanConnection) -> None:
        self.connections.pop(connection, None)
        if connection.fault is not None:
            self._faults[connection.fault.name] += 1
        self._all_gone.set()

    def _route(
        self, wire: LeanConnection, stream_id: int, path: bytes, traceparent: bytes
    ) -> Call | None:
        if path == _PROCESS:
            trace = traceparent.decode("latin-1") if self._service.is_traced else ""
            return ExtProcCall(wire, stream_id, self._service, trace)
        if path == _CHECK:
            return HealthCall(wire, stream_id, self._health)
        if path == _WATCH:
            return WatchCall(wire, stream_id, self._health)
        return None

    def _remove_socket(self) -> None:
        path = socket_path(self._service.config.extproc)
        if path is not None:
            path.unlink(missing_ok=True)

    def tick(self) -> None:
        """Closes or aborts what made no progress for too long; repeats itself."""
        # first: whatever happens here, stalls must be found again
        self._timer = asyncio.get_running_loop().call_later(self._bounds.tick_seconds, self.tick)
        for connection in list(self.connections):
            try:
                connection.tick()
            except Exception:  # the other connections must be looked at
                self._faults[TICK_FAULT] += 1
                if is_logged(self._faults[TICK_FAULT]):
                    log.exception(
                        "a connection could not be checked for stalls (%d so far)",
                        self._faults[TICK_FAULT],
                    )


def _dispensable(connections: Iterable[LeanConnection]) -> LeanConnection | None:
    """Returns the longest idle connection, preferably one that was never used."""
    idle = [one for one in connections if one.is_idle]
    unused = next((one for one in idle if not one.has_served), None)
    return unused or min(idle, key=lambda one: one.rested_at, default=None)


# The name under which checks that failed by an error of the router's own are counted.
TICK_FAULT = "ROUTER_ERROR"


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Closes the connection, since too many are open."""
        transport.close()
