"""Checks whether a worker's engine tokenizes as KVSteer does, by the tokens in its events.

Some requests are watched. Each has one of three results. Matched: the engine stored KVSteer's
blocks. Mismatched: the engine computed the request, but stored tokens that contain the request's
own ones and differ from KVSteer's at a known position. Without evidence: everything else, such as a
difference that another request on the worker explains, or a request that the worker refused.
Retried and aborted requests, short prompts, prompts that were cached already, and workers without a
cache give no evidence.

A worker with 3 mismatches among its last 8 checked requests is distrusted, until 6 in a row match.
A worker whose tokens for golden requests differ from KVSteer's (`extproc.checking.golden`) is
distrusted for requests of the forms that differ, until they match.
Time is an argument: seconds of one monotonic clock.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from extproc.checking.evidence import (
    Asked,
    Chain,
    Chains,
    Difference,
    Growth,
    difference,
    explains,
    holds_own,
    is_stored,
    runs_of,
)
from extproc.requests.prompt import ALL_FORMS, FORM_NAMES
from kvstate.events import AllCleared, BlocksStored, Event
from kvstate.overlap import Tokens

# How many of the last checked requests must differ before a worker is distrusted, and how many must
# match in a row before it is trusted again: more, since only prompts of some forms may differ.
MISMATCHES = 3
LAST_CHECKED = 8
MATCHES_TO_HEAL = 6

# Events of a request may arrive after its answer; SGLang and TensorRT-LLM store it at its end.
GRACE_SECONDS = 1.0

# A request that takes longer was computed long ago, or never will be.
MAX_WATCH_SECONDS = 60.0

# Limits of watched requests per worker: at once, and then per second; fewer while all is well.
MAX_PENDING = 8
WATCHED_PER_SECOND = 2.0
WATCHED_PER_SECOND_WHILE_WELL = 0.2

# Longer prompts are not watched: comparing them takes milliseconds.
MAX_PROMPT_TOKENS = 16_384

# Most chains that are kept because they may be about one request.
MAX_CHAINS = 8

# Most tokens remembered of prompts that were placed on a worker while it is watched: more than any
# engine computes while one request is watched.
MAX_PLACED_TOKENS = 1 << 20


# CPU limit for listening to one worker: this share of a core, and this many CPU seconds at once. A
# store costs 50 us to 1 ms, and an engine, or an attacker, may store endlessly.
EFFORT_SHARE = 0.005
EFFORT_BURST_SECONDS = 0.25


class Effort:
    """The CPU time that listening to one worker may take."""

    def __init__(self) -> None:
        self._left_seconds = EFFORT_BURST_SECONDS
        self._at = 0.0
        self._is_spent = False

    def may_begin(self, now: float) -> bool:
        """Returns whether listening may begin; after all is spent, only once half is saved up."""
        self._save(now)
        if self._left_seconds >= EFFORT_BURST_SECONDS / 2:
            self._is_spent = False
        return not self._is_spent

    def spend(self, cpu_seconds: float, now: float) -> bool:
        """Subtracts what was spent; returns whether any is left."""
        self._save(now)
        self._left_seconds -= cpu_seconds
        self._is_spent |= self._left_seconds <= 0
        return not self._is_spent

    def _save(self, now: float) -> None:
        saved = self._left_seconds + EFFORT_SHARE * (now - self._at)
        self._left_seconds = min(EFFORT_BURST_SECONDS, saved)
        self._at = now


class Placed:
    """Prompts recently placed on a worker, watched or not: stored blocks may be theirs."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[float, Tokens]] = deque()
        self._tokens = 0
        self._forgot_at = -math.inf

    def add(self, tokens: Tokens, now: float) -> None:
        """Adds a prompt; forgets the oldest ones beyond the limits of size and age."""
        self._prompts.append((now, tokens))
        self._tokens += len(tokens)
        oldest_at = now - 2 * MAX_WATCH_SECONDS
        while self._tokens > MAX_PLACED_TOKENS or self._prompts[0][0] < oldest_at:
            self._forgot_at, oldest = self._prompts.popleft()
            self._tokens -= len(oldest)
            if not self._prompts:
                return

    def may_explain(self, chain: Chain, found: Difference, since: float) -> bool:
        """Returns whether a chain may belong to another prompt than the one it differs from.

        since: when the latter was placed. If a prompt placed since then has been forgotten, the
        chain may belong to it.
        """
        if self._forgot_at >= since:
            return True
        return any(explains(tokens, chain, found) for _, tokens in self._prompts)


