"""The last decisions, kept so that each can be explained later."""

from collections import deque
from dataclasses import dataclass

from extproc.picking.decision import Decision

MAX_DECISIONS = 512

# A decision remembers every candidate: about 500 bytes each, so this is some 16 MB at the worst.
MAX_CANDIDATES = 32_768


@dataclass(slots=True)
class Kept:
    """One decision; number counts from 1. at: seconds since the epoch.

    served: ip:port that answered in the end, "" where that is not known.
    """

    number: int
    at: float
    decision: Decision
    served: str = ""


class Recent:
    """A ring of decisions, bounded by their number and by the candidates that they remember."""

    def __init__(self, decisions: int = MAX_DECISIONS, candidates: int = MAX_CANDIDATES) -> None:
        self._kept: deque[Kept] = deque()
        self._by_decision: dict[int, Kept] = {}  # by identity, as long as it is kept
        self._limits = decisions, candidates
        self._candidates = 0
        self.last = 0

    def add(self, decision: Decision, at: float) -> None:
        """Keeps a decision; the oldest ones make room for it."""
        decisions, candidates = self._limits
        self.last += 1
        kept = Kept(self.last, at, decision)
        self._kept.append(kept)
        self._by_decision[id(decision)] = kept
        self._candidates += len(decision.workers)
        while len(self._kept) > decisions or (
            self._candidates > candidates and len(self._kept) > 1
        ):
            oldest = self._kept.popleft()
            self._candidates -= len(oldest.decision.workers)
            self._by_decision.pop(id(oldest.decision), None)

    def served(self, decision: Decision, endpoint: str) -> None:
        """Notes who answered a request, if its decision is still kept."""
        kept = self._by_decision.get(id(decision))
        if kept is not None:
            kept.served = endpoint

    def since(self, number: int, limit: int = MAX_DECISIONS) -> list[Kept]:
        """The newest decisions behind a number, at most `limit` of them, the oldest first.

        A number that was not given out yet is one of a router that ran before this one: then all.
        """
        behind = self.last - number if 0 <= number <= self.last else self.last
        count = min(behind, limit, len(self._kept))
        return list(self._kept)[len(self._kept) - count :]

    def find(self, number: int) -> Kept | None:
        """A decision by its number; None where it is not kept any more, or was never made."""
        if not self._kept or not self._kept[0].number <= number <= self.last:
            return None
        return self._kept[number - self._kept[0].number]
