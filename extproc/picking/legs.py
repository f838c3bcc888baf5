"""Whether one worker computes a prompt and another one answers, and which ones: pure.

A request has one leg, a worker that takes all of it, or two: a prefill worker computes the prompt,
hands its KV blocks over, and a decode worker generates. Who answers is decided first, by its own
cost. A second leg is worth it if computing the prompt there costs more than elsewhere:

    here  = uncached prompt tokens x affinity + prompt tokens still queued there
            + uncached prompt tokens x requests that it is answering x interference
    apart = cost of the cheapest prefill worker, by overlap and load as of any other worker
            + tokens to be transferred, at the speed of a transfer

All in tokens of prefill work. A worker of role both takes whole requests only: whether its engine
could do half of one is not known.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from extproc.config.sections import BOTH, DECODE, MIRROR, PREFILL, SGLANG, Disaggregation
from extproc.picking.decision import Decision, Query, Snapshot, Source, Split, decide
from extproc.picking.eligibility import Candidate, why_excluded
from extproc.picking.load import Load
from extproc.picking.policies import Chance
from kvstate.overlap import Overlap

Value = TypeVar("Value")

COMPUTES_FOR_OTHERS = "computes prompts for other workers only"

# Why another worker computes a prompt, or none does: as it is counted, and in words.
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
    NO_WORKER: "no prefill worker can take it",
    WHOLE: "the cheapest worker takes whole requests",
    FEW: "too little of it has to be computed",
    HERE: "computing the prompt where it is answered costs no more",
}


def decide_legs(
    query: Query, snapshot: Snapshot, rules: Disaggregation, now: float, rng: Chance
) -> Decision:
    """Decides where a query goes among workers of which some take only part of a request.

    now: seconds of the clock that the load is kept in.
    """
    workers = snapshot.workers
    computes = bool(query.prompts or query.text or query.unread_bytes)
    helpers = [
        worker
        for worker in workers
        if worker.role == PREFILL
        and worker.endpoint not in snapshot.ejected
        and not why_excluded(worker, query.demand, snapshot.unfit)
    ]
    helpers = [one for one in helpers if one.endpoint not in snapshot.doubted] or helpers
    whole = _why_whole(query, rules, helpers) if computes else NO_PROMPT
    # SGLang's decode workers cannot compute a prompt
    needs_helper = computes and rules.connector == SGLANG
    closed = {PREFILL: COMPUTES_FOR_OTHERS}
    if needs_helper and whole:
        closed[DECODE] = f"cannot compute a prompt itself: {WORDS[whole]}"
    answering = msgspec.structs.replace(
        snapshot, workers=[_closed(worker, closed) for worker in workers], roster=None
    )
    answer = decide(query, answering, now, rng)
    if not answer.pick:
        return answer
    roles = {worker.endpoint: worker.role for worker in workers}
    if not whole and roles[answer.pick[0]] == BOTH:
        whole = WHOLE
    if whole:
        split = _whole(whole)
    else:
        among = msgspec.structs.replace(
            snapshot,
            workers=helpers,
            roster=None,
            ranks=None,
            rules=replace(snapshot.rules, shed=False),
        )
        split = _split(query, among, answer, rules, (now, rng), must=needs_helper)
    pick = answer.pick
    if split.prefill is not None or needs_helper:  # a retry must fit the request as it is sent
        fitting = DECODE if split.prefill is not None else BOTH
        pick = tuple([endpoint for endpoint in pick if roles[endpoint] == fitting])
    return msgspec.structs.replace(answer, pick=pick, split=split)


def _why_whole(query: Query, rules: Disaggregation, helpers: Sequence[Candidate]) -> str:
    """Why the request cannot have two legs, whatever they cost; "" if it can."""
    if rules.mode is None:
        return NOT_SET
    if not query.may_split:
        return BODY
    if query.answers > 1:
        return ANSWERS
    if len(query.prompts) > 1 and not (rules.mode == MIRROR and rules.connector == SGLANG):
        return PROMPTS
    return "" if helpers else NO_WORKER


def _whole(outcome: str) -> Split:
    return Split(None, WORDS[outcome], outcome=outcome)


def _closed(worker: Candidate, closed: dict[str, str]) -> Candidate:
    why = closed.get(worker.role, "")
    if not why or worker.excluded:
        return worker
    return msgspec.structs.replace(worker, excluded=why)


def _split(
    query: Query,
    among: Snapshot,
    answer: Decision,
    rules: Disaggregation,
    around: tuple[float, Chance],
    *,
    must: bool,
) -> Split:
    """Weighs a second leg against none; must: the first worker cannot do without it."""
    uncached = answer.uncached_tokens
    if not must and uncached < rules.min_uncached_tokens:
        few = f"{uncached:.0f} uncached tokens are fewer than {rules.min_uncached_tokens}"
        return Split(None, few, outcome=FEW)
    prefill = decide(query, among, *around)
    load = _of_pick(answer, answer.loads) or Load()
    others = load.in_flight + load.others
    weight = answer.affinity + rules.interference_percent / 100 * others
    here = (load.backlog_tokens + weight * uncached) * load.slowness
    rate = among.rules.cost.prefill_tokens_per_second
    transfer = uncached * rate / rules.transfer_tokens_per_second
    apart = (_of_pick(prefill, prefill.costs) or 0.0) + transfer
    outcome = NEEDED if must else APART if here > apart else HERE
    return Split(None if outcome == HERE else prefill, WORDS[outcome], here, apart, outcome)


def _of_pick(decision: Decision, column: Sequence[Value]) -> Value:
    """Returns the entry of the first pick in a column of all workers."""
    places = [worker.name for worker in decision.workers]
    return column[places.index(decision.worker)]


def with_source(query: Query, decision: Decision, least: int, ejected: Collection[str]) -> Decision:
    """Names the worker that holds most of the prompt, if that is enough more than the pick does.

    least: tokens that it has to hold beyond the pick. ejected: endpoints that fail. Both workers
    have to have a port where KV blocks are handed over. A retry does not go to the source: nobody
    is to pull from himself.
    """
    is_whole = decision.prefill is None and query.may_split and query.reads_cache
    if not (decision.pick and is_whole and query.sole is not None):
        return decision
    held = decision.held[0]
    own = _certain(held, decision.worker)
    ports = {worker.name: worker.transfer_port for worker in decision.workers}
    able = [
        Source(worker.endpoint, worker.transfer_port, _certain(held, worker.name) - own)
        for worker, why in zip(decision.workers, decision.excluded, strict=True)
        if worker.transfer_port is not None and not why and worker.endpoint not in ejected
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
