"""Compares the configuration that Envoy runs with what the router needs.

Sources: `envoy.admin.v3.ConfigDump` (`GET /config_dump`) as JSON, where durations are strings such
as "0.5s", 64-bit numbers are strings, and defaults are left out; it contains
`envoy.config.cluster.v3.Cluster`, `envoy.extensions.transport_sockets.tls.v3.CommonTlsContext` and
`envoy.config.route.v3.RouteConfiguration`. The hosts of a cluster come from
`envoy.admin.v3.Clusters` (`GET /clusters?format=json`), no matter whether Envoy has them from its
own configuration, DNS or EDS. envoy/envoy.yaml explains each setting.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from extproc.base import address
from extproc.base.headers import DESTINATION, DESTINATION_NAMESPACE
from extproc.config.schema import Config, Tls
from extproc.config.sections import RING_HASH
from extproc.requests.request import PATHS
from kvstate.undecodable import UNDECODABLE
from kvtools.doctor.findings import Finding, Subject, name_list
from kvtools.doctor.tenancy import judge_failure_mode
from kvtools.envoy.hold_limits import low_limits, seconds
from kvtools.envoy.path_rewrites import unrecognized

Node = Mapping[str, Any]
# The hosts of each cluster, as ip:port or unix:PATH, each with the number of its failed connections
# if all of them failed, 0 otherwise.
Hosts = Mapping[str, Mapping[str, int]]
_MANAGER = ".HttpConnectionManager"
_EXT_PROC = ".ext_proc.v3.ExternalProcessor"

# Envoy's default.
DEFAULT_TIMEOUT_SECONDS = 0.2

_DUPLEX = "FULL_DUPLEX_STREAMED"


class FilterContext(NamedTuple):
    """The surroundings of a filter.

    name: the filter's name in the list of filters. routes: the route configurations outside
    connection managers. steered: names of the clusters that send requests to the picked worker.
    """

    name: str
    listener: Node
    manager: Node
    routes: Sequence[Node]
    steered: Collection[str]

    @property
    def hosts(self) -> Iterator[tuple[Node, Node]]:
        """Yields the virtual hosts that requests come to, each with its route configuration."""
        name = mapping(self.manager.get("rds")).get("route_config_name")
        own = mapping(self.manager.get("route_config"))
        for config in [own] if own else [one for one in self.routes if one.get("name") == name]:
            for host in listing(config.get("virtual_hosts")):
                yield config, mapping(host)


# The default of `CircuitBreakers.Thresholds.max_requests`.
DEFAULT_MAX_REQUESTS = 1_024


def judge_envoy(
    about: Subject, config: Config, dump: bytes, hosts: Hosts, workers: Mapping[str, str]
) -> Iterator[Finding]:
    """Yields the findings about an Envoy.

    dump: its answer to GET /config_dump. hosts: its clusters' hosts, from `hosts_in`. workers: as
    for `judge_hosts`.
    """
    try:
        raw = msgspec.json.decode(dump)
    except UNDECODABLE:
        raw = None
    if not isinstance(raw, Mapping) or not isinstance(raw.get("configs"), list):
        yield about.wrong("envoy-unreadable", "its /config_dump cannot be read")
        return
    # the bootstrap holds the static part a second time
    parts = [one for one in raw["configs"] if not type_of(one).endswith(".BootstrapConfigDump")]
    found = dict.fromkeys(
        (
            *_filters(about, config, parts, hosts),
            *_fallbacks(about, config, parts),
            *judge_hosts(about, parts, hosts, workers),
        )
    )
    says = "ext_proc, routes and clusters are configured correctly"
    yield from found or [about.right("envoy", says)]


def _filters(about: Subject, config: Config, parts: object, hosts: Hosts) -> Iterator[Finding]:
    """Yields the faults of the ext_proc filters and their surroundings."""
    apart = [one for one in nodes(parts) if isinstance(one.get("virtual_hosts"), list)]
    names = steered(parts).keys()
    listeners = [one for one in nodes(parts) if "filter_chains" in one]
    managers = [(one, manager) for one in listeners for manager in typed(one, _MANAGER)]
    has_filter = False
    for listener, manager in managers:
        for one in map(mapping, listing(manager.get("http_filters"))):
            around = FilterContext(str(one.get("name", "")), listener, manager, apart, names)
            for ext_proc in typed(one, _EXT_PROC):
                has_filter = True
                yield from _ext_proc(about, config, ext_proc)
                yield from judge_router_cluster(about, config, ext_proc, parts, hosts)
                yield from _manager(about, manager)
                yield from judge_routes(about, around)
                yield from judge_rewrites(about, config, around)
                if _mode(ext_proc) != _DUPLEX:
                    yield from judge_buffers(about, config, around)
                yield from judge_holds(about, config, ext_proc, around)
    if not has_filter:
        yield about.wrong("envoy-no-ext-proc", "no listener has an ext_proc filter")
    elif not any(map(overrides, nodes(parts))):
        says = "no cluster has an override_host policy that reads the metadata "
        says += f"{DESTINATION_NAMESPACE} {DESTINATION}"
        yield about.wrong("envoy-no-override", says)


def _ext_proc(about: Subject, config: Config, ext_proc: Node) -> Iterator[Finding]:
    timeout = seconds(ext_proc.get("message_timeout"), DEFAULT_TIMEOUT_SECONDS)
    if timeout * 1000 <= config.extproc.deadline_ms:
        says = f"message_timeout is {timeout * 1000:g} ms"
        says += f", but a decision may take {config.extproc.deadline_ms} ms (extproc.deadline_ms)"
        yield about.wrong("envoy-message-timeout", says)
    fails_open = bool(ext_proc.get("failure_mode_allow"))
    yield from judge_failure_mode(config, about, fails_open=fails_open)
    mode = _mode(ext_proc)
    if mode not in ("BUFFERED", _DUPLEX):
        says = f"request_body_mode is {mode}: the router does not get the prompt"
        yield about.wrong("envoy-body-mode", says)
    if mode == "BUFFERED" and not ext_proc.get("allow_mode_override"):
        says = (
            "allow_mode_override is false: bodies that the router does not need are buffered anyway"
        )
        yield about.wrong("envoy-mode-override", says)
    options = mapping(mapping(ext_proc.get("metadata_options")).get("receiving_namespaces"))
    if DESTINATION_NAMESPACE not in listing(options.get("untyped")):
        says = f"receiving_namespaces lacks {DESTINATION_NAMESPACE}: Envoy drops the pick"
        yield about.wrong("envoy-namespaces", says)
    yield from _responses(about, config, mapping(ext_proc.get("processing_mode")))


def _responses(about: Subject, config: Config, mode: Node) -> Iterator[Finding]:
    """Yields a finding if the router does not get the end or the headers of responses."""
    if mode.get("response_trailer_mode") != "SEND" and mode.get("response_body_mode") is None:
        says = "response_trailer_mode is not SEND: Envoy 1.40 still tells the router when a "
        says += "response ends; if an Envoy does not, load is counted only until the pick"
        yield about.note("envoy", says)
    wanted = config.accounting.responses
    if wanted != "none" and mode.get("response_header_mode") == "SKIP":
        says = f"accounting.responses is {wanted}, but response_header_mode is SKIP: the router"
        yield about.wrong("envoy-response-headers", f"{says} gets no responses")


def _manager(about: Subject, manager: Node) -> Iterator[Finding]:
    early = manager.get("early_header_mutation_extensions")
    removed = {str(one["remove"]).lower() for one in nodes(early) if "remove" in one}
    if DESTINATION not in removed:
        says = f"a client's own {DESTINATION} is not removed: it steers while the router is down"
        yield about.wrong("envoy-client-header", says)
    if manager.get("normalize_path") is not True:
        says = "normalize_path is not true: routes see /v1/chat/%63ompletions as another path than"
        yield about.wrong("envoy-path", f"{says} the engines, which decode it")
    action = manager.get("path_with_escaped_slashes_action", "KEEP_UNCHANGED")
    if action in ("IMPLEMENTATION_SPECIFIC_DEFAULT", "KEEP_UNCHANGED"):
        says = "path_with_escaped_slashes_action keeps %2F in paths: routes see another path than"
        yield about.note("envoy", f"{says} the engines, which decode it")


def _mode(ext_proc: Node) -> str:
    return str(mapping(ext_proc.get("processing_mode")).get("request_body_mode", "NONE"))


_CLUSTER = ".cluster.v3.Cluster"
_OVERRIDE = ".OverrideHost"
_RING_HASH = ".ring_hash.v3.RingHash"
_TLS = ".UpstreamTlsContext"
_HTTP_OPTIONS = ".upstreams.http.v3.HttpProtocolOptions"

# Fields of `CommonTlsContext` that may give a client's own certificate.
_CERTIFICATES = (
    "tls_certificates",
    "tls_certificate_sds_secret_configs",
    "tls_certificate_provider_instance",
    "custom_tls_certificate_selector",
)


def hosts_in(answer: bytes) -> Hosts:
    """Returns the hosts of each cluster that has any, from an answer to /clusters?format=json."""
    try:
        raw = msgspec.json.decode(answer)
    except UNDECODABLE:
        return {}
    return {
        str(mapping(one).get("name")): {
            place_of(mapping(mapping(host).get("address"))): _in_vain(mapping(host))
            for host in listing(mapping(one).get("host_statuses"))
        }
        for one in listing(mapping(raw).get("cluster_statuses"))
    }


def _in_vain(host: Node) -> int:
    """Returns how many connections to a host have failed, if all have; 0 otherwise."""
    stats = map(mapping, listing(host.get("stats")))
    # a 64-bit number is a string in JSON, and left out if it is 0
    counts = {str(one.get("name")): str(one.get("value", 0)) for one in stats}
    failed = counts.get("cx_connect_fail", "")
    return int(failed) if failed.isdecimal() and failed == counts.get("cx_total") else 0


def place_of(host: Node) -> str:
    """Returns an `envoy.config.core.v3.Address` as ip:port or unix:PATH."""
    if "pipe" in host:
        return f"{address.UNIX_PREFIX}{mapping(host['pipe']).get('path', '')}"
    socket = mapping(host.get("socket_address"))
    ip = str(socket.get("address", ""))
    return f"[{ip}]:{socket.get('port_value')}" if ":" in ip else f"{ip}:{socket.get('port_value')}"


def _fallbacks(about: Subject, config: Config, parts: object) -> Iterator[Finding]:
    """Yields the clusters that keep no sessions together while the router is away."""
    if config.envoy.fallback != RING_HASH:
        return
    for name, cluster in steered(parts).items():
        for node in filter(overrides, nodes(cluster)):
            if next(typed(node.get("fallback_policy"), _RING_HASH), None) is None:
                says = f"cluster {name} does not hash by session when it has no pick"
                yield about.wrong("envoy-fallback", f"{says} (envoy.fallback: {RING_HASH})")


def steered(parts: object) -> dict[str, Node]:
    """Returns the clusters that send requests to the address that the router names, by name."""
    return {
        str(one.get("name")): one
        for one in typed(parts, _CLUSTER)
        if any(map(overrides, nodes(one)))
    }


def overrides(node: Node) -> bool:
    """Tells whether a node makes Envoy send requests to the address that the router names."""
    if node.get("type") == "ORIGINAL_DST":
        return True
    if not type_of(node).endswith(_OVERRIDE):
        return False
    sources = [mapping(one) for one in listing(node.get("override_host_sources"))]
    return any(
        str(one.get("header", "")).lower() == DESTINATION
        or mapping(one.get("metadata")).get("key") == DESTINATION_NAMESPACE
        for one in sources
    )


def judge_hosts(
    about: Subject, parts: object, hosts: Hosts, workers: Mapping[str, str]
) -> Iterator[Finding]:
    """Yields a finding for workers missing in the steered clusters, and for unknown hosts in them.

    workers: each worker's name by its ip:port. The ip:port is "" if unknown, so that any host may
    be that worker. The name is "" if the worker takes no requests now; it may or may not be a host.
    Yields nothing if Envoy lists no hosts, as for ORIGINAL_DST, which accepts any address.
    """
    clusters = steered(parts)
    if not workers or any(one.get("type") == "ORIGINAL_DST" for one in clusters.values()):
        return
    listed = {name: set(hosts.get(name, {})) for name in clusters}
    if not any(name in hosts for name in clusters):
        return
    there = set[str]().union(*listed.values())
    names = name_list(sorted(clusters))
    known = {place: name for place, name in workers.items() if place}
    missing = sorted(name for place, name in known.items() if name and place not in there)
    if missing:
        says = f"{name_list(missing)}: not among the hosts of cluster {names}"
        yield about.wrong("envoy-worker-missing", f"{says}; if picked, another worker answers")
    strangers = sorted(there - workers.keys())
    if strangers and len(known) == len(workers):
        says = f"cluster {names} has hosts that are not workers of this configuration"
        yield about.wrong("envoy-host-unknown", f"{says}: {name_list(strangers)}")


def judge_router_cluster(
    about: Subject, config: Config, ext_proc: Node, parts: object, hosts: Hosts
) -> Iterator[Finding]:
    """Yields the faults of the connection from a filter to the router, as far as the dump shows.

    parts: the parts of the dump that have the clusters.
    """
    grpc = mapping(mapping(ext_proc.get("grpc_service")).get("envoy_grpc"))
    name = grpc.get("cluster_name")
    for cluster in typed(parts, _CLUSTER):
        if name is None or cluster.get("name") != name:
            continue
        if not _speaks_http2(cluster):
            says = f"cluster {name} speaks HTTP/1.1, but gRPC needs HTTP/2: Envoy cannot reach"
            yield about.wrong("envoy-router-protocol", f"{says} the router")
        if not cluster.get("transport_socket_matches"):
            contexts = list(typed(cluster.get("transport_socket"), _TLS))
            yield from _tls(about, f"cluster {name}", config.extproc.tls, contexts)
        yield from _held_streams(about, config, cluster)
        at = hosts.get(str(name), {})
        yield from _router_place(about, config, str(name), at)
        yield from _routers_apart(about, config, cluster, at)
        if at and all(at.values()):
            places = name_list(sorted(at))
            says = f"cluster {name}: all {sum(at.values())} connections to {places} failed"
            yield about.wrong("envoy-router-unreachable", says)


def _held_streams(about: Subject, config: Config, cluster: Node) -> Iterator[Finding]:
    """Yields a finding if requests that wait in the router may use up its cluster's streams."""
    thresholds = listing(mapping(cluster.get("circuit_breakers")).get("thresholds"))
    usual = [one for one in map(mapping, thresholds) if one.get("priority") in (None, "DEFAULT")]
    limit = number(usual[0].get("max_requests") if usual else None, DEFAULT_MAX_REQUESTS)
    waiting = config.policy.hold.max_requests * config.extproc.processes
    if config.policy.hold.enabled and limit < 2 * waiting:
        says = f"cluster {cluster.get('name')} has {limit} streams (circuit_breakers: max_requests)"
        says += f", but {waiting} requests may wait in the router (policy.hold.max_requests)"
        yield about.wrong("envoy-hold-requests", says)


