"""One gRPC call on the lean server: messages of its request in, answers and a status out."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from extproc._core import Budget, Session
from extproc.base.errors import CallError, ProtocolError
from extproc.base.logs import log_fault
from extproc.http2.call_events import ENDED, FAILED, MESSAGE, PART
from extproc.http2.codes import Status
from extproc.http2.messages import LongMessage, Message, MessageParts
from extproc.pb.kvsteer_health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.requests.request import RoutingRequest
from extproc.serving.exchange import Exchange, Service
from extproc.serving.health_service import WATCH_SECONDS, Health, ServingStatus
from extproc.serving.long_message import joined
from extproc.serving.proxy_message import OF_RESPONSES, ProxyMessage
from extproc.serving.stream_answers import Answers

log = logging.getLogger("kvsteer.extproc")

# While more bytes of a call's answers than this wait for the peer, the call takes no messages.
_MAX_QUEUED_BYTES = 1024 * 1024

# The bytes charged for a kept message in addition to its content, so that hundreds of thousands of
# short ones also reach the limit.
_MESSAGE_BYTES = 64


class Wire(Protocol):
    """The connection of a call, which is identified by its stream's number.

    session: the calls of the connection. budget: the limit for kept bytes.
    """

    session: Session
    budget: Budget

    def forget(self, stream_id: int) -> None:
        """Forgets a call that has ended."""

    def flush(self) -> None:
        """Writes what was sent; needed only outside of `Call.receive`."""


class Call(ABC):
    """One open gRPC call.

    What arrives before a message is answered, or while the peer does not read the answers, is kept;
    meanwhile the session lets the peer send no more than the stream's window.

    is_over: whether its status was sent, or its stream is gone.
    """

    _kept_bytes: int = 0  # of the class, since most calls keep nothing

    def __init__(self, wire: Wire, stream_id: int) -> None:
        self._wire = wire
        self._session = wire.session
        self._id = stream_id
        self.is_over = False
        self._kept: deque[tuple[int, Any]] | None = None
        self._parts: list[bytes] | None = None
        self._queued = 0
        self._awaited: asyncio.Task[Answers] | None = None  # of the message taken last

    @abstractmethod
    def take(self, message: Message | ProxyMessage) -> None:
        """Takes one message of the request, as the session passes it on.

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
        if self._queued > _MAX_QUEUED_BYTES:
            self._queued = self._session.queued(self._id)
        return self._awaited is not None or self._queued > _MAX_QUEUED_BYTES

    @property
    def has_kept(self) -> bool:
        """Whether something is kept that `go_on` can take as soon as the call is not busy."""
        return bool(self._kept)

    def receive(self, kind: int, content: Any) -> bool:
        """Takes an event of the session; returns whether the call is then held back."""
        is_held_up = self._awaited is not None or self._queued > _MAX_QUEUED_BYTES
        if is_held_up or self._kept is not None or self._parts is not None or kind == PART:
            return self._receive_in_turn(kind, content)
        self._take(kind, content)
        return False

    def _receive_in_turn(self, kind: int, content: Any) -> bool:
        """Takes an event as `receive`: behind what is kept, and a part of a message to the rest."""
        if kind == PART:
            self._parts = [*(self._parts or ()), content]
            return False
        if kind == MESSAGE and self._parts:
            content, self._parts = MessageParts([*self._parts, content]), None
        if self._kept or self.is_busy:
            self._keep(kind, content)
            return bool(self._kept)
        self._take(kind, content)
        return False

    def go_on(self) -> None:
        """Takes what was kept while the call was busy, until it is busy again."""
        while self._kept and not self.is_busy:
            kind, content = self._kept.popleft()
            size = _kept_bytes(kind, content)
            self._kept_bytes -= size
            self._wire.budget.give_back(size)
            self._take(kind, content)
        if not self._kept and not self.is_over:
            self._session.unhold(self._id)

    def answer(self, message: bytes | LongMessage) -> None:
        """Sends one message of the answer; does nothing if the call has ended."""
        if self.is_over:
            return
        self._queued = self._session.answer(self._id, message)
        if self._queued < 0:
            self.abort()
            self._wire.forget(self._id)

    def finish(self, status: int = Status.OK, text: str = "") -> None:
        """Ends the call with a gRPC status; does nothing if it has ended."""
        if not self.is_over:
            self._let_go()
            self._session.finish(self._id, status, text)
            self._wire.forget(self._id)

    def abort(self) -> None:
        """Ends the call because its stream is gone; does nothing if it has ended."""
        if not self.is_over:
            self._let_go()

    def _let_go(self) -> None:
        """Marks the call as over, and releases what it keeps."""
        self.is_over = True
        if self._kept is not None or self._parts is not None:
            self._kept = self._parts = None
            self._wire.budget.give_back(self._kept_bytes)
        self.close()

    def guarded(self, function: Callable[..., None], *arguments: object) -> None:
        """Calls a function; its error ends this call, but not the connection."""
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, other calls go on
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, CallError):
            self.finish(error.status, str(error))
            return
        log_fault(log, "stream ended by an internal error: %s", error)
        self.finish(Status.INTERNAL)

    def _take(self, kind: int, content: Any) -> None:
        """Takes an event; an error ends this call, but not the connection."""
        try:
            if kind == MESSAGE:
                self.take(content)
            elif kind == ENDED:
                self.end()
            else:
                status, text = content
                self.finish(status, text)
        except Exception as error:  # noqa: BLE001 - whatever it is, other calls go on
            self._fail(error)

    def _keep(self, kind: int, content: Any) -> None:
        """Keeps an event; ends the call if there is no room for it."""
        size = _kept_bytes(kind, content)
        if not self._wire.budget.take(size):
            self.finish(Status.RESOURCE_EXHAUSTED, "no memory left for unfinished messages")
            return
        self._kept_bytes += size
        if self._kept is None:
            self._kept = deque()
        self._kept.append((kind, content))
        self._session.hold(self._id)


