"""One gRPC call on the lean server: pieces of its request in, answers and a status out.

A call is in one state, and the tables below say which may follow. A request goes from the left to
the right, its answer begins on the way down, and every state may be followed by OVER:

    OPENED ── message ──> ASKED ────── last ──> WHOLE ──────────── taken ──> TAKEN
                            │                     │                            │
                          answer                answer                       answer
                            v                     v                            v
                        ANSWERING ──── last ──> WHOLE_ANSWERING ── taken ──> TAKEN_ANSWERING

A request without a message goes from OPENED to WHOLE.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

from google.protobuf.message import DecodeError

from extproc.base.errors import CallError, ProtocolError
from extproc.base.logs import tell_fault
from extproc.http2.connection import Connection
from extproc.http2.grpc_messages import (
    ANSWER_HEAD,
    Message,
    MessageReader,
    Parts,
    Piece,
    Status,
    framed,
    trailers,
    trailers_only,
)
from extproc.http2.limits import Budget
from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest
from extproc.pb.kvsteer_health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.serving.exchange import Service
from extproc.serving.health_service import WATCH_SECONDS, Health, ServingStatus
from extproc.serving.long_message import joined
from extproc.serving.stream_answers import Answers

log = logging.getLogger("kvsteer.extproc")

# While more bytes of a call's answers than this wait for the peer, the call takes no messages.
_MAX_QUEUED_BYTES = 1024 * 1024

# The bytes charged for a call itself, and for a kept piece in addition to its content, so that
# hundreds of thousands of calls, or of two-byte pieces, also reach the limit.
CALL_BYTES = 4096
_PIECE_BYTES = 64

# Smallest amount of used bytes that is reported to the connection.
_TOLD_BYTES = 64 * 1024


class Wire(Protocol):
    """The connection of a call, which is identified by its stream's number.

    http2: its session. max_message_bytes: largest message of a request. budget: the limit for kept
    bytes.
    """

    http2: Connection
    max_message_bytes: int
    budget: Budget

    def send(self, stream_id: int, data: bytes, head: bytes = b"") -> int:
        """Sends a part of the answer; returns how many bytes of it now wait for the peer.

        Aborts the call if there is no room for them. head: the header block that begins the answer.
        """

    def finish(self, stream_id: int, block: bytes) -> None:
        """Sends the last header block of the answer and forgets the call."""

    def flush(self) -> None:
        """Writes what was sent; needed only outside of `Call.receive`."""


class CallState:
    """Where a call is. It is compared by identity, and shows its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        """Returns the state's name."""
        return self.name


# The request goes on; no message of it has come, messages have, an answer was sent.
OPENED: Final = CallState("OPENED")
ASKED: Final = CallState("ASKED")
ANSWERING: Final = CallState("ANSWERING")
# The request has ended, but some of it may still be kept.
WHOLE: Final = CallState("WHOLE")
WHOLE_ANSWERING: Final = CallState("WHOLE_ANSWERING")
# All of the request was taken.
TAKEN: Final = CallState("TAKEN")
TAKEN_ANSWERING: Final = CallState("TAKEN_ANSWERING")
# The status was sent, or the stream is gone.
OVER: Final = CallState("OVER")

# What follows a state, by event; where a state is missing, the event cannot come.
AFTER_MESSAGE: Final = {
    OPENED: ASKED,
    ASKED: ASKED,
    ANSWERING: ANSWERING,
    WHOLE: WHOLE,
    WHOLE_ANSWERING: WHOLE_ANSWERING,
}
AFTER_ANSWER: Final = {
    ASKED: ANSWERING,
    ANSWERING: ANSWERING,
    WHOLE: WHOLE_ANSWERING,
    WHOLE_ANSWERING: WHOLE_ANSWERING,
    TAKEN: TAKEN_ANSWERING,
    TAKEN_ANSWERING: TAKEN_ANSWERING,
}
AFTER_LAST: Final = {OPENED: WHOLE, ASKED: WHOLE, ANSWERING: WHOLE_ANSWERING}
AFTER_TAKEN: Final = {WHOLE: TAKEN, WHOLE_ANSWERING: TAKEN_ANSWERING}

