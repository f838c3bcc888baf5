"""One ext_proc stream on the server: its messages, the router's decision, and its accounting.

An exchange is in one phase at a time:

    phase      meaning                                  what may come            then
    WAITING    the request is not complete              the request, complete    ROUTING
                                                        the end of the stream    CLOSED
    ROUTING    the router decides                       the answers are ready    PLACED
                                                        it must be refused       REFUSED
                                                        the end of the stream    CLOSED
    PLACED     the proxy sends it on, response expected the end of the stream    CLOSED
    REFUSED    we have answered it ourselves            the end of the stream    CLOSED
    CLOSED     all is released and accounted for        nothing                  -

From the decision on there is a passage, which holds what must be ended: the load, the record, the
answers that are awaited. It is settled once: at the end of the stream, or, if the stream ended
while the router was deciding, as soon as it has decided.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from types import MappingProxyType

import msgspec

from extproc._core import Budget
from extproc.base.headers import MODEL
from extproc.config.owned_headers import owned_headers
from extproc.config.schema import Config
from extproc.config.sections import session_headers
from extproc.disaggregation.announcement import Announcer
from extproc.http2.limits import MIB
from extproc.observing.metrics import Metrics
from extproc.observing.outcomes import Account
from extproc.observing.recorder import Recorder
from extproc.observing.usage import UsageScanner
from extproc.requests.request import NOT_INFERENCE, RoutingRequest
from extproc.requests.responses_request import PATH as RESPONSES_PATH
from extproc.routing.decision import Decision, Verdict
from extproc.routing.load import Booking
from extproc.routing.policy_choice import endpoints_named
from extproc.routing.statuses import FIRST_FAILURE
from extproc.serving.classes import named_priority
from extproc.serving.named_rank import named_rank
from extproc.serving.naming_headers import NamingHeaders
from extproc.serving.proxy_decoder import ProxyDecoder
from extproc.serving.proxy_message import (
    REQUEST_HEADERS,
    RESPONSE_BODY,
    RESPONSE_HEADERS,
    ProxyMessage,
)
from extproc.serving.refusals import Refusal, refusal_of, refused_body
from extproc.serving.router import Routed, Router
from extproc.serving.stream import Step, Stream, StreamSettings
from extproc.serving.stream_answers import Answers, Phrases, Placement, Told

log = logging.getLogger("kvsteer.extproc")


# Memory for collected bodies: in dialect B the router collects them; in dialect A, Envoy does.
_BODIES_BYTES = 1024 * MIB


class Service:
    """What all streams of a server share.

    monotonic: a clock in seconds, for the times of responses. is_traced: whether requests are
    traced. looks_at_headers: whether requests' headers say more than a stream reads. accounts:
    whether responses are accounted for. reads_usage: whether their reported tokens are, too.
    recorder: notified when a request has ended. decoder: of the proxy's messages.
    names_model: whether the proxy is told the model.
    endpoints, duplex_endpoints: how many of a pick a proxy is told at most, in dialects A and B.
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
        self.legs = Announcer(config) if has_legs else None
        self.preparation = router.preparation
        self.prepares = router.preparation.is_needed
        self.looks_at_headers = self.prepares or self.is_traced
        self.joining = ThreadPoolExecutor(1, thread_name_prefix="joining")
        self.endpoints = endpoints_named(config.policy, is_duplex=False)
        self.duplex_endpoints = endpoints_named(config.policy, is_duplex=True)
        phrases = Phrases(owned_headers(config))
        self.names_model = phrases.names_model
        header = config.policy.header
        self.stream_settings = StreamSettings(
            max_body_bytes=config.extproc.max_body_bytes,
            bodies=Budget(_BODIES_BYTES),
            policy_header=None if header is None else header.lower(),
            naming=NamingHeaders.of(
                session_headers(config.policy.session_header), router.steering.headers
            ),
            dialect=config.extproc.dialect,
            reads_usage=self.reads_usage,
            cleans=self.preparation.reads_bodies,
            phrases=phrases,
            paths=router.paths,
            note_unrecognized=router.unrecognized.note,
        )
        names = self.stream_settings.header_names()
        self.decoder = ProxyDecoder(
            names,
            self.preparation.headers,
            self.stream_settings.naming,
            self.stream_settings.policy_header,
        )

    def open(self, traceparent: str = "") -> "Exchange":
        """Returns the exchange of a new stream, which the caller must close.

        traceparent: the trace in the stream's own metadata; if it is "", the client's header is
        used.
        """
        return Exchange(self, traceparent)


