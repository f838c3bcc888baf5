"""The policies: each ranks the eligible workers, the lowest rank first.

Each is one small function over columns, which have an entry for each eligible worker, and one entry
of `POLICIES`, whose names the configuration offers. docs/policies.md says when to use which.

Scoring: what it costs to send a request to a worker, in tokens of prefill work.

    cost =   uncached prompt tokens x affinity
           + prompt tokens still queued there
           + running x requests in flight there

On an idle fleet, an uncached token delays only this request; on a busy one, it delays others too.
So affinity is 1 on an idle fleet, grows with its utilization as waiting times do, and further if
every worker has a queue.

This runs for every worker at every request: plain numbers, no objects.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

import msgspec

from extproc.config.sections import CacheAware, PrefixCacheSettings


class PolicyInput(msgspec.Struct, frozen=True, gc=False):
    """The input of a policy; saved and in_flight are computed on demand.

    prompt_tokens: the request's. costs, saved: tokens for each worker. in_flight: requests on each
    worker, others' reported ones included. turn: requests placed so far.
    """

    prompt_tokens: float
    costs: list[float]
    saved: Callable[[], Sequence[float]]
    in_flight: Callable[[], list[float]]
    turn: int
    cache_aware: CacheAware = CacheAware()
    prefix_cache: PrefixCacheSettings = PrefixCacheSettings()


# Ranks, of which the lowest is the best.
Order = list[float]


def by_cost(columns: PolicyInput) -> Order:
    """Ranks by cost: the least work first."""
    return columns.costs


def by_least_request(columns: PolicyInput) -> Order:
    """Ranks by requests in flight: the fewest first."""
    return columns.in_flight()


def by_turn(columns: PolicyInput) -> Order:
    """Ranks the workers in turn (round robin)."""
    count = len(columns.costs)
    return [float((place - columns.turn) % count) for place in range(count)]


def by_chance(columns: PolicyInput) -> Order:
    """Every worker has the same rank; ties are broken at random."""
    return [0.0] * len(columns.costs)


def by_cache_aware(columns: PolicyInput) -> Order:
    """Ranks by the longest match if it is long enough and the fleet is balanced, else by load."""
    knobs, requests = columns.cache_aware, columns.in_flight()
    most, least = max(requests, default=0.0), min(requests, default=0.0)
    is_busier = most > knobs.balance_rel_percent / 100 * least
    is_unbalanced = is_busier and most - least > knobs.balance_abs_requests
    enough = knobs.cache_threshold_percent / 100 * columns.prompt_tokens
    saved = columns.saved()
    if is_unbalanced or max(saved, default=0.0) <= enough:
        return requests
    return _ranks_of([(-tokens, own) for tokens, own in zip(saved, requests, strict=True)])


def by_prefix_cache(columns: PolicyInput) -> Order:
    """Ranks by the longest match among workers that are not too busy, then by load."""
    knobs, requests = columns.prefix_cache, columns.in_flight()
    if not requests or max(requests) - min(requests) > knobs.imbalance_requests:
        return requests
    limit = fmean(requests) + knobs.sigma_percent / 100 * pstdev(requests)
    return _ranks_of(
        [
            (-tokens if own <= limit else 0.0, own)
            for tokens, own in zip(columns.saved(), requests, strict=True)
        ]
    )


def _ranks_of(pairs: Sequence[tuple[float, float]]) -> Order:
    """Returns the ranks of pairs: the second number counts where the first ones are equal."""
    rank_of = {pair: float(at) for at, pair in enumerate(sorted(set(pairs)))}
    return [rank_of[pair] for pair in pairs]


class Ranking(NamedTuple):
    """A policy, by what it needs.

    rank: ranks the workers. reads_caches: whether it considers what they hold: only then its picks
    have an overlap as their reason. is_sampled: whether it may compare a sample of the workers.
    """

    rank: Callable[[PolicyInput], Order]
    reads_caches: bool = False
    is_sampled: bool = False


POLICIES: Mapping[str, Ranking] = {
    "cost": Ranking(by_cost, reads_caches=True, is_sampled=True),
    "cache_aware": Ranking(by_cache_aware, reads_caches=True),
    "prefix_cache": Ranking(by_prefix_cache, reads_caches=True),
    "least_request": Ranking(by_least_request),
    "round_robin": Ranking(by_turn),
    "random": Ranking(by_chance),
}
