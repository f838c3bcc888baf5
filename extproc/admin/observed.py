"""What the admin server remembers: the last decisions and prompts, and the fleet over time.

All of it is bounded, and cheap to keep. Shared prefixes are the branching points of the tree of the
last prompts. In sorted order, prompts with a common prefix are neighbours, so the length that each
shares with the previous one describes the whole tree, without a node for every token.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isnan, nan
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import xxhash
from msgspec.structs import replace

from extproc.picking.decision import Decision
from extproc.picking.explain import why
from extproc.picking.sent import NO_CLAIMS, root_key
from kvstate.overlap import Overlap, Prompt, Tier, shared_tokens

if TYPE_CHECKING:
    _Ring: TypeAlias = array[float]
else:
    _Ring = array


# Nobody reads more decisions per second than this. Keeping one touches memory, which evicts the
# decisions' own data from the processor's caches.
KEPT_PER_SECOND = 50
KEPT_AT_ONCE = 512


class Observed:
    """The last decisions and prompts, and the fleet over time.

    Decisions are kept up to a rate, with room for bursts; every request counts in the figures.

    clock: seconds since the epoch. kept_at_once: how many decisions of a burst are kept.
    is_closed: whether the router is stopping, so that no more will follow.
    """

    def __init__(self, clock: Callable[[], float], kept_at_once: int = KEPT_AT_ONCE) -> None:
        self._clock = clock
        self.is_closed = False
        self.recent = Recent()
        self.prompts = Prompts()
        self.history = History()
        self._routed: dict[str, _Routed] = {}
        self._most = self._allowance = float(kept_at_once)
        self._allowance_at = 0.0

    def decided(self, decision: Decision, prompts: Sequence[Prompt]) -> None:
        """Records a request that was routed."""
        at = self._clock()
        is_kept = self._may_keep(at)
        if is_kept:
            self.recent.add(decision, at)
            for prompt in prompts:
                self.prompts.add(prompt)
        if decision.prompt_tokens and decision.worker and decision.is_steered:
            routed = self._routed.get(decision.worker)
            if routed is None:
                routed = self._routed[decision.worker] = _Routed()
            routed.prompt_tokens += decision.prompt_tokens
            routed.held_tokens += decision.certain_tokens
            if is_kept:  # this reads every worker, so it is not done for each of very many requests
                routed.compared_tokens += decision.prompt_tokens
                routed.average_tokens += held_on_average(decision)

    def served(self, decision: Decision, endpoint: str) -> None:
        """Records which endpoint answered a request."""
        self.recent.served(decision, endpoint)

    def _may_keep(self, at: float) -> bool:
        passed = max(0.0, at - self._allowance_at)
        self._allowance_at = at
        self._allowance = min(self._most, self._allowance + KEPT_PER_SECOND * passed)
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True

    def sample(self, at: float, fills: Mapping[str, tuple[int, int]]) -> None:
        """Ends a step of the history.

        fills: requests in flight and blocks of every worker. at: seconds since the epoch.
        """
        routed, self._routed = self._routed, {}
        nothing = _Routed()
        figures = {
            name: Figures(*fill, *routed.get(name, nothing).figures())
            for name, fill in fills.items()
        }
        self.history.sample(at, figures)


@dataclass(slots=True)
class _Routed:
    """Prompt tokens of one step's requests to a worker.

    held_tokens: tokens that it certainly held. compared_tokens: tokens of the requests for which
    every worker was compared. average_tokens: of these, how many the workers held on average.
    """

    prompt_tokens: int = 0
    held_tokens: int = 0
    compared_tokens: int = 0
    average_tokens: float = 0.0

    def figures(self) -> tuple[int, int, int]:
        """Returns the tokens of all prompts, those held, and those held on average.

        If no request was compared, the held tokens are used as the average: nothing was saved.
        """
        average: float = self.held_tokens
        if self.compared_tokens:
            average = self.average_tokens * self.prompt_tokens / self.compared_tokens
        return self.prompt_tokens, self.held_tokens, round(average)


def held_on_average(decision: Decision) -> float:
    """Returns how many prompt tokens a worker certainly held, on average over eligible workers.

    With the same caches, round robin would find this many.
    """
    possible = {
        worker.name
        for worker, excluded in zip(decision.workers, decision.excluded, strict=True)
        if not excluded
    }
    held = (
        overlap.certain_tokens
        for each in decision.held
        for name, overlap in each.items()
        if name in possible
    )
    return sum(held) / max(len(possible), 1)


MAX_DECISIONS = 512

# A decision keeps every candidate, about 500 bytes each, so this is at most about 16 MB.
MAX_CANDIDATES = 32_768


@dataclass(slots=True)
class Kept:
    """One decision; number counts from 1. at: seconds since the epoch.

    served: the ip:port that answered, "" if unknown.
    """

    number: int
    at: float
    decision: Decision
    served: str = ""


class Recent:
    """A ring of decisions, bounded by their number and by the candidates that they hold."""

    def __init__(self, decisions: int = MAX_DECISIONS, candidates: int = MAX_CANDIDATES) -> None:
        self._kept: deque[Kept] = deque()
        self._by_decision: dict[int, Kept] = {}  # by identity, while it is kept
        self._limits = decisions, candidates
        self._candidates = 0
        self.last = 0

    def add(self, decision: Decision, at: float) -> None:
        """Keeps a decision, and drops the oldest ones beyond the bounds."""
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
        """Records which endpoint answered a request, if its decision is still kept."""
        kept = self._by_decision.get(id(decision))
        if kept is not None:
            kept.served = endpoint

    def since(self, number: int, limit: int = MAX_DECISIONS) -> list[Kept]:
        """Returns the newest decisions after a number, the oldest first, at most `limit` of them.

        A number above the newest one comes from an earlier run of the router: then it returns all.
        """
        behind = self.last - number if 0 <= number <= self.last else self.last
        count = min(behind, limit, len(self._kept))
        return list(self._kept)[len(self._kept) - count :]

    def find(self, number: int) -> Kept | None:
        """Returns a decision by its number; None if it is no longer kept, or was never made."""
        if not self._kept or not self._kept[0].number <= number <= self.last:
            return None
        return self._kept[number - self._kept[0].number]


def summary(kept: Kept) -> dict[str, Any]:
    """Returns one entry of GET /decisions; it has only the prompt's length, no text."""
    decision = kept.decision
    claimed = decision.claims.get(decision.worker, NO_CLAIMS)
    return {
        "id": kept.number,
        "at": round(kept.at, 3),
        "model": decision.model,
        "prompt_tokens": decision.prompt_tokens,
        "weighed_tokens": round(decision.weighed_tokens),
        "pick": list(decision.pick),
        "worker": decision.worker,
        "prefill": None if decision.prefill is None else decision.prefill.pick[0],
        "served": kept.served,
        "steered": decision.is_steered,
        "policy": decision.policy,
        "verdict": decision.verdict.value,
        "reason": decision.reason,
        "why": why(decision),
        "predicted_tokens": decision.certain_tokens,
        "uncertain_tokens": decision.uncertain_tokens,
        "speculative_tokens": claimed.speculative,
        "approximate_tokens": claimed.approximate,
        "candidates": len(decision.workers),
    }


