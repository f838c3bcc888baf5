"""The policies: from what is known of all eligible workers to their ranks, the lowest first.

Each is one small function over columns: one entry for each eligible worker, in the same order.
docs/policies.md says when to use which.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

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


class Columns(NamedTuple):
    """What a policy looks at; saved and in_flight are made for those that ask.

    prompt_tokens: of the request. costs, saved: in tokens, of each worker. in_flight: requests,
    those of others too, by report. turn: requests placed so far.
    """

    prompt_tokens: float
    costs: Sequence[float]
    saved: Callable[[], Sequence[float]]
    in_flight: Callable[[], Sequence[float]]
    turn: int
    chance: Chance
    cache_aware: CacheAware = CacheAware()
    prefix_cache: PrefixCache = PrefixCache()


Rank = tuple[float, float, float]
Policy = Callable[[Columns], list[Rank]]


def by_cost(columns: Columns) -> list[Rank]:
    """The least work first; ties at random."""
    random = columns.chance.random
    return [(cost, random(), 0.0) for cost in columns.costs]


def by_least_request(columns: Columns) -> list[Rank]:
    """The fewest requests in flight first; ties at random."""
    random = columns.chance.random
    return [(requests, random(), 0.0) for requests in columns.in_flight()]


def by_turn(columns: Columns) -> list[Rank]:
    """One after the other."""
    count = len(columns.costs)
    return [((position - columns.turn) % count, 0.0, 0.0) for position in range(count)]


def by_chance(columns: Columns) -> list[Rank]:
    """Any order."""
    random = columns.chance.random
    return [(random(), 0.0, 0.0) for _ in columns.costs]


def by_cache_aware(columns: Columns) -> list[Rank]:
    """The longest match where it is long enough and the fleet is balanced, else the idlest."""
    knobs, requests = columns.cache_aware, columns.in_flight()
    most, least = max(requests, default=0.0), min(requests, default=0.0)
    is_unbalanced = most - least > knobs.balance_abs and most > knobs.balance_rel * least
    enough = knobs.cache_threshold * columns.prompt_tokens
    if is_unbalanced or max(columns.saved(), default=0.0) <= enough:
        return by_least_request(columns)
    random = columns.chance.random
    return [(-saved, own, random()) for saved, own in zip(columns.saved(), requests, strict=True)]


def by_prefix_cache(columns: Columns) -> list[Rank]:
    """The longest match among workers that are not busier than most, then the idlest."""
    knobs, requests = columns.prefix_cache, columns.in_flight()
    if not requests or max(requests) - min(requests) > knobs.imbalance:
        return by_least_request(columns)
    limit = fmean(requests) + knobs.sigmas * pstdev(requests)
    random = columns.chance.random
    return [
        (-saved if own <= limit else 0.0, own, random())
        for saved, own in zip(columns.saved(), requests, strict=True)
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