def _routers_apart(
    about: Subject, config: Config, cluster: Node, hosts: Collection[str]
) -> Iterator[Finding]:
    """Yields a finding if Envoy asks several routers in turn that do not share.

    The router says so itself if `envoy.routers` names them. Processes of one router share.
    """
    is_configured = config.envoy.routers is not None or config.sharing is not None
    if is_configured or len(hosts) <= config.extproc.processes:
        return
    groups = map(mapping, listing(mapping(cluster.get("load_assignment")).get("endpoints")))
    by_hash = cluster.get("lb_policy") in ("RING_HASH", "MAGLEV")
    if by_hash or any(number(one.get("priority"), 0) for one in groups):
        return
    says = f"cluster {cluster.get('name')} sends to {name_list(sorted(hosts))} in turn"
    yield about.wrong("routers-share-nothing", f"{says}, but sharing is not configured")


def _speaks_http2(cluster: Node) -> bool:
    if "http2_protocol_options" in cluster:  # the form before Envoy 1.17, still accepted
        return True
    for options in typed(cluster.get("typed_extension_protocol_options"), _HTTP_OPTIONS):
        explicit = mapping(options.get("explicit_http_config"))
        if "http2_protocol_options" in explicit or "auto_config" in options:
            return True
        # the client's protocol is used, which may be HTTP/2
        return "use_downstream_protocol_config" in options
    return False


