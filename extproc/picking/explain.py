"""Explains a decision: every candidate, every term of its cost, and a sentence."""

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

from extproc.picking.decision import CALLS_NO_MODEL, FINDS_MODEL, Decision, Split, Verdict
from extproc.picking.load import Load
from extproc.picking.sent import NO_CLAIMS
from kvstate.overlap import Tier


def _not_known(_: str) -> Load | None:
    return None


def explanation(
    decision: Decision,
    state: Callable[[str], str],
    load: Callable[[str], Load | None] = _not_known,
) -> dict[str, Any]:
    """Returns the answer of POST /explain, which is also a line of the decision log.

    state: returns the state of a worker's feeds, by its name. load: returns the load of an endpoint
    at the time of the decision, for workers that were not compared; None if unknown.
    """
    return explanation_with(decision, list(candidates(decision, state, load)))


def candidates(
    decision: Decision,
    state: Callable[[str], str],
    load: Callable[[str], Load | None] = _not_known,
) -> Iterator[dict[str, Any]]:
    """Yields the entry of each candidate; a thousand take ten milliseconds."""
    sampled = None if decision.sampled is None else frozenset(decision.sampled)
    for at, worker in enumerate(decision.workers):
        is_sampled = sampled is None or at in sampled or bool(decision.excluded[at])
        known = decision.loads[at] if is_sampled else load(worker.endpoint)
        shown = _candidate(decision, at, state(worker.name), known or Load())
        shown["sampled"] = is_sampled
        if not is_sampled and known is None:
            shown["in_flight"] = shown["cost"] = shown["cost_terms"] = None
        yield shown


def explanation_with(decision: Decision, shown: object) -> dict[str, Any]:
    """Returns the explanation with the given candidates."""
    return {
        "model": decision.model,
        "prompt_tokens": decision.prompt_tokens,
        "policy": decision.policy,
        "candidates": shown,
        "pick": list(decision.pick),
        "rank": decision.rank,
        "verdict": decision.verdict.value,
        "steered": decision.is_steered,
        "reason": decision.reason,
        "session": _session_worker(decision),
        "why": why(decision),
        "prefill": _prefill(decision),
        "source": None if decision.source is None else decision.source._asdict(),
    }


def _session_worker(decision: Decision) -> str | None:
    """Returns the endpoint of the session's worker, None if the session does not count."""
    first = next(iter(decision.session), None)
    return next((one.endpoint for one in decision.workers if one.name == first), None)


def _prefill(decision: Decision) -> dict[str, Any] | None:
    """Returns the entry about the prefill worker; None if all workers take whole requests."""
    split = decision.split
    if split is None:
        return None
    costs = {"here": split.here, "apart": split.apart}
    prefill = split.prefill
    shown: dict[str, Any] = {
        "pick": None if prefill is None else prefill.pick[0],
        "why": split.why,
        "cost": {name: None if cost is None else round(cost, 3) for name, cost in costs.items()},
    }
    if prefill is not None:
        shown["candidates"] = [
            {"endpoint": worker.endpoint, "cost": cost, "excluded": excluded or None}
            for worker, cost, excluded in zip(
                prefill.workers, prefill.costs, prefill.excluded, strict=True
            )
        ]
    return shown


NOT_STEERED = "not steered, so the proxy chooses; otherwise"


def why(decision: Decision) -> str:
    """Returns the reason of a decision as a sentence."""
    words = _why(decision)
    return words if decision.is_steered or not decision.pick else f"{NOT_STEERED} {words}"


def _why(decision: Decision) -> str:
    if decision.verdict is Verdict.SHED:
        return "every worker that may answer is over its limit of requests"
    for left in (FINDS_MODEL, CALLS_NO_MODEL):
        if left in decision.excluded:
            return f"{left}: {decision.reason}"
    if decision.verdict is not Verdict.STEER:
        return "no worker may answer this request"
    rows = zip(decision.workers, decision.costs, decision.excluded, strict=True)
    costs = {
        worker.endpoint: cost for worker, cost, why_not in rows if cost is not None and not why_not
    }
    first = decision.pick[0]
    others = decision.pick[1:] or sorted(costs.keys() - {first}, key=costs.__getitem__)
    words = f"{decision.policy}: {first} is expected to hold {_held(decision)}"
    if decision.policy == "cost":
        words += f", cost {costs[first]:.0f}"
        words += f"; next is {others[0]} with {costs[others[0]]:.0f}" if others else ""
    if decision.sampled is not None:
        words += f"; {len(decision.sampled)} of {len(decision.workers)} workers were compared"
    owner = _session_worker(decision)
    if owner is not None:
        costly = "" if owner == first else ", which is too busy"
        words += f"; its session belongs to {owner}{costly}"
    if decision.split is not None:
        words += f"; {_who_computes(decision.split)}"
    if decision.source is not None:
        words += f"; it pulls {decision.source.tokens} tokens from {decision.source.endpoint}"
    return words if decision.prompt_tokens else f"{words}; without tokens: {decision.reason}"


