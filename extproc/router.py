"""The path of a request: parse, tokens, decide, book. One router serves all streams."""

import logging
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Protocol

import msgspec

from extproc.checking.self_check import Watched
from extproc.config.schema import Config
from extproc.errors import RequestError
from extproc.observing.decisions import Course, Traces
from extproc.observing.elsewhere import Deliveries, SteeringCollector, WarningLimit
from extproc.observing.metrics import Metrics
from extproc.picking.decision import (
    CALLS_NO_MODEL,
    FINDS_MODEL,
    MAX_TEXT_BYTES,
    OVER_LIMIT,
    Decision,
    Query,
)
from extproc.picking.disaggregation import may_split
from extproc.picking.eligibility import ANY, Demand
from extproc.picking.explain import DecisionLog, explanation
from extproc.picking.load import Booking
from extproc.picking.placing import Placing
from extproc.picking.steering import Steering, beginning_of, hash_of
from extproc.picking.upstreams import FIRST_FAILURE
from extproc.requests.costly_json import is_light
from extproc.requests.prompt import forms_of
from extproc.requests.request import (
    ENGINES_REFUSE,
    NOT_INFERENCE,
    UNREAD,
    Ask,
    Head,
    InferenceRequest,
    Models,
    Served,
    model_of,
    parse,
    why_unkeyed,
)
from extproc.tokenizing.prompt_tokens import AnyTokenizer, PromptTokens
from extproc.workers.workers import Workers
from kvstate.feeds.feed import State
from kvstate.overlap import Prompt, Tokens

log = logging.getLogger("kvsteer.decision")