@dataclass(eq=False, slots=True)
class Watched:
    """A request in flight to a worker.

    is_heard: whether the worker is listened to meanwhile; if not, only the index is checked, at the
    end. grown: by chain, what was stored since the request was placed and may be about it.
    """

    asked: Asked
    started_at: float
    is_heard: bool = True
    ended_at: float | None = None
    grown: dict[int, Growth] = field(default_factory=dict)

    def is_due(self, now: float) -> bool:
        """Returns whether no more events about it are expected."""
        if now - self.started_at >= MAX_WATCH_SECONDS:
            return True
        return self.ended_at is not None and now - self.ended_at >= GRACE_SECONDS


@dataclass(slots=True)
class Result:
    """Requests counted by the result of their check, and the last difference found."""

    matched: int = 0
    mismatched: int = 0
    without_evidence: int = 0
    is_distrusted: bool = False
    difference: Difference | None = None


# Results of golden requests for a worker's tokens. OFF: nothing is compared.
VERIFIED, DIFFERENT, NOT_VERIFIED, OFF = "verified", "differs", "not_verified", "off"
VERIFICATIONS = (VERIFIED, DIFFERENT, NOT_VERIFIED, OFF)


class Mismatch(NamedTuple):
    """The first token in which a golden request differs.

    request: its name. ours, engines: the ids there; None if the tokens end before. cause: the
    likely one, in words.
    """

    request: str
    position: int
    ours: int | None
    engines: int | None
    cause: str


class Verification(NamedTuple):
    """The result of golden requests for a worker's tokens.

    result: one of `VERIFICATIONS`. why: in words; "" if all match. compared: how many requests were
    compared. forms: the forms whose tokens differ. mismatch: the first one found.
    """

    result: str = OFF
    why: str = ""
    compared: int = 0
    forms: int = 0
    mismatch: Mismatch | None = None

    def shown(self) -> dict[str, Any]:
        """Returns its fields for GET /workers and GET /models."""
        found = self.mismatch
        return {
            "result": self.result,
            "why": self.why,
            "compared": self.compared,
            "forms": [name for form, name in FORM_NAMES.items() if form & self.forms],
            "request": found and found.request,
            "position": found and found.position,
            "ours": found and found.ours,
            "engine": found and found.engines,
            "cause": found and found.cause,
        }


NOT_ASKED = Verification(NOT_VERIFIED, "it has not answered yet")