STEP_SECONDS = 5.0
STEPS = 180

# The name of the sum of all workers; no worker has it.
FLEET = ""


class Figures(NamedTuple):
    """The figures of one worker: current ones, and those of the last step's requests to it.

    average_tokens: how many tokens of those prompts the workers held on average.
    """

    in_flight: int
    blocks: int
    prompt_tokens: int
    predicted_tokens: int
    average_tokens: int = 0


_COLUMNS = Figures._fields


class History:
    """One ring for each worker and figure, 8 bytes a step; removed with the worker."""

    def __init__(self, steps: int = STEPS) -> None:
        self._steps = steps
        self._next = 0
        self._noted = 0
        self._times = self._empty()
        self._rings: dict[str, tuple[_Ring, ...]] = {}

    def sample(self, at: float, figures: Mapping[str, Figures]) -> None:
        """Records one step; at: seconds since the epoch."""
        total = Figures(*map(sum, zip(*figures.values(), strict=True))) if figures else None
        all_figures = {**figures, **({} if total is None else {FLEET: total})}
        for gone in self._rings.keys() - all_figures.keys():
            del self._rings[gone]
        self._times[self._next] = round(at, 3)
        for name, one in all_figures.items():
            if name not in self._rings:
                self._rings[name] = tuple(self._empty() for _ in _COLUMNS)
            for ring, value in zip(self._rings[name], one, strict=True):
                ring[self._next] = value
        self._next = (self._next + 1) % self._steps
        self._noted = min(self._noted + 1, self._steps)

    def names(self) -> list[str]:
        """Returns the workers that have a history."""
        return [name for name in self._rings if name != FLEET]

    def series(self, name: str) -> dict[str, list[Any]]:
        """Returns a worker's figures by name, the oldest first; None for steps without a record."""
        rings = self._rings.get(name) or tuple(self._empty() for _ in _COLUMNS)
        return {column: self._unrolled(ring) for column, ring in zip(_COLUMNS, rings, strict=True)}

    def times(self) -> list[float | None]:
        """Returns when each step was recorded, in seconds since the epoch, the oldest first."""
        return self._unrolled(self._times)

    def _unrolled(self, ring: _Ring) -> list[float | None]:
        in_order = (ring[self._next :] + ring[: self._next])[self._steps - self._noted :]
        return [None if isnan(value) else value for value in in_order]

    def _empty(self) -> _Ring:
        return array("d", [nan]) * self._steps


# Limits of the kept prompts: 4 bytes a token, so at most 4 MB.
MAX_PROMPTS = 256
MAX_TOKENS = 1_000_000

# Only the beginning of a longer prompt is compared.
LEADING_TOKENS = 16_384

