"""The last decisions, kept so that each can be explained later."""

from collections import deque
from typing import NamedTuple

from extproc.picking.decision import Decision

MAX_DECISIONS = 512

# A decision remembers every candidate: about 500 bytes each, so this is some 16 MB at the worst.
MAX_CANDIDATES = 32_768


class Kept(NamedTuple):
    """One decision; number counts from 1. at: seconds since the epoch."""

    number: int
    at: float
    decision: Decision


class Recent:
    """A ring of decisions, bounded by their number and by the candidates that they remember."""

    def __init__(self, decisions: int = MAX_DECISIONS, candidates: int = MAX_CANDIDATES) -> None:
        self._kept: deque[Kept] = deque()
        self._limits = decisions, candidates
        self._candidates = 0
        self.last = 0

    def add(self, decision: Decision, at: float) -> None:
        """Keeps a decision; the oldest ones make room for it."""
        decisions, candidates = self._limits
        self.last += 1
        self._kept.append(Kept(self.last, at, decision))
        self._candidates += len(decision.workers)
        while len(self._kept) > decisions or (
            self._candidates > candidates and len(self._kept) > 1
        ):
            self._candidates -= len(self._kept.popleft().decision.workers)

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
