"""What was sent where: prefixes that a worker probably holds because we sent it a request.

One table serves two purposes, by two lifetimes of the same claim:

- speculative, of a worker whose feed is live: from the pick until the request is over and its
  events have had time to arrive, or until a deadline. What a running request uses is not evicted;
  afterwards the feed knows better.
- approximate, of a worker whose events we do not have now: until its age limit, or until newer
  prompts took its room.

Kept apart from the index, and bounded: two generations, the older one dropped when the younger one
is full or old.

Marks: keys of a prompt's prefixes at a few lengths, so that what was sent can be met again.

Chaining a key for every block of a long prompt costs more than a whole pick may. What we sent where
need not be known that exactly: eight lengths an octave miss a ninth of a shared prefix at most.

What is claimed of each worker for one request: overlaps, and what was sent there, weighed.

What is certain counts fully. What the index is not sure of, and what we only expect because we sent
it, counts behind that, with a discount; where both claim something the better claim counts.
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

# Shorter prefixes save no work worth a choice; this is also the least step between two marks.
FIRST_TOKENS = 64

# Marks behind each doubling of the length.
MARKS_PER_OCTAVE = 8

# Behind this no more marks are made: an index entry a mark, for any prompt.
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
    """The marks of one prompt: how many tokens lie before each, and its key, shortest first."""

    lengths: tuple[int, ...]
    keys: tuple[int, ...]


NO_MARKS = Marks((), ())


def root_key(secret: int, *namespace: str | int | None) -> int:
    """The key before the first token.

    secret: 64 random bits of this process, so that nobody outside can aim for a mark. namespace:
    what must be equal for prompts to share anything: model, adapter, salt.
    """
    return int(_key(msgspec.msgpack.encode((secret, *namespace))))


def marks_of(root: int, prompt: Tokens | bytes) -> Marks:
    """The marks of token ids, or of text: four bytes of it count as one token.

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


# What a mark takes: its key, its slot in a dict that is at worst a third full, its share of the
# claims.
BYTES_PER_MARK = 160

_NEVER = -inf
_NOTHING = (0, 0)


class Lifetimes(NamedTuple):
    """For how long a claim counts, in seconds.

    speculative: at most, while the request runs. grace: after its end, for its events to arrive.
    approximate: without events.
    """

    speculative: float = 60.0
    grace: float = 1.0
    approximate: float = 600.0


DEFAULT_LIFETIMES = Lifetimes()


# Leading tokens of a prompt that a worker probably holds: (speculative, approximate), each by its
# lifetime. A plain pair: there may be one for every worker at every pick.
Expected = tuple[int, int]


class Holdings:
    """What was sent to one worker, as far as that worker still has it; part of its record.

    worker: its name. lost_at: what was sent until then is lost; seconds of one monotonic clock.
    """

    __slots__ = ("lost_at", "worker")

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.lost_at = _NEVER

    def lose(self, now: float = inf) -> None:
        """The worker lost all that it held; without a time, it is gone for good."""
        self.lost_at = now


class Claim(LightRecord, eq=False, gc=False):
    """One request that was sent to a worker; its times are seconds of one monotonic clock.

    Hundreds of thousands are kept: like its marks, it is of no interest to the garbage collector.
    """

    holdings: Holdings
    marks: Marks
    sent_at: float
    ended_at: float = inf


_Claims = tuple[Claim, ...]


class Sent:
    """The table of claims, of all workers.

    secret: 64 random bits of this process. limit_bytes: about how much memory it may take. marks:
    of a prompt, where they are known; by default they are made of its tokens.
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
        # of prompts without a salt: as many as there are models and adapters
        self._roots: dict[tuple[str, str | int | None], int] = {}

    def __len__(self) -> int:
        """Marks that are kept."""
        return len(self._young) + len(self._old)

    def marks(self, prompt: Prompt) -> Marks:
        """The marks of a prompt in its namespace."""
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
        """The marks of a prompt that is known as text only, in its namespace."""
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
            if claims is not before:  # neighbouring marks mostly have the same claims
                before = claims
                after = (claim, *[one for one in claims if one.holdings is not holdings])
            young[key] = after
        return claim

    def end(self, claim: Claim, now: float) -> None:
        """The request is over: from now on its worker's feed knows better."""
        claim.ended_at = min(claim.ended_at, now)

    def withdraw(self, claim: Claim) -> None:
        """The request never reached its worker."""
        claim.sent_at = claim.ended_at = _NEVER

    def expected(self, marks: Marks, now: float) -> dict[str, Expected]:
        """What each worker probably holds of a prompt, of those that hold its first mark."""
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
    """The marks found, each stretch with the same claims by its longest one."""
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


# The state in which a feed tells all of a prompt whose tokens are known: what is missing from the
# index is not there, or on its way.
LIVE = "live"


class Claims(Light, frozen=True, gc=False):
    """Of one worker, in tokens, over all prompts of the request.

    saved: what need not be computed, by the weights. speculative, approximate: expected there
    behind what is certain, where a feed tells what is there now, or where none does.
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
    """The claims of every worker that has any, by name.

    held, expected: one for each prompt; expected may be left out, and alone be there for a text.
    state: of a worker's feeds, by its name. Where none tells what a worker holds of these prompts,
    whatever the reason, all that was sent there counts. block_size: of a worker's cache, in tokens.
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
            if max(lengths) <= certain:  # as mostly, whatever the state is
                continue
            is_live = bool(held) and state(name) == LIVE
            length = lengths[0] if is_live else lengths[1]
            if held:  # only whole blocks are kept
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
    """The claims with what is expected of one more prompt."""
    saved, speculative, approximate = before.saved + more, before.speculative, before.approximate
    if is_live:
        return Claims(saved, speculative + behind, approximate)
    return Claims(saved, speculative, approximate + behind)