# Shorter prefixes do not fill a block.
LEAST_TOKENS = 16


class Prompts:
    """The beginnings of the last prompts; they are compared and looked up, but never shown."""

    def __init__(self, prompts: int = MAX_PROMPTS, tokens: int = MAX_TOKENS) -> None:
        self._kept: deque[Prompt] = deque()
        self._limits = prompts, tokens
        self._tokens = 0

    def add(self, prompt: Prompt) -> None:
        """Keeps the beginning of a prompt, and drops the oldest ones beyond the bounds."""
        if len(prompt.tokens) > LEADING_TOKENS:
            prompt = replace(prompt, tokens=prompt.tokens[:LEADING_TOKENS])
        prompts, tokens = self._limits
        self._kept.append(prompt)
        self._tokens += len(prompt.tokens)
        while len(self._kept) > prompts or self._tokens > tokens:
            self._tokens -= len(self._kept.popleft().tokens)

    def all(self) -> list[Prompt]:
        """Returns the prompts that are kept, the oldest first."""
        return list(self._kept)


class Prefix(NamedTuple):
    """A prefix of the last prompts.

    key: a hash of its namespace and tokens, keyed with a secret of this process. tokens: its
    length. requests: how many of the prompts begin with it. prompt: one of them, cut one token
    after the prefix, so that the index counts each of the prefix's blocks.
    """

    key: str
    tokens: int
    requests: int
    prompt: Prompt


def prefixes(prompts: Sequence[Prompt], secret: int, limit: int) -> list[Prefix]:
    """Returns the most important prefixes: shared ones by requests x tokens, then single prompts.

    secret: 64 random bits, so that a key reveals nothing about the text. limit: how many.
    """
    found: list[tuple[int, int, Prompt]] = []
    by_tokens = sorted(
        ((_namespace(one), one.tokens.tobytes(), one) for one in prompts), key=_ORDER
    )
    for _, group in groupby(by_tokens, itemgetter(0)):
        found += _tree([one for _, _, one in group])
    found = [node for node in found if node[0] >= LEAST_TOKENS]
    found.sort(key=lambda node: (node[1] == 1, -node[0] * node[1]))
    return [
        Prefix(_key(secret, prompt, tokens), tokens, requests, _cut(prompt, tokens + 1))
        for tokens, requests, prompt in found[:limit]
    ]


_ORDER = itemgetter(0, 1)


def _namespace(prompt: Prompt) -> tuple[str, str, str]:
    return (prompt.model, repr(prompt.lora), repr(prompt.salt))


def _tree(prompts: Sequence[Prompt]) -> Iterator[tuple[int, int, Prompt]]:
    """Yields each node's length in tokens, its number of prompts, and one of these.

    prompts: sorted.
    """
    open_nodes: list[tuple[int, int]] = []  # length and first prompt, each inside the one before
    for at, prompt in enumerate(prompts):
        shared = shared_tokens(prompts[at - 1].tokens, prompt.tokens) if at else 0
        first = at
        while open_nodes and open_nodes[-1][0] > shared:
            length, first = open_nodes.pop()
            yield length, at - first, prompts[first]
        if shared and (not open_nodes or open_nodes[-1][0] < shared):
            open_nodes.append((shared, first))
        if len(prompt.tokens) > shared:
            open_nodes.append((len(prompt.tokens), at))
    for length, first in reversed(open_nodes):
        yield length, len(prompts) - first, prompts[first]


def _cut(prompt: Prompt, tokens: int) -> Prompt:
    return replace(prompt, tokens=prompt.tokens[:tokens])


def _key(secret: int, prompt: Prompt, tokens: int) -> str:
    root = root_key(secret, *_namespace(prompt))
    return f"{xxhash.xxh3_64_intdigest(prompt.tokens[:tokens].tobytes(), root):016x}"[:8]


def spread(prefix: Prefix, overlaps: Mapping[str, Overlap], workers: int) -> dict[str, Any]:
    """Returns one entry of GET /prefixes: a prefix, and the workers that hold a part of it.

    They are sorted by how much they hold, most first. workers: the most workers to show.
    """
    holders = sorted(overlaps.items(), key=lambda one: one[1].rank_order, reverse=True)
    return {
        "key": prefix.key,
        "model": prefix.prompt.model,
        "lora": prefix.prompt.lora,
        "salted": prefix.prompt.salt is not None,
        "tokens": prefix.tokens,
        "cut": prefix.tokens >= LEADING_TOKENS,
        "requests": prefix.requests,
        "held_by": len(holders),
        "workers": [_holder(name, overlap) for name, overlap in holders[:workers]],
    }


def _holder(name: str, overlap: Overlap) -> dict[str, Any]:
    return {
        "name": name,
        "tokens": overlap.certain_tokens,
        "uncertain_tokens": overlap.uncertain_tokens,
        "blocks_by_tier": {tier.name.lower(): overlap.tiers[tier] for tier in Tier},
    }