def _kept_bytes(kind: int, content: Any) -> int:
    if kind != MESSAGE:
        return _MESSAGE_BYTES
    is_read = isinstance(content, ProxyMessage)
    return _MESSAGE_BYTES + (content.size_bytes if is_read else len(content))


class ExtProcCall(Call):
    """One ext_proc stream; it has a task only while it awaits an answer.

    A proxy that gives a request up may only end its own half of the stream (Envoy does, if its
    client goes), or send the headers of its own response (if a timeout of its ends the request).
    """

    def __init__(self, wire: Wire, stream_id: int, service: Service, traceparent: str) -> None:
        Call.__init__(self, wire, stream_id)  # super() costs as much as the rest of a call
        self._service = service
        self._traceparent = traceparent
        self._exchange: Exchange | None = None

    def _opened(self) -> Exchange:
        """Returns the exchange of the stream, which begins with its first message."""
        if self._exchange is None:
            self._exchange = self._service.open(self._traceparent)
        return self._exchange

    def take(self, message: Message | ProxyMessage) -> None:
        """Passes a message to the exchange and sends its answers.

        The exchange usually answers without waiting, and then needs no task, which would add a
        sixth to a request's work (benchmarks/results.md, "No task for a message"). Only
        where it waits, as for a long message to be joined, a task runs the rest of it. A task
        cannot take over what was awaited before it was made, so the first wait must be
        `asyncio.sleep(0)`; anything else fails, like an `asyncio.timeout` before that.
        """
        if isinstance(message, MessageParts):
            self._wait_for(self._long(message))
            return
        exchange = self._exchange or self._opened()
        try:
            read = message
            if not isinstance(read, ProxyMessage):  # the session left it to protobuf
                read = self._service.decoder.decode(read)
            step = exchange.step(read)
            if not isinstance(step, RoutingRequest):
                self._answer_all(step)
                return
            answering = exchange.decide(step, self.ask_for_time)
            waited_for = answering.send(None)
        except StopIteration as done:
            self._answer_all(done.value)
        except DecodeError:
            raise self._malformed() from None
        except ProtocolError as error:
            raise self._refusal(Status.INVALID_ARGUMENT, str(error)) from None
        else:
            if waited_for is not None:
                answering.close()
                raise TypeError("it awaits something before asyncio.sleep(0)")
            if self.is_over:  # its stream was gone when it asked for more time
                answering.close()
                return
            self._wait_for(answering)

    def ask_for_time(self, seconds: float) -> bool:
        """Has the proxy wait so many seconds for the awaited answer; returns whether it does.

        It does not if the request is over by what is kept. From then on, what ends the request
        overtakes the answer: nobody would notice it for as long.
        """
        if self._exchange is None or any(self._ends_request(*one) for one in self._kept or ()):
            return False
        asked = self._exchange.more_time(seconds)
        if asked is None:
            return False
        self._answer_all(asked)
        if self._awaited is not None:  # else `take` still runs, and its caller writes
            self._wire.flush()
        return not self.is_over

    def _receive_in_turn(self, kind: int, content: Any) -> bool:
        """Takes an event as `Call` does, but at once if it ends a request that is held."""
        is_held = self._exchange is not None and self._exchange.is_held
        if not is_held or not self._ends_request(kind, content):
            return super()._receive_in_turn(kind, content)
        if kind == FAILED:
            self._take(kind, content)
        else:
            self.finish()
        return False

    def _ends_request(self, kind: int, content: Any) -> bool:
        """Returns whether nobody waits for a pick after an event: the proxy ends or answers it."""
        if kind != MESSAGE or isinstance(content, MessageParts):
            return kind in (ENDED, FAILED)
        try:
            is_read = isinstance(content, ProxyMessage)
            read = content if is_read else self._service.decoder.decode(content)
        except DecodeError:
            return False
        return read.kind in OF_RESPONSES

    def _answer_all(self, answers: Answers) -> None:
        for answer in answers:
            self.answer(answer)

    def _wait_for(self, answering: Coroutine[Any, Any, Answers]) -> None:
        self._awaited = asyncio.get_running_loop().create_task(answering)
        self._awaited.add_done_callback(self._answered)

    async def _long(self, message: MessageParts) -> Answers:
        """Returns the answers to a long message, which is joined in a thread."""
        service = self._service
        read = await joined(message, service.decoder, service.joining)
        del message  # its parts take as much memory as what was made of them
        exchange = self._opened()
        step = exchange.step(read)
        if not isinstance(step, RoutingRequest):
            return step
        del read
        return await exchange.decide(step, self.ask_for_time)

    def end(self) -> None:
        """Ends the call with OK: the HTTP request has ended."""
        self.finish()

    def close(self) -> None:
        """Releases the request's load, and cancels an awaited answer."""
        if self._awaited is not None:
            self._awaited.cancel()
        if self._exchange is not None:
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
        self._answer_all(answers)

    def _malformed(self) -> CallError:
        return self._refusal(Status.INTERNAL, "malformed message")

    def _refusal(self, status: int, text: str) -> CallError:
        self._service.metrics.protocol_errors.inc()
        log.warning("stream ended: %s", text)
        return CallError(status, text)


class HealthCall(Call):
    """A health check: its question is the only message of the request."""

    def __init__(self, wire: Wire, stream_id: int, health: Health) -> None:
        super().__init__(wire, stream_id)
        self._health = health
        self._question: str | None = None

    def take(self, message: Message | ProxyMessage) -> None:
        """Takes the question; a second one is an error."""
        if self._question is not None:
            raise CallError(Status.INTERNAL, "more than one message")
        if not isinstance(message, bytes):
            raise CallError(Status.INTERNAL, "malformed message")
        try:
            self._question = HealthCheckRequest.FromString(message).service
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
        if not self.is_over:
            self._timer = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._look_again)

    def close(self) -> None:
        """Stops watching."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_again(self) -> None:
        self.guarded(self.end)
        self._wire.flush()
