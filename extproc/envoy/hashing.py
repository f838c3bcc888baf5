"""How Envoy keeps requests with one value of a header together: a hash of it, and a ring of hosts.

By it Envoy chooses among routers, and among workers where it has no pick.
"""

from collections.abc import Iterable

from envoy_data_plane.envoy.config.cluster import v3 as cluster
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request import (
    v3 as least_request,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.ring_hash import v3 as ring_hash
from envoy_data_plane.google.protobuf import Any

from extproc.config.schema import Config
from extproc.config.sections import RING_HASH, session_headers

# Large enough to give two hosts about the same number of values.
RING_SIZE = 4096


def ring() -> cluster.LoadBalancingPolicy:
    """Returns RING_HASH; a host that is left out keeps its place, and the others theirs."""
    return policy("ring_hash", Any.pack(ring_hash.RingHash(minimum_ring_size=RING_SIZE)))


def hashes_by(headers: Iterable[str]) -> list[route.RouteActionHashPolicy]:
    """Returns the hash of the first of these headers that a request has."""
    return [
        route.RouteActionHashPolicy(
            header=route.RouteActionHashPolicyHeader(header_name=name), terminal=True
        )
        for name in headers
    ]


def fallback(config: Config) -> cluster.LoadBalancingPolicy:
    """Returns how Envoy balances a request without a pick."""
    if config.envoy.fallback == RING_HASH:
        return ring()
    return policy("least_request", Any.pack(least_request.LeastRequest()))


def session_hashes(config: Config) -> list[route.RouteActionHashPolicy]:
    """Returns what the fallback hashes: the headers that name a session; nothing without a hash."""
    if config.envoy.fallback != RING_HASH:
        return []
    return hashes_by(session_headers(config.policy.session_header))


def policy(name: str, settings: Any) -> cluster.LoadBalancingPolicy:
    """Returns a load-balancing policy of Envoy's with its settings."""
    extension = core.TypedExtensionConfig(
        name=f"envoy.load_balancing_policies.{name}", typed_config=settings
    )
    made = cluster.LoadBalancingPolicyPolicy(typed_extension_config=extension)
    return cluster.LoadBalancingPolicy(policies=[made])
