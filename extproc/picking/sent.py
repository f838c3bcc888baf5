"""What was sent where: prefixes that a worker probably holds because we sent it a request.

One table serves two purposes, by two lifetimes of the same claim:

- speculative, of a worker whose feed is live: from the pick until the request is over and its
  events have had time to arrive, or until a deadline. What a running request uses is not evicted;
  afterwards the feed knows better.
- approximate, of a worker whose events we do not have now: until its age limit, or until newer
  prompts took its room.

Kept apart from the index, and bounded: two generations, the older one dropped when the younger one
is full or old.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from extproc.picking.marks import Marks, marks_of, root_key
from kvstate.overlap import Prompt

# What a mark takes: its key, its slot in a dict that is at worst a third full, its share of the
# claims.
BYTES_PER_MARK = 160

_NOT_OVER = float("inf")
_NEVER = float("-inf")
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


class Claim:
    """One request that was sent to a worker; its times are seconds of one monotonic clock."""

    __slots__ = ("ended_at", "marks", "sent_at", "worker")

    def __init__(self, worker: str, marks: Marks, sent_at: float) -> None:
        self.worker = worker
        self.marks = marks
        self.sent_at = sent_at
        self.ended_at = _NOT_OVER


_Claims = tuple[Claim, ...]


class Sent:
    """The table of claims, of all workers.

    secret: 64 random bits of this process. limit_bytes: about how much memory it may take.
    """

    def __init__(
        self, secret: int, limit_bytes: int = 64 << 20, lifetimes: Lifetimes = DEFAULT_LIFETIMES
    ) -> None:
        self._secret = secret
        self._lifetimes = lifetimes
        self._limit_marks = max(1, limit_bytes // BYTES_PER_MARK // 2)
        self._young: dict[int, _Claims] = {}
        self._old: dict[int, _Claims] = {}
        self._young_since = _NEVER
        # of prompts without a salt: as many as there are models and adapters
        self._roots: dict[tuple[str, str | int | None], int] = {}
        self._forgotten_at: dict[str, float] = {}
        # each of these workers once, in about the order in which they are to be let go
        self._losses: deque[tuple[float, str]] = deque()

    def __len__(self) -> int:
        """Marks that are kept."""
        return len(self._young) + len(self._old)

    def marks(self, prompt: Prompt) -> Marks:
        """The marks of a prompt in its namespace."""
        model, tokens, lora, salt = prompt
        if salt is not None:
            root = root_key(self._secret, "tokens", model, lora, salt)
            return marks_of(root, tokens)
        root = self._roots.get((model, lora), 0)
        if not root:
            root = root_key(self._secret, "tokens", model, lora, None)
            self._roots[model, lora] = root
        return marks_of(root, tokens)

    def text_marks(
        self, model: str | None, text: bytes, lora: str | None = None, salt: str | None = None
    ) -> Marks:
        """The marks of a prompt that is known as text only, in its namespace."""
        return marks_of(root_key(self._secret, "text", model, lora, salt), text)

    def record(self, worker: str, marks: Marks, now: float) -> Claim:
        """Claims that a worker is about to hold a prompt."""
        self._make_room(now)
        claim = Claim(worker, marks, now)
        alone: _Claims = (claim,)
        after = alone
        before: _Claims | None = None
        young = self._young
        for key in marks.keys:
            claims = young.get(key)
            if claims is None:
                young[key] = alone
                continue
            if claims is not before:  # neighbouring marks mostly have the same claims
                before = claims
                after = (claim, *[other for other in claims if other.worker != worker])
            young[key] = after
        return claim

    def end(self, claim: Claim, now: float) -> None:
        """The request is over: from now on its worker's feed knows better."""
        claim.ended_at = min(claim.ended_at, now)

    def withdraw(self, claim: Claim) -> None:
        """The request never reached its worker."""
        claim.sent_at = claim.ended_at = _NEVER

    def forget(self, worker: str, now: float) -> None:
        """A worker lost all that it held."""
        forgotten, losses = self._forgotten_at, self._losses
        if worker not in forgotten:
            losses.append((now, worker))
        forgotten[worker] = now
        oldest = now - self._lifetimes.approximate
        while losses and losses[0][0] <= oldest:
            _, other = losses.popleft()
            last = forgotten[other]
            if last > oldest:
                losses.append((last, other))
            else:
                del forgotten[other]

    def expected(self, marks: Marks, now: float) -> dict[str, Expected]:
        """What each worker probably holds of a prompt, of those that hold its first mark."""
        lifetimes, forgotten = self._lifetimes, self._forgotten_at
        found: dict[str, Expected] = {}
        for generation in (self._old, self._young):
            if not generation:
                continue
            for length, claims in _stretches(generation, marks):
                for claim in claims:
                    age, worker = now - claim.sent_at, claim.worker
                    if age >= lifetimes.approximate:
                        continue
                    if forgotten and claim.sent_at <= forgotten.get(worker, _NEVER):
                        continue
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