def _router_place(
    about: Subject, config: Config, cluster: str, hosts: Collection[str]
) -> Iterator[Finding]:
    """Yields a finding if no host of the router's cluster can be the router.

    Only ports are compared: addresses may be names, and there may be several routers. A port on
    another machine may belong to a Kubernetes Service.
    """
    wanted = config.router_addresses()
    if not hosts or any(text in hosts for text in wanted):
        return
    sends = f"cluster {cluster} sends to {name_list(sorted(hosts))}"
    if all(text.startswith(address.UNIX_PREFIX) for text in wanted):
        says = f"{sends}; the router listens on {' and '.join(wanted)}"
        yield about.wrong("envoy-router-place", says)
        return
    ports = {
        str(address.parse(text).port) for text in wanted if not text.startswith(address.UNIX_PREFIX)
    }
    if any(host.rpartition(":")[2] in ports for host in hosts):
        return
    says = f"{sends}; the router listens on port {' or '.join(sorted(ports))}"
    is_configured = config.envoy.router or config.envoy.routers
    if is_configured or any(host.startswith(("127.", "[::1]", "unix:")) for host in hosts):
        yield about.wrong("envoy-router-place", says)
    else:
        yield about.note("envoy", f"{says}: correct only if something in between maps the ports")


def _tls(
    about: Subject, cluster: str, router: Tls | None, contexts: Sequence[Node]
) -> Iterator[Finding]:
    if router is None and contexts:
        says = f"{cluster} speaks TLS, but the router plain text: Envoy cannot reach it"
        yield about.wrong("envoy-tls-to-plain", says)
    if router is not None and not contexts:
        says = f"{cluster} speaks plain text, but the router TLS: Envoy cannot reach it"
        yield about.wrong("envoy-plain-to-tls", says)
    asks = router is not None and router.client_ca is not None
    if asks and contexts and not any(map(_has_certificate, contexts)):
        says = f"{cluster} presents no certificate, but extproc.tls.client_ca requires one"
        yield about.wrong("envoy-no-client-certificate", says)


