"""Remembers what was sent where: prefixes that a worker probably holds because it got a request.

One table serves two purposes, by two lifetimes of the same claim:

- speculative, for a worker whose feed is live: from the pick until the request has ended and its
  events have had time to arrive, or until a deadline. A running request's blocks are not evicted;
  afterwards the feed knows better.
- approximate, for a worker without events now: until its age limit, or until newer prompts need the
  memory.

The table is separate from the index, and bounded: it has two generations, and drops the older one
when the younger one is full or old.

Marks are keys of a prompt's prefixes at a few lengths, by which a later prompt is found again.
Chaining a key for every block of a long prompt costs more than a whole pick may. Eight lengths per
octave are exact enough: they miss at most a ninth of a shared prefix.

Claims are what each worker is assumed to hold for one request: overlaps, and what was sent there,
weighed. Certain tokens count fully. Uncertain ones, and those only expected because they were sent,
count beyond that with a discount; if both claim the same tokens, the better claim counts.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

import msgspec
import xxhash

from extproc.config.schema import Cost
from extproc.structs import Light, LightRecord
from kvstate.overlap import Overlap, Prompt, Tokens, worth_tokens

BYTES_PER_TOKEN = 4

# Shorter prefixes save too little to matter; this is also the smallest step between two marks.
FIRST_TOKENS = 64

# Marks for each doubling of the length.
MARKS_PER_OCTAVE = 8

# Longest marked prefix in tokens: it bounds the entries for one prompt.
LAST_TOKENS = 1 << 20


def _lengths() -> Iterator[int]:
    length = FIRST_TOKENS
    while length <= LAST_TOKENS:
        yield length
        octave = 1 << (length.bit_length() - 1)
        length += max(FIRST_TOKENS, octave // MARKS_PER_OCTAVE)


LENGTHS = tuple(_lengths())
_ENDS = tuple(length * BYTES_PER_TOKEN for length in LENGTHS)

_key = xxhash.xxh3_64_intdigest


class Marks(Light, frozen=True, gc=False):
    """The marks of one prompt: each prefix's length in tokens and its key, shortest first."""

    lengths: tuple[int, ...]
    keys: tuple[int, ...]


NO_MARKS = Marks((), ())


def root_key(secret: int, *namespace: str | int | None) -> int:
    """Returns the key before the first token.

    secret: 64 random bits of this process, so that nobody outside can forge a mark. namespace: what
    must be equal for prompts to share blocks: model, adapter, salt.
    """
    return int(_key(msgspec.msgpack.encode((secret, *namespace))))


def marks_of(root: int, prompt: Tokens | bytes) -> Marks:
    """Returns the marks of token ids, or of text, of which four bytes count as one token.

    The last token is left out, since an engine always computes it.
    """
    view = memoryview(prompt).cast("B")
    count = bisect_right(_ENDS, len(view) - BYTES_PER_TOKEN)
    keys: list[int] = []
    key, start = root, 0
    for end in _ENDS[:count]:
        key = _key(view[start:end], key)
        keys.append(key)
        start = end
    return Marks(LENGTHS[:count], tuple(keys))


# Memory of a mark: its key, its slot in a dict that is at worst a third full, its share of claims.
BYTES_PER_MARK = 160

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


class Holdings:
    """What was sent to one worker, unless it lost its cache since; part of its record.

    worker: its name. lost_at: everything sent before is lost; seconds of one monotonic clock.
    """

    __slots__ = ("lost_at", "worker")

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.lost_at = _NEVER

    def lose(self, now: float = inf) -> None:
        """Notes that the worker lost its cache; without a time, that it was removed."""
        self.lost_at = now


class Claim(LightRecord, eq=False, gc=False):
    """One request that was sent to a worker; its times are seconds of one monotonic clock.

    Hundreds of thousands are kept; like their marks, they are not tracked by the garbage collector.
    """

    holdings: Holdings
    marks: Marks
    sent_at: float
    ended_at: float = inf


_Claims = tuple[Claim, ...]


