"""The policies: from what is known of all eligible workers to their ranks, the lowest best.

Each is one small function over columns: one entry for each eligible worker, in the same order.
docs/policies.md says when to use which.

Scoring: what it costs to send a request to a worker, in tokens of prefill work.

    cost =   uncached prompt tokens x affinity
           + prompt tokens still queued there
           + running x requests in flight there

An uncached token makes this request wait on an idle fleet, and others besides on a busy one: so
affinity is 1 there and grows with the utilization of the fleet, as waiting does.

This runs for every worker at every request: plain numbers, no objects.

Which data-parallel rank of a worker a request is to name, where its ranks share one HTTP port.

vLLM and SGLang read a rank from the request header `X-data-parallel-rank` and refuse one that they
do not have, so it is named only where every worker that the request may reach has it. A request
that names a rank is not balanced over the ranks by its engine: so it names one only while what the
rank saves is more than what it has to do beyond the idlest one.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import mul
from statistics import fmean, pstdev
from typing import NamedTuple, Protocol

import msgspec

from extproc import config as configuration
from extproc.config import AUTO
from kvstate.overlap import Overlap
from kvstate.tiers import RESTORE_WEIGHT, Tier

# From this utilization on, the wait of those who come later counts in full.
FULL_WEIGHT_UTILIZATION = 0.25

_TIER_WEIGHTS = tuple(RESTORE_WEIGHT[tier] for tier in Tier)


class Weights(NamedTuple):
    """What a cost is made of; benchmarks/routing.py is where these come from.

    affinity: tokens of waiting that one uncached token is worth on an idle fleet. busy_affinity:
    how many more on one that is half busy or more. running: tokens that one request in flight costs
    a new one, by its share of every step. uncertain, speculative, approximate: what a claimed token
    saves, as a share of a certain one.
    """

    affinity: float = 1.0
    busy_affinity: float = 1.0
    running: float = 128.0
    uncertain: float = 0.5
    speculative: float = 0.9
    approximate: float = 0.9


DEFAULT_WEIGHTS = Weights()


class Chance(Protocol):
    """The randomness that a pick may use; random.Random is one."""

    def random(self) -> float:
        """A number from 0 to below 1."""


def worth_tokens(overlap: Overlap, uncertain_weight: float = DEFAULT_WEIGHTS.uncertain) -> float:
    """Prompt tokens that an overlap saves, a lower tier's at its restore price."""
    block_size, tiers, uncertain, _ = overlap
    device, host, disk, remote = tiers
    if not (host or disk or remote or uncertain):  # as nearly always
        return block_size * device
    certain: float = sum(map(mul, _TIER_WEIGHTS, tiers))
    return block_size * (certain + uncertain_weight * uncertain)


def affinity_of(weights: Weights, utilization: float) -> float:
    """The weight of an uncached token.

    utilization: of the fleet, the mean of its workers'. What is added by each token to the wait of
    all who come later is in proportion to u / (1 - u); bounded, since u is a rough estimate, and
    less than that where u is low: one burst makes no busy fleet.
    """
    if utilization >= 0.5:  # noqa: PLR2004 - where u / (1 - u) is 1
        return weights.affinity + weights.busy_affinity
    waiting = utilization / (1.0 - utilization)
    if utilization < FULL_WEIGHT_UTILIZATION:
        waiting *= utilization / FULL_WEIGHT_UTILIZATION
    return weights.affinity + weights.busy_affinity * waiting


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


Order = Sequence[float] | Sequence[tuple[float, float]]
Policy = Callable[[Columns], Order]


def best(ranks: Order, chance: Chance, count: int) -> list[int]:
    """The places of the lowest ranks, `count` of them at most; ties at random."""
    lowest = sorted(ranks)[: count + 1]
    if len(set(lowest)) == len(lowest):
        return [ranks.index(rank) for rank in lowest[:count]]
    random = chance.random
    drawn = sorted([(rank, random(), place) for place, rank in enumerate(ranks)])
    return [place for _, _, place in drawn[:count]]


def by_cost(columns: Columns) -> Order:
    """The least work first."""
    return columns.costs


def by_least_request(columns: Columns) -> Order:
    """The fewest requests in flight first."""
    return columns.in_flight()


def by_turn(columns: Columns) -> Order:
    """One after the other."""
    count = len(columns.costs)
    return [(place - columns.turn) % count for place in range(count)]


