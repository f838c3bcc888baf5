"""One connection of the lean server: a transport, its HTTP/2 state, and the calls on it."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from extproc.http2.connection import Connection
from extproc.http2.events import Opened, Received
from extproc.http2.frames import ErrorCode
from extproc.http2.grpc_messages import Status, refusal_of, trailers_only
from extproc.http2.header_blocks import BlockCache
from extproc.http2.limits import Budget, Limits
from extproc.http2.request_head import RequestHead
from extproc.serving.lean_call import CALL_BYTES, Call
from extproc.serving.listening import keep_alive

log = logging.getLogger("kvsteer.extproc")

# How long a peer may take to read why its connection ends, and to take its leave of TLS.
LINGER_SECONDS = 1.0

# What makes a call of a request, None if nobody answers to its path.
Route = Callable[["LeanConnection", int, RequestHead], Call | None]


@dataclass(frozen=True, slots=True)
class Host:
    """What all connections of a server share.

    max_message_bytes: of a request. came, left: told when a connection is there (with TLS, after
    its handshake), and when it is gone.
    """

    limits: Limits
    cache: BlockCache
    budget: Budget
    max_message_bytes: int
    route: Route
    came: Callable[["LeanConnection"], None]
    left: Callable[["LeanConnection"], None]


class LeanConnection(asyncio.Protocol):
    """Writes once for all that one read brought. has_served: whether a call ever came."""

    def __init__(self, host: Host) -> None:
        self.has_served = False
        self.budget = host.budget
        self.max_message_bytes = host.max_message_bytes
        self._host = host
        self._http2 = Connection(host.limits, host.cache, host.budget)
        self._calls: dict[int, Call] = {}
        self._held_back: dict[int, Call] = {}
        self._paused_ticks: int | None = None
        self._is_closing = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: somebody connected."""
        self._transport = cast("asyncio.Transport", transport)
        keep_alive(transport)
        self._host.came(self)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came."""
        if self._is_closing:
            return
        for event in self._http2.receive(data):
            if isinstance(event, Received):
                call = self._calls.get(event.stream_id)
                if call is not None:
                    call.receive(event.data, is_last=event.is_last)
                    if call.is_held_back:
                        self._held_back[event.stream_id] = call
            elif isinstance(event, Opened):
                self._open(event)
            else:
                self._abort(event.stream_id)
        self.flush()

    def eof_received(self) -> bool:
        """asyncio: nothing more comes; HTTP/2 has no use for half a connection."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: it is gone, and with it every stream."""
        self._is_closing = True
        if exc is not None:
            log.debug("connection lost: %s", exc)
        for stream_id in list(self._calls):
            self._abort(stream_id)
        self._http2.close()
        self._host.left(self)

    def pause_writing(self) -> None:
        """asyncio: the peer does not read. Then neither do we, or answers would pile up."""
        self._paused_ticks = 0
        self._http2.pause_sending()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """asyncio: it reads again."""
        self._paused_ticks = None
        self._http2.resume_sending()
        self._transport.resume_reading()
        self.flush()

    def tick(self) -> None:
        """Time passes: what took too long ends."""
        if self._paused_ticks is not None:
            self._paused_ticks += 1
            if self._paused_ticks > self._host.limits.stall_ticks:
                self._transport.abort()
                return
        for event in self._http2.tick():
            self._abort(event.stream_id)
        for call in list(self._calls.values()):
            call.tick(self._host.limits.stall_ticks)
        self.flush()

    @property
    def fault(self) -> ErrorCode | None:
        """The code with which it was ended, None if its peer did nothing wrong."""
        fault = self._http2.fault
        return None if fault is None else ErrorCode(fault.code)

    @property
    def is_idle(self) -> bool:
        """Whether no stream is open."""
        return not self._http2.stream_count

    def drain(self) -> None:
        """Takes no new streams; closes when those under way have ended."""
        self._http2.drain()
        self.flush()

    def drop(self) -> None:
        """Closes now."""
        self._transport.abort()

    def begin(self, stream_id: int, block: bytes) -> None:
        """Of a call: the head of its answer."""
        self._http2.send_head(stream_id, block)

    def send(self, stream_id: int, data: bytes) -> int:
        """Of a call: more of its answer."""
        queued = self._http2.send_data(stream_id, data)
        if queued is None:
            self._abort(stream_id)
            return 0
        return queued

    def finish(self, stream_id: int, block: bytes) -> None:
        """Of a call: the end of its answer."""
        self._calls.pop(stream_id, None)
        self._held_back.pop(stream_id, None)
        self._http2.end(stream_id, block)

    def consume(self, stream_id: int, size: int) -> None:
        """Of a call: so much of its request was used."""
        self._http2.consume(stream_id, size)

    def queued(self, stream_id: int) -> int:
        """Of a call: bytes of its answer that wait."""
        return self._http2.queued(stream_id)

    def flush(self) -> None:
        """Writes what there is to write."""
        if self._is_closing:
            return
        self._write()
        while self._held_back and self._release():
            self._write()
        if self._http2.fault is not None:
            log.warning("connection ended: %s", self._http2.fault)
            self._linger()
        elif self._http2.is_over:
            self._is_closing = True
            self._transport.close()

    def _write(self) -> None:
        while data := self._http2.data_to_send():
            self._transport.write(data)

    def _release(self) -> bool:
        """Lets calls go on that could not; whether there were any."""
        able = [(number, one) for number, one in self._held_back.items() if not one.is_busy]
        for stream_id, call in able:
            call.go_on()
            if not call.is_held_back:
                self._held_back.pop(stream_id, None)
        return bool(able)

    def _linger(self) -> None:
        """Says why, and waits a little: to close with bytes unread would take that back."""
        self._is_closing = True
        for stream_id in list(self._calls):
            self._abort(stream_id)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.abort)

    def _open(self, event: Opened) -> None:
        refusal = refusal_of(event.head)
        if refusal is not None:
            self._http2.end(event.stream_id, refusal)
            return
        if not self.budget.take(CALL_BYTES):
            self._http2.reset(event.stream_id, ErrorCode.REFUSED_STREAM)
            return
        call = self._host.route(self, event.stream_id, event.head)
        if call is None:
            self.budget.give_back(CALL_BYTES)
            block = trailers_only(Status.UNIMPLEMENTED, "unknown method")
            self._http2.end(event.stream_id, block)
            return
        self._calls[event.stream_id] = call
        self.has_served = True
        if event.is_whole:
            call.receive(b"", is_last=True)

    def _abort(self, stream_id: int) -> None:
        self._held_back.pop(stream_id, None)
        call = self._calls.pop(stream_id, None)
        if call is not None:
            call.abort()
