"""The path of a request: parse, tokens, decide, book. One router serves all streams."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import msgspec

from extproc.base.engine import Engine
from extproc.base.errors import RequestError
from extproc.base.logs import tell_fault
from extproc.config.schema import Config
from extproc.config.sections import KNOWN
from extproc.disaggregation.disaggregator import Disaggregator
from extproc.disaggregation.handover import may_split
from extproc.fleet.workers import Workers
from extproc.media.knowledge import MediaKnowledge
from extproc.media.prompts import MediaPrompt
from extproc.observing.decisions import Course, Traces
from extproc.observing.deliveries import Deliveries, SteeringCollector
from extproc.observing.metrics import Metrics
from extproc.observing.outcomes import Outcome
from extproc.observing.reason_faults import ReasonFaults
from extproc.observing.store_figures import StoreCollector
from extproc.observing.unrecognized import Unrecognized, UnrecognizedCollector
from extproc.requests.costly_json import is_light
from extproc.requests.engine_paths import EnginePaths
from extproc.requests.request import (
    NOT_INFERENCE,
    UNKEYED,
    Ask,
    Head,
    Models,
    why_unkeyed,
)
from extproc.requests.tenant_salt import name_apart
from extproc.routing.decision import OVER_LIMIT, Decision, decide
from extproc.routing.decision_log import DecisionLog, ids_of
from extproc.routing.explain import explanation
from extproc.routing.load import Booking
from extproc.routing.placing import Placing
from extproc.routing.query import Media, Query
from extproc.routing.statuses import FIRST_FAILURE
from extproc.routing.steering import Steering, beginning_of, hash_of
from extproc.routing.store_offers import StoreOffers
from extproc.serving.delivery import Delivery
from extproc.serving.observers import Observer
from extproc.serving.preparation import NOTHING_NAMED, Fleet, Named, Preparation
from extproc.serving.queries import (
    Queries,
)
from extproc.serving.refusals import Refusal
from extproc.serving.token_watch import TokenWatch
from extproc.serving.treatment import explain_refusal, with_treatment
from extproc.serving.variants import by_variant
from extproc.tokenizing.prompt_tokens import AnyTokenizer, PromptTokens
from kvstate.overlap import Prompt, usable_tokens

log = logging.getLogger("kvsteer.decision")


HTTP_OK = 200

# How many bytes of a body log_prompts shows.
LOGGED_BODY_BYTES = 4_096


# The decision for a request, and its booking if a worker was picked for a call of a model; the
# caller releases the booking at the end. A plain tuple, since every request makes one.
Routed = tuple[Decision, Booking | None]


class Router:
    """Decides where requests go, and accounts for those in flight.

    tokenizers: by model; requests for other models are routed by load, unless they have token ids.
    traces: records the decisions' spans; None if requests are not traced. observer: gets the
    decisions, and which endpoint answered.
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
        observer: Observer | None = None,
    ) -> None:
        self._config = config
        self._changes_bodies = config.disaggregation.changes_bodies
        self._models = Models(config.models)
        self._workers = workers
        self.preparation = Preparation(
            config, Fleet(workers.candidates.engines_of, workers.candidates.engines)
        )
        self.tokens = PromptTokens(tokenizers, config.extproc.deadline_ms / 1000)
        names_sessions = config.policy.session_header == KNOWN
        index, reporter = workers.followed.index, workers.reporter
        secret = index.media_ids.secret if reporter is None else reporter.secret
        self.media = media = MediaKnowledge(
            secret.to_bytes(8, "little"), index.media_ids, workers.monotonic
        )
        index.listen(media.learning)
        self._media_of: dict[Booking, MediaPrompt] = {}
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
        self.placing = Placing(config, rng.getrandbits(64), candidates, reporter)
        self._disaggregator = Disaggregator(
            config, self.placing, workers.upstreams, candidates.tokens_on_host
        )
        self._stores: StoreOffers | None = None
        if config.stores:
            prefill = float(config.policy.cost.prefill_tokens_per_second)
            self._stores = StoreOffers(
                config.stores,
                prefill,
                candidates.stored,
                lambda: candidates.store_shares(self._monotonic()),
            )
            stored = workers.followed
            metrics.registry.register(StoreCollector(stored.stores.blocks, stored.pools.events))
        self._learns = config.policy.learn
        self.watched = TokenWatch(workers.proofs, compares=config.accounting.responses == "usage")
        self._observer = observer
        self.steering = Steering(config.steering.percent, config.steering.header)
        self.unsteered: Counter[str | None] = Counter()
        self.deliveries = deliveries = Deliveries()
        self.delivery = Delivery(workers, deliveries, self._monotonic)
        self.paths = EnginePaths(config.extproc.path_prefixes, guesses=not config.edits_bodies)
        self.unrecognized = Unrecognized(metrics.calls, self._monotonic)
        metrics.registry.register(UnrecognizedCollector(self.unrecognized))
        self.reasons = ReasonFaults(metrics.calls, metrics.decided_for, self._monotonic)
        steered, unsteered = self.placing.steered, self.unsteered
        metrics.registry.register(SteeringCollector(deliveries, steered, unsteered, self.steering))

    async def route(self, ask: Ask, traceparent: str = "") -> Routed:
        """Decides where a request goes, and books it there.

        A request that cannot be read or keyed, for whatever reason, is placed by load.

        It waits only for work that takes a millisecond or more, and yields None before it does:
        until then `send(None)` can drive it without a task. A request that calls no model is
        counted, but adds to no worker's load and is not shown to observers.

        traceparent: the trace that the request belongs to, "" if none.
        """
        clock = self._monotonic
        course = Course(clock, clock(), traceparent, ask.head.path, ask.whose)
        if self._config.log_prompts and ask.body is not None:
            log.debug("body: %s", ask.body[:LOGGED_BODY_BYTES].decode(errors="replace"))
        query = await self._queries.make_query(ask, course)
        if self.steering.is_partial:
            decision, query = await self._decide_side(ask, query, course)
        else:
            decision, query = self._decide(ask, query, course)
        course.picked_at = now = clock()
        if decision.reason == NOT_INFERENCE:
            self._metrics.observe_decision(decision, course)
            return decision, None
        if self._traces is not None:
            course.trace = self._traces.record(decision, course)
        self._metrics.observe_decision(decision, course)
        if decision.basis.media is not None:
            self._metrics.count_media(decision.model, decision.basis.media, now)
        if log.isEnabledFor(logging.DEBUG):
            self._tell(decision, course, ask.head)
        self._decisions.tell(decision, ask.head, course.trace.trace_id)
        if self._observer is not None:
            self._show(self._observer, decision, query, ask.head)
        # last: a failure before it must leave no load behind that nobody releases
        try:
            return decision, self._book(decision, query, now)
        except BaseException:
            if self._observer is not None:
                self._observer.note_drop(decision)
            raise

    def _book(self, decision: Decision, query: Query, now: float) -> Booking | None:
        """Books a request where it was decided to go; returns the booking, if there is a load."""
        if query.variants:
            query = query.query_for((decision.prefill or decision).worker)
        if not decision.is_steered:
            self.unsteered[decision.model] += 1
            booking = self.placing.note(decision, now)
        else:
            step = self.placing if decision.split is None else self._disaggregator
            if decision.source is not None:
                self._watch_pull(decision, query, now)
            booking = step.book(decision, now, self._announced_prompt(decision, query))
        if booking is None:
            return None
        certain = decision.basis.certain_tokens
        if certain and decision.is_steered:
            self._candidates.note_saved(decision.worker, certain, now)
        # otherwise its engine would count blocks that it got from another worker as cached
        if decision.source is None and (decision.split is None or decision.prefill is None):
            self._watch(decision, query, booking)
        return booking

    def _watch(self, decision: Decision, query: Query, booking: Booking) -> None:
        """Has a request watched that one worker computes whole."""
        self.watched.begin(decision, query, booking)
        if decision.rank is not None and booking.prompt is not None:
            self._workers.candidates.pins.watch(decision.worker, booking, booking.prompt)
        if query.media is not None:
            self._begin_media(decision, query.media, booking)

    def _watch_pull(self, decision: Decision, query: Query, now: float) -> None:
        """Notes a pull that begins, and has its arrival looked for if it can be measured."""
        pull, prompt, source = (
            self._disaggregator.begin_pull(decision, now),
            query.sole,
            decision.source,
        )
        if pull is None or prompt is None or source is None:
            return
        if self._proofs.is_live(decision.worker, query.forms):
            held = decision.basis.overlaps[0].get(decision.worker)
            tokens = source.tokens + (0 if held is None else held.certain_tokens)
            pull.expect()
            self._workers.questions.pulls.watch(decision.worker, prompt, tokens, pull.note_arrival)

    def _begin_media(self, decision: Decision, media: Media, booking: Booking) -> None:
        """Has a request with media wait for what its worker stores."""
        if media.prompt is None or not decision.is_steered:
            return
        self.media.learning.begin(decision.worker, media.prompt, is_known=media.is_known)
        self._media_of[booking] = media.prompt

    async def explain(
        self, head: Head, body: bytes, named: Named = NOTHING_NAMED
    ) -> dict[str, Any]:
        """Returns the answer of POST /explain: the decision for a request, without side effects.

        named: the values of the trusted headers, by their names.
        """
        head = msgspec.structs.replace(head, path=self.paths.seen(head.path))
        unkeyed = why_unkeyed(head.method, head.path)
        is_read = not unkeyed or (unkeyed == UNKEYED and self.preparation.is_needed)
        ask = Ask(head, body if is_read else None, unkeyed)
        step, isolated, _ = await self.preparation.prepare(ask, named)
        if isinstance(step, Refusal):
            return explain_refusal(step, isolated)
        course = Course.begin(self._monotonic)
        query = await self._queries.make_query(step, course)
        if self.steering.is_partial:
            decision, _ = await self._decide_side(step, query, course)
        else:
            decision, _ = self._decide(step, query, course)
        shown = explanation(decision, self._trusted_state(query), self._workers.states.load)
        engine = self.engine(decision.worker)
        return with_treatment(shown, isolated, decision.of_class, engine, head.path)

    def _trusted_state(self, query: Query) -> Callable[[str], str]:
        """Returns the state of a worker for a request: of its feeds, and of its tokens."""
        if not query.forms:
            return self._candidates.state
        proofs = self._proofs
        return lambda worker: proofs.trust_for(query.query_for(worker).forms).state(worker)

    def is_hung(self, model: str) -> bool:
        """Returns whether a model's template or tokenizer did not come back, and runs no more."""
        return self.tokens.is_hung(model)

    def release(self, booking: Booking) -> None:
        """Ends a booking: the request is over."""
        self.watched.end(booking)
        if self._media_of:
            prompt = self._media_of.pop(booking, None)
            if prompt is not None:
                self.media.learning.end(prompt)
        if self._disaggregator.legs:
            self._disaggregator.release(booking, self._monotonic())
        clock = self._monotonic
        self.placing.release(booking, clock())

    def note_server(self, decision: Decision, booking: Booking, endpoint: str) -> None:
        """Notes which endpoint answered a request, according to its response."""
        if self._observer is not None:
            self._observer.note_server(decision, endpoint)
        if not decision.is_steered:
            self.note_worker(decision, booking, endpoint)
            return
        if self.delivery.note(decision, endpoint):
            self.note_answer_elsewhere(booking, decision.basis.worker_at(endpoint), endpoint)
            self._workers.upstreams.doubt(decision.pick[0], is_doubted=True)
            self.delivery.warn(decision, endpoint)

    def note_worker(self, decision: Decision, booking: Booking, endpoint: str) -> None:
        """Notes the endpoint to which an unsteered request went."""
        worker = decision.basis.worker_at(endpoint)
        if worker:
            self.placing.note_worker(booking, decision, worker, endpoint, self._monotonic())
        else:
            self.placing.disclaim(booking)
            self.placing.loads.end(booking, self._monotonic())

    def any_endpoint(self, decision: Decision, booking: Booking) -> str:
        """Returns a random endpoint for an unsteered request, and books the request there.

        For proxies that need an endpoint from the router.
        """
        rows = zip(decision.basis.workers, decision.basis.excluded, strict=True)
        able = [one.endpoint for one, why in rows if why in ("", OVER_LIMIT)]
        endpoint = able[int(self._rng.random() * len(able))]
        self.note_worker(decision, booking, endpoint)
        return endpoint

    def steering_status(self) -> dict[str, Any]:
        """Returns the answer of GET /steering."""
        results = self.deliveries.totals(self.placing.steered)
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

    def keyed_by_kind(self) -> list[dict[str, Any]]:
        """Returns the answer of GET /media."""
        return self._metrics.keyed_by_kind(self._monotonic())

    def note_answer_elsewhere(self, booking: Booking, worker: str, endpoint: str) -> None:
        """Moves the load of a request to the worker that answers it instead of the picked one.

        worker: "" if the endpoint is no known worker's; then the load is removed.
        """
        self._drop_watch(booking)  # the picked worker's events say nothing about this request
        if worker:
            self.placing.move(booking, worker, endpoint, self._monotonic())
        else:
            self._disaggregator.disclaim(booking)
            self.placing.disclaim(booking)
            self.placing.loads.end(booking, self._monotonic())

    def _drop_watch(self, booking: Booking) -> None:
        """Gives up comparing what the picked worker stores with a request."""
        self.watched.drop(booking)
        prompt = self._media_of.pop(booking, None)
        if prompt is not None:
            self.media.learning.drop(prompt)

    def keeps(self, decision: Decision, worker: str, response: str) -> bool:
        """Notes that a worker keeps a response, which requests may continue; False without one."""
        if not (worker and response):
            return False
        name = name_apart(decision.tenant, response)
        self.placing.note_response(worker, name, self._monotonic())
        return True

    def note_answer(self, booking: Booking, status: int, served: str) -> None:
        """Notes that a response began. served: the endpoint that sent it, "" if unknown."""
        if status >= FIRST_FAILURE:
            self._drop_watch(booking)
        else:
            self.watched.note_answer(booking)
        self._disaggregator.note_answer(booking, status, self._monotonic())
        seconds = self.placing.note_answer(booking, status, served, self._monotonic())
        if seconds:
            log.warning(
                "worker at %s keeps failing, last with %d: ejected for %.0f s while others answer",
                booking.endpoint,
                status,
                seconds,
            )
        elif seconds is not None:
            log.info("worker at %s answers again and is no longer ejected", booking.endpoint)

    def engine(self, worker: str) -> Engine | None:
        """Returns the engine that a worker runs, None if it is unknown."""
        return self._candidates.engine(worker)

    def in_flight(self, endpoint: str) -> int:
        """Returns how many requests are in flight on an endpoint."""
        return self.placing.loads.in_flight(endpoint)

    def note_usage(self, outcome: Outcome) -> None:
        """Notes what an engine reports of a request's media, and of what its store offered."""
        loaded = outcome.loaded_tokens
        if outcome.fetch is not None and loaded is not None:
            offered, now = outcome.fetch.tokens, self._monotonic()
            self._candidates.note_loaded(outcome.worker, offered, loaded, now)
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

    async def _is_steered(self, ask: Ask) -> bool:
        """Returns whether a request is steered.

        It waits if the body takes a millisecond or more to parse. Requests that call no model count
        as steered.
        """
        if ask.reason == NOT_INFERENCE:
            return True
        beginning = ask.head.conversation.encode()
        body = None if ask.reason else ask.body
        if not beginning and body is not None:
            path = ask.head.path
            if is_light(body):
                beginning = beginning_of(path, body)
            else:
                with suppress(TimeoutError, RequestError):  # then the side is random
                    read = partial(beginning_of, path, body)
                    beginning = await self.tokens.run_in_thread(read, len(body), None, ask.whose)
        return self.steering.steers(hash_of(beginning), self._rng.random())

    async def _decide_side(self, ask: Ask, query: Query, course: Course) -> tuple[Decision, Query]:
        """Decides if only some requests are steered; unsteered ones are never split."""
        is_steered = await self._is_steered(ask)
        if not is_steered:
            query = msgspec.structs.replace(query, may_split=False)
        decision, query = self._decide(ask, query, course)
        return msgspec.structs.replace(decision, is_steered=is_steered), query

    def _decide(self, ask: Ask, query: Query, course: Course) -> tuple[Decision, Query]:
        if self._changes_bodies:
            body = None if ask.wants_endpoint else ask.body
            if not may_split(self._config.disaggregation.connector, ask.head.path, body):
                query = msgspec.structs.replace(query, may_split=False)
        try:
            return self._place(query, ask, course), query
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
            query = self._queries.broken(error)
            return self._place(query, ask, course), query

    def _place(self, query: Query, ask: Ask, course: Course) -> Decision:
        candidates, head = self._candidates, ask.head
        if head.policy is not None or head.subset is not None:
            query = msgspec.structs.replace(
                query, policy=head.policy, demand=query.demand._replace(subset=head.subset)
            )
        if ask.of_class is not None or ask.tenant is not None or ask.policy_headers:
            query = msgspec.structs.replace(
                query,
                of_class=ask.of_class,
                tenant=ask.tenant,
                policy_headers=ask.policy_headers,
            )
        if head.session:
            query = msgspec.structs.replace(query, session=head.session)
        trusted = self._proofs.trust_for(query.forms) if query.forms else candidates
        prompts, reads_cache = query.prompts, query.reads_cache
        held = list(map(trusted.overlaps, prompts)) if reads_cache else [{} for _ in prompts]
        if query.variants and reads_cache:
            held, trusted = by_variant(query, held, trusted, self._proofs)
        now = course.clock()
        if held:
            course.looked_at = now
        workers = candidates.list_for(query.model or self._models.default)
        ranks = None
        if candidates.names_ranks:
            writes_body = ask.body is not None and not ask.wants_endpoint
            ranks = self.placing.ranks(head.path, writes_body=writes_body)
        snapshot = self.placing.snapshot(query, workers, held, trusted.state, now, ranks)
        if self._stores is not None:
            snapshot = self._stores.offer(query, snapshot)
        step, has_roles = self._disaggregator, candidates.has_roles
        if has_roles or step.pulls:
            return step.decide(query, snapshot, now, self._rng, has_roles=has_roles)
        return decide(query, snapshot, now, self._rng)

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

    def _show(self, observer: Observer, decision: Decision, query: Query, head: Head) -> None:
        """Shows a decision to the observer, whose errors do not affect the request."""
        try:
            observer.note_decision(decision, query.prompts, head)
        except Exception as error:  # noqa: BLE001 - as in _decide
            tell_fault(log, "an observer failed with %s", error)

    def _tell(self, decision: Decision, course: Course, head: Head) -> None:
        log.debug(
            "decision: model %s, picked %s%s, overlap %d of %d tokens, uncertain %d, reason %s",
            decision.model,
            decision.pick[0] if decision.pick else None,
            "" if decision.is_steered else " (not steered)",
            decision.basis.certain_tokens,
            decision.basis.prompt_tokens,
            decision.basis.uncertain_tokens,
            decision.reason,
            extra=ids_of(head, course.trace.trace_id),
        )