def _has_certificate(context: Node) -> bool:
    common = mapping(context.get("common_tls_context"))
    return any(common.get(key) for key in _CERTIFICATES)


# Envoy's defaults.
DEFAULT_BUFFER_BYTES = 1024 * 1024
DEFAULT_ROUTE_SECONDS = 15.0

# Generations may take longer than a timeout below this.
LEAST_ROUTE_SECONDS = 60.0

_PER_ROUTE = ".ExtProcPerRoute"

# Retry conditions that let Envoy try the next worker if it cannot connect to the picked one.
_RETRIES = frozenset(("connect-failure", "reset", "gateway-error", "5xx", "reset-before-request"))


def judge_buffers(about: Subject, config: Config, around: FilterContext) -> Iterator[Finding]:
    """Yields a finding if Envoy's buffer is smaller than the bodies that the router reads.

    Streamed bodies and routes that switch the filter off need no buffer.
    """
    default = number(around.listener.get("per_connection_buffer_limit_bytes"), DEFAULT_BUFFER_BYTES)
    for tree, host in around.hosts:
        limit = number(host.get("request_body_buffer_limit"), default)
        every = [mapping(one) for one in listing(host.get("routes"))]
        asked = [one for one in every if not _is_disabled(around.name, (one, host, tree))]
        if every and not asked:
            continue
        least = min(
            (number(one.get("request_body_buffer_limit"), limit) for one in asked), default=limit
        )
        if least < config.extproc.max_body_bytes:
            says = f"virtual host {host.get('name')}: bodies above {least} bytes get 413"
            says += f"; the router reads up to {config.extproc.max_body_bytes}"
            yield about.wrong("envoy-buffer-limit", says)


