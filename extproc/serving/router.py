"""The router: a request goes in, a decision and its ticket come out.

It is the one place that knows the order of the steps, and none of them itself:

    query      its prompts, or what is known without them    `extproc.serving.queries`
    overlaps   what workers hold of these                    `extproc.fleet.candidates`
    snapshot   the fleet as it is for this request           `extproc.routing.ledger`
    terms      of enabled features                           `extproc.features`
    decision   pure                                          `extproc.routing.decide`
    ticket     what must be released when it is over         `extproc.routing.ledger`

One router serves all streams, on one event loop. It knows nothing of Envoy's messages; an exchange
(`extproc.serving.exchange`) calls it, and tells it what became of the request. Whatever fails in a
step, the request goes on: by load, or as the proxy chooses.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from extproc.base.engine import Engine
from extproc.base.errors import RequestError
from extproc.base.logs import log_fault
from extproc.config.schema import Config
from extproc.config.sections import KNOWN
from extproc.disaggregation.disaggregator import Disaggregator
from extproc.features.feature import AskForTime, Feature
from extproc.features.hooks import NO_HOOKS, Hooks, tell
from extproc.features.router_parts import RouterParts
from extproc.fleet.workers import Workers
from extproc.media.knowledge import MediaKnowledge
from extproc.observing.decisions import Timeline, Traces
from extproc.observing.deliveries import DeliveryCounts, SteeringCollector
from extproc.observing.metrics import Metrics
from extproc.observing.outcomes import Outcome
from extproc.observing.reason_faults import ReasonFaults
from extproc.observing.unrecognized import UnrecognizedCollector, UnrecognizedRequests
from extproc.requests.costly_json import is_light
from extproc.requests.engine_paths import EnginePaths
from extproc.requests.refusals import Refusal
from extproc.requests.request import (
    NOT_INFERENCE,
    UNKEYED,
    Head,
    Models,
    RoutingRequest,
    why_unkeyed,
)
from extproc.requests.tenant_salt import name_apart
from extproc.requests.trusted_headers import NO_TRUSTED_HEADERS, TrustedHeaders
from extproc.routing.candidates.ranks import Ranks
from extproc.routing.cost.term import Term
from extproc.routing.decision import OVER_LIMIT, Decision, without_room
from extproc.routing.decision_log import DecisionLog, ids_of
from extproc.routing.explain import explanation
from extproc.routing.health.statuses import FIRST_FAILURE
from extproc.routing.inputs.query import Media, Query
from extproc.routing.ledger import Ledger
from extproc.routing.load.endpoint_load import Ticket
from extproc.routing.steering import Steering, beginning_of, hash_of
from extproc.serving.delivery import DeliveryWatch
from extproc.serving.enabled_features import enabled
from extproc.serving.preparation import KnownEngines, Preparation
from extproc.serving.queries import Queries, broken
from extproc.serving.tenants import IsolationOutcome
from extproc.serving.token_watch import TokenWatch
from extproc.serving.treatment import explain_refusal, with_treatment
from extproc.serving.variants import by_variant
from extproc.tokenizing.prompt_tokens import AnyTokenizer, PromptTokens
from kvstate.overlap import Overlap, Prompt, usable_tokens

log = logging.getLogger("kvsteer.decision")


HTTP_OK = 200

AnyFeature = TypeVar("AnyFeature", bound=Feature)

# How many bytes of a body log_prompts shows.
LOGGED_BODY_BYTES = 4_096


# Returns the state of a worker's feeds, by its name.
State = Callable[[str], str]


class Foreseen(NamedTuple):
    """The decision that a request would get, and its query.

    isolated: what would become of its tenant, None without tenants. path: as engines see it.
    """

    decision: Decision
    query: Query
    isolated: IsolationOutcome | None
    path: str


class Refused(NamedTuple):
    """The answer of the router itself that a request would get. isolated: as in `Foreseen`."""

    refusal: Refusal
    isolated: IsolationOutcome | None


# The decision for a request, and its ticket if a worker was picked for a call of a model; the
# caller releases the ticket at the end. A plain tuple, since every request makes one.
Routed = tuple[Decision, Ticket | None]


def no_more_time(_: float) -> bool:
    """Is the `AskForTime` of those who wait no longer than they do for every decision."""
    return False


class Router:
    """Decides where requests go, and accounts for those in flight.

    tokenizers: by model; requests for other models are routed by load, unless they have token ids.
    traces: records the decisions' spans; None if requests are not traced. features: those that the
    caller adds to the ones that the configuration enables. hooks: of all of them.
    steering: the percentage of steered requests. unsteered: requests that were not, by model.
    deliveries: whether steered requests reached their workers. delivery: notes it. watched: the
    requests under way that may show whether tokens match. preparation: what requests go through
    before they are routed. paths: finds those that engines see. unrecognized: requests of no known
    API. reasons: the faults that the reasons of decisions show.

    Raises:
        StartError: a file that the configuration names cannot be read.
    """

    def __init__(
        self,
        config: Config,
        workers: Workers,
        tokenizers: Mapping[str, AnyTokenizer],
        metrics: Metrics,
        rng: Random,
        traces: Traces | None = None,
        features: Sequence[Feature] = (),
    ) -> None:
        self._config = config
        self._models = Models(config.models)
        self._workers = workers
        self.tokens = PromptTokens(tokenizers, config.extproc.deadline_ms / 1000)
        names_sessions = config.policy.session_header == KNOWN
        index, reporter = workers.followed.index, workers.reporter
        secret = index.media_ids.secret if reporter is None else reporter.secret
        self.media = media = MediaKnowledge(
            secret.to_bytes(8, "little"), index.media_ids, workers.monotonic
        )
        index.listen(media.learning)
        metrics.media_known = media.identities.__len__
        metrics.media_bytes = lambda: media.identities.size_bytes
        self._queries = Queries(
            self._models,
            self.tokens,
            workers.candidates.dialects_of,
            self.media,
            names_sessions=names_sessions,
        )
        self._metrics = metrics
        self._rng = rng
        self._monotonic = workers.monotonic
        self._traces = traces
        self.is_traced = traces is not None
        self._candidates = candidates = workers.candidates
        self._proofs = workers.proofs
        self._decisions = DecisionLog(config.log.decisions_percent, rng.random, candidates.state)
        self.ledger = Ledger(config, rng.getrandbits(64), candidates, reporter)
        self._disaggregator = Disaggregator(config, self.ledger, workers.upstreams)
        ledger = self.ledger
        parts = RouterParts(workers, ledger.loads, ledger.homes, ledger.lines, metrics, self.tokens)
        made = [*enabled(config, parts), *features]
        for collector in itertools.chain.from_iterable(one.collectors() for one in made):
            metrics.registry.register(collector)
        self.hooks = Hooks(made)
        engines = KnownEngines(candidates.engines_of, candidates.engines)
        self.preparation = Preparation(config, engines, self.hooks)
        self._learns = config.policy.learn
        self.watched = TokenWatch(workers.proofs, compares=config.accounting.responses == "usage")
        self.steering = Steering(config.steering.percent, config.steering.header)
        self.unsteered: Counter[str | None] = Counter()
        self.deliveries = deliveries = DeliveryCounts()
        self.delivery = DeliveryWatch(workers, deliveries, self._monotonic)
        self.paths = EnginePaths(config.extproc.path_prefixes, guesses=not config.edits_bodies)
        self.unrecognized = UnrecognizedRequests(metrics.calls, self._monotonic)
        metrics.registry.register(UnrecognizedCollector(self.unrecognized))
        self.reasons = ReasonFaults(metrics.calls, metrics.decided_for, self._monotonic)
        steered, unsteered = self.ledger.steered, self.unsteered
        metrics.registry.register(SteeringCollector(deliveries, steered, unsteered, self.steering))

    async def route(
        self,
        request: RoutingRequest,
        traceparent: str = "",
        ask_for_time: AskForTime = no_more_time,
    ) -> Routed:
        """Decides where a request goes, and books it there.

        A request that cannot be read or keyed, for whatever reason, is placed by load.

        It waits only for work that takes a millisecond or more, and yields None before it does:
        until then `send(None)` can drive it without a task. A request that calls no model is
        counted, but adds to no worker's load, and no feature's `begin` sees it.

        traceparent: the trace that the request belongs to, "" if none. ask_for_time: to be called
        once, and before a wait that may be longer than the proxy's; such a wait is cancelled when
        the proxy gives the request up.
        """
        clock = self._monotonic
        timeline = Timeline(clock, clock(), traceparent, request.head.path, request.whose)
        if self._config.log_prompts and request.body is not None:
            log.debug("body: %s", request.body[:LOGGED_BODY_BYTES].decode(errors="replace"))
        query = await self._queries.make_query(request, timeline)
        is_steered = not self.steering.is_partial or await self._is_steered(request)
        decision, query = self._decide(request, query, timeline, is_steered=is_steered)
        if self.hooks.must_wait:
            decision, query = await self._after_waits(
                request, query, decision, timeline, ask_for_time, is_steered=is_steered
            )
        timeline.picked_at = now = clock()
        if decision.reason == NOT_INFERENCE:
            self._metrics.observe_decision(decision, timeline)
            return decision, None
        try:
            self._record(decision, timeline, request.head, now)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
            log_fault(log, "recording a decision failed with %s", error)
        if self.hooks.begin:
            tell(self.hooks.begin, request, query, decision, now)
        # last: a failure before it must leave no load behind that nobody releases
        try:
            return decision, self._book(decision, query, now)
        except BaseException:
            tell(self.hooks.note_end, decision, None, is_booked=False, is_sent=False)
            raise

    async def _after_waits(
        self,
        request: RoutingRequest,
        query: Query,
        decision: Decision,
        timeline: Timeline,
        ask_for_time: AskForTime,
        *,
        is_steered: bool,
    ) -> tuple[Decision, Query]:
        """Returns the decision for a request after the waits that features have for it."""
        clock = timeline.clock
        for must_wait in self.hooks.must_wait:
            began = clock()
            try:
                wait = must_wait(request, decision, began)
                if wait is None:
                    continue
                goes_on = await wait.end(ask_for_time)
            except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
                log_fault(log, "a feature failed with %s", error)
                goes_on = True
            held = clock() - began
            timeline.pause(held)
            if not goes_on:
                return replace(without_room(decision), held_seconds=held), query
            self._metrics.note_recomputed(decision, began)  # its conversation counted only before
            decision, query = self._decide(request, query, timeline, is_steered=is_steered)
            decision = replace(decision, held_seconds=held)
        return decision, query

    def _record(self, decision: Decision, timeline: Timeline, head: Head, now: float) -> None:
        """Shows a decision in traces, metrics and logs."""
        if self._traces is not None:
            timeline.trace = self._traces.record(decision, timeline)
        self._metrics.observe_decision(decision, timeline)
        if decision.basis.media is not None:
            self._metrics.count_media(decision.model, decision.basis.media, now)
        if log.isEnabledFor(logging.DEBUG):
            self._tell(decision, timeline, head)
        if self._decisions.is_on:
            self._decisions.tell(decision, head, timeline.trace.trace_id)

    def _book(self, decision: Decision, query: Query, now: float) -> Ticket | None:
        """Books a request where it was decided to go; returns its ticket, if there is a load."""
        if query.variants:
            query = query.query_for((decision.prefill or decision).worker)
        if not decision.is_steered:
            self.unsteered[decision.model] += 1
            ticket = self.ledger.note(decision, now)
        else:
            step = self.ledger if decision.split is None else self._disaggregator
            ticket = step.book(decision, now, self._announced_prompt(decision, query))
        if ticket is None:
            return None
        try:
            self._watch(decision, query, ticket, now)
        except Exception as error:  # noqa: BLE001 - it is booked: its ticket must be released
            log_fault(log, "watching a request failed with %s", error)
        return ticket

    def _watch(self, decision: Decision, query: Query, ticket: Ticket, now: float) -> None:
        """Counts what a booked request saves, and has it watched if one worker computes it whole.

        Otherwise its engine would count blocks that it got from another worker as cached.
        """
        certain = decision.basis.certain_tokens
        if certain and decision.is_steered:
            self._candidates.note_saved(decision.worker, certain, now)
        if decision.source is not None or decision.prefill is not None:
            return
        self.watched.begin(decision, query, ticket)
        if decision.rank is not None and ticket.prompt is not None:
            self._workers.candidates.pins.watch(decision.worker, ticket, ticket.prompt)
        if query.media is not None:
            self._begin_media(decision, query.media, ticket)

    def _begin_media(self, decision: Decision, media: Media, ticket: Ticket) -> None:
        """Has a request with media wait for what its worker stores."""
        if media.prompt is None or not decision.is_steered:
            return
        self.media.learning.begin(decision.worker, media.prompt, is_known=media.is_known)
        ticket.media = media.prompt

    async def explain(
        self, head: Head, body: bytes, named: TrustedHeaders = NO_TRUSTED_HEADERS
    ) -> dict[str, Any]:
        """Returns the answer of POST /explain: the decision for a request, without side effects.

        named: the values of the trusted headers, by their names.
        """
        seen = await self.foresee(head, body, named)
        if isinstance(seen, Refused):
            return explain_refusal(seen.refusal, seen.isolated)
        decision, query, isolated, path = seen
        shown = explanation(decision, self._trusted_state(query), self._workers.states.load)
        engine = self.engine(decision.worker)
        return with_treatment(shown, isolated, decision.of_class, engine, path)

    async def foresee(
        self, head: Head, body: bytes, named: TrustedHeaders = NO_TRUSTED_HEADERS
    ) -> Foreseen | Refused:
        """Returns the decision that a request would get now; nothing is booked, counted or noted.

        named: the values of the trusted headers, by their names.
        """
        head = replace(head, path=self.paths.seen(head.path))
        unkeyed = why_unkeyed(head.method, head.path)
        is_read = not unkeyed or (unkeyed == UNKEYED and self.preparation.is_needed)
        request = RoutingRequest(head, body if is_read else None, unkeyed)
        step, isolated, _ = await self.preparation.prepare(request, named)
        if isinstance(step, Refusal):
            return Refused(step, isolated)
        timeline = Timeline.begin(self._monotonic)
        query = await self._queries.make_query(step, timeline)
        is_steered = not self.steering.is_partial or await self._is_steered(step)
        decision, query = self._decide(step, query, timeline, is_steered=is_steered)
        return Foreseen(decision, query, isolated, head.path)

    def _trusted_state(self, query: Query) -> Callable[[str], str]:
        """Returns the state of a worker for a request: of its feeds, and of its tokens."""
        if not query.forms:
            return self._candidates.state
        proofs = self._proofs
        return lambda worker: proofs.trust_for(query.query_for(worker).forms).state(worker)

    def feature(self, kind: type[AnyFeature]) -> AnyFeature | None:
        """Returns the enabled feature of a kind, None if it is off."""
        return next((one for one in self.hooks.features if isinstance(one, kind)), None)

    def is_hung(self, model: str) -> bool:
        """Returns whether a model's template or tokenizer did not come back, and runs no more."""
        return self.tokens.is_hung(model)

    def release(self, ticket: Ticket) -> None:
        """Ends all that a request began: it is over."""
        clock = self._monotonic
        now = clock()
        # first: a failure of what follows must leave no load behind
        self.ledger.release(ticket, now)
        if ticket.leg is not None:
            self._disaggregator.release(ticket, now)
        self.watched.end(ticket)
        if ticket.media is not None:
            self.media.learning.end(ticket.media)
            ticket.media = None

    def note_server(self, decision: Decision, ticket: Ticket, endpoint: str) -> None:
        """Notes which endpoint answered a request, according to its response."""
        tell(self.hooks.note_server, decision, endpoint)
        if not decision.is_steered:
            self.note_worker(decision, ticket, endpoint)
            return
        if self.delivery.note(decision, endpoint):
            self.note_answer_elsewhere(ticket, decision.basis.worker_at(endpoint), endpoint)
            self._workers.upstreams.doubt(decision.pick[0], is_doubted=True)
            self.delivery.warn(decision, endpoint)

    def note_worker(self, decision: Decision, ticket: Ticket, endpoint: str) -> None:
        """Notes the endpoint to which an unsteered request went."""
        worker = decision.basis.worker_at(endpoint)
        if worker:
            self.ledger.note_worker(ticket, decision, worker, endpoint, self._monotonic())
        else:
            self.ledger.lose(ticket, self._monotonic())

    def any_endpoint(self, decision: Decision, ticket: Ticket) -> str:
        """Returns a random endpoint for an unsteered request, and books the request there.

        For proxies that need an endpoint from the router.
        """
        rows = zip(decision.basis.workers, decision.basis.excluded, strict=True)
        able = [one.endpoint for one, why in rows if why in ("", OVER_LIMIT)]
        endpoint = able[int(self._rng.random() * len(able))]
        self.note_worker(decision, ticket, endpoint)
        return endpoint

    def steering_status(self) -> dict[str, Any]:
        """Returns the answer of GET /steering."""
        results = self.deliveries.totals(self.ledger.steered)
        return {
            "percent": self.steering.percent,
            "header": ", ".join(self.steering.headers) or None,
            "steered": results,
            "unsteered": self.unsteered.total(),
            "fault": self.delivery.fault(),
        }

    def keyed_by_api(self) -> list[dict[str, Any]]:
        """Returns the answer of GET /apis."""
        return self._metrics.keyed_by_api(self._monotonic())

    def recomputed_share(self, model: str) -> float | None:
        """Returns the share of a model's prompt tokens of 15 minutes that were computed again.

        None if there were none.
        """
        return self._metrics.recomputed_share(model, self._monotonic())

    def keyed_by_kind(self) -> list[dict[str, Any]]:
        """Returns the answer of GET /media."""
        return self._metrics.keyed_by_kind(self._monotonic())

    def note_answer_elsewhere(self, ticket: Ticket, worker: str, endpoint: str) -> None:
        """Moves the load of a request to the worker that answers it instead of the picked one.

        worker: "" if the endpoint is no known worker's; then the load is removed.
        """
        if not worker:
            self.withdraw(ticket)
            return
        self._drop_watch(ticket)  # the picked worker's events say nothing about this request
        self.ledger.move(ticket, worker, endpoint, self._monotonic())

    def withdraw(self, ticket: Ticket) -> None:
        """Ends the load of a request that no known worker computes, and withdraws its claims."""
        self._drop_watch(ticket)
        self._disaggregator.disclaim(ticket)
        self.ledger.lose(ticket, self._monotonic())

    def _drop_watch(self, ticket: Ticket) -> None:
        """Gives up comparing what the picked worker stores with a request."""
        self.watched.drop(ticket)
        if ticket.media is not None:
            self.media.learning.drop(ticket.media)
            ticket.media = None

    def remember_response(self, decision: Decision, worker: str, response: str) -> bool:
        """Notes that a worker keeps a response, which requests may continue; False without one."""
        if not (worker and response):
            return False
        name = name_apart(decision.tenant, response)
        self.ledger.note_response(worker, name, self._monotonic())
        return True

    def note_answer(self, ticket: Ticket, status: int, served: str) -> None:
        """Notes that a response began. served: the endpoint that sent it, "" if unknown."""
        if status >= FIRST_FAILURE:
            self._drop_watch(ticket)
        else:
            self.watched.note_answer(ticket)
        self._disaggregator.note_answer(ticket, status, self._monotonic())
        seconds = self.ledger.note_answer(ticket, status, served, self._monotonic())
        if seconds:
            log.warning(
                "worker at %s keeps failing, last with %d: ejected for %.0f s while others answer",
                ticket.endpoint,
                status,
                seconds,
            )
        elif seconds is not None:
            log.info("worker at %s answers again and is no longer ejected", ticket.endpoint)

    def engine(self, worker: str) -> Engine | None:
        """Returns the engine that a worker runs, None if it is unknown."""
        return self._candidates.engine(worker)

    def in_flight(self, endpoint: str) -> int:
        """Returns how many requests are in flight on an endpoint."""
        return self.ledger.loads.in_flight(endpoint)

    def note_usage(self, outcome: Outcome) -> None:
        """Notes what an engine reports of a request, for its media."""
        media, reported = outcome.media, outcome.reported
        if media is None or not outcome.is_whole or outcome.status not in (None, HTTP_OK):
            return
        whole, items = reported.prompt_tokens, media.items
        texts = media.weighed_tokens - sum([one.tokens for one in items])
        others = None if whole is None else whole - texts
        if whole is not None and media.prompt is not None and not outcome.is_moved:
            self.media.learning.count(media.prompt, whole)
        kinds = [one.kind for one in items]
        self.media.note_usage(outcome.model, kinds, reported.media_tokens, others)

    def close(self) -> None:
        """Stops the tokenizer threads."""
        self.tokens.close()

    async def _is_steered(self, request: RoutingRequest) -> bool:
        """Returns whether a request is steered.

        It waits if the body takes a millisecond or more to parse. Requests that call no model count
        as steered.
        """
        if request.reason == NOT_INFERENCE:
            return True
        beginning = request.head.conversation.encode()
        body = None if request.reason else request.body
        if not beginning and body is not None:
            path = request.head.path
            if is_light(body):
                beginning = beginning_of(path, body)
            else:
                with suppress(TimeoutError, RequestError):  # then the side is random
                    read = partial(beginning_of, path, body)
                    beginning = await self.tokens.run_in_thread(
                        read, len(body), None, request.whose
                    )
        return self.steering.steers(hash_of(beginning), self._rng.random())

    def _decide(
        self, request: RoutingRequest, query: Query, timeline: Timeline, *, is_steered: bool
    ) -> tuple[Decision, Query]:
        """Decides where a request goes; returns the query by which that was decided, too."""
        decided = partial(self._decide_by, request, timeline, is_steered=is_steered)
        try:
            return decided(query, self.hooks), query
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
            query = broken(query, error)
            return decided(query, NO_HOOKS), query

    def _decide_by(
        self,
        request: RoutingRequest,
        timeline: Timeline,
        query: Query,
        hooks: Hooks,
        *,
        is_steered: bool,
    ) -> Decision:
        """Decides where a request goes by a query.

        is_steered: if not, the proxy chooses, and the request goes to one worker alone.
        """
        disaggregator = self._disaggregator
        held, state = self._overlaps(query)
        now = timeline.clock()
        if held:
            timeline.looked_at = now
        snapshot = self.ledger.snapshot(
            request,
            query,
            self._candidates.list_for(query.model or self._models.default),
            held,
            state,
            now,
            self._ranks(request) if self._candidates.names_ranks else None,
            may_split=is_steered
            and (not disaggregator.changes_bodies or disaggregator.may_split(request)),
        )
        terms: Sequence[Term] = ()
        if hooks.terms:
            terms = [one for ask in hooks.terms for one in ask(request, query, snapshot, now)]
        has_roles = self._candidates.has_roles
        decision = disaggregator.decide(
            request, query, snapshot, now, self._rng, terms, has_roles=has_roles
        )
        for dress in hooks.dress:
            decision = dress(decision, request, query)
        if is_steered:
            return decision
        return replace(decision, is_steered=False, handing=None)

    def _overlaps(self, query: Query) -> tuple[Sequence[Mapping[str, Overlap]], State]:
        """Returns what workers hold of each prompt, and the state of a worker's feeds by its name.

        Both are of the workers whose tokens can be trusted for the forms of the request.
        """
        trusted = self._proofs.trust_for(query.forms) if query.forms else self._candidates
        if not query.reads_cache:
            return [{} for _ in query.prompts], trusted.state
        held = list(map(trusted.overlaps, query.prompts))
        if query.variants:
            held, trusted = by_variant(query, held, trusted, self._proofs)
        return held, trusted.state

    def _ranks(self, request: RoutingRequest) -> Ranks:
        """Returns the workers' ranks, of which a request may name one."""
        writes_body = request.body is not None and not request.wants_endpoint
        return self.ledger.ranks(request.head.path, writes_body=writes_body)

    def _announced_prompt(self, decision: Decision, query: Query) -> Prompt | None:
        """Returns the prompt if its worker's feed will announce when it is computed, else None."""
        prompts = query.prompts
        if not self._learns or len(prompts) != 1 or not query.reads_cache:
            return None
        if query.media is not None and not query.media.is_whole:
            return None
        if decision.source or decision.basis.fetches.get(decision.worker):
            return None  # the time of a transfer would be measured, too
        picked = decision if decision.split is None else decision.prefill or decision
        if not self._proofs.is_live(picked.worker, query.forms):
            return None
        (prompt,) = prompts
        overlap = picked.basis.overlaps[0].get(picked.worker)
        if overlap is None:
            block_size = self._candidates.block_size(picked.worker)
            return prompt if usable_tokens(prompt.tokens, block_size) > 0 else None
        # nothing is announced if all its blocks are held already, or there are none
        is_held = overlap.held_tokens >= usable_tokens(prompt.tokens, overlap.block_size)
        return None if is_held else prompt

    def _tell(self, decision: Decision, timeline: Timeline, head: Head) -> None:
        log.debug(
            "decision: model %s, picked %s%s, overlap %d of %d tokens, uncertain %d, reason %s",
            decision.model,
            decision.pick[0] if decision.pick else None,
            "" if decision.is_steered else " (not steered)",
            decision.basis.certain_tokens,
            decision.basis.prompt_tokens,
            decision.basis.uncertain_tokens,
            decision.reason,
            extra=ids_of(head, timeline.trace.trace_id),
        )
