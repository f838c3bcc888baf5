"""Handing over token ids, as a feature: engines get those of prompts that are proved there.

The ids of the next turn are known here in a fraction of a millisecond; an engine renders and
tokenizes the whole conversation again. But an engine that is given ids answers whatever they say.
So they go along only where all workers to which the proxy may send the request have proved its
forms, and as long as samples agree (`extproc.proof.samples`).
"""

import logging
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from prometheus_client.registry import Collector

from extproc.config.schema import Config
from extproc.config.sections import TokenHandover
from extproc.features.feature import Feature
from extproc.features.handing.handing_figures import HandingFigures
from extproc.features.handing.id_fields import IdField, field_of, member_of
from extproc.features.handing.judging import is_placed, result_of, traits_of, why_kept
from extproc.features.router_parts import RouterParts
from extproc.fleet.records.worker import Worker
from extproc.fleet.workers import Workers
from extproc.observing.outcomes import Outcome
from extproc.proof.samples import (
    DISAGREED,
    FEWER,
    HANDED,
    SAMPLE,
    Samples,
    step_among,
)
from extproc.requests.request import RoutingRequest
from extproc.routing.decision import Decision
from extproc.routing.handing import NOT_LIVE, UNPROVED, Handing
from extproc.routing.inputs.query import Query

log = logging.getLogger("kvsteer.tokens")


class HandTokens(Feature):
    """Has ids go with requests. writes_legs: whether bodies tell of other workers' parts."""

    def __init__(self, rules: TokenHandover, workers: Workers, *, writes_legs: bool) -> None:
        self._rules = rules
        self._workers = workers
        self._proofs = workers.proofs
        self._writes_legs = writes_legs
        self._figures = HandingFigures(self._samples)

    def collectors(self) -> Sequence[Collector]:
        """Returns what shows the figures of handed ids."""
        return (self._figures,)

    def _samples(self) -> Iterator[tuple[str, Samples]]:
        for name, record in self._workers.records.items():
            if record.proof.samples.results:
                yield name, record.proof.samples

    def dress(self, decision: Decision, request: RoutingRequest, query: Query) -> Decision:
        """Says whether the ids of a request's prompt go with it."""
        if not is_placed(decision):
            return decision
        handing = self._handing(decision, request, query)
        return msgspec.structs.replace(decision, handing=handing)

    def _handing(self, decision: Decision, request: RoutingRequest, query: Query) -> Handing:
        kept = why_kept(
            decision, request, query, self._rules.min_tokens, writes_legs=self._writes_legs
        )
        if kept:
            return Handing(kept)
        path = request.head.path
        members = list(self._members(query.model))
        field = self._field_of(decision.worker, path)
        unproved = self._unproved(members, query.forms, path, field)
        if unproved:
            return Handing(UNPROVED, worker=unproved)
        named = frozenset(decision.pick)
        for worker in members:
            if worker.endpoint in named and not self._proofs.is_live(worker.name, query.forms):
                return Handing(NOT_LIVE, worker=worker.name)
        return self._step(decision, query, members, traits_of(query.forms, path, query.lora))

    def _field_of(self, worker: str, path: str) -> IdField | None:
        record = self._workers.records.get(worker)
        return None if record is None else field_of(record.engine, path)

    def _members(self, model: str | None) -> Iterator[Worker]:
        """Yields the workers that the proxy may choose for a model, however they are now."""
        model_of = self._workers.candidates.model_of
        return (one for one in self._workers.records.values() if model_of(one) in (model, None))

    def _unproved(
        self, members: Iterable[Worker], forms: int, path: str, field: IdField | None
    ) -> str:
        """Returns the name of a worker that may not get ids in this field, "" if there is none."""
        wanted, has_proved = forms | (0 if field is None else field.forms), self._proofs.has_proved
        for worker in members:
            takes = field_of(worker.engine, path)
            if takes is None or takes != field or not has_proved(worker.name, wanted):
                return worker.name
        return ""

    def _step(
        self, decision: Decision, query: Query, members: Sequence[Worker], traits: Sequence[str]
    ) -> Handing:
        """Returns what samples say."""
        cluster = {one.name: one.proof.samples for one in members}
        step, refuted = step_among(decision.worker, cluster, traits)
        tokens, own = query.prompts[0].tokens, cluster[decision.worker]
        handed = tokens if step == HANDED else None
        return Handing(step, handed, traits, own, own.start, len(tokens), refuted)

    def begin(self, request: RoutingRequest, query: Query, decision: Decision, now: float) -> None:
        """Counts a request, and one less before the next sample if its ids go with it."""
        handing = decision.handing
        if handing is None:
            return
        tokens = 0 if handing.tokens is None else len(handing.tokens)
        self._figures.count(decision.model or "", handing.outcome, tokens)
        if tokens and handing.samples is not None:
            handing.samples.note_handed(handing.traits, tokens)

    def extend(self, decision: Decision, path: str) -> bytes:
        """Returns the member with the ids of a request's prompt, if they go with it.

        Where another worker has a part in it, the feature that says so writes them.
        """
        handing = decision.handing
        if handing is None or handing.tokens is None:
            return b""
        field = self._field_of(decision.worker, path)
        has_parts = decision.prefill is not None or decision.source is not None
        if field is None or (has_parts and field.holds_legs):
            return b""
        return member_of(field, handing.tokens)

    def note_end(
        self, decision: Decision, outcome: Outcome | None, *, is_booked: bool, is_sent: bool
    ) -> None:
        """Compares what an engine counted with the ids here, and forgets them."""
        handing = decision.handing
        if handing is None or handing.samples is None:
            return
        handing.tokens = None
        if not is_sent:
            return
        is_sample = handing.outcome == SAMPLE
        block_tokens = self._proofs.block_size(decision.worker) or 0
        result = result_of(outcome, handing.prompt_tokens, block_tokens, is_sample=is_sample)
        if not is_sample and result != DISAGREED:
            return
        says, every = _disagreement(outcome, handing.prompt_tokens), self._rules.sample_every
        if handing.samples.note_result(result, handing.traits, every, handing.start, says):
            log.warning(
                "worker %s: token ids no longer go with requests until it starts anew: %s",
                decision.worker,
                says,
            )
        record = self._workers.records.get(decision.worker)
        if result == FEWER and record is not None and handing.start == handing.samples.start:
            log.info("worker %s: a sample found fewer blocks than it holds", decision.worker)
            self._workers.engines.note_restart(record)


def _disagreement(outcome: Outcome | None, tokens: int) -> str:
    if outcome is None:
        return ""
    counted = outcome.reported.prompt_tokens
    return f"its engine counted {counted} tokens in a prompt of {tokens}"


def handing(config: Config, parts: RouterParts) -> HandTokens | None:
    """Returns the feature if ids may go with requests."""
    rules, legs = config.policy.hand_tokens, config.disaggregation
    if not rules.enabled:
        return None
    return HandTokens(rules, parts.workers, writes_legs=legs.changes_bodies)
