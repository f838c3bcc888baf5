"""One ext_proc stream on the server: its messages, the router's decision, and its accounting.

An exchange is in one phase at a time:

    phase      meaning                                  what may come            then
    WAITING    the request is not complete              the request, complete    ROUTING
                                                        the end of the stream    CLOSED
    ROUTING    the router decides; it may ask for more  the answers are ready    PLACED
               time, which the proxy is told at once
                                                        it must be refused       REFUSED
                                                        the end of the stream    CLOSED
    PLACED     the proxy sends it on, response expected the end of the stream    CLOSED
    REFUSED    we have answered it ourselves            the end of the stream    CLOSED
    CLOSED     all is released and accounted for        nothing                  -

From the decision on there is a `PlacedRequest`, which holds what must be ended: the load, the
record, the answers that are awaited. It is settled once: at the end of the stream, or as soon as
the router has decided, if the stream ended meanwhile, or the request is refused.
"""

import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

from msgspec.structs import replace

from extproc.base.headers import MODEL
from extproc.base.logs import log_fault
from extproc.features.feature import AskForTime
from extproc.features.hooks import tell
from extproc.requests.added_fields import Body, with_members
from extproc.requests.refusals import Refusal, busy, no_room, unavailable
from extproc.requests.request import RoutingRequest
from extproc.routing.decision import Decision, Verdict
from extproc.serving.named_rank import named_rank
from extproc.serving.placed_request import PlacedRequest
from extproc.serving.proxy_message import (
    REQUEST_HEADERS,
    RESPONSE_HEADERS,
    ProxyMessage,
)
from extproc.serving.router import Routed, no_more_time
from extproc.serving.shared_by_streams import SharedByStreams
from extproc.serving.stream import Step, Stream
from extproc.serving.stream_answers import Answers, HeaderValues, PickAnswer

log = logging.getLogger("kvsteer.extproc")


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

# The answers to requests that a decision refuses.
_REFUSALS = MappingProxyType(
    {Verdict.SHED: busy, Verdict.NO_ROOM: no_room, Verdict.UNAVAILABLE: unavailable}
)

MAY_FOLLOW: Mapping[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.ROUTING, Phase.CLOSED}),
    Phase.ROUTING: frozenset({Phase.PLACED, Phase.REFUSED, Phase.CLOSED}),
    Phase.PLACED: frozenset({Phase.CLOSED}),
    Phase.REFUSED: frozenset({Phase.CLOSED}),
    Phase.CLOSED: frozenset(),
}


