"""Envoy's routes to the workers: whether they ask the router, and let a generation end.

Source: `envoy.config.route.v3.RouteConfiguration` in `GET /config_dump`; `typed_per_filter_config`
with `envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute`. The most specific place that sets
a thing counts: route, virtual host, route configuration.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from extproc.config import Config
from extproc.doctor.dump_tree import Node, listing, mapping, nodes, number, seconds, type_of
from extproc.doctor.findings import About, Finding
from extproc.requests.request import PATHS

# Envoy's own, where nothing is set.
DEFAULT_BUFFER_BYTES = 1024 * 1024
DEFAULT_ROUTE_SECONDS = 15.0

# Generations take longer than a limit below this.
LEAST_ROUTE_SECONDS = 60.0

_PER_ROUTE = ".ExtProcPerRoute"

# What lets Envoy try the next worker where the picked one cannot be connected to.
_RETRIES = frozenset(("connect-failure", "reset", "gateway-error", "5xx", "reset-before-request"))


class Around(NamedTuple):
    """Where a filter stands.

    name: its own in the list of filters. routes: the route configurations that stand apart.
    steered: names of the clusters that go by the address that the router names.
    """

    name: str
    listener: Node
    manager: Node
    routes: Sequence[Node]
    steered: Collection[str]

    @property
    def hosts(self) -> Iterator[tuple[Node, Node]]:
        """The virtual hosts that requests come to, each with its route configuration."""
        name = mapping(self.manager.get("rds")).get("route_config_name")
        own = mapping(self.manager.get("route_config"))
        for config in [own] if own else [one for one in self.routes if one.get("name") == name]:
            for host in listing(config.get("virtual_hosts")):
                yield config, mapping(host)


class _Route(NamedTuple):
    """One route to the workers that LLM API requests take; path: one of them."""

    where: str
    route: Node
    host: Node
    config: Node
    path: str


def judge_buffers(about: About, config: Config, around: Around) -> Iterator[Finding]:
    """Whether bodies that the router would read fit; what is streamed is not held."""
    default = number(around.listener.get("per_connection_buffer_limit_bytes"), DEFAULT_BUFFER_BYTES)
    for _, host in around.hosts:
        limit = number(host.get("request_body_buffer_limit"), default)
        each = [mapping(one) for one in listing(host.get("routes"))]
        least = min(
            (number(one.get("request_body_buffer_limit"), limit) for one in each), default=limit
        )
        if least < config.extproc.max_body_bytes:
            says = f"virtual host {host.get('name')}: bodies above {least} bytes get 413"
            says += f"; the router reads up to {config.extproc.max_body_bytes}"
            yield about.wrong("envoy-buffer-limit", says)


def judge_routes(about: About, around: Around) -> Iterator[Finding]:
    """What is wrong with the routes by which LLM API requests reach the workers."""
    first = {one.where: one for one in reversed(list(_taken(around)))}
    for one, taken in reversed(first.items()):
        if _is_disabled(around.name, taken):
            says = f"{one}: ext_proc is disabled, and {taken.path} goes to the workers there"
            yield about.wrong("envoy-route-disabled", says)
        action = mapping(taken.route.get("route"))
        limit = seconds(action.get("timeout"), DEFAULT_ROUTE_SECONDS)
        if 0 < limit < LEAST_ROUTE_SECONDS:
            says = f"{one}: its timeout is {limit:g} s, which ends longer generations"
            yield about.wrong("envoy-route-timeout", says)
        policy = mapping(action.get("retry_policy") or taken.host.get("retry_policy"))
        reasons = {reason.strip() for reason in str(policy.get("retry_on", "")).split(",")}
        if reasons.isdisjoint(_RETRIES):
            says = f"{one}: no retries: a request picked for a worker that has just died fails"
            yield about.wrong("envoy-no-retries", says)


def _taken(around: Around) -> Iterator[_Route]:
    """The routes to the workers that requests of some LLM API take."""
    for config, host in around.hosts:
        for path in PATHS:
            for place, route in enumerate(map(mapping, listing(host.get("routes")))):
                match = mapping(route.get("match"))
                if not _matches(match, path):
                    continue
                if _leads_to(mapping(route.get("route")), around.steered):
                    where = f"virtual host {host.get('name')}, route {route.get('name') or place}"
                    yield _Route(where, route, host, config, path)
                if not match.get("headers") and not match.get("query_parameters"):
                    break


def _matches(match: Node, path: str) -> bool:
    if "prefix" in match:
        return path.startswith(str(match["prefix"]))
    if "path" in match:
        return path == str(match["path"])
    if "path_separated_prefix" in match:
        prefix = str(match["path_separated_prefix"])
        return path == prefix or path.startswith(f"{prefix}/")
    return False  # by a regular expression of somebody else's, which may take for ever


def _leads_to(action: Node, steered: Collection[str]) -> bool:
    """Whether a route leads to the workers, or may: by a header that names the cluster."""
    weighted = mapping(action.get("weighted_clusters"))
    named = [action, *map(mapping, listing(weighted.get("clusters")))]
    names = {one.get("cluster", one.get("name")) for one in named}
    return "cluster_header" in action or not names.isdisjoint(steered)


def _is_disabled(name: str, taken: _Route) -> bool:
    for place in (taken.route, taken.host, taken.config):
        own = mapping(mapping(place.get("typed_per_filter_config")).get(name))
        if own:
            return any(
                one.get("disabled") is True
                for one in nodes(own)
                if one is own or type_of(one).endswith(_PER_ROUTE)
            )
    return False
