"""Remembers what was sent where: prefixes that a worker probably holds because it got a request.

One table serves two purposes, by two lifetimes of the same claim:

- speculative, for a worker whose feed is live: from the pick until the request has ended and its
  events have had time to arrive, or until a deadline. A running request's blocks are not evicted;
  afterwards the feed knows better.
- approximate, for a worker without events now: until its age limit, until newer prompts need the
  memory, or until more was sent to that worker than its cache can hold, if its size is known.

The table is separate from the index, and bounded: it has two generations, and drops the older one
when the younger one is full or old.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

import msgspec

from extproc._core import MarkTable, expected
from extproc.requests.outline import Outline
from extproc.routing.claims.live_contexts import LiveContexts
from extproc.routing.claims.marks import (
    KEY_BYTES,
    HasMarks,
    Marks,
    marks_of,
    marks_of_outline,
    root_key,
)
from kvstate.events import Loss
from kvstate.overlap import Prompt

# A mark has at most this many claims. Beyond that, only KEPT_CLAIMS of them are kept: the newest of
# at most ENDED_CLAIMS workers whose requests have ended, and requests under way.
MOST_CLAIMS = 32
KEPT_CLAIMS = 24
ENDED_CLAIMS = 16

# Memory of a mark: its slot in a dict that is at worst a third full; of each claim at a mark: its
# key and its places; and of a claim by itself. In the compiled core a mark takes less.
_BYTES_PER_SLOT = 104
_BYTES_PER_PLACE = 56
_BYTES_PER_CLAIM = 224

# The memory of a claim by itself, divided by the bytes of its keys, is that for each mark.
_BYTES_OF_KEYS = _BYTES_PER_CLAIM * KEY_BYTES

# Memory of a mark with one claim that has many marks.
BYTES_PER_MARK = _BYTES_PER_SLOT + _BYTES_PER_PLACE

_NEVER = -inf
_NOTHING = (0, 0)


class Lifetimes(NamedTuple):
    """How long a claim counts, in seconds.

    speculative: the limit while the request runs. grace: after its end, until its events arrive.
    approximate: for workers without events.
    """

    speculative: float = 60.0
    grace: float = 1.0
    approximate: float = 600.0


DEFAULT_LIFETIMES = Lifetimes()


# Leading tokens of a prompt that a worker probably holds, by lifetime: (speculative, approximate).
# A plain tuple: there may be one for every worker at every pick.
Expected = tuple[int, int]


# The parts of a worker's cache whose age is known.
_PARTS = 64


@dataclass(slots=True)
class _Filled:
    """Some prompts sent one after the other: their new tokens, and when the last one was sent."""

    tokens: float = 0.0
    at: float = _NEVER


class Holdings:
    """What was sent to one worker, unless it lost its cache since; part of its record.

    worker: its name. lost_at: everything sent until then is lost; seconds of one monotonic clock.
    lost_by: why, as its engine told; None if it did not.
    contexts: those of the conversations that live there. capacity_tokens: the size of its cache,
    None if it is not known. is_blind: whether no events tell what is evicted.
    """

    __slots__ = (
        "_filled",
        "_filled_tokens",
        "capacity_tokens",
        "contexts",
        "is_blind",
        "lost_at",
        "lost_by",
        "worker",
    )

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.lost_at = _NEVER
        self.lost_by: Loss | None = None
        self.contexts = LiveContexts()
        self.capacity_tokens: int | None = None
        self.is_blind = False
        self._filled: deque[_Filled] = deque()
        self._filled_tokens = 0.0

    def fill(self, tokens: float, now: float) -> None:
        """Notes that a prompt was sent of which so many tokens were not there.

        An engine evicts what was not used for longest: once more tokens than its cache has are new,
        whatever was last sent before the first of them is gone. Generated tokens are not counted,
        and of the prompts sent, `_PARTS` of a cache are told apart.
        """
        capacity = self.capacity_tokens
        if capacity is None or not self.is_blind:
            return
        if not self._filled or self._filled[-1].tokens >= capacity / _PARTS:
            self._filled.append(_Filled())
        self._filled[-1].tokens += tokens
        self._filled[-1].at = now
        self._filled_tokens += tokens
        while self._filled_tokens - self._filled[0].tokens >= capacity:
            gone = self._filled.popleft()
            self._filled_tokens -= gone.tokens
            self.lost_at = max(self.lost_at, gone.at)

    def lose(self, now: float = inf, why: Loss | None = None) -> None:
        """Notes that the worker lost its cache; without a time, that it was removed.

        why: as its engine told; None if the worker is gone, or was given up as dead.
        """
        self.lost_at, self.lost_by = now, why
        self.contexts = LiveContexts()
        self._filled.clear()
        self._filled_tokens = 0.0


class Claim(msgspec.Struct, eq=False, gc=False):
    """One request that was sent to a worker; its times are seconds of one monotonic clock.

    keys, lengths: of its marks, while it may be withdrawn; of another router's request no lengths.
    mark_bytes: its memory, divided by its marks.

    Hundreds of thousands are kept, which are not tracked by the garbage collector.
    """

    holdings: Holdings
    keys: bytes
    sent_at: float
    mark_bytes: int = 0
    lengths: tuple[int, ...] = ()
    ended_at: float = inf


class ReportedClaim(Protocol):
    """A claim of another router, as its message has it."""

    @property
    def number(self) -> int:
        """The number by which that router tells of its end."""

    @property
    def worker(self) -> int:
        """The id of its worker in messages."""

    @property
    def keys(self) -> bytes:
        """The keys of its marks."""


# The workers by their ids in messages: where each is, and the record of what was sent to it.
ReportedPlaces = Mapping[int, tuple[str, Holdings]]

# How many claims of another router are recorded: the most marks of a message, the most of those
# that were not told before, and the most open claims; beyond that, the oldest are left to expire.
ReportedBounds = tuple[int, float, int]

# What became of them: the marks of those recorded, how many are of workers that are not known here,
# and how many are beyond the bounds.
ReportedCounts = tuple[int, int, int]


# The claims of one mark, worker by worker, each worker's newest claim first. Behind it are those
# that would count if it were withdrawn: of requests under way, and the newest one that has ended.
_Claims = tuple[Claim, ...]


class ClaimTable:
    """The table of claims, of all workers.

    If a mark has too many claims, those of ended requests stay, since nothing can withdraw them.

    secret: 64 random bits of this process. limit_bytes: approximate limit of its memory. marks:
    returns a prompt's marks if they are known; by default they are computed from its tokens.
    """

    def __init__(
        self,
        secret: int,
        limit_bytes: int = 64 << 20,
        lifetimes: Lifetimes = DEFAULT_LIFETIMES,
        marks: Callable[[Prompt], Marks] | None = None,
    ) -> None:
        self._known_marks = marks
        self._secret = secret
        self._lifetimes = lifetimes
        self._limit_bytes = limit_bytes // 2  # of a generation
        self._young, self._old = _mark_table(), _mark_table()
        self._young_since = _NEVER
        # for prompts without a salt: one for each model and adapter
        self._roots: dict[tuple[str, str | int | None], int] = {}

    def __len__(self) -> int:
        """Returns how many marks are kept."""
        return len(self._young) + len(self._old)

    def marks(self, prompt: Prompt) -> Marks:
        """Returns the marks of a prompt in its namespace."""
        if self._known_marks is not None:
            return self._known_marks(prompt)
        model, lora, salt = prompt.model, prompt.lora, prompt.salt
        if salt is not None:
            root = root_key(self._secret, "tokens", model, lora, salt)
            return marks_of(root, prompt.tokens)
        root = self._roots.get((model, lora), 0)
        if not root:
            root = root_key(self._secret, "tokens", model, lora, None)
            self._roots[model, lora] = root
        return marks_of(root, prompt.tokens)

    def text_marks(
        self, model: str | None, said: Outline, lora: str | None = None, salt: str | None = None
    ) -> Marks:
        """Returns the marks of a prompt that is known only as text, in its namespace."""
        return marks_of_outline(root_key(self._secret, "text", model, lora, salt), said)

    def record(self, holdings: Holdings, marks: HasMarks, now: float) -> Claim:
        """Claims that a worker is about to hold a prompt."""
        self._turn(now)
        return self._young.record(holdings, marks, now, now - self._lifetimes.speculative)

    def record_reported(
        self,
        told: Sequence[ReportedClaim],
        places: ReportedPlaces,
        known: dict[int, Claim],
        bounds: ReportedBounds,
        now: float,
    ) -> ReportedCounts:
        """Claims that workers are about to hold the prompts that another router sent there.

        known: its open claims by their numbers, to which the new ones are added.
        """
        self._turn(now)
        since = now - self._lifetimes.speculative
        return self._young.record_reported(told, places, known, bounds, now, since)

    def _turn(self, now: float) -> None:
        """Begins a new generation if the young one is full or old."""
        is_full = self._young.bytes >= self._limit_bytes
        if is_full or now - self._young_since >= self._lifetimes.approximate:
            self._old, self._young, self._young_since = self._young, _mark_table(), now

    def end(self, claim: Claim, now: float) -> None:
        """Notes that the request has ended: from now on its worker's feed knows better.

        From then on, the claim cannot be withdrawn.
        """
        if now < claim.ended_at:
            claim.ended_at = now
        # only `withdraw` needs them, and they take most of its memory
        claim.keys, claim.lengths = b"", ()

    def withdraw(self, claim: Claim) -> None:
        """Removes the claim of a request that its worker did not compute.

        Afterwards the table is as if the claim had never been recorded: an older claim of the same
        worker counts again.
        """
        self._young.withdraw(claim)
        self._old.withdraw(claim)

    def begun_at(self, marks: Marks) -> dict[str, float]:
        """Returns when the longest known part of a prompt was first sent to each worker.

        Of requests that are under way; a worker that had that part before has none.
        """
        found: dict[str, tuple[int, float]] = {}
        for generation in (self._old, self._young):
            for length, claims in generation.stretches(marks.lengths, marks.keys):
                for claim in claims:
                    worker = claim.holdings.worker
                    longest, at = found.get(worker, (0, inf))
                    if length > longest:
                        longest, at = length, inf
                    at = -inf if claim.ended_at < inf else min(at, claim.sent_at)
                    found[worker] = longest, at
        return {worker: at for worker, (_, at) in found.items()}

    def expected(self, marks: Marks, now: float) -> dict[str, Expected]:
        """Returns what each worker probably holds of a prompt, if it holds its first mark."""
        return expected(self._old, self._young, marks.lengths, marks.keys, now, self._lifetimes)


def _fewer(claims: _Claims, since: float) -> _Claims:
    """Returns fewer claims: of each worker the newest that has ended, and some under way.

    Of requests under way, half of the room is for the newest and half for the oldest, which will be
    the first to have ended. One that was sent before `since` counts as ended.
    """
    newest_first = sorted(claims, key=_sent_at, reverse=True)
    valid = [one for one in newest_first if one.sent_at > one.holdings.lost_at]
    under_way = [one for one in valid if one.ended_at == inf and one.sent_at > since]
    kept: dict[Holdings, Claim] = {}
    for one in valid:
        if one.ended_at < inf or one.sent_at <= since:
            kept.setdefault(one.holdings, one)
            if len(kept) == ENDED_CLAIMS:
                break
    room = KEPT_CLAIMS - len(kept)
    if len(under_way) > room:
        under_way = [*under_way[: room // 2], *under_way[room // 2 - room :]]
    chosen = {*kept.values(), *under_way}
    return tuple([one for one in claims if one in chosen])


def _sent_at(claim: Claim) -> float:
    return claim.sent_at


class Costs(NamedTuple):
    """The memory of claims at marks, in bytes: of a mark, of a claim at it, and, times the bytes of
    a claim's keys, of each claim."""

    slot: int
    place: int
    keys: int


_COSTS = Costs(_BYTES_PER_SLOT, _BYTES_PER_PLACE, _BYTES_OF_KEYS)


def _mark_table() -> MarkTable:
    return MarkTable(Claim, MOST_CLAIMS, _fewer, _COSTS)