_UNANSWERED: Final = frozenset((OPENED, ASKED, WHOLE, TAKEN))

Kept = TypeVar("Kept", bytes, bytes | Parts)

_NOTHING: deque[Any] = deque(maxlen=0)


def _appended(kept: deque[Kept], data: Kept) -> deque[Kept]:
    """Returns the kept pieces or messages, with one more."""
    if kept is _NOTHING:
        return deque((data,))
    kept.append(data)
    return kept


class Call(ABC):
    """One open gRPC call.

    Bytes that arrive before a message is answered, or while the peer does not read the answers, are
    kept as they arrived; the stream's window bounds them. Whoever creates a call has already taken
    `CALL_BYTES` from the wire's budget for it.

    state: changes only as the tables above say.
    """

    def __init__(self, wire: Wire, stream_id: int) -> None:
        self.state = OPENED
        self._wire = wire
        self._id = stream_id
        self._reader = MessageReader(wire.max_message_bytes)
        # usually nothing is kept, and two queues would be most of a call's memory
        self._messages: deque[bytes | Parts] = _NOTHING
        self._unread: deque[bytes] = _NOTHING
        self._buffered_bytes = 0
        self._queued = 0
        self._used_bytes = 0
        self._charged = CALL_BYTES
        self._owed_ticks = 0
        self._awaited: asyncio.Task[Answers] | None = None  # of the message taken last

    @abstractmethod
    def take(self, message: Message) -> None:
        """Takes one message of the request.

        Raises:
            CallError: the call ends with this error.
        """

    @abstractmethod
    def end(self) -> None:
        """Called when the request has ended and all its messages were taken.

        Raises:
            CallError: the call ends with this error.
        """

    @abstractmethod
    def close(self) -> None:
        """Called once when the call has ended, whoever ended it."""

    @property
    def is_busy(self) -> bool:
        """Whether the call cannot take a message now."""
        if self._queued <= _MAX_QUEUED_BYTES:
            return self._awaited is not None
        self._queued = self._wire.http2.queued(self._id)
        return self._awaited is not None or self._queued > _MAX_QUEUED_BYTES

    @property
    def has_unread(self) -> bool:
        """Whether bytes are kept that `go_on` can take as soon as the call is not busy."""
        return bool(self._messages or self._unread) or self.state in AFTER_TAKEN

    def receive(self, data: Piece, *, is_last: bool) -> bool:
        """Takes more bytes of the request; returns whether the call is then held back.

        is_last: whether the request ends with them.
        """
        if is_last:
            self.state = AFTER_LAST[self.state]
        if not data:
            self.go_on()
        elif self._messages or self._unread or self.is_busy:
            self._unread = _appended(self._unread, bytes(data))
            self._buffered_bytes += len(data) + _PIECE_BYTES
            self._charge()
        else:
            self.guarded(self._read, data)
            if is_last or self._messages:
                self.go_on()
            elif self._reader.buffered_bytes or self._charged > CALL_BYTES:
                self._charge()
            else:
                return False
        return self.state is not OVER and self.has_unread

    def go_on(self) -> None:
        """Takes the bytes that were kept while the call was busy, until it is busy again."""
        while not self.is_busy:  # nothing is kept of a call that is over
            if self._messages:
                message = self._messages.popleft()
                self._buffered_bytes -= len(message) + _PIECE_BYTES
                self.guarded(self.take, message)
            elif self._unread:
                piece = self._unread.popleft()
                self._buffered_bytes -= len(piece) + _PIECE_BYTES
                self.guarded(self._read, piece)
            else:
                if self.state in AFTER_TAKEN:
                    self.guarded(self._end)
                break
        if self.state is not OVER:
            self._charge()

    def answer(self, message: bytes) -> None:
        """Sends one message of the answer; does nothing if the call has ended."""
        before = self.state
        if before is OVER:
            return
        self.state = after = AFTER_ANSWER[before]
        head = b"" if after is before else ANSWER_HEAD
        self._queued = self._wire.send(self._id, framed(message), head)

    def finish(self, status: int = Status.OK, text: str = "") -> None:
        """Ends the call with a gRPC status; does nothing if it has ended."""
        before = self.state
        if before is not OVER:
            self._over()
            block = (trailers_only if before in _UNANSWERED else trailers)(status, text)
            self._wire.finish(self._id, block)

    def abort(self) -> None:
        """Ends the call because its stream is gone; does nothing if it has ended."""
        if self.state is not OVER:
            self._over()

    def tick(self, most: int) -> None:
        """Called every 5 s: ends a call if its first message is missing, or another one is
        incomplete, for more than `most` ticks."""
        if self.state is not OPENED and not self._reader.buffered_bytes:
            self._owed_ticks = 0
            return
        self._owed_ticks += 1
        if self._owed_ticks > most:
            self.finish(Status.DEADLINE_EXCEEDED, "no message in time")

    def guarded(self, function: Callable[..., None], *arguments: object) -> None:
        """Calls a function; its error ends this call, but not the connection."""
        try:
            function(*arguments)
        except CallError as error:
            self.finish(error.status, str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, other calls go on
            tell_fault(log, "stream ended by an internal error: %s", error)
            self.finish(Status.INTERNAL)

    def _read(self, data: Piece) -> None:
        messages = self._reader.read(data)
        self._used_bytes += len(data)
        if self._used_bytes >= _TOLD_BYTES:
            self._wire.http2.consume(self._id, self._used_bytes)
            self._used_bytes = 0
        if messages:
            self.state = AFTER_MESSAGE[self.state]
            self._owed_ticks = 0
            for later in messages[1:]:
                kept = later if isinstance(later, Parts) else bytes(later)
                self._messages = _appended(self._messages, kept)
                self._buffered_bytes += len(later) + _PIECE_BYTES
            self.take(messages[0])

    def _end(self) -> None:
        self.state = AFTER_TAKEN[self.state]
        if self._reader.buffered_bytes:
            raise CallError(Status.INTERNAL, "the last message is incomplete")
        self.end()

    def _charge(self) -> None:
        """Books the kept bytes; ends the call if there is no room for them."""
        if self.state is OVER:
            return
        more = CALL_BYTES + self._buffered_bytes + self._reader.buffered_bytes - self._charged
        if more < 0:
            self._wire.budget.give_back(-more)
        elif not self._wire.budget.take(more):
            self.finish(Status.RESOURCE_EXHAUSTED, "no memory left for unfinished messages")
            return
        self._charged += more

    def _over(self) -> None:
        self.state = OVER
        self._messages = self._unread = _NOTHING
        self._wire.budget.give_back(self._charged)
        self.close()


class ExtProcCall(Call):
    """One ext_proc stream; it has a task only while it awaits an answer."""

    def __init__(self, wire: Wire, stream_id: int, service: Service, traceparent: str) -> None:
        super().__init__(wire, stream_id)
        self._metrics = service.metrics
        self._encoded = service.stream_settings.phrases.encoded
        self._joining = service.joining
        self._exchange = service.open(traceparent)

    def take(self, message: Message) -> None:
        """Passes a message to the exchange and sends its answers.

        The exchange usually answers without waiting, and then needs no task, which would add a
        sixth to a request's work (docs/performance-appendix.md, "No task for a message"). Only
        where it waits, as for a long message to be joined, a task runs the rest of it. A task
        cannot take over what was awaited before it was made, so the first wait must be
        `asyncio.sleep(0)`; anything else fails, like an `asyncio.timeout` before that.
        """
        if isinstance(message, Parts):
            self._wait_for(self._long(message))
            return
        try:
            answering = self._exchange.receive(ProcessingRequest.FromString(message))  # type: ignore[arg-type]
            waited_for = answering.send(None)
        except StopIteration as done:
            for answer in done.value:
                self.answer(self._encoded(answer))
        except DecodeError:
            raise self._malformed() from None
        except ProtocolError as error:
            raise self._refusal(Status.INVALID_ARGUMENT, str(error)) from None
        else:
            if waited_for is not None:
                answering.close()
                raise TypeError("it awaits something before asyncio.sleep(0)")
            self._wait_for(answering)

    def _wait_for(self, answering: Coroutine[Any, Any, Answers]) -> None:
        self._awaited = asyncio.get_running_loop().create_task(answering)
        self._awaited.add_done_callback(self._answered)

    async def _long(self, message: Parts) -> Answers:
        """Returns the answers to a long message, which is joined in a thread."""
        return await self._exchange.receive(*await joined(message, self._joining))

    def end(self) -> None:
        """Ends the call with OK: the HTTP request has ended."""
        self.finish()

    def close(self) -> None:
        """Releases the request's load, and cancels an awaited answer."""
        if self._awaited is not None:
            self._awaited.cancel()
        self._exchange.close()

    def _answered(self, awaited: asyncio.Task[Answers]) -> None:
        if awaited.cancelled():
            self.finish(Status.INTERNAL)
        else:
            self.guarded(self._take_awaited, awaited)
        self.go_on()
        self._wire.flush()

    def _take_awaited(self, awaited: asyncio.Task[Answers]) -> None:
        self._awaited = None
        try:
            answers = awaited.result()
        except DecodeError:
            raise self._malformed() from None
        except ProtocolError as error:
            raise self._refusal(Status.INVALID_ARGUMENT, str(error)) from None
        for answer in answers:
            self.answer(self._encoded(answer))

    def _malformed(self) -> CallError:
        return self._refusal(Status.INTERNAL, "malformed message")

    def _refusal(self, status: int, text: str) -> CallError:
        self._metrics.protocol_errors.inc()
        log.warning("stream ended: %s", text)
        return CallError(status, text)


class HealthCall(Call):
    """A health check: its question is the only message of the request."""

    def __init__(self, wire: Wire, stream_id: int, health: Health) -> None:
        super().__init__(wire, stream_id)
        self._health = health
        self._question: str | None = None

    def take(self, message: Message) -> None:
        """Takes the question; a second one is an error."""
        if self._question is not None:
            raise CallError(Status.INTERNAL, "more than one message")
        if isinstance(message, Parts):
            raise CallError(Status.INTERNAL, "malformed message")
        try:
            self._question = HealthCheckRequest.FromString(message).service  # type: ignore[arg-type]
        except DecodeError:
            raise CallError(Status.INTERNAL, "malformed message") from None

    def end(self) -> None:
        """Answers the question and ends the call."""
        status = self._status()
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            raise CallError(Status.NOT_FOUND, "unknown service")
        self._tell(status)
        self.finish()

    def close(self) -> None:
        """Does nothing: a health call holds nothing."""

    def _status(self) -> ServingStatus:
        if self._question is None:
            raise CallError(Status.INTERNAL, "no message")
        return self._health.status_of(self._question)

    def _tell(self, status: ServingStatus) -> None:
        self.answer(HealthCheckResponse(status=status).SerializeToString())


class WatchCall(HealthCall):
    """A health watch: answers the question again whenever the answer changes."""

    def __init__(self, wire: Wire, stream_id: int, health: Health) -> None:
        super().__init__(wire, stream_id, health)
        self._sent_status: ServingStatus | None = None
        self._timer: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """Answers now, and again whenever the health has changed."""
        status = self._status()
        if status != self._sent_status:
            self._sent_status = status
            self._tell(status)
            self._wire.flush()
        if self._health.is_stopping:
            raise CallError(Status.UNAVAILABLE, "stopping")
        if self.state is not OVER:
            self._timer = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._look_again)

    def close(self) -> None:
        """Stops watching."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_again(self) -> None:
        self.guarded(self.end)
        self._wire.flush()
