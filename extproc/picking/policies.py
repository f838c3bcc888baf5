"""The policies: from what is known of all eligible workers to their ranks, the lowest best.

Each is one small function over columns, which have an entry for each eligible worker.
docs/policies.md says when to use which.

Scoring: what it costs to send a request to a worker, in tokens of prefill work.

    cost =   uncached prompt tokens x affinity
           + prompt tokens still queued there
           + running x requests in flight there

An uncached token makes this request wait on an idle fleet, and others besides on a busy one: so
affinity is 1 there and grows with the utilization of the fleet, as waiting does, and further
where every worker has a queue.

This runs for every worker at every request: plain numbers, no objects.

Which data-parallel rank of a worker a request is to name, where its ranks share one HTTP port.

vLLM and SGLang read a rank from the request header `X-data-parallel-rank` and refuse one that they
do not have, so it is named only where every worker that the request may reach has it. A request
that names a rank is not balanced over the ranks by its engine: so it names one only while what the
rank saves is more than what it has to do beyond the idlest one.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple, Protocol

import xxhash

from extproc.config import schema
from extproc.config.schema import AUTO, Cost, Policy
from extproc.config.sections import CacheAware, PrefixCache
from extproc.structs import Light
from kvstate.overlap import Overlap, worth_tokens

# From this utilization on, the wait of those who come later counts in full.
FULL_WEIGHT_UTILIZATION = 0.25

# Where even the idlest worker has a queue, a token makes so many more wait for each second of it,
# up to so many in all.
WAITING_A_SECOND = 1.0
MAX_WAITING = 10.0


# A longer name of a session counts for none: only the end of it might tell clients apart.
MAX_SESSION_LETTERS = 256

# A request of a session counts for so many tokens at least, by which its worker is preferred.
LEAST_SESSION_TOKENS = 2_048.0


def session_credit(session: str, workers: Sequence[str], tokens: float) -> dict[str, float]:
    """Returns the workers that a session belongs to, and the tokens that each is preferred by.

    The same session has the same two of the same workers, on every router; where a worker comes or
    goes, only sessions change that belong to it. The second one, by half as many tokens, is for
    when the first one has too much to do. workers: their endpoints. tokens: of the request.
    """
    key, credit = session.encode(errors="surrogatepass"), max(tokens, LEAST_SESSION_TOKENS)
    keyed = ((xxhash.xxh3_64_intdigest(name.encode() + b"\0" + key), name) for name in workers)
    first = heapq.nlargest(2, keyed)
    return {name: credit / (1 + at) for at, (_, name) in enumerate(first)}


class Chance(Protocol):
    """The randomness that a pick may use; random.Random is one."""

    def random(self) -> float:
        """A number from 0 to below 1."""


def affinity_of(cost: Cost, utilization: float, queued_seconds: float = 0.0) -> float:
    """Returns the weight of an uncached token, relative to a token queued before the request.

    utilization: 0 to 1, the mean of the fleet's workers. What is added by each token to the wait of
    all who come later is in proportion to u / (1 - u); bounded, since u is a rough estimate, and
    less than that where u is low: one burst makes no busy fleet. queued_seconds: how long the queue
    of the idlest worker takes. All who come within that time wait for each token, wherever they go.
    """
    waiting = 1.0
    if utilization < 0.5:  # noqa: PLR2004 - where u / (1 - u) is 1
        waiting = utilization / (1.0 - utilization)
        if utilization < FULL_WEIGHT_UTILIZATION:
            waiting *= utilization / FULL_WEIGHT_UTILIZATION
    if queued_seconds > 0.0:
        waiting += min(MAX_WAITING, WAITING_A_SECOND * queued_seconds)
    return (cost.affinity_percent + cost.busy_affinity_percent * waiting) / 100


class Columns(Light, frozen=True, gc=False):
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


Order = Sequence[float] | Sequence[tuple[float, float]]
Ranking = Callable[[Columns], Order]


def best(ranks: Order, chance: Chance, count: int) -> list[int]:
    """Returns the positions of the lowest ranks, best first; ties are broken at random.

    count: how many are returned at most.
    """
    lowest = sorted(ranks)[: count + 1]
    if len(set(lowest)) == len(lowest):
        return [ranks.index(rank) for rank in lowest[:count]]
    random = chance.random
    drawn = sorted([(rank, random(), place) for place, rank in enumerate(ranks)])
    return [place for _, _, place in drawn[:count]]


def by_cost(columns: Columns) -> Order:
    """Ranks by cost: the least work first."""
    return columns.costs


def by_least_request(columns: Columns) -> Order:
    """Ranks by requests in flight: the fewest first."""
    return columns.in_flight()


def by_turn(columns: Columns) -> Order:
    """Ranks so that workers get their turn one after the other."""
    count = len(columns.costs)
    return [(place - columns.turn) % count for place in range(count)]


def by_chance(columns: Columns) -> Order:
    """Every worker has the same rank; ties are broken at random."""
    return [0.0] * len(columns.costs)


def by_cache_aware(columns: Columns) -> Order:
    """Ranks by the longest match if it is long enough and the fleet is balanced, else by load."""
    knobs, requests = columns.cache_aware, columns.in_flight()
    most, least = max(requests, default=0.0), min(requests, default=0.0)
    is_busier = most > knobs.balance_rel_percent / 100 * least
    is_unbalanced = is_busier and most - least > knobs.balance_abs_requests
    enough = knobs.cache_threshold_percent / 100 * columns.prompt_tokens
    saved = columns.saved()
    if is_unbalanced or max(saved, default=0.0) <= enough:
        return requests
    return [(-tokens, own) for tokens, own in zip(saved, requests, strict=True)]


def by_prefix_cache(columns: Columns) -> Order:
    """Ranks by the longest match among workers that are not busier than most, then by load."""
    knobs, requests = columns.prefix_cache, columns.in_flight()
    if not requests or max(requests) - min(requests) > knobs.imbalance_requests:
        return requests
    limit = fmean(requests) + knobs.sigma_percent / 100 * pstdev(requests)
    return [
        (-tokens if own <= limit else 0.0, own)
        for tokens, own in zip(columns.saved(), requests, strict=True)
    ]


POLICIES: Mapping[str, Ranking] = {
    "cost": by_cost,
    "cache_aware": by_cache_aware,
    "prefix_cache": by_prefix_cache,
    "least_request": by_least_request,
    "round_robin": by_turn,
    "random": by_chance,
}

# The policies that look at what a worker holds: only their picks have an overlap as their reason.
LOOK_AT_OVERLAP = frozenset({"cost", "cache_aware", "prefix_cache"})


# The policies that may look at a sample: the others compare each worker with all.
SAMPLED = frozenset({"cost"})


# How many workers are looked at by chance where the configuration does not say: alone a router
# loses nothing by so many, and spares itself the others of a large fleet; among several, fewer keep
# them from picking the same one.
SAMPLE_ALONE = 32
SAMPLE_AMONG_ROUTERS = 12


def sample_size(policy: Policy, *, is_alone: bool) -> int:
    """Returns how many workers a pick looks at by chance, 0 for all.

    is_alone: whether nothing is heard of other routers.
    """
    if policy.sample is not None:
        return policy.sample
    return SAMPLE_ALONE if is_alone else SAMPLE_AMONG_ROUTERS


def sample_of(
    eligible: Sequence[int], holders: Mapping[int, float], count: int, chance: Chance
) -> list[int]:
    """Returns the places of the workers that a pick looks at: `count` drawn by chance come first.

    After them come those that hold something of the prompt; of those that hold equally much again
    `count` at most. Who picks the best of all by news that is a moment old picks what all others
    pick at that moment; who picks the best of a few does not, and among equals a few are enough.

    eligible: more than `count` places. holders: what each saves, by place; all are eligible.
    """
    chosen = dict.fromkeys(_drawn(eligible, count, chance))
    if len(holders) <= count:
        chosen.update(dict.fromkeys(holders))
        return list(chosen)
    equals: dict[float, list[int]] = {}
    for place, saved in holders.items():
        equals.setdefault(saved, []).append(place)
    for places in equals.values():
        chosen.update(dict.fromkeys(_drawn(places, count, chance)))
    return list(chosen)


def _drawn(places: Sequence[int], count: int, chance: Chance) -> Sequence[int]:
    """Returns `count` different ones of these places, or all if there are no more."""
    if len(places) <= count:
        return places
    random, number = chance.random, len(places)
    drawn: dict[int, None] = {}
    while len(drawn) < count:
        drawn[places[int(random() * number)]] = None
    return list(drawn)


# Endpoints that are named where the configuration does not say how many: the best one and two to
# retry on, to an Envoy that we know to walk a list; the best one alone by the Endpoint Picker
# Protocol, since most gateways that speak it refuse a list.
BUFFERED_ENDPOINTS = 3
EPP_ENDPOINTS = 1


def endpoints_named(policy: Policy, *, is_duplex: bool) -> int:
    """Returns how many endpoints a proxy is told at most.

    is_duplex: whether it speaks the Endpoint Picker Protocol.
    """
    return policy.endpoints or (EPP_ENDPOINTS if is_duplex else BUFFERED_ENDPOINTS)


def policy_of(config: schema.Config, model: str | None, asked: str | None) -> str:
    """Returns the name of the policy for a request.

    asked: the value of its header `policy.header`, None without one. What is no policy is ignored.
    """
    if config.policy.header is not None and asked in schema.POLICIES:
        return asked
    own = next((one.policy for one in config.models if one.name == model), None)
    return own or config.policy.name


class Ranks(NamedTuple):
    """What is known of the ranks of workers.

    count: of a worker, by name; 0 where that is not known. work: in tokens, of the requests under
    way at an endpoint that named a rank, by that rank; given the endpoint, the time, and the tokens
    that a request counts for.
    """

    count: Callable[[str], int]
    work: Callable[[str, float, float], Mapping[int, float]]


def rank_of(
    overlaps: Sequence[Overlap], counts: Sequence[int], count: int, work: Mapping[int, float]
) -> int | None:
    """Returns the data-parallel rank that a request is to name, None for none.

    overlaps: of its prompts on the picked worker. counts: ranks of every worker that it may reach.
    count, work: ranks of the picked one, and what they have to do.
    """
    ranks = {overlap.rank for overlap in overlaps}
    if len(ranks) != 1:
        return None
    rank = ranks.pop()
    if count == 1 or min(counts) <= rank:
        return None
    idlest = min([work.get(other, 0.0) for other in range(count)])
    saved = sum([worth_tokens(overlap) for overlap in overlaps])
    return rank if saved > work.get(rank, 0.0) - idlest else None


# Of vLLM and SGLang.
RANK_HEADER = "x-data-parallel-rank"


def rank_header(name: str | None, rank: int | None) -> tuple[str, str] | None:
    """Returns the request header that names a rank, None where there is none to name.

    name: as it is configured.
    """
    if name is None or rank is None:
        return None
    return (RANK_HEADER if name == AUTO else name.lower()), str(rank)
