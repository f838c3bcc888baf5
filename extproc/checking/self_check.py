"""Whether a worker's engine tokenizes as we do, told from the tokens that its events carry.

Some requests are watched. Each ends as one of three:

- matched: the engine stored our blocks for it;
- mismatched: it did not, though it has computed the request: what it stored holds the request's own
  tokens and differs from ours at a named position;
- without evidence: everything else. What another request explains that was placed there, whoever
  tokenized it, is none; nor is a request that the worker refused. Retried and aborted requests,
  short prompts, prompts that were cached already, and workers that cache nothing store nothing that
  could tell.

A worker with 3 mismatches among its last 8 checked requests is distrusted, until 6 in a row match.
Time is an argument: seconds of one monotonic clock.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from extproc.checking.chains import Chain, Chains, Growth
from extproc.checking.evidence import (
    Asked,
    Difference,
    difference,
    explains,
    holds_own,
    is_stored,
    runs_of,
)
from kvstate.events import AllCleared, BlocksStored, Event, Tokens

# So many of the last checked requests must differ before a worker is distrusted, and so many must
# match in a row before it is trusted again: more, since prompts of some forms only may differ.
MISMATCHES = 3
LAST_CHECKED = 8
MATCHES_TO_HEAL = 6

# Events of a request may come after its answer; SGLang and TensorRT-LLM store it at its end.
GRACE_SECONDS = 1.0

# One that takes longer has been computed long ago, or never will be.
MAX_WATCH_SECONDS = 60.0

# What is watched of one worker: so many requests at once, and after as many these a second; the
# fewer while nothing is found, since every batch of a worker is decoded once more for it.
MAX_PENDING = 8
WATCHED_PER_SECOND = 2.0
WATCHED_PER_SECOND_WHILE_WELL = 0.2

# Longer prompts are not watched: comparing them takes milliseconds.
MAX_PROMPT_TOKENS = 16_384

# Chains that may be about one request.
MAX_CHAINS = 8

# What is remembered of prompts that were placed on a worker while it is watched, in tokens: so many
# that no engine computes them while one request is watched.
MAX_PLACED_TOKENS = 1 << 20


class Placed:
    """Prompts that were placed on a worker lately, watched or not: what is stored may be theirs."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[float, Tokens]] = deque()
        self._tokens = 0
        self._forgot_at = -math.inf

    def add(self, tokens: Tokens, now: float) -> None:
        """One more was placed; the oldest are forgotten where they are too many or too old."""
        self._prompts.append((now, tokens))
        self._tokens += len(tokens)
        oldest_at = now - 2 * MAX_WATCH_SECONDS
        while self._tokens > MAX_PLACED_TOKENS or self._prompts[0][0] < oldest_at:
            self._forgot_at, oldest = self._prompts.popleft()
            self._tokens -= len(oldest)
            if not self._prompts:
                return

    def may_explain(self, chain: Chain, found: Difference, since: float) -> bool:
        """Whether a chain may be another's than the prompt from which it differs.

        since: when that was placed. What was placed after it and is forgotten may be anything.
        """
        if self._forgot_at >= since:
            return True
        return any(explains(tokens, chain, found) for _, tokens in self._prompts)


@dataclass(eq=False, slots=True)
class Watched:
    """A request under way to a worker.

    grown: by chain, what was stored since it was placed and may be about it.
    """

    asked: Asked
    started_at: float
    ended_at: float | None = None
    grown: dict[int, Growth] = field(default_factory=dict)

    def is_due(self, now: float) -> bool:
        """Whether all that there will be of it is there."""
        if now - self.started_at >= MAX_WATCH_SECONDS:
            return True
        return self.ended_at is not None and now - self.ended_at >= GRACE_SECONDS


@dataclass(slots=True)
class Result:
    """Requests counted by how their check ended, and the last difference that was found."""

    matched: int = 0
    mismatched: int = 0
    without_evidence: int = 0
    is_distrusted: bool = False
    difference: Difference | None = None


