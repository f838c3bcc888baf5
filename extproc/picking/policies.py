"""The policies: from what is known of all eligible workers to their ranks, the lowest best.

Each is one small function over columns: one entry for each eligible worker, in the same order.
docs/policies.md says when to use which.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

import msgspec

from extproc.picking.pick import Chance


class CacheAware(NamedTuple):
    """The knobs of `cache_aware`, SMG's by name and default.

    cache_threshold: the least share of the prompt that a worker must hold to be preferred for it.
    balance_abs, balance_rel: the busiest worker has this many requests more than the idlest, and
    this many times as many: then load alone decides.
    """

    cache_threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5


class PrefixCache(NamedTuple):
    """The knobs of `prefix_cache`, AIBrix's by meaning and default.

    imbalance: the busiest worker has more requests than the idlest by more than this: then load
    alone decides. sigmas: standard deviations above the mean number of requests that a worker with
    a match may have.
    """

    imbalance: int = 8
    sigmas: float = 1.0


class Columns(msgspec.Struct, frozen=True, gc=False):
    """What a policy looks at; saved and in_flight are made for those that ask.

    prompt_tokens: of the request. costs, saved: in tokens, of each worker. in_flight: requests,
    those of others too, by report. turn: requests placed so far.
    """

    prompt_tokens: float
    costs: Sequence[float]
    saved: Callable[[], Sequence[float]]
    in_flight: Callable[[], Sequence[float]]
    turn: int
    cache_aware: CacheAware = CacheAware()
    prefix_cache: PrefixCache = PrefixCache()


Ranks = Sequence[float] | Sequence[tuple[float, float]]
Policy = Callable[[Columns], Ranks]


def best(ranks: Ranks, chance: Chance, count: int) -> list[int]:
    """The places of the lowest ranks, `count` of them at most; ties at random."""
    lowest = sorted(ranks)[: count + 1]
    if len(set(lowest)) == len(lowest):
        return [ranks.index(rank) for rank in lowest[:count]]
    random = chance.random
    drawn = sorted([(rank, random(), place) for place, rank in enumerate(ranks)])
    return [place for _, _, place in drawn[:count]]


def by_cost(columns: Columns) -> Ranks:
    """The least work first."""
    return columns.costs


def by_least_request(columns: Columns) -> Ranks:
    """The fewest requests in flight first."""
    return columns.in_flight()


def by_turn(columns: Columns) -> Ranks:
    """One after the other."""
    count = len(columns.costs)
    return [(place - columns.turn) % count for place in range(count)]


def by_chance(columns: Columns) -> Ranks:
    """All alike."""
    return [0.0] * len(columns.costs)


def by_cache_aware(columns: Columns) -> Ranks:
    """The longest match where it is long enough and the fleet is balanced, else the idlest."""
    knobs, requests = columns.cache_aware, columns.in_flight()
    most, least = max(requests, default=0.0), min(requests, default=0.0)
    is_unbalanced = most - least > knobs.balance_abs and most > knobs.balance_rel * least
    enough = knobs.cache_threshold * columns.prompt_tokens
    saved = columns.saved()
    if is_unbalanced or max(saved, default=0.0) <= enough:
        return requests
    return [(-tokens, own) for tokens, own in zip(saved, requests, strict=True)]


def by_prefix_cache(columns: Columns) -> Ranks:
    """The longest match among workers that are not busier than most, then the idlest."""
    knobs, requests = columns.prefix_cache, columns.in_flight()
    if not requests or max(requests) - min(requests) > knobs.imbalance:
        return requests
    limit = fmean(requests) + knobs.sigmas * pstdev(requests)
    return [
        (-tokens if own <= limit else 0.0, own)
        for tokens, own in zip(columns.saved(), requests, strict=True)
    ]


POLICIES: Mapping[str, Policy] = {
    "cost": by_cost,
    "cache_aware": by_cache_aware,
    "prefix_cache": by_prefix_cache,
    "least_request": by_least_request,
    "round_robin": by_turn,
    "random": by_chance,
}

# Those that look at what a worker holds: their picks are for that reason.
LOOK_AT_OVERLAP = frozenset({"cost", "cache_aware", "prefix_cache"})
