"""Decides the legs of a request: whether another worker computes its prompt, or has KV blocks.

A request has one leg, on a worker that takes all of it, or two: a prefill worker computes the
prompt and hands its KV blocks over, and a decode worker generates. The answering worker is decided
first, by its own cost. A second leg is used if computing the prompt there costs more than apart:

    here  = uncached prompt tokens x affinity + prompt tokens still queued there
            + uncached prompt tokens x requests that it is answering x interference
    apart = cost of the cheapest prefill worker, by overlap and load like any other worker's
            + tokens to be transferred, at the speed of a transfer

All in tokens of prefill work. A worker of role both takes only whole requests: whether its engine
could take half of one is not known.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from extproc.config.sections import (
    BOTH,
    DECODE,
    MIRROR,
    PREFILL,
    SGLANG,
    Disaggregation,
)
from extproc.requests.request import RoutingRequest
from extproc.routing.candidates.eligibility import Candidate, Demand, why_excluded
from extproc.routing.candidates.sampling import Chance
from extproc.routing.cost.spread import Rows
from extproc.routing.cost.term import Term
from extproc.routing.decide import decide
from extproc.routing.decision import Decision, PullSource, Split
from extproc.routing.inputs.query import Query, demand_of
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from kvstate.overlap import Overlap

Value = TypeVar("Value")

COMPUTES_FOR_OTHERS = "computes prompts for other workers only"

# Why another worker computes a prompt, or does not: as counted, and in words.
APART, NEEDED = "apart", "needed"
NO_PROMPT, NOT_SET, BODY = "no_prompt", "not_set", "body"
ANSWERS, PROMPTS, NO_WORKER = "several_answers", "several_prompts", "no_prefill_worker"
WHOLE, FEW, HERE = "whole", "few_tokens", "here"
WORDS = {
    APART: "computing the prompt elsewhere costs less",
    NEEDED: "the decode worker cannot compute a prompt itself",
    NO_PROMPT: "there is no prompt to compute",
    NOT_SET: "disaggregation.mode is not set",
    BODY: "its body cannot say where the prompt is computed",
    ANSWERS: "it asks for several answers",
    PROMPTS: "it has several prompts",
    NO_WORKER: "no prefill worker can take the prompt",
    WHOLE: "the cheapest worker takes whole requests",
    FEW: "too few tokens need to be computed",
    HERE: "computing the prompt elsewhere costs no less",
}


class _Plan(NamedTuple):
    """What is settled before the pick.

    helpers: the workers that may compute the prompt for another. whole: why the request has one
    leg, whatever its legs cost; "" if it may have two. needs_helper: whether no decode worker can
    compute the prompt. answering: the snapshot for the pick, without workers that cannot answer.
    """

    helpers: list[Candidate]
    whole: str
    needs_helper: bool
    answering: Snapshot


def decide_legs(
    request: RoutingRequest,
    query: Query,
    snapshot: Snapshot,
    rules: Disaggregation,
    now: float,
    rng: Chance,
    terms: Sequence[Term] = (),
) -> Decision:
    """Decides where a request goes if some workers take only a part of a request.

    now: seconds of the loads' clock. terms: those of enabled features.
    """
    plan = _plan(request, query, snapshot, rules)
    answer = decide(request, query, plan.answering, now, rng, terms)
    if not answer.pick:
        return answer
    roles = {worker.endpoint: worker.role for worker in snapshot.workers}
    whole = plan.whole or (WHOLE if roles[answer.pick[0]] == BOTH else "")
    if whole:
        split = Split(None, WORDS[whole], outcome=whole)
    else:
        among = _snapshot_of_helpers(snapshot, plan.helpers)
        decide_prefill = partial(decide, request, query, among, now, rng, terms)
        split = _split(decide_prefill, among, answer, rules, must=plan.needs_helper)
    pick = answer.pick
    if split.prefill is not None or plan.needs_helper:  # a retry must fit the request as it is sent
        fitting = DECODE if split.prefill is not None else BOTH
        pick = tuple([endpoint for endpoint in pick if roles[endpoint] == fitting])
    return msgspec.structs.replace(answer, pick=pick, split=split)


def _plan(
    request: RoutingRequest, query: Query, snapshot: Snapshot, rules: Disaggregation
) -> _Plan:
    computes = bool(query.prompts or query.outline or query.unread_bytes)
    helpers = _helpers(demand_of(request, query), snapshot)
    may_split = snapshot.may_split
    whole = _why_whole(query, rules, helpers, may_split=may_split) if computes else NO_PROMPT
    # SGLang's decode workers compute no prompts
    needs_helper = computes and rules.connector == SGLANG
    closed = {PREFILL: COMPUTES_FOR_OTHERS}
    if needs_helper and whole:
        closed[DECODE] = f"cannot compute a prompt itself: {WORDS[whole]}"
    workers = [_closed(worker, closed) for worker in snapshot.workers]
    answering = msgspec.structs.replace(snapshot, workers=workers, roster=None)
    return _Plan(helpers, whole, needs_helper, answering)


def _helpers(demand: Demand, snapshot: Snapshot) -> list[Candidate]:
    """Returns the prefill workers that may be used; doubted ones only if all are."""
    helpers = [
        worker
        for worker in snapshot.workers
        if worker.role == PREFILL
        and worker.endpoint not in snapshot.ejected
        and not why_excluded(worker, demand, snapshot.unfit)
    ]
    return [one for one in helpers if one.endpoint not in snapshot.doubted] or helpers


def _snapshot_of_helpers(snapshot: Snapshot, helpers: list[Candidate]) -> Snapshot:
    """Returns the snapshot for the pick of the worker that computes the prompt for another."""
    rules = replace(snapshot.rules, shed=False)
    return msgspec.structs.replace(snapshot, workers=helpers, roster=None, ranks=None, rules=rules)


def _why_whole(
    query: Query, rules: Disaggregation, helpers: Sequence[Candidate], *, may_split: bool
) -> str:
    """Returns why the request has one leg, whatever two would cost; "" if it may have two."""
    if rules.mode is None:
        return NOT_SET
    if not may_split:
        return BODY
    if query.answers > 1:
        return ANSWERS
    if len(query.prompts) > 1 and not (rules.mode == MIRROR and rules.connector == SGLANG):
        return PROMPTS
    return "" if helpers else NO_WORKER


def _closed(worker: Candidate, closed: dict[str, str]) -> Candidate:
    why = closed.get(worker.role, "")
    if not why or worker.excluded:
        return worker
    return msgspec.structs.replace(worker, excluded=why)


def _split(
    decide_prefill: Callable[[], Decision],
    among: Snapshot,
    answer: Decision,
    rules: Disaggregation,
    *,
    must: bool,
) -> Split:
    """Compares the costs with and without a second leg.

    decide_prefill: decides among the helpers. must: the first worker requires one.
    """
    uncached = answer.uncached_tokens
    if not must and uncached < rules.min_uncached_tokens:
        few = f"{uncached:.0f} uncached tokens are fewer than {rules.min_uncached_tokens}"
        return Split(None, few, outcome=FEW)
    prefill = decide_prefill()
    load = _of_pick(answer, answer.basis.loads) or Load()
    others = load.in_flight + load.others
    weight = answer.basis.affinity + rules.interference_percent / 100 * others
    here = (load.backlog_tokens + weight * uncached) * load.slowness
    rate = among.rules.cost.prefill_tokens_per_second
    transfer = uncached * rate / rules.transfer_tokens_per_second
    apart = (_of_pick(prefill, prefill.basis.costs) or 0.0) + transfer
    outcome = NEEDED if must else APART if here > apart else HERE
    return Split(None if outcome == HERE else prefill, WORDS[outcome], here, apart, outcome)


def _of_pick(decision: Decision, column: Rows[Value]) -> Value:
    """Returns the entry of the first pick in a column of all workers."""
    places = [worker.name for worker in decision.basis.workers]
    return column[places.index(decision.worker)]


def with_source(query: Query, decision: Decision, least: int, snapshot: Snapshot) -> Decision:
    """Adds the worker that holds most of the prompt as a source, if it holds enough more.

    least: how many more tokens than the pick it must hold. No failing worker is one. Both workers
    need a port for handing KV blocks over. A retry does not go to the source: no worker can pull
    from itself.
    """
    is_whole = decision.prefill is None and snapshot.may_split and query.reads_cache
    if not (decision.pick and is_whole and query.sole is not None):
        return decision
    held = decision.basis.overlaps[0]
    own = _certain(held, decision.worker)
    ports = {worker.name: worker.transfer_port for worker in decision.basis.workers}
    able = [
        PullSource(worker.endpoint, worker.transfer_port, _certain(held, worker.name) - own)
        for worker, why in zip(decision.basis.workers, decision.basis.excluded, strict=True)
        if worker.transfer_port is not None and not why and worker.endpoint not in snapshot.ejected
    ]
    source = max(able, key=lambda one: one.tokens, default=None)
    if source is None or source.tokens < least or ports[decision.worker] is None:
        return decision
    return msgspec.structs.replace(
        decision,
        source=source,
        pick=tuple([endpoint for endpoint in decision.pick if endpoint != source.endpoint]),
        uncached_tokens=max(0.0, decision.uncached_tokens - source.tokens),
    )


def _certain(held: Mapping[str, Overlap], name: str) -> int:
    return held[name].certain_tokens if name in held else 0
