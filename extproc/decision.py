"""The decision: pure, and the same for a request that is routed and one that is explained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from extproc.pick import MAX_PICKS, POLICIES, Candidate, Chance, Scored, score
from kvstate.overlap import Overlap, Prompt


@dataclass(frozen=True, slots=True)
class Query:
    """What is to be placed.

    model: the configured model; None where the request names none that is known.
    prompts: what could be keyed. reason: why nothing could be, "" if something was.
    """

    model: str | None
    prompts: Sequence[Prompt] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker as it is now; excluded says why it cannot be picked for this query."""

    name: str
    endpoint: str
    state: str
    excluded: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a decision looks at besides the query and the time.

    overlaps: of every worker, by name. in_flight, backlog_tokens: of an endpoint.
    turn: decisions so far.
    """

    workers: Sequence[Worker]
    overlaps: Callable[[Prompt], Mapping[str, Overlap]]
    in_flight: Callable[[str], int]
    backlog_tokens: Callable[[str, float], float]
    policy: str
    turn: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why.

    pick: ip:port, best first; empty where we have nothing to say.
    scored: all candidates, those that were excluded too, in the order of configuration.
    reason: overlap, or why the pick was made without it; docs/metrics.md lists them.
    """

    model: str | None
    prompt_tokens: int
    scored: tuple[Scored, ...]
    pick: tuple[str, ...]
    reason: str

    @property
    def best(self) -> Scored | None:
        """The candidate that was picked first."""
        if not self.pick:
            return None
        return next(one for one in self.scored if one.candidate.endpoint == self.pick[0])

    def as_json(self) -> dict[str, Any]:
        """The answer of POST /explain."""
        return {
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "candidates": [_as_json(one) for one in self.scored],
            "pick": list(self.pick),
            "reason": self.reason,
        }


def decide(query: Query, snapshot: Snapshot, now: float, rng: Chance) -> Decision:
    """Places a query; looks only, books nothing.

    now: seconds of the clock that the load is kept in.
    """
    prompt_tokens = sum(len(prompt.tokens) for prompt in query.prompts)
    held = [snapshot.overlaps(prompt) for prompt in query.prompts]
    scored = tuple(
        score(_candidate(worker, held, snapshot, now), prompt_tokens) for worker in snapshot.workers
    )
    eligible = [one for one in scored if not one.candidate.excluded]
    ordered = POLICIES[snapshot.policy](eligible, snapshot.turn, rng) if eligible else []
    pick = tuple(one.candidate.endpoint for one in ordered[:MAX_PICKS])
    return Decision(query.model, prompt_tokens, scored, pick, _reason(query, snapshot, ordered))


def _candidate(
    worker: Worker, held: Sequence[Mapping[str, Overlap]], snapshot: Snapshot, now: float
) -> Candidate:
    return Candidate(
        endpoint=worker.endpoint,
        state=worker.state,
        in_flight=snapshot.in_flight(worker.endpoint),
        backlog_tokens=snapshot.backlog_tokens(worker.endpoint, now),
        overlaps=[overlaps[worker.name] for overlaps in held if worker.name in overlaps],
        excluded=worker.excluded,
    )


def _reason(query: Query, snapshot: Snapshot, ordered: Sequence[Scored]) -> str:
    if not ordered:
        return "no_worker"
    if query.reason:
        return query.reason
    if snapshot.policy != "cost":
        return f"policy_{snapshot.policy}"
    best = ordered[0]
    if best.certain_tokens:
        return "overlap"
    return "uncertain_overlap" if best.uncertain_tokens else "nothing_cached"


def _as_json(one: Scored) -> dict[str, Any]:
    candidate = one.candidate
    return {
        "endpoint": candidate.endpoint,
        "state": candidate.state,
        "overlap_tokens": one.certain_tokens,
        "overlap_blocks": one.blocks_by_tier,
        "uncertain_tokens": one.uncertain_tokens,
        "speculative_tokens": 0,
        "in_flight": candidate.in_flight,
        "cost": round(one.cost, 3),
        "excluded": candidate.excluded or None,
    }