def tell_fault(what: str, error: Exception) -> None:
    """Logs the type and place of an error, but not its message, which may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error(f"{what}\n%s", type(error).__name__, frames)  # noqa: G004 - a constant


# How many bytes of a body with media are weighed: media take many bytes, but only a thousand or two
# tokens.
MEDIA_TEXT_BYTES = 8 * 1024

# The key of a cache salt in a body: only prompts with the same salt share blocks.
_SALT = b'"cache_salt"'

# A request, and the model it is for.
Read = tuple[InferenceRequest, Served]


class Queries:
    """Turns any request into a query: parses its body and tokenizes its prompt."""

    def __init__(self, models: Models, tokens: PromptTokens) -> None:
        self._models = models
        self._tokens = tokens

    async def of(self, ask: Ask, course: Course) -> Query:
        """Returns the query for a request; waits only for work that takes a millisecond or more.

        course: notes the ends of the request's phases.
        """
        if ask.body is None:
            return _unread(ask)
        path, body = ask.head.path, ask.body
        if not is_light(body):
            return await self._large(path, body, course)
        read = self._read(path, body)
        course.parsed()
        if isinstance(read, Query):
            return read
        query = await self._tokenized(*read, body)
        course.tokenized()
        return query

    def _read(self, path: str, body: bytes) -> Read | Query:
        """Returns a request and its model, or the query if the request cannot be keyed."""
        try:
            request = parse(path, body)
        except RequestError as error:
            return self._unparsed(body, error.reason)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
            return self.broken(error)
        served = self._models.find(request.model)
        if served is None:
            return Query(None, reason="unknown_model")
        return request, served

    def _unparsed(self, body: bytes, reason: str) -> Query:
        """Returns the query for a request that could not be read, or not in time."""
        served = self._models.find(model_of(body))
        if served is None:
            return Query(None, reason=reason, text=_text_of(body, reason))
        # the salt's value is not known
        return _by_text(served, body, reason, "" if _SALT in body else None)

    async def _large(self, path: str, body: bytes, course: Course) -> Query:
        """Parses and tokenizes a large body in a thread, so that no other request waits for it."""
        try:
            read, course.parsed_at = await self._tokens.apart(
                lambda: self._read_and_tokenized(path, body, course), len(body)
            )
        except TimeoutError:
            return self._unparsed(body, "deadline")
        except RequestError as error:
            return self._unparsed(body, error.reason)
        query = read if isinstance(read, Query) else await self._tokenized(*read, body)
        course.tokenized()
        return query

    def _read_and_tokenized(
        self, path: str, body: bytes, course: Course
    ) -> tuple[Read | Query, float]:
        """Returns the query, or the request if workers tokenize it; and when it was parsed."""
        read = self._read(path, body)
        parsed_at = course.now()
        if isinstance(read, Query):
            return read, parsed_at
        request, served = read
        try:
            tokens = self._tokens.here(request, served.model)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
            return self._untokenized(request, served, body, error), parsed_at
        return (read if tokens is None else _keyed(request, served, tokens)), parsed_at

    async def _tokenized(self, request: InferenceRequest, served: Served, body: bytes) -> Query:
        try:
            tokens = await self._tokens.of(request, served.model, len(body))
            return _keyed(request, served, tokens)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
            return self._untokenized(request, served, body, error)

    def _untokenized(
        self, request: InferenceRequest, served: Served, body: bytes, error: Exception
    ) -> Query:
        """Returns the query by text for a prompt whose tokens are uncertain or late."""
        if not isinstance(error, RequestError | TimeoutError):
            return self.broken(error)
        reason = error.reason if isinstance(error, RequestError) else "deadline"
        query = _by_text(served, body, reason, request.cache_salt)
        if request.reads_cache:
            return query
        return msgspec.structs.replace(query, reads_cache=False)

    def broken(self, error: Exception) -> Query:
        """Logs an error in KVSteer itself, and returns the query for the request that hit it."""
        tell_fault("decision failed with %s; the request is routed by load", error)
        return Query(self._models.default, reason="internal_error")


def _by_text(served: Served, body: bytes, reason: str, salt: str | None) -> Query:
    """Returns the query for a prompt that is compared by its text. salt: "" if it is unknown."""
    text = _text_of(body, reason)
    demand = ANY if served.lora is None else Demand(served.lora)
    return Query(served.model, reason=reason, text=text, lora=served.lora, salt=salt, demand=demand)


def _text_of(body: bytes, reason: str) -> bytes:
    """Returns the text by which a prompt that cannot be keyed is compared and weighed."""
    if reason in ENGINES_REFUSE:
        return b""
    return body[:MEDIA_TEXT_BYTES] if reason == "unsupported_media" else body


def _unread(ask: Ask) -> Query:
    """Returns the query for a request whose body is not read, weighed by its length if known."""
    if ask.reason == NOT_INFERENCE and not ask.wants_endpoint:
        return Query(None, reason=ask.reason, left_to_proxy=CALLS_NO_MODEL)
    if ask.reason in ("no_body", NOT_INFERENCE):
        return Query(None, reason=ask.reason)
    finds_model = FINDS_MODEL if ask.proxy_finds_model else ""
    if ask.reason not in UNREAD:
        return Query(None, reason=ask.reason, left_to_proxy=finds_model)
    length = ask.head.content_length
    return Query(
        None,
        reason=ask.reason,
        unread_bytes=MAX_TEXT_BYTES if length is None else length,
        left_to_proxy=finds_model,
    )


def _keyed(request: InferenceRequest, served: Served, tokens: list[Tokens]) -> Query:
    model, lora = served
    prompts = [Prompt(model, one, lora, request.cache_salt) for one in tokens]
    demand = ANY if lora is None else Demand(lora)
    if not request.reads_cache:
        # the prompt is known and weighed, but the worker will not use its cache for it
        return Query(model, prompts, "reads_no_cache", demand=demand, reads_cache=False)
    forms = 0
    for one in request.prompts:
        forms |= forms_of(one)
    return Query(model, prompts, demand=demand, answers=request.answers, forms=forms)


# How many bytes of a body log_prompts shows.
LOGGED_BODY_BYTES = 4_096


# The decision for a request, and its booking if a worker was picked for a call of a model; the
# caller releases the booking at the end. A plain tuple, since every request makes one.
Routed = tuple[Decision, Booking | None]


class Observer(Protocol):
    """Watches requests; its errors do not affect them."""

    def decided(self, decision: Decision, prompts: Sequence[Prompt]) -> None:
        """A decision was made."""

    def served(self, decision: Decision, endpoint: str) -> None:
        """The endpoint that answered a request is known."""


class Observers:
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def decided(self, decision: Decision, prompts: Sequence[Prompt]) -> None:
        """A decision was made."""
        for one in self._observers:
            one.decided(decision, prompts)

    def served(self, decision: Decision, endpoint: str) -> None:
        """The endpoint that answered a request is known."""
        for one in self._observers:
            one.served(decision, endpoint)


class Router:
    """Decides where requests go, and accounts for those in flight.

    tokenizers: by model; requests for other models are routed by load, unless they have token ids.
    traces: records the decisions' spans; None if requests are not traced. observer: gets the
    decisions, and which endpoint answered.
    steering: the percentage of steered requests. unsteered: requests that were not, by model.
    deliveries: whether steered requests reached their workers.
    """

    def __init__(
        self,
        config: Config,
        workers: Workers,
        tokenizers: Mapping[str, AnyTokenizer],
        metrics: Metrics,
        rng: Random,
        traces: Traces | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._config = config
        self._changes_bodies = config.disaggregation.changes_bodies
        self._models = Models(config.models)
        self._workers = workers
        self._tokens = PromptTokens(tokenizers, config.extproc.deadline_ms / 1000)
        self._queries = Queries(self._models, self._tokens)
        self._metrics = metrics
        self._rng = rng
        self._monotonic = workers.monotonic
        self._traces = traces
        self.is_traced = traces is not None
        self._decisions = DecisionLog(config.log.decisions_percent, rng.random, workers.state)
        self.placing = Placing(config, rng.getrandbits(64), workers, workers.telling)
        self._watched: dict[Booking, Watched] = {}
        self._learns = config.policy.learn
        self._compares = config.accounting.responses == "usage"
        self._compared: dict[Booking, Prompt] = {}
        self._observer = observer
        self._warnings = WarningLimit()
        self.steering = Steering(config.steering.percent, config.steering.header)
        self.unsteered: Counter[str | None] = Counter()
        self.deliveries = deliveries = Deliveries()
        steered, unsteered = self.placing.steered, self.unsteered
        metrics.registry.register(SteeringCollector(deliveries, steered, unsteered, self.steering))

    async def route(self, ask: Ask, traceparent: str = "") -> Routed:
        """Decides where a request goes, and books it there; never fails, whatever the request is.

        It waits only for work that takes a millisecond or more, and yields None before it does:
        until then `send(None)` can drive it without a task. A request that calls no model is
        counted, but adds to no worker's load and is not shown to observers.

        traceparent: the trace that the request belongs to, "" if none.
        """
        course = Course(self._monotonic, traceparent)
        if self._config.log_prompts and ask.body is not None:
            log.debug("body: %s", ask.body[:LOGGED_BODY_BYTES].decode(errors="replace"))
        query = await self._queries.of(ask, course)
        if self.steering.is_partial:
            decision, query = await self._decide_side(ask, query, course)
        else:
            decision, query = self._decide(ask, query, course)
        now = course.picked()
        if decision.reason == NOT_INFERENCE:
            self._metrics.observe_decision(decision, course)
            return decision, None
        if self._traces is not None:
            course.trace = self._traces.record(decision, course)
        self._metrics.observe_decision(decision, course)
        self._tell(decision, course)
        self._decisions.tell(decision, course.trace.trace_id)
        self._show(decision, query)
        # last: a failure before it must leave no load behind that nobody releases
        if not decision.is_steered:
            self.unsteered[decision.model] += 1
            booking = self.placing.note(decision, now)
        else:
            booking = self.placing.book(decision, now, self._told_of(decision, query))
            if booking is not None and query.prompts:
                self._watch(decision, query, booking)
        # otherwise its engine would count blocks that it got from another worker as cached
        is_whole = decision.prefill is None and decision.source is None
        if booking is not None and self._compares and is_whole and query.sole is not None:
            self._compared[booking] = query.sole
        return decision, booking

    async def explain(self, head: Head, body: bytes) -> dict[str, Any]:
        """Returns the answer of POST /explain: the decision for a request, without side effects."""
        ask = Ask(head, body)
        unkeyed = why_unkeyed(head.method, head.path)
        if unkeyed:
            ask = Ask(head, None, unkeyed)
        course = Course(self._monotonic)
        query = await self._queries.of(ask, course)
        if self.steering.is_partial:
            decision, _ = await self._decide_side(ask, query, course)
        else:
            decision, _ = self._decide(ask, query, course)
        return explanation(decision, self._workers.state, self._workers.load)

    def release(self, booking: Booking) -> None:
        """Ends a booking: the request is over."""
        self._compared.pop(booking, None)
        self.placing.release(booking, self._monotonic())
        self._unwatch(booking)

    def compared(self, booking: Booking) -> Prompt | None:
        """Returns the prompt of a request whose reported usage is compared with the prediction."""
        return self._compared.get(booking)

    def served(self, decision: Decision, booking: Booking, endpoint: str) -> None:
        """Notes which endpoint answered a request, according to its response."""
        if self._observer is not None:
            self._observer.served(decision, endpoint)
        if not decision.is_steered:
            self.found(decision, booking, endpoint)
            return
        picked = decision.pick[0]
        self._workers.served(decision.worker, is_elsewhere=endpoint != picked)
        now, deliveries = self._monotonic(), self.deliveries
        deliveries.note(decision.model, now, is_elsewhere=endpoint != picked)
        if deliveries.has_turned(now):
            log.warning("%s", self.undelivered() or "steered requests reach their workers again")
        if endpoint == picked:
            return
        names = [one.name for one in decision.workers if one.endpoint == endpoint]
        self.answered_elsewhere(booking, names[0] if names else "", endpoint)
        self._workers.upstreams.doubt(picked, is_doubted=True)
        cause = self._workers.astray(decision.worker)
        is_down = self._workers.down(picked)
        if cause and not is_down and self._warnings.may_warn(self._monotonic()):
            log.warning(
                "requests steered to %s are answered by other servers, the last by %.80s: %s",
                *(picked, endpoint, cause),
            )

    def found(self, decision: Decision, booking: Booking, endpoint: str) -> None:
        """Notes the endpoint to which an unsteered request went."""
        names = [one.name for one in decision.workers if one.endpoint == endpoint]
        if names:
            self.placing.found(booking, decision, names[0], endpoint, self._monotonic())
        else:
            self.placing.disclaim(booking)
            self.placing.loads.end(booking, self._monotonic())

    def any_endpoint(self, decision: Decision, booking: Booking) -> str:
        """Returns a random endpoint for an unsteered request, and books the request there.

        For proxies that need an endpoint from the router.
        """
        rows = zip(decision.workers, decision.excluded, strict=True)
        able = [one.endpoint for one, why in rows if why in ("", OVER_LIMIT)]
        endpoint = able[int(self._rng.random() * len(able))]
        self.found(decision, booking, endpoint)
        return endpoint

    def undelivered(self) -> str:
        """Returns why too few steered requests reached their workers lately, "" if enough did."""
        return self.deliveries.fault(self._monotonic(), self._workers.why_astray)

    def steering_status(self) -> dict[str, Any]:
        """Returns the answer of GET /steering."""
        results = self.deliveries.totals(self.placing.steered)
        return {
            "percent": self.steering.percent,
            "header": self.steering.header,
            "steered": results,
            "unsteered": self.unsteered.total(),
            "fault": self.undelivered(),
        }

    def answered_elsewhere(self, booking: Booking, worker: str, endpoint: str) -> None:
        """Moves the load of a request to the worker that answers it instead of the picked one.

        worker: "" if the endpoint is no known worker's; then the load is removed.
        """
        self._unwatch(booking)  # the picked worker's events say nothing about this request
        if worker:
            self.placing.move(booking, worker, endpoint, self._monotonic())
        else:
            self.placing.disclaim(booking)
            self.placing.loads.end(booking, self._monotonic())

    def wants_status(self) -> bool:
        """Returns whether to ask the proxy for the next response, if it need not send any."""
        return self.placing.wants_status()

    def answered(self, booking: Booking, status: int, served: str) -> None:
        """Notes that a response began. served: the endpoint that sent it, "" if unknown."""
        if status >= FIRST_FAILURE and (watched := self._watched.pop(booking, None)):
            self._workers.checks.refused(watched)
        seconds = self.placing.answered(booking, status, served, self._monotonic())
        if seconds:
            log.warning(
                "worker at %s keeps failing, last with %d: ejected for %.0f s while others answer",
                *(booking.endpoint, status, seconds),
            )
        elif seconds is not None:
            log.info("worker at %s answers again and is no longer ejected", booking.endpoint)

    def in_flight(self, endpoint: str) -> int:
        """Returns how many requests are in flight on an endpoint."""
        return self._workers.in_flight(endpoint)

    def close(self) -> None:
        """Stops the tokenizer threads."""
        self._tokens.close()

    async def _side(self, ask: Ask) -> tuple[int, bool]:
        """Returns the hash of a request's conversation, 0 if unknown, and whether it is steered.

        It waits if the body takes a millisecond or more to parse. Requests that call no model count
        as steered.
        """
        if ask.reason == NOT_INFERENCE:
            return 0, True
        beginning, body = ask.head.conversation.encode(), ask.body
        if not beginning and body is not None:
            path = ask.head.path
            if is_light(body):
                beginning = beginning_of(path, body)
            else:
                with suppress(TimeoutError, RequestError):  # then the side is random
                    read = lambda: beginning_of(path, body)  # noqa: E731 - it is short
                    beginning = await self._tokens.apart(read, len(body))
        conversation = hash_of(beginning)
        return conversation, self.steering.steers(conversation, self._rng.random())

    async def _decide_side(self, ask: Ask, query: Query, course: Course) -> tuple[Decision, Query]:
        """Decides if only some requests are steered; unsteered ones are never split."""
        conversation, is_steered = await self._side(ask)
        if not is_steered:
            query = msgspec.structs.replace(query, may_split=False)
        decision, query = self._decide(ask, query, course)
        known = msgspec.structs.replace(decision, is_steered=is_steered, conversation=conversation)
        return known, query

    def _decide(self, ask: Ask, query: Query, course: Course) -> tuple[Decision, Query]:
        if self._changes_bodies:
            body = None if ask.wants_endpoint else ask.body
            if not may_split(self._config.disaggregation.connector, ask.head.path, body):
                query = msgspec.structs.replace(query, may_split=False)
        try:
            return self._place(query, ask.head, course), query
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
            query = self._queries.broken(error)
            return self._place(query, ask.head, course), query

    def _place(self, query: Query, head: Head, course: Course) -> Decision:
        workers = self._workers
        if head.policy is not None or head.subset is not None:
            query = msgspec.structs.replace(
                query, policy=head.policy, demand=query.demand._replace(subset=head.subset)
            )
        if head.session:
            query = msgspec.structs.replace(query, session=head.session)
        trusted = workers.checks.of(query.forms) if query.forms else workers
        held = [trusted.overlaps(prompt) if query.reads_cache else {} for prompt in query.prompts]
        return self.placing.decide(
            query,
            workers.candidates(query.model or self._models.default),
            held,
            trusted.state,
            course.looked() if held else self._monotonic(),
            self._rng,
        )

    def _told_of(self, decision: Decision, query: Query) -> Prompt | None:
        """Returns the prompt if its worker's feed will announce when it is computed, else None."""
        prompts = query.prompts
        if not self._learns or len(prompts) != 1 or not query.reads_cache:
            return None
        picked = decision.prefill or decision
        if self._workers.checks.of(query.forms).state(picked.worker) != State.LIVE:
            return None
        overlap = picked.held[0].get(picked.worker)
        if overlap is not None:
            size, tiers, uncertain, _ = overlap
            if sum(tiers) + uncertain >= (len(prompts[0].tokens) - 1) // size:
                return None  # all usable blocks are cached already
        return prompts[0]

    def _unwatch(self, booking: Booking) -> None:
        watched = self._watched.pop(booking, None)
        if watched is not None:
            self._workers.checks.ended(watched)

    def _watch(self, decision: Decision, query: Query, booking: Booking) -> None:
        """Starts comparing the engine's tokens for a request with KVSteer's, if they can differ."""
        prompts, checks, watched = query.prompts, self._workers.checks, None
        try:
            checks.placed(decision.worker, prompts)
            if query.forms and len(prompts) == 1:
                overlap = decision.held[0].get(decision.worker)
                watched = checks.watch(decision.worker, prompts[0], overlap)
        except Exception as error:  # noqa: BLE001 - the request is on its way already
            tell_fault("self-check failed with %s", error)
            return
        if watched is not None:
            self._watched[booking] = watched

    def _show(self, decision: Decision, query: Query) -> None:
        """Shows a decision to the observer, whose errors do not affect the request."""
        try:
            if self._observer is not None:
                self._observer.decided(decision, query.prompts)
        except Exception as error:  # noqa: BLE001 - as in _decide
            tell_fault("an observer failed with %s", error)

    def _tell(self, decision: Decision, course: Course) -> None:
        if not log.isEnabledFor(logging.DEBUG):
            return
        log.debug(
            "decision: model %s, picked %s%s, overlap %d of %d tokens, uncertain %d, reason %s",
            decision.model,
            decision.pick[0] if decision.pick else None,
            "" if decision.is_steered else " (not steered)",
            decision.certain_tokens,
            decision.prompt_tokens,
            decision.uncertain_tokens,
            decision.reason,
            extra={"trace_id": course.trace.trace_id},
        )
