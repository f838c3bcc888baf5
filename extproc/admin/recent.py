"""The last decisions, for the admin server."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from extproc.base.trace_context import trace_id_of
from extproc.requests.request import NO_HEAD, Head
from extproc.routing.decision import Decision
from extproc.routing.explain import decided_by, reason_sentence

MAX_DECISIONS = 512

# A decision keeps every candidate, about 500 bytes each: about 16 MB.
MAX_CANDIDATES = 32_768


@dataclass(slots=True)
class RecentDecision:
    """One decision; number counts from 1. at: seconds since the epoch.

    served: the ip:port that answered, "" if unknown. head: of the request.
    """

    number: int
    at: float
    decision: Decision
    served: str = ""
    head: Head = NO_HEAD

    @property
    def request_id(self) -> str:
        """The request's x-request-id, "" without one."""
        return self.head.request_id

    @property
    def trace_id(self) -> str:
        """The id of the trace that the request belongs to, "" without one."""
        return trace_id_of(self.head.traceparent)


class RecentDecisions:
    """A ring of decisions, bounded by their number and by the candidates that they hold."""

    def __init__(self, decisions: int = MAX_DECISIONS, candidates: int = MAX_CANDIDATES) -> None:
        self._decisions: deque[RecentDecision] = deque()
        self._by_decision: dict[int, RecentDecision] = {}  # by identity, while it is kept
        self._limits = decisions, candidates
        self._candidates = 0
        self.last = 0

    def add(self, decision: Decision, at: float, head: Head = NO_HEAD) -> None:
        """Keeps a decision, and drops the oldest ones beyond the bounds."""
        decisions, candidates = self._limits
        self.last += 1
        kept = RecentDecision(self.last, at, decision, head=head)
        self._decisions.append(kept)
        self._by_decision[id(decision)] = kept
        self._candidates += len(decision.basis.workers)
        while len(self._decisions) > decisions or (
            self._candidates > candidates and len(self._decisions) > 1
        ):
            oldest = self._decisions.popleft()
            self._candidates -= len(oldest.decision.basis.workers)
            self._by_decision.pop(id(oldest.decision), None)

    def note_server(self, decision: Decision, endpoint: str) -> None:
        """Records which endpoint answered a request, if its decision is still kept."""
        kept = self._by_decision.get(id(decision))
        if kept is not None:
            kept.served = endpoint

    def newest_after(self, number: int, limit: int = MAX_DECISIONS) -> list[RecentDecision]:
        """Returns the newest decisions after a number, the oldest first, at most `limit` of them.

        A number above the newest one comes from an earlier run of the router: then it returns all.
        """
        behind = self.last - number if 0 <= number <= self.last else self.last
        count = min(behind, limit, len(self._decisions))
        return list(self._decisions)[len(self._decisions) - count :]

    def find(self, number: int) -> RecentDecision | None:
        """Returns a decision by its number; None if it is no longer kept, or was never made."""
        if not self._decisions or not self._decisions[0].number <= number <= self.last:
            return None
        return self._decisions[number - self._decisions[0].number]


def with_ids(
    found: Sequence[RecentDecision], request_id: str = "", trace_id: str = ""
) -> list[RecentDecision]:
    """Returns those of a request, or of a trace; all for "" and ""."""
    if request_id:
        found = [one for one in found if one.request_id == request_id]
    if trace_id:
        found = [one for one in found if one.trace_id == trace_id]
    return list(found)


def summary(kept: RecentDecision) -> dict[str, Any]:
    """Returns one entry of GET /decisions; it has only the prompt's length, no text."""
    decision, basis = kept.decision, kept.decision.basis
    claimed = basis.claims_on(decision.worker)
    return {
        "id": kept.number,
        "at": round(kept.at, 3),
        "request_id": kept.request_id,
        "trace_id": kept.trace_id,
        "model": decision.model,
        "prompt_tokens": basis.prompt_tokens,
        "weighed_tokens": round(basis.weighed_tokens),
        "pick": list(decision.pick),
        "worker": decision.worker,
        "prefill": None if decision.prefill is None else decision.prefill.pick[0],
        "served": kept.served,
        "steered": decision.is_steered,
        "policy": basis.policy,
        "verdict": decision.verdict.value,
        "reason": decision.reason,
        "decided_by": decided_by(decision),
        "why": reason_sentence(decision),
        "predicted_tokens": basis.certain_tokens,
        "uncertain_tokens": basis.uncertain_tokens,
        "speculative_tokens": claimed.speculative,
        "approximate_tokens": claimed.approximate,
        "candidates": len(basis.workers),
    }