class WorkerCheck:
    """The check of one worker.

    worker: its name. is_listened: whether its events are passed to the self-check. is_raised:
    whether it was last logged as differing in live traffic. verification: by golden requests.
    """

    def __init__(self, worker: str = "") -> None:
        self.worker = worker
        self.is_listened = self.is_raised = False
        self.verification = Verification()
        self.result = Result()
        self.pending: list[Watched] = []
        self.placed = Placed()
        self.effort = Effort()
        self._own_runs: frozenset[int] | None = None  # of all pending requests; None: not computed
        self._chains: dict[int, Chains] = {}
        self._last: deque[bool] = deque(maxlen=LAST_CHECKED)  # whether it matched
        self._unsuspicious = 0  # checks in a row that gave no reason to listen
        self._allowance = float(MAX_PENDING)
        self._allowance_at = 0.0

    @property
    def is_well(self) -> bool:
        """Whether so many checks in a row were unsuspicious that it need not be listened to."""
        return self._unsuspicious >= LAST_CHECKED

    @property
    def distrusted_forms(self) -> int:
        """The forms of requests whose tokens here are not trusted to be the engine's."""
        return ALL_FORMS if self.result.is_distrusted else self.verification.forms

    def verify(self, verification: Verification) -> None:
        """Records the result of golden requests.

        If they matched after a difference, what live traffic showed before no longer counts.
        """
        is_mended = self.verification.forms and verification.result == VERIFIED
        self.verification = verification
        if is_mended:
            self.result.is_distrusted = False
            self._last.clear()

    def may_watch(self, now: float) -> bool:
        """Returns whether one more request may be watched now."""
        rate = WATCHED_PER_SECOND_WHILE_WELL if self.is_well else WATCHED_PER_SECOND
        self._allowance += rate * (now - self._allowance_at)
        self._allowance = min(MAX_PENDING, self._allowance)
        self._allowance_at = now
        return self._allowance >= 1 and len(self.pending) < MAX_PENDING

    def watch(self, asked: Asked, now: float) -> Watched | None:
        """Watches a request that is being placed, if one more may be; returns it or None."""
        if not self.may_watch(now):
            return None
        self._allowance -= 1
        watched = Watched(asked, now, is_heard=not self.is_well)
        self.pending.append(watched)
        self._own_runs = None
        return watched

    def stored(self, rank: int, events: Iterable[Event]) -> None:
        """Applies the events of a rank."""
        chains = self._chains.setdefault(rank, Chains())
        for event in events:
            if isinstance(event, AllCleared):
                chains.clear()
            elif isinstance(event, BlocksStored):
                growth = chains.store(event)
                if growth is not None:
                    self._grow(growth)

    def due(self, now: float) -> list[Watched]:
        """Returns the watched requests whose checks must be concluded."""
        return [watched for watched in self.pending if watched.is_due(now)]

    def conclude(self, watched: Watched, *, is_held: bool) -> None:
        """Ends a check with what was found.

        is_held: whether the worker is known to hold all of the prompt that can be reused, as it is
        tokenized here.
        """
        if is_held:
            self._matched(watched)
            return
        proofs = (self._proof(watched, growth) for growth in watched.grown.values())
        proof = next((proof for proof in proofs if proof is not None), None)
        if proof is None:
            self.give_up(watched)
            if not watched.is_heard:  # listen to the next ones, to find out why
                self._unsuspicious = 0
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
        """Frees all chains; the next time it is listened to, they begin anew."""
        self._chains.clear()

    def _proof(self, watched: Watched, growth: Growth) -> Difference | None:
        """Returns where the stored tokens differ from the prompt, if they can be no other's."""
        found = difference(watched.asked, growth)
        if found and self.placed.may_explain(growth.chain, found, watched.started_at):
            return None
        return found

    def _grow(self, growth: Growth) -> None:
        name = id(growth.chain)
        matching = [one for one in self.pending if is_stored(one.asked, growth.chain)]
        for watched in matching:
            self._matched(watched)
        if matching:  # the chain is theirs, however similar it is to another request
            for watched in self.pending:
                watched.grown.pop(name, None)
            return
        runs = runs_of(growth) if self.pending else []
        if self._is_nobodys(runs):
            return
        for watched in self.pending:
            may_grow = name not in watched.grown and len(watched.grown) < MAX_CHAINS
            if may_grow and holds_own(watched.asked, growth.chain, runs):
                watched.grown[name] = growth

    def _is_nobodys(self, runs: list[int]) -> bool:
        """Returns whether none of these runs is any pending request's own, in a single lookup."""
        if self._own_runs is None:
            self._own_runs = frozenset().union(*(one.asked.own for one in self.pending))
        return self._own_runs.isdisjoint(runs)

    def _matched(self, watched: Watched) -> None:
        self.pending.remove(watched)
        self._unsuspicious += 1
        self.result.matched += 1
        self._last.append(True)
        if self.result.is_distrusted and all(list(self._last)[-MATCHES_TO_HEAL:]):
            self.result.is_distrusted = False
            self._last.clear()