class Phase(StrEnum):
    """The phases of an exchange; the table above says what they mean."""

    WAITING = "waiting"
    ROUTING = "routing"
    PLACED = "placed"
    REFUSED = "refused"
    CLOSED = "closed"


# Naming a member through its class is a search, which every request would make several times.
_WAITING, _ROUTING, _PLACED, _CLOSED = Phase.WAITING, Phase.ROUTING, Phase.PLACED, Phase.CLOSED
_STEER = Verdict.STEER

MAY_FOLLOW: Mapping[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.ROUTING, Phase.CLOSED}),
    Phase.ROUTING: frozenset({Phase.PLACED, Phase.REFUSED, Phase.CLOSED}),
    Phase.PLACED: frozenset({Phase.CLOSED}),
    Phase.REFUSED: frozenset({Phase.CLOSED}),
    Phase.CLOSED: frozenset(),
}


class Passage(msgspec.Struct, eq=False):
    """A request that the router decided on, until it is settled.

    booking: None if it is no worker's load. account: of the response, None if that is not shown.
    scanner: of a response that may show a model's work, None if it is a known API's. awaits_server:
    whether the proxy still has to report which endpoint answered. is_remembered: whether it is
    remembered which worker keeps the response, for requests that continue it.
    """

    decision: Decision
    booking: Booking | None
    account: Account | None = None
    scanner: UsageScanner | None = None
    awaits_server: bool = False
    is_remembered: bool = False


