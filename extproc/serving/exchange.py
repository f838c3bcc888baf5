"""One ext_proc stream on any server: its messages, the router's decision, and its accounting."""

import logging
import time
from collections.abc import Callable

import msgspec

from extproc.config.schema import Config
from extproc.http2.limits import MIB, Budget
from extproc.observing.metrics import Metrics
from extproc.observing.outcomes import Account, Outcome
from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest
from extproc.picking.decision import Decision, Refusal, Verdict, refusal_of
from extproc.picking.disaggregation import Legs
from extproc.picking.load import Booking
from extproc.picking.policies import endpoints_named, rank_header
from extproc.recorder import Recorder
from extproc.requests.request import Ask
from extproc.router import Routed, Router
from extproc.serving.stream import Spoken, Stream, traceparent_of
from extproc.serving.stream_answers import Answers, Placement

log = logging.getLogger("kvsteer.extproc")


# Memory for collected bodies: in dialect B the router collects them; in dialect A, Envoy does.
_BODIES_BYTES = 1024 * MIB


class Service:
    """What all streams of a server share.

    monotonic: a clock in seconds, for the times of responses. is_traced: whether requests are
    traced. accounts: whether responses are accounted for. reads_usage: whether their reported
    tokens are, too. recorder: notified when a request has ended.
    """

    def __init__(
        self,
        config: Config,
        router: Router,
        metrics: Metrics,
        monotonic: Callable[[], float] = time.monotonic,
        recorder: Recorder | None = None,
    ) -> None:
        self.config = config
        self.recorder = recorder
        self.router = router
        self.metrics = metrics
        self.monotonic = monotonic
        self.is_traced = router.is_traced
        self.accounts = config.accounting.responses != "none"
        self.reads_usage = config.accounting.responses == "usage"
        rules = config.disaggregation
        has_legs = rules.mode is not None or rules.changes_bodies
        self.legs = Legs(config) if has_legs else None
        header, session = config.policy.header, config.policy.session_header
        shares = router.steering.header
        self.spoken = Spoken(
            max_body_bytes=config.extproc.max_body_bytes,
            bodies=Budget(_BODIES_BYTES),
            names_model=len(config.models) > 1,
            policy_header=None if header is None else header.lower(),
            session_header=None if session is None else session.lower(),
            conversation_header=shares,
            dialect=config.extproc.dialect,
            reads_usage=self.reads_usage,
            owned=self.legs.headers if self.legs is not None else (),
        )

    def open(self, traceparent: str = "") -> "Exchange":
        """Returns the exchange of a new stream, which the caller must close.

        traceparent: the trace in the stream's own metadata; if it is "", the client's header is
        used.
        """
        return Exchange(self, traceparent)


