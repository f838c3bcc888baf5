"""One ext_proc stream on any server: its messages, the router's decision, and the books."""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from extproc.config import Config
from extproc.http2.limits import MIB, Budget
from extproc.observing.metrics import Metrics
from extproc.observing.outcomes import Account
from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest
from extproc.picking.decision import Decision, Verdict, refusal_of
from extproc.picking.load import Booking
from extproc.picking.policies import endpoints_named, rank_header
from extproc.router import Routed, Router
from extproc.serving.stream import Ask, Placement, Stream, traceparent_of
from extproc.serving.stream_answers import Answers

log = logging.getLogger("kvsteer.extproc")


# In dialect B bodies are collected here, where Envoy does it in dialect A.
_BODIES_BYTES = 1024 * MIB


@dataclass(frozen=True, slots=True)
class Service:
    """What all streams of a server share.

    monotonic: seconds, for what is accounted of responses. bodies: what bodies that are collected
    may keep in all.
    """

    config: Config
    router: Router
    metrics: Metrics
    monotonic: Callable[[], float] = time.monotonic
    bodies: Budget = field(default_factory=lambda: Budget(_BODIES_BYTES))

    @property
    def is_traced(self) -> bool:
        """Whether it matters which trace a stream belongs to."""
        return self.router.is_traced

    def open(self, traceparent: str = "") -> "Exchange":
        """A new stream; it is to be closed.

        traceparent: of the trace that the stream's own metadata names, "" if there is none: then
        the client's counts.
        """
        return Exchange(self, traceparent)


class Exchange:
    """One stream, which is one HTTP request.

    A server hands over each message that came and sends what is answered, in order, and takes no
    further message before that; and it closes the exchange once, however the stream ended. A
    message may have no answer, or many.
    """

    def __init__(self, service: Service, traceparent: str = "") -> None:
        config = service.config
        self._service = service
        self._traceparent = traceparent
        self._seeks_trace = service.is_traced and not traceparent
        header = config.policy.header
        self._reads_usage = config.accounting.responses == "usage"
        self._accounts = config.accounting.responses != "none"
        self._wants_status = not self._accounts and service.router.wants_status()
        self._stream = Stream(
            max_body_bytes=config.extproc.max_body_bytes,
            bodies=service.bodies,
            names_model=len(config.models) > 1,
            policy_header=None if header is None else header.lower(),
            dialect=config.extproc.dialect,
            reads_usage=self._reads_usage,
            wants_status=self._wants_status,
        )
        self._began_at = service.monotonic()
        self._booking: Booking | None = None
        self._account: Account | None = None
        self._decision: Decision | None = None  # where the response may be shown to us
        self._is_closed = False
        service.metrics.open_streams += 1

    def receive(self, message: ProcessingRequest) -> Answers | Awaitable[Answers]:
        """Takes one message; its answers, or what is to be awaited for them.

        Raises:
            ProtocolError: the stream is to end with INVALID_ARGUMENT and what the error says.
        """
        step = self._stream.receive(message)
        if self._seeks_trace and message.HasField("request_headers"):
            self._traceparent = traceparent_of(message)
        if not isinstance(step, Ask):
            if self._booking is not None:
                self._look_at(message, self._booking)
            return step
        routed = self._service.router.route(step, self._traceparent)
        if isinstance(routed, Routed):
            return self._place(routed)
        return self._place_later(routed)

    def close(self) -> None:
        """The stream is over; closing it again changes nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stream.close()
        self._service.metrics.open_streams -= 1
        if self._booking is not None:
            self._service.router.release(self._booking)
        if self._account is not None:
            self._service.metrics.observe_outcome(self._account.outcome())

    async def _place_later(self, routed: Awaitable[Routed]) -> Answers:
        return self._place(await routed)

    def _place(self, routed: Routed) -> Answers:
        decision, self._booking = routed
        if self._is_closed and self._booking is not None:
            self._service.router.release(self._booking)
        verdict = decision.verdict
        if verdict is Verdict.NO_OVERRIDE and self._stream.is_duplex:
            verdict = Verdict.UNAVAILABLE  # Endpoint Picker Protocol 1.0.0, Destination Endpoint
        refusal = refusal_of(verdict)
        if refusal is not None:
            return self._stream.refuse(refusal)
        if self._booking is not None and (self._sees_responses or self._wants_status):
            self._decision = decision
        if self._booking is not None and self._sees_responses and not self._is_closed:
            sole = self._service.router.compared(self._booking)
            self._account = Account(decision, sole, self._began_at)
        rank = rank_header(self._service.config.policy.rank_header, decision.rank)
        named = endpoints_named(self._service.config.policy, is_duplex=self._stream.is_duplex)
        destination = ",".join(decision.pick[:named])
        return self._stream.place(Placement(destination, decision.model or "", rank))

    @property
    def _sees_responses(self) -> bool:
        """Whether responses are shown to us: in dialect B always."""
        return self._stream.is_duplex or self._accounts

    def _look_at(self, message: ProcessingRequest, booking: Booking) -> None:
        """Accounts for what a response says, if this is one."""
        try:
            if message.HasField("response_headers"):
                self._look_at_headers(booking)
            elif self._account is not None and self._reads_usage:
                self._look_at_body(message, self._account)
        except Exception as error:  # noqa: BLE001 - whatever it is, the response must go on
            log.error("accounting failed with %s", type(error).__name__)
            self._account = None

    def _look_at_headers(self, booking: Booking) -> None:
        head, account, router = self._stream.response.head, self._account, self._service.router
        if head is None:
            return
        if account is not None:
            account.respond(head.status, head.served, self._service.monotonic())
        if head.served and self._decision is not None:
            router.served(self._decision, booking, head.served)
        if head.status is not None:
            router.answered(booking, head.status, head.served)

    def _look_at_body(self, message: ProcessingRequest, account: Account) -> None:
        head = self._stream.response.head
        if message.HasField("response_body") and head is not None and head.is_readable:
            body = message.response_body
            account.read(body.body, self._service.monotonic(), is_last=body.end_of_stream)