class WorkerCheck:
    """The check of one worker."""

    def __init__(self) -> None:
        self.result = Result()
        self.pending: list[Watched] = []
        self.placed = Placed()
        self._chains: dict[int, Chains] = {}
        self._last: deque[bool] = deque(maxlen=LAST_CHECKED)  # whether it matched
        self._unsuspicious = 0  # checks in a row that ended otherwise than mismatched
        self._allowance = float(MAX_PENDING)
        self._allowance_at = 0.0

    def may_watch(self, now: float) -> bool:
        """Whether one more may be watched now."""
        is_well = self._unsuspicious >= LAST_CHECKED
        rate = WATCHED_PER_SECOND_WHILE_WELL if is_well else WATCHED_PER_SECOND
        self._allowance += rate * (now - self._allowance_at)
        self._allowance = min(MAX_PENDING, self._allowance)
        self._allowance_at = now
        return self._allowance >= 1 and len(self.pending) < MAX_PENDING

    def watch(self, asked: Asked, now: float) -> Watched | None:
        """Watches a request that is being placed, if it may."""
        if not self.may_watch(now):
            return None
        self._allowance -= 1
        watched = Watched(asked, now)
        self.pending.append(watched)
        return watched

    def stored(self, rank: int, events: Iterable[Event]) -> None:
        """Takes the events of a rank."""
        chains = self._chains.setdefault(rank, Chains())
        for event in events:
            if isinstance(event, AllCleared):
                chains.clear()
            elif isinstance(event, BlocksStored):
                growth = chains.store(event)
                if growth is not None:
                    self._grow(growth)

    def due(self, now: float) -> list[Watched]:
        """Those of the pending that are to be concluded."""
        return [watched for watched in self.pending if watched.is_due(now)]

    def conclude(self, watched: Watched, *, is_held: bool) -> None:
        """Ends a check.

        is_held: the worker is known to hold all of the prompt that can be reused, as we have it.
        """
        if is_held:
            self._matched(watched)
            return
        proofs = (self._proof(watched, growth) for growth in watched.grown.values())
        proof = next((proof for proof in proofs if proof is not None), None)
        if proof is None:
            self.give_up(watched)
            return
        self.pending.remove(watched)
        self._unsuspicious = 0
        self.result.mismatched += 1
        self.result.difference = proof
        self._last.append(False)
        if self._last.count(False) >= MISMATCHES:
            self.result.is_distrusted = True

    def give_up(self, watched: Watched) -> None:
        """Ends a check without evidence."""
        self.pending.remove(watched)
        self._unsuspicious += 1
        self.result.without_evidence += 1

    def forget_chains(self) -> None:
        """Frees what was heard; who listens again begins anew."""
        self._chains.clear()

    def _proof(self, watched: Watched, growth: Growth) -> Difference | None:
        """Where what was stored differs from a prompt, if it can be nobody else's."""
        found = difference(watched.asked, growth)
        if found and self.placed.may_explain(growth.chain, found, watched.started_at):
            return None
        return found

    def _grow(self, growth: Growth) -> None:
        name = id(growth.chain)
        matching = [one for one in self.pending if is_stored(one.asked, growth.chain)]
        for watched in matching:
            self._matched(watched)
        if matching:  # it is theirs, however much it is like another's
            for watched in self.pending:
                watched.grown.pop(name, None)
            return
        runs = runs_of(growth) if self.pending else []
        for watched in self.pending:
            may_grow = name not in watched.grown and len(watched.grown) < MAX_CHAINS
            if may_grow and holds_own(watched.asked, growth.chain, runs):
                watched.grown[name] = growth

    def _matched(self, watched: Watched) -> None:
        self.pending.remove(watched)
        self._unsuspicious += 1
        self.result.matched += 1
        self._last.append(True)
        if self.result.is_distrusted and all(list(self._last)[-MATCHES_TO_HEAL:]):
            self.result.is_distrusted = False
            self._last.clear()