class Exchange:
    """One ext_proc stream, which is one HTTP request. phase: see the module.

    A server passes it each message and sends the answers in order before passing the next one; the
    server closes it once, however the stream ended. A message may have any number of answers.
    """

    # What few exchanges look at belongs to the class: every request makes one.
    _named: Mapping[str, Sequence[bytes]] = MappingProxyType({})  # by the header that names them

    def __init__(self, service: Service, traceparent: str = "") -> None:
        self.phase = _WAITING
        self._passage: Passage | None = None
        router, accounts = service.router, service.accounts
        self._service = service
        self._traceparent = traceparent
        # if only some requests are steered, as much must be known about the others
        self._accounts = accounts or router.steering.is_partial
        self._wants_status = not accounts and (
            self._accounts or router.watched.proofs.wants_answers or router.placing.wants_status()
        )
        self._stream = Stream(service.stream_settings, wants_status=self._wants_status)
        clock = service.monotonic
        self._began_at = clock()
        service.metrics.open_streams += 1

    async def receive(self, message: ProxyMessage) -> Answers:
        """Takes one message and returns the answers to it; waits as `Router.route` does.

        Raises:
            ProtocolError: the stream must end with INVALID_ARGUMENT and the error's text.
        """
        step = self.step(message)
        return await self.decide(step) if isinstance(step, RoutingRequest) else step

    def step(self, message: ProxyMessage) -> Step:
        """Takes one message; returns the answers to it, or what `decide` must answer next.

        Raises:
            ProtocolError: as `receive`.
        """
        step = self._stream.receive(message)
        if self._service.looks_at_headers and message.kind == REQUEST_HEADERS:
            self._look_at_headers_of_request(message)
        if isinstance(step, RoutingRequest):
            self._enter(_ROUTING)
        elif self._passage is not None:
            self._look_at(message, self._passage)
        return step

    def _look_at_headers_of_request(self, message: ProxyMessage) -> None:
        """Takes what the request's headers say besides what the stream reads."""
        self._named = message.values
        if self._service.is_traced and not self._traceparent:
            self._traceparent = self._stream.head.traceparent

    async def decide(self, request: RoutingRequest) -> Answers:
        """Returns the answers that carry the decision for a request; waits as `Router.route`."""
        service = self._service
        if not service.prepares:
            return self._place(await service.router.route(request, self._traceparent), request)
        prepared = await self._prepared(request)
        if isinstance(prepared, Refusal):
            return self._refuse(prepared)
        routed = await service.router.route(prepared, self._traceparent)
        return self._place(routed, prepared, is_changed=prepared.body is not request.body)

    async def _prepared(self, request: RoutingRequest) -> RoutingRequest | Refusal:
        """Returns a request as its worker is to get it, or the answer that refuses it."""
        metrics = self._service.metrics
        step, isolated, unclear = await self._service.preparation.prepare(request, self._named)
        if unclear:
            metrics.bodies_refused.labels(unclear).inc()
        if isolated is not None:
            metrics.isolated.labels(isolated.value).inc()
        return step

    def _enter(self, phase: Phase) -> None:
        """Changes the phase, as the table says; a closed exchange stays closed."""
        if phase not in MAY_FOLLOW[self.phase]:
            raise RuntimeError(f"an exchange that is {self.phase.value} cannot be {phase.value}")
        self.phase = phase

    def _refuse(self, refusal: Refusal) -> Answers:
        """Returns the answer of the router itself; nothing if the stream has ended."""
        if self.phase is _CLOSED:
            return []
        self._enter(Phase.REFUSED)
        return self._stream.refuse(refusal)

    def close(self) -> None:
        """Ends the stream and releases its load; closing it again changes nothing."""
        phase = self.phase
        if phase is _CLOSED:
            return
        self.phase = _CLOSED  # which may follow every other phase
        self._stream.close()
        self._service.metrics.open_streams -= 1
        passage = self._passage
        if passage is not None:
            self._settle(passage, is_placed=phase is _PLACED)

    def _settle(self, passage: Passage, *, is_placed: bool) -> None:
        """Ends everything that a decided request began.

        is_placed: whether the proxy got its answers; if not, it was refused, or placing it failed.
        """
        service, decision = self._service, passage.decision
        if passage.booking is not None:
            service.router.release(passage.booking)
        if passage.awaits_server and decision.is_steered:
            service.router.deliveries.note_unreported(decision.model)
        if passage.scanner is not None and passage.scanner.usage.form:
            service.stream_settings.learned.learn(self._stream.head.path)
        outcome = None
        if passage.account is not None and (
            self._sees_every_response or self._stream.response_head
        ):
            outcome = passage.account.outcome()
            service.metrics.observe_outcome(outcome)
            service.router.note_usage(outcome)
        if decision.of_class is not None:
            seconds = None if outcome is None else outcome.ttft_seconds
            name, is_booked = decision.of_class.name, passage.booking is not None
            service.metrics.classes.end(name, seconds, is_booked=is_booked)
        if service.recorder is not None:
            if is_placed:
                service.recorder.end(decision, outcome)
            else:
                service.recorder.note_drop(decision)

    def _place(
        self, routed: Routed, request: RoutingRequest, *, is_changed: bool = False
    ) -> Answers:
        """Returns the answers that carry a decision. is_changed: whether its body has been."""
        decision, booking = routed
        if decision.of_class is not None:
            name, verdict = decision.of_class.name, decision.verdict
            self._service.metrics.classes.begin(name, verdict.value, is_booked=booking is not None)
            if verdict is Verdict.SHED:
                self._service.metrics.note_shed(name)
        passage = Passage(decision, booking)
        if self.phase is _CLOSED:
            self._settle(passage, is_placed=False)
            return []
        self._passage = passage
        verdict = self._verdict_of(decision)
        if verdict is not _STEER:
            refusal = refusal_of(verdict, request.head.path)
            if refusal is not None:
                return self._refuse(refusal)
        if self._wants_status or self._accounts or booking is None or self._stream.is_duplex:
            self._await_response(passage)
        placement = self._placement(passage, request, is_changed=is_changed)
        if placement is None:
            return self._refuse(refused_body(request.head.path))
        answers = self._stream.place(placement)
        self._enter(_PLACED)
        return answers

    def _verdict_of(self, decision: Decision) -> Verdict:
        """Returns what to do with the request on this stream."""
        if self._stream.is_duplex:  # Endpoint Picker Protocol 1.0.0, Destination Endpoint
            is_left = decision.verdict is Verdict.NO_OVERRIDE
            return Verdict.UNAVAILABLE if is_left else decision.verdict
        return decision.verdict if decision.is_steered else Verdict.NO_OVERRIDE

    def _placement(
        self, passage: Passage, request: RoutingRequest, *, is_changed: bool
    ) -> Placement | None:
        """Returns what the proxy is told about a request; None to refuse it.

        Here, and nowhere else, the headers of `extproc.config.owned_headers` get their values.
        """
        service, is_duplex, decision = self._service, self._stream.is_duplex, passage.decision
        if decision.is_steered:
            rank = decision.rank
            named = service.duplex_endpoints if is_duplex else service.endpoints
            destination = ",".join(decision.pick[:named])
        else:
            rank, destination = None, self._proxy_endpoint(passage)
        body = None if request.wants_endpoint else request.body
        told: Told = ()
        if service.names_model and decision.model:
            told = ((MODEL, decision.model),)
        header, pinned = named_rank(rank, body)
        if header is not None:
            told = (*told, header)
        new_body = pinned or (body if is_changed else None)
        if decision.of_class is not None:
            engine = service.router.engine(decision.worker)
            path, so_far = request.head.path, new_body or body
            priority, with_priority = named_priority(decision.of_class, engine, path, so_far)
            if priority is not None:
                told = (*told, priority)
            new_body = with_priority or new_body
        if service.legs is not None:
            legs = service.legs.announce(decision, request.head.path, new_body or body)
            if legs is None:
                return None
            said, changed = legs
            told = (*told, *said)
            new_body = changed or new_body
        return Placement(destination, told, new_body)

    def _await_response(self, passage: Passage) -> None:
        """Prepares to account for the response, if the proxy will send it."""
        decision, booking, router = passage.decision, passage.booking, self._service.router
        if booking is None:
            if decision.reason == NOT_INFERENCE and self._stream.reads_usage:
                passage.scanner = UsageScanner()
            return
        sees_responses = self._stream.is_duplex or self._accounts  # always in dialect B
        if not (sees_responses or self._wants_status):
            return
        passage.awaits_server = True
        if decision.is_steered:
            router.deliveries.look(decision.model)
        if sees_responses:
            passage.account = Account(decision, router.watched.compared(booking), self._began_at)

    def _proxy_endpoint(self, passage: Passage) -> str:
        """Returns the endpoint for an unsteered request; "" if the proxy chooses by itself."""
        if not self._stream.is_duplex or passage.booking is None:
            return ""
        endpoint = self._service.router.any_endpoint(passage.decision, passage.booking)
        if passage.account is not None:
            passage.account.note_proxy_endpoint(endpoint)
        return endpoint

    @property
    def _sees_every_response(self) -> bool:
        """Whether the proxy sends every response, so that a missing one means there was none."""
        return self._service.accounts or self._stream.is_duplex

    def _look_at(self, message: ProxyMessage, passage: Passage) -> None:
        """Accounts for a message if it is part of a response."""
        try:
            if passage.scanner is not None:
                self._look_at_unknown(message, passage.scanner)
            elif passage.booking is None:
                return
            elif message.kind == RESPONSE_HEADERS:
                self._look_at_headers(passage, passage.booking)
            elif passage.account is not None and self._service.reads_usage:
                self._look_at_body(message, passage, passage.account)
        except Exception as error:  # noqa: BLE001 - whatever it is, the response must go on
            log.error("accounting failed with %s", type(error).__name__)
            passage.account = None

    def _look_at_unknown(self, message: ProxyMessage, scanner: UsageScanner) -> None:
        """Reads the response to a request that calls no model, as far as is known."""
        head = self._stream.response_head
        if message.kind != RESPONSE_BODY or head is None or not head.is_readable:
            return
        if head.status is not None and head.status < FIRST_FAILURE:
            scanner.read(message.body)

    def _look_at_headers(self, passage: Passage, booking: Booking) -> None:
        head, account, router = self._stream.response_head, passage.account, self._service.router
        if head is None:
            return
        if account is not None:
            account.respond(head.status, head.served, self._service.monotonic())
        if head.served and passage.awaits_server:
            passage.awaits_server = False  # reported once
            router.note_server(passage.decision, booking, head.served)
        if head.status is not None:
            router.note_answer(booking, head.status, head.served)

    def _look_at_body(self, message: ProxyMessage, passage: Passage, account: Account) -> None:
        head = self._stream.response_head
        if message.kind == RESPONSE_BODY and head is not None and head.is_readable:
            account.read(message.body, self._service.monotonic(), is_last=message.is_last)
            if self._stream.head.path == RESPONSES_PATH and not passage.is_remembered:
                passage.is_remembered = self._service.router.keeps(
                    passage.decision, account.worker, account.response_id
                )