class Exchange:
    """One ext_proc stream, which is one HTTP request. phase: see the module.

    A server passes it each message and sends the answers in order before passing the next one; the
    server closes it once, however the stream ended. A message may have any number of answers.
    """

    # What few exchanges look at belongs to the class: every request makes one.
    _named: Mapping[str, Sequence[bytes]] = MappingProxyType({})  # by the header that names them

    def __init__(self, service: SharedByStreams, traceparent: str = "") -> None:
        self.phase = _WAITING
        self._placed: PlacedRequest | None = None
        router, accounts = service.router, service.accounts
        self._service = service
        self._traceparent = traceparent
        # if only some requests are steered, as much must be known about the others
        self._accounts = accounts or router.steering.is_partial
        self._wants_status = not accounts and (
            self._accounts or router.watched.proofs.wants_answers or router.ledger.wants_status()
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
        if self._service.hooks.respond and message.kind == RESPONSE_HEADERS:
            self._stream.response_values = self._response_values()
        step = self._stream.receive(message)
        if self._service.looks_at_headers and message.kind == REQUEST_HEADERS:
            self._look_at_headers_of_request(message)
        if isinstance(step, RoutingRequest):
            self._enter(_ROUTING)
        elif self._placed is not None:
            self._placed.look_at(message)
        return step

    def _response_values(self) -> HeaderValues:
        """Returns the headers that features add to the response."""
        if self._placed is None:
            return ()
        found: HeaderValues = ()
        for respond in self._service.hooks.respond:
            try:
                found = (*found, *respond(self._placed.decision))
            except Exception as error:  # noqa: BLE001 - whatever it is, the response must go on
                log_fault(log, "a feature failed with %s", error)
        return found

    def _look_at_headers_of_request(self, message: ProxyMessage) -> None:
        """Takes what the request's headers say besides what the stream reads."""
        self._named = message.values
        if self._service.is_traced and not self._traceparent:
            self._traceparent = self._stream.head.traceparent

    async def decide(
        self, request: RoutingRequest, ask_for_time: AskForTime = no_more_time
    ) -> Answers:
        """Returns the answers that carry the decision for a request; waits as `Router.route`.

        ask_for_time: sends what `more_time` returns before these answers.
        """
        service = self._service
        route = service.router.route
        if service.passes_named:
            request = replace(request, named=self._named)
        if not service.prepares:
            return self._place(await route(request, self._traceparent, ask_for_time), request)
        prepared = await self._prepared(request)
        if isinstance(prepared, Refusal):
            return self._refuse(prepared)
        routed = await route(prepared, self._traceparent, ask_for_time)
        return self._place(routed, prepared, is_changed=prepared.body is not request.body)

    def more_time(self, seconds: float) -> Answers | None:
        """Returns what has the proxy wait so long for the decision; None if it does not wait."""
        return self._stream.more_time(seconds) if self.phase is _ROUTING else None

    @property
    def is_held(self) -> bool:
        """Whether the proxy was asked for more time, and has no answer yet."""
        return self.phase is _ROUTING and self._stream.has_more_time

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

    def _refuse_decided(self, placed: PlacedRequest, refusal: Refusal) -> Answers:
        """Ends all that a request began, and returns the answer of the router itself."""
        self._placed = None
        placed.settle(is_sent=False)
        return self._refuse(refusal)

    def close(self) -> None:
        """Ends the stream and releases its load; closing it again changes nothing."""
        phase = self.phase
        if phase is _CLOSED:
            return
        self.phase = _CLOSED  # which may follow every other phase
        self._stream.close()
        self._service.metrics.open_streams -= 1
        if self._placed is not None:
            self._placed.settle(is_sent=phase is _PLACED)

    def _place(
        self, routed: Routed, request: RoutingRequest, *, is_changed: bool = False
    ) -> Answers:
        """Returns the answers that carry a decision. is_changed: whether its body has been."""
        decision, ticket = routed
        verdict = self._verdict_of(decision)
        if self._service.hooks.note_placed:
            tell(self._service.hooks.note_placed, decision, verdict, is_booked=ticket is not None)
        placed = PlacedRequest(self._service, self._stream, decision, ticket, self._began_at)
        if self.phase is _CLOSED:
            placed.settle(is_sent=False)
            return []
        self._placed = placed
        if verdict is not _STEER:
            refused = _REFUSALS.get(verdict)
            if refused is not None:
                return self._refuse_decided(placed, refused(request.head.path))
        if self._wants_status or self._accounts or ticket is None or self._stream.is_duplex:
            placed.await_response(accounts=self._accounts)
        answer = self._pick_answer(placed, request, is_changed=is_changed)
        if isinstance(answer, Refusal):
            return self._refuse_decided(placed, answer)
        answers = self._stream.place(answer)
        self._enter(_PLACED)
        return answers

    def _verdict_of(self, decision: Decision) -> Verdict:
        """Returns what to do with the request on this stream."""
        if self._stream.is_duplex:  # Endpoint Picker Protocol 1.0.0, Destination Endpoint
            is_left = decision.verdict is Verdict.NO_OVERRIDE
            return Verdict.UNAVAILABLE if is_left else decision.verdict
        return decision.verdict if decision.is_steered else Verdict.NO_OVERRIDE

    def _pick_answer(
        self, placed: PlacedRequest, request: RoutingRequest, *, is_changed: bool
    ) -> PickAnswer | Refusal:
        """Returns the answer that names the pick of a request, or refuses it.

        Here the headers of `extproc.config.owned_headers` get their values, but for the one of an
        `AskingExchange`.
        """
        service, is_duplex, decision = self._service, self._stream.is_duplex, placed.decision
        if decision.is_steered:
            rank = decision.rank
            named = service.duplex_endpoints if is_duplex else service.endpoints
            destination = ",".join(decision.pick[:named])
        else:
            rank, destination = None, placed.proxy_endpoint()
        extended = self._extended(decision, request) if service.hooks.extend else None
        body = None if request.wants_endpoint else extended or request.body
        values: HeaderValues = ()
        if service.names_model and decision.model:
            values = ((MODEL, decision.model),)
        new_body = extended or (body if is_changed else None)
        if rank is not None:
            headers, pinned = named_rank(rank, body)
            values, body, new_body = (*values, *headers), pinned or body, pinned or new_body
        for write in service.hooks.write:
            written = write(decision, request.head.path, body)
            if isinstance(written, Refusal):
                return written
            values, body = (*values, *written.headers), written.body or body
            new_body = written.body or new_body
        return PickAnswer(destination, values, new_body)

    def _extended(self, decision: Decision, request: RoutingRequest) -> Body | None:
        """Returns the body of a request with what features add, None if they add nothing."""
        found: Body | None = None
        for extend in self._service.hooks.extend:
            body = found or request.body
            try:
                more = extend(decision, request.head.path)
            except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
                log_fault(log, "a feature failed with %s", error)
                continue
            if more and body is not None:
                found = with_members(body, more) or found
        return found


class Service(SharedByStreams):
    """The service of a server: opens an exchange for each stream."""

    def open(self, traceparent: str = "") -> Exchange:
        """Returns the exchange of a new stream, which the caller must close.

        traceparent: the trace in the stream's own metadata; if it is "", the client's header is
        used.
        """
        return Exchange(self, traceparent)