class _Route(NamedTuple):
    """A route that LLM API requests take to the workers; path: the path of such a request."""

    where: str
    route: Node
    host: Node
    config: Node
    path: str


def judge_routes(about: Subject, around: FilterContext) -> Iterator[Finding]:
    """Yields the faults of the routes that LLM API requests take to the workers."""
    first = {one.where: one for one in reversed(list(_llm_routes(around)))}
    for one, taken in reversed(first.items()):
        if _is_disabled(around.name, (taken.route, taken.host, taken.config)):
            says = f"{one}: ext_proc is disabled, but it takes {taken.path} to the workers"
            yield about.wrong("envoy-route-disabled", says)
        action = mapping(taken.route.get("route"))
        limit = seconds(action.get("timeout"), DEFAULT_ROUTE_SECONDS)
        if 0 < limit < LEAST_ROUTE_SECONDS:
            says = f"{one}: its timeout of {limit:g} s cuts longer generations off"
            yield about.wrong("envoy-route-timeout", says)
        policy = mapping(action.get("retry_policy") or taken.host.get("retry_policy"))
        reasons = {reason.strip() for reason in str(policy.get("retry_on", "")).split(",")}
        if reasons.isdisjoint(_RETRIES):
            says = f"{one}: no retries: a request steered to a worker that has just died fails"
            yield about.wrong("envoy-no-retries", says)


