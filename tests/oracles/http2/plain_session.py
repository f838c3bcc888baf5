"""A session in Python, with which the compiled one is compared.

`extproc/_core.pyi` describes both.
"""

from collections.abc import Callable
from typing import Any, Final

from extproc.base import headers
from extproc.http2.call_events import (
    ABORTED,
    ENDED,
    FAILED,
    MESSAGE,
    OPENED,
    PART,
    CallEvent,
)
from extproc.http2.codes import ErrorCode, Status
from extproc.http2.leftovers import FAULTY, KEPT_BACK, MORE, OVER
from extproc.http2.limits import Limits
from extproc.http2.messages import LongMessage
from extproc.http2.method_decoder import MethodDecoder
from tests.oracles.http2.budget import Budget
from tests.oracles.http2.connection import Connection
from tests.oracles.http2.grpc_messages import (
    ANSWER_HEAD,
    MessageReader,
    Piece,
    RefusedRequest,
    framed,
    joined,
    refusal_of,
    trailers,
    trailers_only,
)
from tests.oracles.http2.header_blocks import RequestHead
from tests.oracles.http2.streams import Opened, Received

# What a call takes of the budget besides its content: before its first message, and from then on.
# A refused request whose answer waits takes as much as the first.
_OPEN_BYTES: Final = 1024
_CALL_BYTES: Final = 4096

# Most times that `send` writes: then others have their turn.
_MAX_WRITES: Final = 4

_TRACEPARENT = headers.TRACEPARENT.encode()


class _Call:
    """What a session knows of one call; withheld_bytes: of its request while it is held."""

    __slots__ = (
        "charged_bytes",
        "has_answer",
        "has_message",
        "has_parts",
        "is_failed",
        "is_held",
        "is_read",
        "is_whole",
        "owed_ticks",
        "reader",
        "withheld_bytes",
    )

    def __init__(self, max_message_bytes: int) -> None:
        self.reader = MessageReader(max_message_bytes)
        self.charged_bytes = _OPEN_BYTES
        self.withheld_bytes = 0
        self.owed_ticks = 0
        self.has_answer = self.has_message = False
        self.is_failed = self.is_held = self.is_whole = False
        self.is_read = self.has_parts = False


def _least_bytes(call: _Call) -> int:
    """What a call takes besides its content."""
    return _CALL_BYTES if call.has_message else _OPEN_BYTES


