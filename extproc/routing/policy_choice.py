"""Chooses the policy for a request, and how many endpoints are named."""

from extproc.config.policies import POLICIES
from extproc.config.schema import Config, Policy

# Default numbers of endpoints to name: the best one and two for retries to an Envoy, which uses a
# list; only the best one in the Endpoint Picker Protocol, since most of its gateways refuse a list.
BUFFERED_ENDPOINTS = 3
EPP_ENDPOINTS = 1


def endpoints_named(policy: Policy, *, is_duplex: bool) -> int:
    """Returns the most endpoints to name to a proxy.

    is_duplex: whether it speaks the Endpoint Picker Protocol.
    """
    return policy.endpoints or (EPP_ENDPOINTS if is_duplex else BUFFERED_ENDPOINTS)


def policy_of(config: Config, model: str | None, asked: str | None) -> str:
    """Returns the name of the policy for a request.

    asked: the value of its header `policy.header`, None without one. Unknown names are ignored.
    """
    if config.policy.header is not None and asked is not None and asked in POLICIES:
        return asked
    own = next((one.policy for one in config.models if one.name == model), None)
    return own or config.policy.name