def judge_holds(
    about: Subject, config: Config, ext_proc: Node, around: FilterContext
) -> Iterator[Finding]:
    """Yields the limits that end a request before the router lets it go (`policy.hold`)."""
    hold = config.policy.hold
    if not hold.enabled:
        return
    needed = hold.envoy_seconds
    limit = seconds(ext_proc.get("max_message_timeout"), 0.0)
    if limit < needed and _mode(ext_proc) != _DUPLEX:  # in which there is no such timeout
        says = f"max_message_timeout is {limit:g} s, but the router may ask for {needed} s"
        yield about.wrong("envoy-hold-message-timeout", f"{says} (policy.hold.bound_seconds)")
    for one in _llm_routes(around):
        for low in low_limits(around.manager, mapping(one.route.get("route")), needed):
            whose = f"{one.where}: its" if low.is_of_route else "the connection manager's"
            says = f"{whose} {low.key} of {low.seconds:g} s ends requests that wait in the router"
            yield about.wrong("envoy-hold-limit", f"{says}, as they may for {needed} s")


def judge_rewrites(about: Subject, config: Config, around: FilterContext) -> Iterator[Finding]:
    """Yields the routes to the workers whose requests the router does not recognize."""
    for tree, host in around.hosts:
        for place, route in enumerate(map(mapping, listing(host.get("routes")))):
            action = mapping(route.get("route"))
            if not _leads_to(action, around.steered):
                continue
            if _is_disabled(around.name, (route, host, tree)):
                continue
            says = unrecognized(mapping(route.get("match")), action, config)
            if says:
                where = f"virtual host {host.get('name')}, route {route.get('name') or place}"
                yield about.wrong("envoy-path-rewritten", f"{where}: {says}")


def _llm_routes(around: FilterContext) -> Iterator[_Route]:
    """Yields the routes that LLM API requests take to the workers."""
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
    return False  # regular expressions are not tried: a hostile one may never end


def _leads_to(action: Node, steered: Collection[str]) -> bool:
    """Tells whether a route leads to the workers, or may because a header names the cluster."""
    weighted = mapping(action.get("weighted_clusters"))
    named = [action, *map(mapping, listing(weighted.get("clusters")))]
    names = {one.get("cluster", one.get("name")) for one in named}
    return "cluster_header" in action or not names.isdisjoint(steered)


def _is_disabled(name: str, places: Iterable[Node]) -> bool:
    """Tells whether the first of these places that configures the filter disables it."""
    for place in places:
        own = mapping(mapping(place.get("typed_per_filter_config")).get(name))
        if own:
            return any(
                one.get("disabled") is True
                for one in nodes(own)
                if one is own or type_of(one).endswith(_PER_ROUTE)
            )
    return False


_MAX_DIGITS = 19


def typed(tree: object, suffix: str) -> Iterator[Node]:
    """Yields every mapping in a tree whose `@type` ends with `suffix`."""
    return (one for one in nodes(tree) if type_of(one).endswith(suffix))


def nodes(tree: object) -> Iterator[Node]:
    """Yields every mapping in a tree, the tree itself included."""
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def type_of(node: object) -> str:
    """Returns the node's `@type`, "" if it has none."""
    return str(mapping(node).get("@type", ""))


def mapping(value: object) -> Node:
    """Returns the value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def listing(value: object) -> list[Any]:
    """Returns the value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def number(value: object, default: int) -> int:
    """Returns a number of 0 or more, given as a number or as text; else the default."""
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else default