def by_chance(columns: Columns) -> Order:
    """All alike."""
    return [0.0] * len(columns.costs)


def by_cache_aware(columns: Columns) -> Order:
    """The longest match where it is long enough and the fleet is balanced, else the idlest."""
    knobs, requests = columns.cache_aware, columns.in_flight()
    most, least = max(requests, default=0.0), min(requests, default=0.0)
    is_unbalanced = most - least > knobs.balance_abs and most > knobs.balance_rel * least
    enough = knobs.cache_threshold * columns.prompt_tokens
    saved = columns.saved()
    if is_unbalanced or max(saved, default=0.0) <= enough:
        return requests
    return [(-tokens, own) for tokens, own in zip(saved, requests, strict=True)]


def by_prefix_cache(columns: Columns) -> Order:
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


# Endpoints that are named where the configuration does not say how many: the best one and two to
# retry on, to an Envoy that we know to walk a list; the best one alone by the Endpoint Picker
# Protocol, since most gateways that speak it refuse a list.
BUFFERED_ENDPOINTS = 3
EPP_ENDPOINTS = 1


class Rules(msgspec.Struct, frozen=True):
    """All knobs of a pick.

    max_in_flight: requests of one worker above which it is picked only if all have as many; None
    for no limit. sheds: then the request is refused instead. refuses: also where no worker is
    eligible at all. endpoints: how many are picked at most, best first.
    """

    weights: Weights = Weights()
    cache_aware: CacheAware = CacheAware()
    prefix_cache: PrefixCache = PrefixCache()
    max_in_flight: int | None = None
    sheds: bool = False
    refuses: bool = False
    endpoints: int = BUFFERED_ENDPOINTS


def rules_of(policy: configuration.Policy) -> Rules:
    """The rules that a configuration asks for."""
    cost, smg, aibrix = policy.cost, policy.cache_aware, policy.prefix_cache
    return Rules(
        weights=Weights(
            affinity=cost.affinity_percent / 100,
            busy_affinity=cost.busy_affinity_percent / 100,
            running=float(cost.running_tokens),
            uncertain=cost.uncertain_percent / 100,
            speculative=cost.speculative_percent / 100,
            approximate=cost.approximate_percent / 100,
        ),
        cache_aware=CacheAware(
            smg.cache_threshold_percent / 100,
            smg.balance_abs_requests,
            smg.balance_rel_percent / 100,
        ),
        prefix_cache=PrefixCache(aibrix.imbalance_requests, aibrix.sigma_percent / 100),
        max_in_flight=policy.max_in_flight,
        sheds=policy.shed,
        refuses=policy.refuse,
        endpoints=endpoints_named(policy, is_duplex=False),
    )


def endpoints_named(policy: configuration.Policy, *, is_duplex: bool) -> int:
    """How many endpoints a proxy is told at most.

    is_duplex: whether it speaks the Endpoint Picker Protocol.
    """
    return policy.endpoints or (EPP_ENDPOINTS if is_duplex else BUFFERED_ENDPOINTS)


def policy_of(config: configuration.Config, model: str | None, asked: str | None) -> str:
    """The name of the policy for a request.

    asked: the value of its header `policy.header`, None without one. What is no policy is ignored.
    """
    if config.policy.header is not None and asked in configuration.POLICIES:
        return asked
    own = next((one.policy for one in config.models if one.name == model), None)
    return own or config.policy.name


class Ranks(NamedTuple):
    """What is known of the ranks of workers.

    may_name: whether requests may name one now. count: of a worker, by name; 0 where that is not
    known. work: in tokens, of the requests under
    way at an endpoint that named a rank, by that rank; given the endpoint, the time, and the tokens
    that a request counts for.
    """

    may_name: Callable[[], bool]
    count: Callable[[str], int]
    work: Callable[[str, float, float], Mapping[int, float]]


def rank_of(
    overlaps: Sequence[Overlap], counts: Sequence[int], count: int, work: Mapping[int, float]
) -> int | None:
    """The rank that a request is to name; None for none.

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
    """The request header that names a rank; None where there is none to name.

    name: as it is configured.
    """
    if name is None or rank is None:
        return None
    return (RANK_HEADER if name == AUTO else name.lower()), str(rank)
