"""The policies: each ranks the eligible workers, the lowest rank first.

Each is one small function over columns, which have an entry for each eligible worker, and one entry
of `POLICIES`, whose names the configuration offers. The entry says what the policy reads; that a
request's header is checked, taken in and explained, follows from it (docs/internals/headers.md).
docs/requests.md says when to use which policy.

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
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:  # whose choices of a policy's name are the entries below
    from extproc.config.schema import Policy


class PolicyInput(msgspec.Struct, frozen=True, gc=False):
    """The input of a policy; what takes time is computed on demand."""

    # The settings of all policies.
    rules: "Policy"
    # How many tokens the request's prompts have.
    prompt_tokens: float
    # For each worker, what the request costs there, in tokens.
    costs: list[float]
    # For each worker, the prompt tokens that it need not compute.
    saved: Callable[[], Sequence[float]]
    # Requests on each worker, others' reported ones included.
    in_flight: Callable[[], list[float]]
    # The ip:port of each worker.
    endpoints: Callable[[], Sequence[str]]
    # How many requests were placed so far.
    turn: int
    # The client's session, "" without one.
    session: str = ""
    # The value of the header that the policy's entry reads, its values joined with commas if there
    # are several; b"" without one.
    header: bytes = b""


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
    knobs, requests = columns.rules.cache_aware, columns.in_flight()
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
    knobs, requests = columns.rules.prefix_cache, columns.in_flight()
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
    reads_header: the key below `policy` that names a header of requests whose value it gets, such
    as "mine.header"; "" for none.
    """

    rank: Callable[[PolicyInput], Order]
    reads_caches: bool = False
    is_sampled: bool = False
    reads_header: str = ""


POLICIES: Mapping[str, Ranking] = {
    "cost": Ranking(by_cost, reads_caches=True, is_sampled=True),
    "cache_aware": Ranking(by_cache_aware, reads_caches=True),
    "prefix_cache": Ranking(by_prefix_cache, reads_caches=True),
    "least_request": Ranking(by_least_request),
    "round_robin": Ranking(by_turn),
    "random": Ranking(by_chance),
}


def header_keys() -> list[str]:
    """Returns the keys below `policy` that name the headers which policies read."""
    return list(dict.fromkeys(one.reads_header for one in POLICIES.values() if one.reads_header))
