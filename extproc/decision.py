"""The decision: pure, and the same for a request that is routed and one that is explained."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from extproc.pick import MAX_PICKS, POLICIES, Chance, Load, Rank, worth_tokens
from kvstate.overlap import Overlap, Prompt
from kvstate.tiers import Tier


class Query(msgspec.Struct, frozen=True):
    """What is to be placed.

    model: the configured model; None where the request names none that is known.
    prompts: what could be keyed. reason: why nothing could be, "" if something was.
    """

    model: str | None
    prompts: Sequence[Prompt] = ()
    reason: str = ""


class Worker(msgspec.Struct, frozen=True):
    """One worker, for requests to one model.

    endpoint: ip:port; its configured name where that could not be resolved yet. excluded: why it
    cannot be picked, "" if it can.
    """

    name: str
    endpoint: str
    excluded: str = ""


class Snapshot(msgspec.Struct, frozen=True):
    """All that a decision looks at besides the query and the time.

    overlaps: of every worker that holds something of a prompt, by name. load: of an endpoint, at a
    time. turn: decisions so far for this model.
    """

    workers: Sequence[Worker]
    overlaps: Callable[[Prompt], Mapping[str, Overlap]]
    load: Callable[[str, float], Load]
    policy: str
    turn: int


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes, and all that it was decided on.

    pick: ip:port, best first; empty where we have nothing to say. reason: overlap, or why the pick
    was made without it; docs/metrics.md lists them. certain_tokens, uncertain_tokens,
    uncached_tokens: of the first pick. workers, loads and held belong together: all candidates,
    their loads (None for the excluded), and the overlaps of each prompt.
    """

    model: str | None
    prompt_tokens: int
    pick: tuple[str, ...]
    reason: str
    certain_tokens: int
    uncertain_tokens: int
    uncached_tokens: float
    workers: Sequence[Worker]
    loads: Sequence[Load | None]
    held: Sequence[Mapping[str, Overlap]]


def decide(query: Query, snapshot: Snapshot, now: float, rng: Chance) -> Decision:
    """Places a query; looks only, books nothing.

    now: seconds of the clock that the load is kept in.
    """
    prompt_tokens = sum(len(prompt.tokens) for prompt in query.prompts)
    held = [snapshot.overlaps(prompt) for prompt in query.prompts]
    workers, load, turn = snapshot.workers, snapshot.load, snapshot.turn
    rank = POLICIES[snapshot.policy]
    saved = saved_tokens(held)
    loads: list[Load | None] = []
    ranked: list[tuple[Rank, int]] = []
    eligible = [worker.excluded for worker in workers].count("")
    for position, worker in enumerate(workers):
        if worker.excluded:
            loads.append(None)
            continue
        known = load(worker.endpoint, now)
        loads.append(known)
        cost = prompt_tokens - saved.get(worker.name, 0.0) + known.tokens
        turns = (len(ranked) - turn) % eligible
        ranked.append((rank(cost, known.in_flight, turns, rng), position))
    ranked.sort()
    order = [workers[position] for _, position in ranked[:MAX_PICKS]]
    overlaps = [each[order[0].name] for each in held if order[0].name in each] if order else []
    certain = sum(overlap.certain_tokens for overlap in overlaps)
    uncertain = sum(overlap.uncertain_tokens for overlap in overlaps)
    return Decision(
        model=query.model,
        prompt_tokens=prompt_tokens,
        pick=tuple([worker.endpoint for worker in order]),
        reason=_reason(query, snapshot.policy, picked=bool(order), held=(certain, uncertain)),
        certain_tokens=certain,
        uncertain_tokens=uncertain,
        uncached_tokens=prompt_tokens - (saved.get(order[0].name, 0.0) if order else 0.0),
        workers=workers,
        loads=loads,
        held=held,
    )


def saved_tokens(held: Sequence[Mapping[str, Overlap]]) -> dict[str, float]:
    """Prompt tokens that each worker need not compute, over all prompts."""
    saved: dict[str, float] = {}
    for overlaps in held:
        for name, overlap in overlaps.items():
            saved[name] = saved.get(name, 0.0) + worth_tokens(overlap)
    return saved


def _reason(query: Query, policy: str, *, picked: bool, held: tuple[int, int]) -> str:
    if not picked:
        return "no_worker"
    if query.reason:
        return query.reason
    if policy != "cost":
        return f"policy_{policy}"
    certain, uncertain = held
    if certain:
        return "overlap"
    return "uncertain_overlap" if uncertain else "nothing_cached"


def explanation(decision: Decision, state: Callable[[str], str]) -> dict[str, Any]:
    """The answer of POST /explain.

    state: of a worker's feeds, by its name.
    """
    return {
        "model": decision.model,
        "prompt_tokens": decision.prompt_tokens,
        "candidates": [
            _candidate(decision, worker, load, state)
            for worker, load in zip(decision.workers, decision.loads, strict=True)
        ],
        "pick": list(decision.pick),
        "reason": decision.reason,
    }


def _candidate(
    decision: Decision, worker: Worker, load: Load | None, state: Callable[[str], str]
) -> dict[str, Any]:
    overlaps = [each[worker.name] for each in decision.held if worker.name in each]
    known = load or Load()
    saved = sum(map(worth_tokens, overlaps))
    return {
        "endpoint": worker.endpoint,
        "state": state(worker.name),
        "overlap_tokens": sum(overlap.certain_tokens for overlap in overlaps),
        "overlap_blocks": {
            tier.name.lower(): sum(overlap.tiers[tier] for overlap in overlaps) for tier in Tier
        },
        "uncertain_tokens": sum(overlap.uncertain_tokens for overlap in overlaps),
        "speculative_tokens": 0,
        "in_flight": known.in_flight,
        "cost": round(decision.prompt_tokens - saved + known.tokens, 3),
        "excluded": worker.excluded or None,
    }
