"""The envoy.yaml for a configuration, as `kvsteer envoy` prints it.

This folder knows Envoy's configuration: it prints a whole one (here), adds the router to one that
exists (`envoy_patch`, `yaml_edit`), and writes the files by which Envoy follows the workers
(`endpoint_files`). It may know the router's configuration, and nothing that runs: all but the
reading of files by commands is pure.

The rule: how Envoy is set up follows from the router's configuration, and what a user wrote stays
as it was, comments included, or the patch is refused. A client's own headers of the names that the
router owns are removed before it is asked.

It is built from envoy-data-plane's messages, so that a misspelt field fails here and not in Envoy.
envoy/envoy.yaml is an example of the output that explains each setting. The messages need the extra
`envoy`, so no module of the running router imports this one.
"""

import typing
from collections.abc import Iterable, Mapping
from datetime import timedelta
from types import MappingProxyType

import betterproto2
import yaml
from envoy_data_plane.envoy.config.bootstrap import v3 as bootstrap
from envoy_data_plane.envoy.config.cluster import v3 as cluster
from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation_rules
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.envoy.config.listener import v3 as listener
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.filters.http.lua import v3 as lua
from envoy_data_plane.envoy.extensions.filters.http.router import v3 as router
from envoy_data_plane.envoy.extensions.filters.http.upstream_codec import v3 as upstream_codec
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import (
    v3 as connection_manager,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation import (
    v3 as early_header_mutation,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request import (
    v3 as least_request,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import (
    v3 as override_host,
)
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts import v3 as previous_hosts
from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstream_http
from envoy_data_plane.envoy.type import v3 as percent
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.envoy.type.metadata import v3 as metadata
from envoy_data_plane.google.protobuf import Any

from extproc.base import address
from extproc.base.errors import ConfigError
from extproc.base.headers import (
    DESTINATION,
    DESTINATION_NAMESPACE,
    MODEL,
    PREFILL_CLUSTER,
    PREFILL_TAIL,
    PREFILLER,
    SERVED,
    UPSTREAM,
)
from extproc.config.owned_headers import removed_early
from extproc.config.schema import Config
from extproc.config.sections import MIRROR, OPEN, PREFILL, SGLANG
from extproc.envoy.endpoint_files import cluster_names, path_of, prefill_cluster
from extproc.envoy.envoy_routers import (
    at_another,
    conversation_hashes,
    stream_metadata,
    transport_socket,
    use_several,
)
from extproc.envoy.hashing import fallback, policy, session_hashes
from extproc.envoy.model_finder import model_finder

HEADING = """\
# A complete Envoy configuration for this KVSteer configuration. Run it with: envoy -c FILE
# Needs Envoy {oldest} or newer. Why each setting is there: envoy/envoy.yaml in KVSteer's sources.
#
# If you add routes that do not lead to these workers, switch the filter off for each of them:
#   typed_per_filter_config:
#     envoy.filters.http.ext_proc:
#       "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute
#       disabled: true
"""

NO_LIMIT = timedelta(0)

# Engines close a connection that was idle for five seconds (uvicorn's default, which vLLM and
# SGLang keep); Envoy has to do so before them.
IDLE_TIMEOUT = timedelta(seconds=4)

HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

# Edits the body of a second request: the header has a number of bytes to cut off the end, and the
# text to append instead.
_TAIL_CUTTER = """\
function envoy_on_request(handle)
  local tail = handle:headers():get("{header}")
  if not tail then return end
  local cut, text = tail:match("^(%d+):(.*)$")
  local body = handle:body()
  if not (cut and body) then return end
  local whole = body:getBytes(0, body:length())
  local length = body:setBytes(whole:sub(1, #whole - tonumber(cut)) .. text)
  handle:headers():replace("content-length", length)
  handle:headers():remove("{header}")
end
"""


def render(config: Config) -> str:
    """Returns a complete envoy.yaml for an Envoy in front of `kvsteer serve` with this file.

    The same configuration always gives the same text.

    Raises:
        ConfigError: the router serves TLS, but envoy.router_tls is missing.
    """
    check_tls(config)
    heading = HEADING.format(oldest=oldest(config))
    return heading + yaml.safe_dump(tree_of(_bootstrap(config)), sort_keys=False)


def tree_of(message: betterproto2.Message) -> dict[str, typing.Any]:
    """Returns a message as a tree for YAML.

    Fields keep their original names: betterproto2 would turn one into consecutive_5_xx.
    """
    return message.to_dict(casing=typing.cast("typing.Any", str))


def oldest(config: Config) -> str:
    """Returns the oldest Envoy that accepts this: newer fields need newer versions."""
    if config.accounting.responses != "none":
        return "1.38"  # writes the host that answered into the metadata
    return "1.36" if config.envoy.routers is None else "1.37"


def check_tls(config: Config) -> None:
    """Raises ConfigError if the router serves TLS but Envoy has no settings to check it."""
    if config.extproc.tls is not None and config.envoy.router_tls is None:
        raise ConfigError(["envoy.router_tls: missing: the router serves TLS (extproc.tls)"])


def _bootstrap(config: Config) -> bootstrap.Bootstrap:
    # Envoy reads files of endpoints only if its node has a name.
    node = core.Node(id="kvsteer", cluster="kvsteer") if config.envoy.eds_directory else None
    return bootstrap.Bootstrap(
        node=node,
        admin=bootstrap.Admin(address=socket(config.envoy.admin, BOUND)),
        static_resources=bootstrap.BootstrapStaticResources(
            listeners=[_listener(config)],
            clusters=[*worker_clusters(config), router_cluster(config)],
        ),
    )


def _listener(config: Config) -> listener.Listener:
    http = listener.Filter(
        name="envoy.filters.network.http_connection_manager",
        typed_config=Any.pack(_connection_manager(config)),
    )
    return listener.Listener(
        name="clients",
        address=socket(config.envoy.listen, BOUND),
        filter_chains=[listener.FilterChain(filters=[http])],
    )


def _connection_manager(config: Config) -> connection_manager.HttpConnectionManager:
    filters: dict[str, betterproto2.Message] = {FILTER: ext_proc_filter(config)}
    if len(config.models) > 1:
        filters["envoy.filters.http.lua"] = model_finder(config)
    filters["envoy.filters.http.router"] = router.Router()
    return connection_manager.HttpConnectionManager(
        stat_prefix="clients",
        # An engine may take minutes to its first token; its own limits apply.
        stream_idle_timeout=NO_LIMIT,
        # A path means to routes and router what it means to the engines, which decode it.
        normalize_path=True,
        path_with_escaped_slashes_action=(
            connection_manager.HttpConnectionManagerPathWithEscapedSlashesAction.UNESCAPE_AND_FORWARD
        ),
        # It appends the address of the other end to x-forwarded-for, which clients can write too:
        # the client's is before those of as many proxies as are trusted.
        use_remote_address=True,
        xff_num_trusted_hops=config.envoy.trusted_hops,
        preserve_external_request_id=True,
        early_header_mutation_extensions=[client_headers_removed(config)],
        route_config=route.RouteConfiguration(
            name="clients", virtual_hosts=[_virtual_host(config)]
        ),
        http_filters=[
            connection_manager.HttpFilter(name=name, typed_config=Any.pack(message))
            for name, message in filters.items()
        ],
    )


def client_headers_removed(config: Config) -> core.TypedExtensionConfig:
    """Returns the removal of clients' own headers, which would count while the router is down."""
    names = removed_early(config)
    mutations = [mutation_rules.HeaderMutation(remove=name) for name in names]
    return core.TypedExtensionConfig(
        name="envoy.http.early_header_mutation.header_mutation",
        typed_config=Any.pack(early_header_mutation.HeaderMutation(mutations=mutations)),
    )


def ext_proc_filter(config: Config) -> ext_proc.ExternalProcessor:
    """Returns the settings of the filter that asks the router."""
    headers, bodies = ext_proc.ProcessingModeHeaderSendMode, ext_proc.ProcessingModeBodySendMode
    namespaces = ext_proc.MetadataOptionsMetadataNamespaces(untyped=[DESTINATION_NAMESPACE])
    options = ext_proc.MetadataOptions(receiving_namespaces=namespaces)
    hold = config.policy.hold
    longest = timedelta(seconds=hold.envoy_seconds) if hold.enabled else None
    reads_responses = config.accounting.responses != "none"
    if reads_responses:  # the cluster writes into it which worker answered
        options.forwarding_namespaces = namespaces
    return ext_proc.ExternalProcessor(
        grpc_service=core.GrpcService(
            envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=ROUTER),
            initial_metadata=stream_metadata(config.envoy.routers),
        ),
        failure_mode_allow=config.isolation is None or config.isolation.fail == OPEN,
        message_timeout=timedelta(milliseconds=config.envoy.message_timeout_ms),
        max_message_timeout=longest,  # of a message for which the router asks for more time
        processing_mode=ext_proc.ProcessingMode(
            request_header_mode=headers.SEND,
            request_body_mode=bodies.BUFFERED,
            response_header_mode=headers.SEND if reads_responses else headers.SKIP,
            # The router asks for a body in its answer to the headers.
            response_body_mode=bodies.NONE,
            request_trailer_mode=headers.SKIP,
            # Keeps the stream open until the response ends, which is how load is counted.
            response_trailer_mode=headers.SEND,
        ),
        allow_mode_override=True,
        metadata_options=options,
        response_attributes=[UPSTREAM],  # for the responses that the router reads
    )


def switched_off() -> Any:
    """Returns the per-route setting that switches the filter off."""
    return Any.pack(ext_proc.ExtProcPerRoute(disabled=True))


def _virtual_host(config: Config) -> route.VirtualHost:
    return route.VirtualHost(
        name="inference",
        domains=["*"],
        routes=_routes(config),
        retry_policy=retry_policy(),
        request_body_buffer_limit=config.envoy.request_body_buffer_limit_bytes,
    )


def _routes(config: Config) -> list[route.Route]:
    """Returns a route for each model, if there are several, and a last one to the first model.

    The last one is used while the router is down, or if it does not know the model.
    """
    clusters = cluster_names(model.name for model in config.models)
    default = _route(config, next(iter(clusters.values())), [])
    several = clusters.items() if len(clusters) > 1 else ()
    routes = [*(_route(config, name, [_is_model(model)]) for model, name in several), default]
    if config.disaggregation.mode == MIRROR:
        for action in [one.route for one in routes if one.route is not None]:
            action.request_mirror_policies = [_second_leg()]
    return routes


def _second_leg() -> route.RouteActionRequestMirrorPolicy:
    """Mirrors the request to the cluster that the router names; Envoy drops the answer."""
    return route.RouteActionRequestMirrorPolicy(
        cluster_header=PREFILL_CLUSTER, disable_shadow_host_suffix_append=True
    )


def _route(config: Config, cluster: str, headers: list[route.HeaderMatcher]) -> route.Route:
    hashes = session_hashes(config)
    return route.Route(
        match=route.RouteMatch(prefix="/", headers=headers),
        route=route.RouteAction(cluster=cluster, timeout=NO_LIMIT, hash_policy=hashes),
    )


def _is_model(model: str) -> route.HeaderMatcher:
    return route.HeaderMatcher(name=MODEL, string_match=matcher.StringMatcher(exact=model))


def retry_policy() -> route.RetryPolicy:
    """Returns retries on the next endpoint of the pick: override_host ignores hosts' health.

    Envoy retries only if the worker has not received the request, so nothing is generated twice.
    """
    other_host = route.RetryPolicyRetryHostPredicate(
        name="envoy.retry_host_predicates.previous_hosts",
        typed_config=Any.pack(previous_hosts.PreviousHostsPredicate()),
    )
    return route.RetryPolicy(
        retry_on="connect-failure,refused-stream,reset-before-request",
        num_retries=3,
        retry_host_predicate=[other_host],
        # A dead host has nothing in flight, so the fallback would choose it again and again.
        host_selection_retry_max_attempts=16,
        retry_back_off=route.RetryPolicyRetryBackOff(
            base_interval=timedelta(milliseconds=1), max_interval=timedelta(milliseconds=10)
        ),
    )


# The names of the router's cluster and of the filter, in every configuration of this project.
ROUTER = "kvsteer"
FILTER = "envoy.filters.http.ext_proc"

# Envoy listens on IPs only.
BOUND = {"localhost": "127.0.0.1"}

# How to reach a server that listens on every address, from the same machine.
DIALLED = {"0.0.0.0": "127.0.0.1", "::": "::1"}

# Envoy's default is 1024 requests at once, and every request in flight holds one ext_proc stream.
# Requests should wait in the engines' queues, so these limits only stop a runaway.
MAX_REQUESTS = 100_000
MAX_CONNECTIONS = 10_000
MAX_RETRIES = 1_000


def worker_clusters(config: Config) -> list[cluster.Cluster]:
    """Returns one cluster for each model, in the order of the models, then their prefill clusters.

    With envoy.eds_directory their members come from files that the router writes.
    """
    rules = config.disaggregation
    helpers: dict[str, list[str]] = {model.name: [] for model in config.models}
    endpoints: dict[str, list[str]] = {model.name: [] for model in config.models}
    for worker in config.workers:
        group = helpers if worker.role == PREFILL else endpoints
        group[config.model_of(worker)].append(worker.endpoint)
    closed = {one.endpoint for one in config.workers if not rules.answers_alone(one.role)}
    names = cluster_names(endpoints)
    found = [
        _worker_cluster(config, name, endpoints[model], closed) for model, name in names.items()
    ]
    if rules.mode == MIRROR:
        found += [_prefill_cluster(config, name, helpers[model]) for model, name in names.items()]
    if config.envoy.eds_directory is not None:
        for one in found:
            _follow(one, path_of(config.envoy.eds_directory, one.name))
    return found


def router_cluster(config: Config) -> cluster.Cluster:
    """Returns the router's cluster, with the addresses of extproc.listen or envoy.router(s).

    Each process is its own endpoint. Each Envoy thread opens one connection to an endpoint, so
    processes behind one port (SO_REUSEPORT) would get very uneven shares; endpoints take turns.
    """
    envoy, processes = config.envoy, range(config.extproc.processes)
    members = [
        address.nth(one, number) for one in config.router_addresses() for number in processes
    ]
    http = upstream_http.HttpProtocolOptions(
        explicit_http_config=upstream_http.HttpProtocolOptionsExplicitHttpConfig(
            http2_protocol_options=core.Http2ProtocolOptions()
        ),
        hash_policy=conversation_hashes(envoy.routers),
        # a stream that cannot be opened is retried at another router
        retry_policy=at_another(retry_policy(), envoy.routers) if envoy.routers else None,
    )
    found = _cluster(ROUTER, members, DIALLED)
    found.connect_timeout = timedelta(milliseconds=250)
    found.typed_extension_protocol_options = {HTTP_OPTIONS: Any.pack(http)}
    if envoy.routers is not None:
        use_several(found, envoy.routers, len(processes))
    if envoy.router_tls is not None:
        found.transport_socket = transport_socket(envoy.router_tls)
    return found


def _follow(followed: cluster.Cluster, path: str) -> None:
    """Makes Envoy read a cluster's members from a file, and watch it."""
    followed.type = cluster.ClusterDiscoveryType.EDS
    followed.load_assignment = None
    followed.dns_lookup_family = (
        cluster.ClusterDnsLookupFamily.AUTO
    )  # the default: EDS has only IP addresses
    followed.eds_cluster_config = cluster.ClusterEdsClusterConfig(
        eds_config=core.ConfigSource(
            path_config_source=core.PathConfigSource(path=path),
            resource_api_version=core.ApiVersion.V3,
        )
    )


def _worker_cluster(
    config: Config, name: str, endpoints: list[str], closed: set[str]
) -> cluster.Cluster:
    """Returns a cluster of workers that answer; closed: those that get only picked requests."""
    found = _cluster(name, endpoints)
    found.connect_timeout = timedelta(seconds=1)
    found.typed_extension_protocol_options = {HTTP_OPTIONS: Any.pack(worker_http())}
    found.load_balancing_policy = load_balancing(config)
    if closed.intersection(endpoints):
        found.load_assignment = _members(
            name,
            [socket(text) for text in endpoints],
            [at for at, text in enumerate(endpoints) if text in closed],
        )
        # else Envoy chooses closed ones too where too few are open
        found.common_lb_config = cluster.ClusterCommonLbConfig(
            healthy_panic_threshold=percent.Percent(value=0.0)
        )
    return found


def _prefill_cluster(config: Config, workers: str, endpoints: list[str]) -> cluster.Cluster:
    """Returns the cluster for second requests, each sent to the worker that its header names.

    For all but SGLang's workers, a filter of the cluster changes the end of the body.
    """
    found = _cluster(prefill_cluster(workers), endpoints)
    found.connect_timeout = timedelta(seconds=1)
    named = override_host.OverrideHostOverrideHostSource(header=PREFILLER)
    override = override_host.OverrideHost(
        override_host_sources=[named],
        fallback_policy=policy("least_request", Any.pack(least_request.LeastRequest())),
    )
    found.load_balancing_policy = policy("override_host", Any.pack(override))
    if config.disaggregation.connector == SGLANG:
        found.typed_extension_protocol_options = {HTTP_OPTIONS: Any.pack(worker_http())}
        return found
    code = _TAIL_CUTTER.format(header=PREFILL_TAIL)
    filters = {
        "envoy.filters.http.lua": lua.Lua(default_source_code=core.DataSource(inline_string=code)),
        "envoy.filters.http.upstream_codec": upstream_codec.UpstreamCodec(),
    }
    options = worker_http()
    options.http_filters = [
        connection_manager.HttpFilter(name=name, typed_config=Any.pack(message))
        for name, message in filters.items()
    ]
    found.typed_extension_protocol_options = {HTTP_OPTIONS: Any.pack(options)}
    # the filter buffers the whole body
    found.per_connection_buffer_limit_bytes = config.envoy.request_body_buffer_limit_bytes
    return found


def _cluster(
    name: str, members: list[str], instead: Mapping[str, str] = MappingProxyType({})
) -> cluster.Cluster:
    """Returns a cluster that resolves host names, IPv4 first, and uses IP addresses unchanged."""
    found = cluster.Cluster(
        name=name,
        type=cluster.ClusterDiscoveryType.STATIC,
        load_assignment=_members(name, [socket(text, instead) for text in members]),
        circuit_breakers=circuit_breakers(),
        outlier_detection=outlier_detection(),
    )
    if any(_is_name(text) for text in members):
        found.type = cluster.ClusterDiscoveryType.STRICT_DNS
        # One family only: half the addresses of a server that listens on just one would be dead.
        # The router must resolve workers in the same way, since it names them by IP.
        found.dns_lookup_family = cluster.ClusterDnsLookupFamily.V4_PREFERRED
    return found


def socket(text: str, instead: Mapping[str, str] = MappingProxyType({})) -> core.Address:
    """Returns an address of the configuration in Envoy's form.

    instead: hosts to replace, such as those of `BOUND`.
    """
    if text.startswith(address.UNIX_PREFIX):
        # gRPC also writes unix:///absolute/path.
        path = text.removeprefix(address.UNIX_PREFIX).removeprefix("//")
        return core.Address(pipe=core.Pipe(path=path))
    host, port = address.parse(text)
    return core.Address(
        socket_address=core.SocketAddress(address=instead.get(host, host), port_value=port)
    )


def worker_http() -> upstream_http.HttpProtocolOptions:
    """Returns how Envoy speaks to workers: it closes idle connections before they do.

    An engine may close one just when Envoy sends a request over it, which the client would see as
    a 503: it may have been read, so it is not sent again.
    """
    return upstream_http.HttpProtocolOptions(
        common_http_protocol_options=core.HttpProtocolOptions(idle_timeout=IDLE_TIMEOUT),
        explicit_http_config=upstream_http.HttpProtocolOptionsExplicitHttpConfig(
            http_protocol_options=core.Http1ProtocolOptions()
        ),
    )


def load_balancing(config: Config) -> cluster.LoadBalancingPolicy:
    """Returns the policy that follows the pick in the metadata: a header could be the client's.

    Where responses are read, it also writes into the metadata which host answered.
    """
    override = override_host.OverrideHost(
        override_host_sources=[
            override_host.OverrideHostOverrideHostSource(metadata=_metadata_key(DESTINATION))
        ],
        fallback_policy=fallback(config),
    )
    if config.accounting.responses != "none":
        override.selected_host_key = _metadata_key(SERVED)
    return policy("override_host", Any.pack(override))


def _metadata_key(name: str) -> metadata.MetadataKey:
    path = [metadata.MetadataKeyPathSegment(key=name)]
    return metadata.MetadataKey(key=DESTINATION_NAMESPACE, path=path)


def _is_name(text: str) -> bool:
    return not text.startswith(address.UNIX_PREFIX) and not address.parse(text).is_ip


def _members(
    name: str, addresses: list[core.Address], closed: Iterable[int] = ()
) -> endpoint.ClusterLoadAssignment:
    """Returns the members of a cluster; closed: indices of those that get only picked requests."""
    members = [
        endpoint.LbEndpoint(endpoint=endpoint.Endpoint(address=member)) for member in addresses
    ]
    for place in closed:
        members[place].health_status = core.HealthStatus.DRAINING
    return endpoint.ClusterLoadAssignment(
        cluster_name=name, endpoints=[endpoint.LocalityLbEndpoints(lb_endpoints=members)]
    )


def circuit_breakers() -> cluster.CircuitBreakers:
    """Returns limits so high that requests queue in the engines."""
    limits = cluster.CircuitBreakersThresholds(
        max_requests=MAX_REQUESTS,
        max_pending_requests=MAX_REQUESTS,
        max_connections=MAX_CONNECTIONS,
        max_retries=MAX_RETRIES,
    )
    return cluster.CircuitBreakers(thresholds=[limits])


def outlier_detection() -> cluster.OutlierDetection:
    """Returns the ejection of unreachable members from the fallback, for at least two seconds.

    A count of 0 is never reached: errors that a member answers, 503 included, do not eject it.
    """
    return cluster.OutlierDetection(
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=1,
        consecutive_gateway_failure=0,
        consecutive_5xx=0,
        interval=timedelta(milliseconds=500),
        base_ejection_time=timedelta(seconds=2),
        max_ejection_percent=100,
    )