def _who_computes(split: Split) -> str:
    costs = ""
    if split.here is not None and split.apart is not None:
        costs = f" ({split.here:.0f} here, {split.apart:.0f} apart)"
    who = "it" if split.prefill is None else split.prefill.pick[0]
    return f"{who} computes the prompt: {split.why}{costs}"


def _held(decision: Decision) -> str:
    claimed = decision.claims.get(decision.worker, NO_CLAIMS)
    parts = [
        f"{tokens} {kind}"
        for kind, tokens in (
            ("certain", decision.certain_tokens),
            ("uncertain", decision.uncertain_tokens),
            ("speculative", claimed.speculative),
            ("approximate", claimed.approximate),
        )
        if tokens
    ]
    return f"{' + '.join(parts) or 'none'} of {decision.weighed_tokens:.0f} prompt tokens"


def _candidate(decision: Decision, at: int, state: str, load: Load) -> dict[str, Any]:
    worker = decision.workers[at]
    overlaps = [each[worker.name] for each in decision.held if worker.name in each]
    claimed = decision.claims.get(worker.name, NO_CLAIMS)
    beyond = max(0.0, decision.session.get(worker.name, 0.0) - claimed.saved)
    terms = _terms(decision, decision.weighed_tokens - claimed.saved, load, beyond)
    return {
        "endpoint": worker.endpoint,
        "name": worker.name,
        "state": state,
        "overlap_tokens": sum(overlap.certain_tokens for overlap in overlaps),
        "overlap_blocks": {
            tier.name.lower(): sum(overlap.tiers[tier] for overlap in overlaps) for tier in Tier
        },
        "uncertain_tokens": sum(overlap.uncertain_tokens for overlap in overlaps),
        "speculative_tokens": claimed.speculative,
        "approximate_tokens": claimed.approximate,
        "in_flight": load.in_flight,
        "cost": round(terms["uncached"] + terms["queued"] + terms["running"] - terms["session"], 3),
        "cost_terms": terms,
        "reported": _reported(load),
        "excluded": decision.excluded[at] or None,
    }


def _terms(
    decision: Decision, uncached_tokens: float, load: Load, session_tokens: float
) -> dict[str, float]:
    """Returns the terms that add up to the cost, and the parts of the first one.

    slowness: the worker's time relative to the configured one, a factor of all terms. session: the
    discount for the request's session.
    """
    slowness = load.slowness
    return {
        "uncached_tokens": round(uncached_tokens, 3),
        "slowness": round(slowness, 3),
        "uncached": round(slowness * decision.affinity * uncached_tokens, 3),
        "session": round(slowness * decision.affinity * session_tokens, 3),
        "queued": round(slowness * load.backlog_tokens, 3),
        "running": round(slowness * decision.running * (load.in_flight + load.others), 3),
    }


def _reported(load: Load) -> dict[str, Any] | None:
    report = load.report
    if report is None:
        return None
    return {
        "running": report.running,
        "waiting": report.waiting,
        "pending_tokens": report.pending_tokens,
        "cache_usage": report.cache_usage,
        "of_others": round(load.others, 3),
        "age_seconds": round(load.age_seconds, 3),
    }


log = logging.getLogger("kvsteer.decisions")


class DecisionLog:
    """Logs a sample of the decisions as POST /explain shows them, without any prompt text.

    percent: the percentage of decisions to log, at random. chance: returns a random number from 0
    to below 1. state: returns the state of a worker's feeds, by its name.
    """

    def __init__(
        self, percent: int, chance: Callable[[], float], state: Callable[[str], str]
    ) -> None:
        self._share = percent / 100
        self._chance = chance
        self._state = state

    def tell(self, decision: Decision, trace_id: str = "") -> None:
        """Logs a decision if it is in the sample.

        trace_id: the trace that the request belongs to, if it is traced.
        """
        if self._share and self._chance() < self._share:
            shown = explanation(decision, self._state)
            if trace_id:
                shown["trace_id"] = trace_id
            log.info("%s", json.dumps(shown, separators=(",", ":")))