class Sent:
    """The table of claims, of all workers.

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
        self._limit_marks = max(1, limit_bytes // BYTES_PER_MARK // 2)
        self._young: dict[int, _Claims] = {}
        self._old: dict[int, _Claims] = {}
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
        self, model: str | None, text: bytes, lora: str | None = None, salt: str | None = None
    ) -> Marks:
        """Returns the marks of a prompt that is known only as text, in its namespace."""
        return marks_of(root_key(self._secret, "text", model, lora, salt), text)

    def record(self, holdings: Holdings, marks: Marks, now: float) -> Claim:
        """Claims that a worker is about to hold a prompt."""
        self._make_room(now)
        claim = Claim(holdings, marks, now)
        alone: _Claims = (claim,)
        after = alone
        before: _Claims | None = None
        young = self._young
        for key in marks.keys:
            claims = young.setdefault(key, alone)
            if claims is alone:
                continue
            if claims is not before:  # neighbouring marks usually have the same claims
                before = claims
                after = (claim, *[one for one in claims if one.holdings is not holdings])
            young[key] = after
        return claim

    def end(self, claim: Claim, now: float) -> None:
        """Notes that the request has ended: from now on its worker's feed knows better."""
        claim.ended_at = min(claim.ended_at, now)

    def withdraw(self, claim: Claim) -> None:
        """Removes the claim of a request that never reached its worker."""
        claim.sent_at = claim.ended_at = _NEVER

    def expected(self, marks: Marks, now: float) -> dict[str, Expected]:
        """Returns what each worker probably holds of a prompt, if it holds its first mark."""
        lifetimes = self._lifetimes
        found: dict[str, Expected] = {}
        for generation in (self._old, self._young):
            if not generation:
                continue
            for length, claims in _stretches(generation, marks):
                for claim in claims:
                    age, holdings = now - claim.sent_at, claim.holdings
                    if age >= lifetimes.approximate or claim.sent_at <= holdings.lost_at:
                        continue
                    worker = holdings.worker
                    speculative, approximate = found.get(worker, _NOTHING)
                    is_under_way = now < claim.ended_at + lifetimes.grace
                    if is_under_way and age < lifetimes.speculative and length > speculative:
                        speculative = length
                    found[worker] = (speculative, max(length, approximate))
        return found

    def _make_room(self, now: float) -> None:
        is_full = len(self._young) >= self._limit_marks
        if is_full or now - self._young_since >= self._lifetimes.approximate:
            self._old, self._young, self._young_since = self._young, {}, now


def _stretches(generation: dict[int, _Claims], marks: Marks) -> Sequence[tuple[int, _Claims]]:
    """Returns the longest mark of each run of marks with the same claims, and these claims."""
    stretches: list[tuple[int, _Claims]] = []
    before: _Claims | None = None
    longest = 0
    for length, key in zip(marks.lengths, marks.keys, strict=True):
        claims = generation.get(key)
        if claims is not before:
            if before is not None:
                stretches.append((longest, before))
            before = claims
        if claims is None:
            return stretches
        longest = length
    return stretches if before is None else [*stretches, (longest, before)]


# In this state a feed is complete: blocks missing in the index are not cached, or on their way.
LIVE = "live"


class Claims(Light, frozen=True, gc=False):
    """One worker's claims in tokens, over all prompts of the request.

    saved: tokens that need not be computed, by the weights. speculative, approximate: tokens
    expected there beyond the certain ones, with or without a live feed.
    """

    saved: float = 0.0
    speculative: int = 0
    approximate: int = 0


NO_CLAIMS = Claims()

_NOTHING_HELD: Mapping[str, Overlap] = {}


def claims_of(
    held: Sequence[Mapping[str, Overlap]],
    expected: Sequence[Mapping[str, Expected]],
    state: Callable[[str], str],
    cost: Cost,
    block_size: Callable[[str], int],
) -> dict[str, Claims]:
    """Returns the claims of every worker that has any, by name.

    held, expected: one for each prompt; expected may be empty, and a text has only expected ones.
    state: returns the state of a worker's feeds, by its name; without a live feed, everything that
    was sent there counts. block_size: returns the block size of a worker's cache, in tokens.
    """
    found: dict[str, Claims] = {}
    for overlaps in held:
        for name, overlap in overlaps.items():
            worth = worth_tokens(overlap, cost.uncertain_percent / 100)
            if name in found:
                worth += found[name].saved
            found[name] = Claims(worth)
    for number, each in enumerate(expected):
        overlaps = held[number] if held else _NOTHING_HELD
        for name, lengths in each.items():
            known = overlaps.get(name)
            certain = 0 if known is None else known.certain_tokens
            if max(lengths) <= certain:  # the usual case, whatever the state is
                continue
            is_live = bool(held) and state(name) == LIVE
            length = lengths[0] if is_live else lengths[1]
            if held:  # engines keep only whole blocks
                length -= length % block_size(name)
            if length <= certain:
                continue
            behind = length - certain
            percent = cost.speculative_percent if is_live else cost.approximate_percent
            more = behind * percent / 100
            if known is not None:
                more = max(0.0, more - cost.uncertain_percent / 100 * known.uncertain_tokens)
            found[name] = _added(found.get(name, NO_CLAIMS), more, behind, is_live=is_live)
    return found


def _added(before: Claims, more: float, behind: int, *, is_live: bool) -> Claims:
    """Returns the claims with the expected tokens of one more prompt."""
    saved, speculative, approximate = before.saved + more, before.speculative, before.approximate
    if is_live:
        return Claims(saved, speculative + behind, approximate)
    return Claims(saved, speculative, approximate + behind)
