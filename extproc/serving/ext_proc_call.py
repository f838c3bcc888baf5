"""ExternalProcessor.Process on the lean server."""

import asyncio
import logging

from google.protobuf.message import DecodeError

from extproc.errors import CallError, ProtocolError
from extproc.http2.grpc_messages import Piece, Status
from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest
from extproc.serving.exchange import Service
from extproc.serving.lean_call import Call, Wire
from extproc.serving.stream_answers import Answers

log = logging.getLogger("kvsteer.extproc")


class ExtProcCall(Call):
    """One ext_proc stream. Without a task, unless an answer has to be awaited."""

    def __init__(self, wire: Wire, stream_id: int, service: Service, traceparent: str) -> None:
        super().__init__(wire, stream_id)
        self._metrics = service.metrics
        self._exchange = service.open(traceparent)
        self._awaited: asyncio.Future[Answers] | None = None

    @property
    def is_busy(self) -> bool:
        """While an answer is awaited, too."""
        return self._awaited is not None or super().is_busy

    def take(self, message: Piece) -> None:
        """Hands it to the exchange, and sends what is answered."""
        try:
            answers = self._exchange.receive(ProcessingRequest.FromString(message))  # type: ignore[arg-type]
        except DecodeError:
            raise self._refusal(Status.INTERNAL, "malformed message") from None
        except ProtocolError as error:
            raise self._refusal(Status.INVALID_ARGUMENT, str(error)) from None
        if isinstance(answers, list):
            self._send(answers)
        else:
            self._awaited = asyncio.ensure_future(answers)
            self._awaited.add_done_callback(self._answered)

    def end(self) -> None:
        """The HTTP request is over, and so are we."""
        self.finish()

    def close(self) -> None:
        """Releases what the request held."""
        if self._awaited is not None:
            self._awaited.cancel()
        self._exchange.close()

    def _send(self, answers: Answers) -> None:
        for answer in answers:
            self.answer(answer.SerializeToString())

    def _answered(self, awaited: asyncio.Future[Answers]) -> None:
        if awaited.cancelled():
            if not self._is_over:
                self.finish(Status.INTERNAL)
        else:
            self.guarded(self._take_awaited, awaited)
        self.go_on()
        self._wire.flush()

    def _take_awaited(self, awaited: asyncio.Future[Answers]) -> None:
        self._awaited = None
        try:
            self._send(awaited.result())
        except ProtocolError as error:
            raise self._refusal(Status.INVALID_ARGUMENT, str(error)) from None

    def _refusal(self, status: int, text: str) -> CallError:
        self._metrics.protocol_errors.inc()
        log.warning("stream ended: %s", text)
        return CallError(status, text)
