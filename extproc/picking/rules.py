"""The rules by which a worker is picked, as the pure functions take them."""

import msgspec

from extproc import config as configuration
from extproc.picking.pick import Weights
from extproc.picking.policies import CacheAware, PrefixCache

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
