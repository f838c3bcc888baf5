"""Envoy clusters: the workers of each model, and the router as Envoy reaches it."""

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from types import MappingProxyType

from envoy_data_plane.envoy.config.cluster import v3 as cluster
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request import (
    v3 as least_request,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import (
    v3 as override_host,
)
from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstream_http
from envoy_data_plane.envoy.type.metadata import v3 as metadata
from envoy_data_plane.google.protobuf import Any

from extproc import address
from extproc.config import Config
from extproc.envoy_endpoints import path_of
from extproc.envoy_tls import transport_socket
from extproc.headers import DESTINATION, DESTINATION_NAMESPACE, SERVED

WORKERS = "workers"
# The router, by the name that it has in every configuration of this project.
ROUTER = "kvsteer"

# Envoy listens on IPs only.
BOUND = {"localhost": "127.0.0.1"}
# Where a server that listens on every address is found from the same machine.
DIALLED = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104

# Envoy allows 1024 requests at once by default, and every request in flight holds one ext_proc
# stream; an engine's queue is where a request should wait, so these only stop a runaway.
MAX_REQUESTS = 100_000
MAX_CONNECTIONS = 10_000
MAX_RETRIES = 1_000


def socket(text: str, instead: Mapping[str, str] = MappingProxyType({})) -> core.Address:
    """An address of the configuration as Envoy writes it.

    instead: hosts to write differently, such as `BOUND`.
    """
    if text.startswith(address.UNIX_PREFIX):
        # gRPC also writes unix:///absolute/path.
        path = text.removeprefix(address.UNIX_PREFIX).removeprefix("//")
        return core.Address(pipe=core.Pipe(path=path))
    host, port = address.parse(text)
    return core.Address(
        socket_address=core.SocketAddress(address=instead.get(host, host), port_value=port)
    )


def cluster_names(models: Iterable[str]) -> dict[str, str]:
    """The cluster of each model: `workers` for a single one, else `workers-<model>`.

    A dot or a slash would split Envoy's statistics names, so only letters, digits, `_` and `-`
    are kept; models that differ in nothing else get a number.
    """
    models = list(models)
    if len(models) == 1:
        return {models[0]: WORKERS}
    names: dict[str, str] = {}
    for model in models:
        safe = f"{WORKERS}-" + re.sub(r"[^A-Za-z0-9_-]+", "-", model)
        taken, name, number = set(names.values()), safe, 2
        while name in taken:
            name, number = f"{safe}-{number}", number + 1
        names[model] = name
    return names


def worker_clusters(config: Config) -> list[cluster.Cluster]:
    """One cluster a model, in the order of the models.

    With envoy.eds_directory its members come from a file that the router keeps.
    """
    endpoints: dict[str, list[str]] = {model.name: [] for model in config.models}
    for worker in config.workers:
        endpoints[config.model_of(worker)].append(worker.endpoint)
    tells_served = config.accounting.responses != "none"
    found = [
        _worker_cluster(name, endpoints[model], tells_served=tells_served)
        for model, name in cluster_names(endpoints).items()
    ]
    if config.envoy.eds_directory is not None:
        for one in found:
            _follow(one, path_of(config.envoy.eds_directory, one.name))
    return found


def router_cluster(config: Config) -> cluster.Cluster:
    """The router, reached where it listens or where envoy.router says."""
    envoy = config.envoy
    http = upstream_http.HttpProtocolOptions(
        explicit_http_config=upstream_http.HttpProtocolOptionsExplicitHttpConfig(
            http2_protocol_options=core.Http2ProtocolOptions()
        )
    )
    found = _cluster(ROUTER, [envoy.router or config.extproc.listen], DIALLED)
    found.connect_timeout = timedelta(milliseconds=250)
    found.typed_extension_protocol_options = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": Any.pack(http)
    }
    if envoy.router_tls is not None:
        found.transport_socket = transport_socket(envoy.router_tls)
    return found