class Exchange:
    """One ext_proc stream, which is one HTTP request.

    A server passes it each message and sends the answers in order before passing the next one; the
    server closes it once, however the stream ended. A message may have any number of answers.
    """

    def __init__(self, service: Service, traceparent: str = "") -> None:
        self._service = service
        self._traceparent = traceparent
        # if only some requests are steered, as much must be known about the others
        self._accounts = service.accounts or service.router.steering.is_partial
        self._wants_status = not service.accounts and (
            self._accounts or service.router.wants_status()
        )
        self._stream = Stream(service.spoken, wants_status=self._wants_status)
        self._began_at = service.monotonic()
        self._booking: Booking | None = None
        self._account: Account | None = None
        self._decision: Decision | None = None  # if we may see the response
        self._recorded: Decision | None = None  # if requests are recorded
        self._is_closed = False
        service.metrics.open_streams += 1

    async def receive(self, message: ProcessingRequest) -> Answers:
        """Takes one message and returns the answers to it; waits as `Router.route` does.

        Raises:
            ProtocolError: the stream must end with INVALID_ARGUMENT and the error's text.
        """
        step = self._stream.receive(message)
        service = self._service
        if service.is_traced and not self._traceparent and message.HasField("request_headers"):
            self._traceparent = traceparent_of(message)
        if not isinstance(step, Ask):
            if self._booking is not None:
                self._look_at(message, self._booking)
            return step
        return self._place(await service.router.route(step, self._traceparent), step)

    def close(self) -> None:
        """Ends the stream and releases its load; closing it again changes nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stream.close()
        self._service.metrics.open_streams -= 1
        if self._booking is not None:
            self._service.router.release(self._booking)
        if self._decision is not None and self._decision.is_steered:
            self._service.router.deliveries.untold(self._decision.model)
        outcome = None
        if self._account is not None and (self._always_shown or self._stream.response_head):
            outcome = self._account.outcome()
            self._service.metrics.observe_outcome(outcome)
        self._end_recording(outcome)

    def _end_recording(self, outcome: Outcome | None) -> None:
        recorder, decision = self._service.recorder, self._recorded
        if recorder is not None and decision is not None:
            recorder.end(decision, outcome)

    def _place(self, routed: Routed, ask: Ask) -> Answers:
        decision, self._booking = routed
        if self._service.recorder is not None:
            self._recorded = decision
        if self._is_closed:
            if self._booking is not None:
                self._service.router.release(self._booking)
            self._end_recording(None)
        verdict = decision.verdict
        service, is_duplex = self._service, self._stream.is_duplex
        if not (decision.is_steered or is_duplex):
            verdict = Verdict.NO_OVERRIDE
        if verdict is Verdict.NO_OVERRIDE and is_duplex:
            verdict = Verdict.UNAVAILABLE  # Endpoint Picker Protocol 1.0.0, Destination Endpoint
        refusal = None if verdict is Verdict.STEER else refusal_of(verdict)
        if refusal is not None:
            return self._stream.refuse(refusal)
        self._await_response(decision)
        if decision.is_steered:
            rank = rank_header(service.config.policy.rank_header, decision.rank)
            named = endpoints_named(service.config.policy, is_duplex=is_duplex)
            destination = ",".join(decision.pick[:named])
        else:
            rank, destination = None, self._left_to(decision)
        placement = Placement(destination, decision.model or "", rank)
        if self._service.legs is None:
            return self._stream.place(placement)
        body = None if ask.wants_endpoint else ask.body
        legs = self._service.legs.of(decision, ask.head.path, body)
        if isinstance(legs, Refusal):
            return self._stream.refuse(legs)
        return self._stream.place(msgspec.structs.replace(placement, legs=legs[0], body=legs[1]))

    def _await_response(self, decision: Decision) -> None:
        """Prepares to account for the response, if the proxy will send it."""
        booking, router, is_duplex = self._booking, self._service.router, self._stream.is_duplex
        sees_responses = is_duplex or self._accounts  # always in dialect B
        if booking is None or self._is_closed or not (sees_responses or self._wants_status):
            return
        self._decision = decision
        if decision.is_steered:
            router.deliveries.look(decision.model)
        if sees_responses:
            self._account = Account(decision, router.compared(booking), self._began_at)

    def _left_to(self, decision: Decision) -> str:
        """Returns the endpoint for an unsteered request; "" if the proxy chooses by itself."""
        if not self._stream.is_duplex or self._booking is None:
            return ""
        endpoint = self._service.router.any_endpoint(decision, self._booking)
        if self._account is not None:
            self._account.left_to(endpoint)
        return endpoint

    @property
    def _always_shown(self) -> bool:
        """Whether the proxy sends every response, so that a missing one means there was none."""
        return self._service.accounts or self._stream.is_duplex

    def _look_at(self, message: ProcessingRequest, booking: Booking) -> None:
        """Accounts for a message if it is part of a response."""
        try:
            if message.HasField("response_headers"):
                self._look_at_headers(booking)
            elif self._account is not None and self._service.reads_usage:
                self._look_at_body(message, self._account)
        except Exception as error:  # noqa: BLE001 - whatever it is, the response must go on
            log.error("accounting failed with %s", type(error).__name__)
            self._account = None

    def _look_at_headers(self, booking: Booking) -> None:
        head, account, router = self._stream.response_head, self._account, self._service.router
        if head is None:
            return
        if account is not None:
            account.respond(head.status, head.served, self._service.monotonic())
        if head.served and self._decision is not None:
            decision, self._decision = self._decision, None  # reported once
            router.served(decision, booking, head.served)
        if head.status is not None:
            router.answered(booking, head.status, head.served)

    def _look_at_body(self, message: ProcessingRequest, account: Account) -> None:
        head = self._stream.response_head
        if message.HasField("response_body") and head is not None and head.is_readable:
            body = message.response_body
            account.read(body.body, self._service.monotonic(), is_last=body.end_of_stream)
