"""grpc.health.v1.Health on the lean server: Check and Watch."""

import asyncio

from google.protobuf.message import DecodeError

from extproc.errors import CallError
from extproc.http2.grpc_messages import Piece, Status
from extproc.pb.kvsteer_health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.serving.health_service import WATCH_SECONDS, Health, ServingStatus
from extproc.serving.lean_call import Call, Wire


class HealthCall(Call):
    """One question, which is the only message of its request."""

    def __init__(self, wire: Wire, stream_id: int, health: Health) -> None:
        super().__init__(wire, stream_id)
        self._health = health
        self._question: str | None = None

    def take(self, message: Piece) -> None:
        """The question."""
        if self._question is not None:
            raise CallError(Status.INTERNAL, "more than one message")
        try:
            self._question = HealthCheckRequest.FromString(message).service  # type: ignore[arg-type]
        except DecodeError:
            raise CallError(Status.INTERNAL, "malformed message") from None

    def end(self) -> None:
        """Answers, once."""
        status = self._status()
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            raise CallError(Status.NOT_FOUND, "unknown service")
        self._tell(status)
        self.finish()

    def close(self) -> None:
        """Nothing is held."""

    def _status(self) -> ServingStatus:
        if self._question is None:
            raise CallError(Status.INTERNAL, "no message")
        return self._health.of(self._question)

    def _tell(self, status: ServingStatus) -> None:
        self.answer(HealthCheckResponse(status=status).SerializeToString())


class WatchCall(HealthCall):
    """The same question, answered whenever the answer changes."""

    def __init__(self, wire: Wire, stream_id: int, health: Health) -> None:
        super().__init__(wire, stream_id, health)
        self._told: ServingStatus | None = None
        self._timer: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """Answers now, and from now on."""
        status = self._status()
        if status != self._told:
            self._told = status
            self._tell(status)
            self._wire.flush()
        if self._health.is_stopping:
            raise CallError(Status.UNAVAILABLE, "stopping")
        if not self._is_over:
            self._timer = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._look_again)

    def close(self) -> None:
        """Nobody watches any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_again(self) -> None:
        self.guarded(self.end)
        self._wire.flush()