class PlainSession:
    """The calls of one connection."""

    def __init__(
        self,
        limits: Limits,
        max_message_bytes: int,
        budget: Budget,
        reading: MethodDecoder | None,
    ) -> None:
        self._limits = limits
        self._reading = reading
        self._max_message_bytes = max_message_bytes
        self._budget = budget
        self._connection = Connection(limits, budget)
        self._calls: dict[int, _Call] = {}
        self._events: list[CallEvent] = []

    @property
    def fault(self) -> tuple[int, str] | None:
        """Why the connection must end."""
        fault = self._connection.fault
        return None if fault is None else (fault.code, str(fault))

    @property
    def is_due(self) -> bool:
        """Whether the peer waits for any of the data to send."""
        return self._connection.is_due

    @property
    def has_unsent(self) -> bool:
        """Whether there is data to send now."""
        return bool(self._connection.unsent or self._connection.ready)

    @property
    def is_over(self) -> bool:
        """Whether no stream is open, and no new one can come."""
        return self._connection.is_over

    @property
    def stream_count(self) -> int:
        """The number of open streams."""
        return self._connection.stream_count

    def receive(self, data: bytes) -> list[CallEvent]:
        """Takes bytes of the peer, and returns what happened."""
        for event in self._connection.receive(data):
            if isinstance(event, Received):
                self._take(event.stream_id, event.data, is_last=event.is_last)
            elif isinstance(event, Opened):
                self._open(event.stream_id, event.head, is_whole=event.is_whole)
            else:
                self._abort(event.stream_id)
        return self._taken()

    def data_to_send(self) -> bytes:
        """Returns the bytes to write now."""
        return self._connection.data_to_send()

    def send(self, write: Callable[[bytes], None]) -> int:
        """Writes what is due; returns what is left to do."""
        data, writes = b"more", 0
        while data and writes < _MAX_WRITES and self.is_due:
            data = self.data_to_send()
            if data:
                write(data)
            writes += 1
        left = MORE if data and self.is_due else 0
        left |= KEPT_BACK if self.has_unsent and not self.is_due else 0
        left |= OVER if self.is_over else 0
        return left | (0 if self.fault is None else FAULTY)

    def answer(self, stream_id: int, message: bytes | LongMessage) -> int:
        """Sends one message of an answer."""
        call = self._calls.get(stream_id)
        if call is None:
            return -1
        whole = message if isinstance(message, bytes) else joined(message)
        head = b"" if call.has_answer else ANSWER_HEAD
        call.has_answer = True
        queued = self._connection.send_data(stream_id, framed(whole), head)
        if queued is None:
            self._forget(stream_id)
            return -1
        return queued

    def finish(self, stream_id: int, status: int, text: str) -> None:
        """Ends a call with a gRPC status."""
        call = self._calls.get(stream_id)
        if call is not None:
            block = (trailers if call.has_answer else trailers_only)(status, text)
            is_due = status != Status.OK or not call.has_answer
            self._connection.end(stream_id, block, is_due=is_due)
            self._forget(stream_id)

    def queued(self, stream_id: int) -> int:
        """Returns how many bytes of an answer wait for the peer."""
        return self._connection.queued(stream_id) if stream_id in self._calls else 0

    def hold(self, stream_id: int) -> None:
        """Lets the peer send no more of a request than its window allows now."""
        call = self._calls.get(stream_id)
        if call is not None:
            call.is_held = True

    def unhold(self, stream_id: int) -> None:
        """Lets the peer send more again."""
        call = self._calls.get(stream_id)
        if call is not None:
            call.is_held = False
            self._connection.consume(stream_id, call.withheld_bytes)
            call.withheld_bytes = 0

    def pause_sending(self) -> None:
        """Holds messages back because the transport is full."""
        self._connection.pause_sending()

    def resume_sending(self) -> None:
        """Sends messages again because the transport has room."""
        self._connection.resume_sending()

    def drain(self) -> None:
        """Accepts no new streams and sends GOAWAY."""
        self._connection.drain()

    def tick(self) -> list[CallEvent]:
        """Called every 5 s: returns the calls that stalled too long."""
        for event in self._connection.tick():
            self._abort(event.stream_id)
        for stream_id, call in self._calls.items():
            if not call.is_failed:
                self._look_at(stream_id, call)
        return self._taken()

    def close(self) -> None:
        """Forgets all calls of a lost connection."""
        self._connection.close()
        for stream_id in list(self._calls):
            self._forget(stream_id)

    def _taken(self) -> list[CallEvent]:
        events, self._events = self._events, []
        return events

    def _open(self, stream_id: int, head: RequestHead, *, is_whole: bool) -> None:
        refusal = refusal_of(head)
        if refusal is not None:
            self._refuse(stream_id, refusal)
        elif not self._budget.take(_OPEN_BYTES):
            self._connection.reset(stream_id, ErrorCode.REFUSED_STREAM)
        else:
            call = self._calls[stream_id] = _Call(self._max_message_bytes)
            call.is_whole = is_whole
            call.is_read = self._reading is not None and head.path == self._reading.path
            traces = (value for name, value in head.fields if name == _TRACEPARENT and value)
            self._events.append((stream_id, OPENED, (head.path, next(traces, b""))))
            if is_whole:
                self._events.append((stream_id, ENDED, None))

    def _refuse(self, stream_id: int, refusal: RefusedRequest) -> None:
        if not self._connection.charge_refusal(stream_id, _OPEN_BYTES):
            self._connection.reset(stream_id, ErrorCode.REFUSED_STREAM)
            return
        if refusal.content:
            self._connection.send_data(stream_id, refusal.content, refusal.block)
        self._connection.end(stream_id, b"" if refusal.content else refusal.block)

    def _take(self, stream_id: int, data: Piece, *, is_last: bool) -> None:
        call = self._calls.get(stream_id)
        if call is None:
            return
        if call.is_held:
            call.withheld_bytes += len(data)
        else:
            self._connection.consume(stream_id, len(data))
        if data and not call.is_failed:
            self._read(stream_id, call, data)
        if is_last and not call.is_failed:
            call.is_whole = True
            if call.reader.buffered_bytes:
                self._fail(stream_id, call, Status.INTERNAL, "the last message is incomplete")
            else:
                self._events.append((stream_id, ENDED, None))

    def _read(self, stream_id: int, call: _Call, data: Piece) -> None:
        for content, is_whole in call.reader.read(data):
            found = self._read_whole(call, content) if is_whole else content
            self._events.append((stream_id, MESSAGE if is_whole else PART, found))
            call.has_parts = not is_whole
            if is_whole:
                call.has_message = True
                call.owed_ticks = 0
        fault = call.reader.fault
        if fault is not None:
            self._fail(stream_id, call, fault.status, str(fault))
        elif not self._charge(call, _least_bytes(call) + call.reader.buffered_bytes):
            text = "no memory left for unfinished messages"
            self._fail(stream_id, call, Status.RESOURCE_EXHAUSTED, text)

    def _read_whole(self, call: _Call, content: bytes) -> Any:
        """Returns a message as it is reported: as it was read, or as it came."""
        if self._reading is None or not call.is_read or call.has_parts:
            return content
        read = self._reading.decoder.read(content)
        return content if read is None else read

    def _charge(self, call: _Call, size: int) -> bool:
        """Books what a call keeps; returns False if there is no room for more."""
        if size > call.charged_bytes and not self._budget.take(size - call.charged_bytes):
            return False
        if size < call.charged_bytes:
            self._budget.give_back(call.charged_bytes - size)
        call.charged_bytes = size
        return True

    def _fail(self, stream_id: int, call: _Call, status: int, text: str) -> None:
        call.reader.forget()
        self._charge(call, _least_bytes(call))
        call.is_failed = True
        self._events.append((stream_id, FAILED, (int(status), text)))

    def _abort(self, stream_id: int) -> None:
        if stream_id in self._calls:
            self._forget(stream_id)
            self._events.append((stream_id, ABORTED, None))

    def _forget(self, stream_id: int) -> None:
        self._charge(self._calls.pop(stream_id), 0)

    def _look_at(self, stream_id: int, call: _Call) -> None:
        """Fails a call whose first message is missing, or another one is incomplete, too long."""
        if (call.has_message or call.is_whole) and not call.reader.buffered_bytes:
            call.owed_ticks = 0
            return
        call.owed_ticks += 1
        limits = self._limits
        if call.owed_ticks > (limits.stall_ticks if call.has_message else limits.first_ticks):
            self._fail(stream_id, call, Status.DEADLINE_EXCEEDED, "no message in time")


class PlainSessions:
    """Opens plain sessions, as `extproc.http2.session.Sessions` opens compiled ones."""

    def __init__(
        self,
        limits: Limits,
        max_message_bytes: int,
        max_bytes: int,
        reading: MethodDecoder | None = None,
    ) -> None:
        self.budget = Budget(max_bytes)
        self._reading = reading
        self._limits = limits
        self._max_message_bytes = max_message_bytes

    def open(self, share: Budget | None = None) -> PlainSession:
        """Returns the session of a new connection."""
        budget = self.budget if share is None else share
        return PlainSession(self._limits, self._max_message_bytes, budget, self._reading)