def _follow(followed: cluster.Cluster, path: str) -> None:
    """Has Envoy take a cluster's members from a file, and watch it."""
    followed.type = cluster.ClusterDiscoveryType.EDS
    followed.load_assignment = None
    followed.dns_lookup_family = (
        cluster.ClusterDnsLookupFamily.AUTO
    )  # the default: EDS has IPs only
    followed.eds_cluster_config = cluster.ClusterEdsClusterConfig(
        eds_config=core.ConfigSource(
            path_config_source=core.PathConfigSource(path=path),
            resource_api_version=core.ApiVersion.V3,
        )
    )


def _worker_cluster(name: str, endpoints: list[str], *, tells_served: bool) -> cluster.Cluster:
    found = _cluster(name, endpoints)
    found.connect_timeout = timedelta(seconds=1)
    found.load_balancing_policy = _load_balancing(tells_served=tells_served)
    return found


def _cluster(
    name: str, members: list[str], instead: Mapping[str, str] = MappingProxyType({})
) -> cluster.Cluster:
    """Resolves if any member is a host name, IPv4 first; IPs pass through unchanged."""
    found = cluster.Cluster(
        name=name,
        type=cluster.ClusterDiscoveryType.STATIC,
        load_assignment=_members(name, [socket(text, instead) for text in members]),
        circuit_breakers=_circuit_breakers(),
        outlier_detection=_outlier_detection(),
    )
    if any(_is_name(text) for text in members):
        found.type = cluster.ClusterDiscoveryType.STRICT_DNS
        # One family only: a server that listens on the other alone would be half dead to Envoy.
        # The router must resolve workers in the same way, since it names them by IP.
        found.dns_lookup_family = cluster.ClusterDnsLookupFamily.V4_PREFERRED
    return found


def _load_balancing(*, tells_served: bool) -> cluster.LoadBalancingPolicy:
    """The pick, from metadata alone: a header could come from the client.

    tells_served: write down beside it which host answered, for those that look at responses.
    """
    override = override_host.OverrideHost(
        override_host_sources=[
            override_host.OverrideHostOverrideHostSource(metadata=_metadata_key(DESTINATION))
        ],
        fallback_policy=_policy("least_request", Any.pack(least_request.LeastRequest())),
    )
    if tells_served:
        override.selected_host_key = _metadata_key(SERVED)
    return _policy("override_host", Any.pack(override))


def _metadata_key(name: str) -> metadata.MetadataKey:
    path = [metadata.MetadataKeyPathSegment(key=name)]
    return metadata.MetadataKey(key=DESTINATION_NAMESPACE, path=path)


def _policy(name: str, settings: Any) -> cluster.LoadBalancingPolicy:
    extension = core.TypedExtensionConfig(
        name=f"envoy.load_balancing_policies.{name}", typed_config=settings
    )
    policy = cluster.LoadBalancingPolicyPolicy(typed_extension_config=extension)
    return cluster.LoadBalancingPolicy(policies=[policy])


def _is_name(text: str) -> bool:
    return not text.startswith(address.UNIX_PREFIX) and not address.parse(text).is_ip


def _members(name: str, addresses: list[core.Address]) -> endpoint.ClusterLoadAssignment:
    members = [
        endpoint.LbEndpoint(endpoint=endpoint.Endpoint(address=member)) for member in addresses
    ]
    return endpoint.ClusterLoadAssignment(
        cluster_name=name, endpoints=[endpoint.LocalityLbEndpoints(lb_endpoints=members)]
    )


def _circuit_breakers() -> cluster.CircuitBreakers:
    limits = cluster.CircuitBreakersThresholds(
        max_requests=MAX_REQUESTS,
        max_pending_requests=MAX_REQUESTS,
        max_connections=MAX_CONNECTIONS,
        max_retries=MAX_RETRIES,
    )
    return cluster.CircuitBreakers(thresholds=[limits])


def _outlier_detection() -> cluster.OutlierDetection:
    """Takes a member that cannot be connected to out of the fallback, for two seconds and more.

    A count of 0 is never reached: an error that a member answers, 503 included, is its own affair.
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
