"""One ext_proc stream on any server: its messages, the router's decision, and the books."""

from collections.abc import Awaitable
from dataclasses import dataclass

from extproc.config import Config
from extproc.metrics import Metrics
from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from extproc.picking.load import Booking
from extproc.picking.refusal import refusal_of
from extproc.router import Routed, Router
from extproc.serving.stream import Ask, Placement, Stream

Answers = list[ProcessingResponse]


@dataclass(frozen=True, slots=True)
class Service:
    """What all streams of a server share."""

    config: Config
    router: Router
    metrics: Metrics

    def open(self) -> "Exchange":
        """A new stream; it is to be closed."""
        return Exchange(self)


class Exchange:
    """One stream, which is one HTTP request.

    A server hands over each message that came and sends what is answered, in order, and takes no
    further message before that; and it closes the exchange once, however the stream ended.
    """

    def __init__(self, service: Service) -> None:
        config = service.config
        self._service = service
        header = config.policy.header
        self._stream = Stream(
            max_body_bytes=config.extproc.max_body_bytes,
            names_model=len(config.models) > 1,
            policy_header=None if header is None else header.lower(),
        )
        self._booking: Booking | None = None
        self._is_closed = False
        service.metrics.open_streams.inc()

    def receive(self, message: ProcessingRequest) -> Answers | Awaitable[Answers]:
        """Takes one message; its answers, or what is to be awaited for them.

        Raises:
            ProtocolError: the stream is to end with INVALID_ARGUMENT and what the error says.
        """
        step = self._stream.receive(message)
        if not isinstance(step, Ask):
            return [step]
        routed = self._service.router.route(step)
        if isinstance(routed, Routed):
            return self._place(routed)
        return self._place_later(routed)

    def close(self) -> None:
        """The stream is over; closing it again changes nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._service.metrics.open_streams.dec()
        if self._booking is not None:
            self._service.router.release(self._booking)

    async def _place_later(self, routed: Awaitable[Routed]) -> Answers:
        return self._place(await routed)

    def _place(self, routed: Routed) -> Answers:
        decision, self._booking = routed
        if self._is_closed and self._booking is not None:
            self._service.router.release(self._booking)
        refusal = refusal_of(decision.verdict)
        if refusal is not None:
            return [self._stream.refuse(refusal)]
        return [self._stream.place(Placement(",".join(decision.pick), decision.model or ""))]
