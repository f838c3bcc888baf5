"""Envoy's clusters: the router's, and those of the workers with the hosts that are in them.

Source: `envoy.config.cluster.v3.Cluster` in `GET /config_dump`: `typed_extension_protocol_options`,
`transport_socket`; `envoy.extensions.transport_sockets.tls.v3.CommonTlsContext`. The hosts are
those of `GET /clusters?format=json` (`envoy.admin.v3.Clusters`), whatever source Envoy has them
from: its own configuration, DNS or EDS.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from extproc import address
from extproc.config import Config, Tls
from extproc.doctor.dump_tree import Node, listing, mapping, nodes, type_of, typed
from extproc.doctor.findings import About, Finding, shown
from extproc.headers import DESTINATION, DESTINATION_NAMESPACE

_CLUSTER = ".cluster.v3.Cluster"
_OVERRIDE = ".OverrideHost"
_TLS = ".UpstreamTlsContext"
_HTTP_OPTIONS = ".upstreams.http.v3.HttpProtocolOptions"

# Where a client's own certificate may come from: `CommonTlsContext`.
_CERTIFICATES = (
    "tls_certificates",
    "tls_certificate_sds_secret_configs",
    "tls_certificate_provider_instance",
    "custom_tls_certificate_selector",
)

Hosts = Mapping[str, Collection[str]]  # ip:port or unix:PATH of the hosts of each cluster


def hosts_in(answer: bytes) -> Hosts:
    """The hosts of each cluster that has some, by an answer of /clusters?format=json."""
    try:
        raw = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return {
        str(mapping(one).get("name")): {
            _place(mapping(mapping(host).get("address")))
            for host in listing(mapping(one).get("host_statuses"))
        }
        for one in listing(mapping(raw).get("cluster_statuses"))
    }


def _place(host: Node) -> str:
    if "pipe" in host:
        return f"{address.UNIX_PREFIX}{mapping(host['pipe']).get('path', '')}"
    socket = mapping(host.get("socket_address"))
    ip = str(socket.get("address", ""))
    return f"[{ip}]:{socket.get('port_value')}" if ":" in ip else f"{ip}:{socket.get('port_value')}"


def steered(parts: object) -> dict[str, Node]:
    """The clusters that send a request to the address that the router names, by their names."""
    return {
        str(one.get("name")): one
        for one in typed(parts, _CLUSTER)
        if any(map(overrides, nodes(one)))
    }


def overrides(node: Node) -> bool:
    """Whether a node is what sends a request to the address that the router named."""
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
    about: About, parts: object, hosts: Hosts, workers: Mapping[str, str]
) -> Iterator[Finding]:
    """Whether the workers are the hosts of the clusters that steer; all of them together.

    workers: the name of each by its ip:port, "" of one that takes no requests now and may be there
    or not. Nothing is said where Envoy does not list hosts, as of
    ORIGINAL_DST, which takes any address.
    """
    clusters = steered(parts)
    if not workers or any(one.get("type") == "ORIGINAL_DST" for one in clusters.values()):
        return
    listed = {name: set(hosts.get(name, ())) for name in clusters}
    if not any(name in hosts for name in clusters):
        return
    there = set[str]().union(*listed.values())
    names = shown(sorted(clusters))
    missing = sorted(name for place, name in workers.items() if name and place not in there)
    if missing:
        says = f"{shown(missing)}: not among the hosts of cluster {names}"
        yield about.wrong("envoy-worker-missing", f"{says}; picked, another one answers")
    strangers = sorted(there - workers.keys())
    if strangers:
        says = f"cluster {names} has hosts that are no workers of this configuration"
        yield about.wrong("envoy-host-unknown", f"{says}: {shown(strangers)}")


def judge_router_cluster(
    about: About, config: Config, ext_proc: Node, parts: object, hosts: Hosts
) -> Iterator[Finding]:
    """What is wrong between a filter and the router; nothing where the dump does not tell.

    parts: of the dump, with the clusters.
    """
    grpc = mapping(mapping(ext_proc.get("grpc_service")).get("envoy_grpc"))
    name = grpc.get("cluster_name")
    for cluster in typed(parts, _CLUSTER):
        if name is None or cluster.get("name") != name:
            continue
        if not _speaks_http2(cluster):
            says = f"cluster {name} speaks HTTP/1.1, and gRPC needs HTTP/2: the router is"
            yield about.wrong("envoy-router-protocol", f"{says} never reached")
        if not cluster.get("transport_socket_matches"):
            contexts = list(typed(cluster.get("transport_socket"), _TLS))
            yield from _tls(about, f"cluster {name}", config.extproc.tls, contexts)
        yield from _router_place(about, config, str(name), hosts.get(str(name), ()))


def _speaks_http2(cluster: Node) -> bool:
    if "http2_protocol_options" in cluster:  # as Envoy had it before 1.17, and still takes it
        return True
    for options in typed(cluster.get("typed_extension_protocol_options"), _HTTP_OPTIONS):
        explicit = mapping(options.get("explicit_http_config"))
        if "http2_protocol_options" in explicit or "auto_config" in options:
            return True
        # then it is the client's protocol, which may be either
        return "use_downstream_protocol_config" in options
    return False


def _router_place(
    about: About, config: Config, cluster: str, hosts: Collection[str]
) -> Iterator[Finding]:
    """Whether a host of the router's cluster may be the router.

    Addresses are not compared, since there may be names, and several routers. A port of another
    machine may be that of a Kubernetes Service.
    """
    wanted = config.envoy.router or config.extproc.listen
    if not hosts or wanted in hosts:
        return
    if wanted.startswith(address.UNIX_PREFIX):
        says = f"cluster {cluster} sends to {shown(sorted(hosts))}; the router listens on {wanted}"
        yield about.wrong("envoy-router-place", says)
        return
    port = address.parse(wanted).port
    if any(host.rpartition(":")[2] == str(port) for host in hosts):
        return
    says = f"cluster {cluster} sends to {shown(sorted(hosts))}; the router listens on port {port}"
    if config.envoy.router or any(host.startswith(("127.", "[::1]", "unix:")) for host in hosts):
        yield about.wrong("envoy-router-place", says)
    else:
        yield about.note("envoy", f"{says}: right only if something between maps the ports")


def _tls(
    about: About, cluster: str, router: Tls | None, contexts: Sequence[Node]
) -> Iterator[Finding]:
    if router is None and contexts:
        says = f"{cluster} speaks TLS, and the router plain text: it is never reached"
        yield about.wrong("envoy-tls-to-plain", says)
    if router is not None and not contexts:
        says = f"{cluster} speaks plain text, and the router TLS: it is never reached"
        yield about.wrong("envoy-plain-to-tls", says)
    asks = router is not None and router.client_ca is not None
    if asks and contexts and not any(map(_has_certificate, contexts)):
        says = f"{cluster} shows no certificate, and extproc.tls.client_ca asks for one"
        yield about.wrong("envoy-no-client-certificate", says)


def _has_certificate(context: Node) -> bool:
    common = mapping(context.get("common_tls_context"))
    return any(common.get(key) for key in _CERTIFICATES)
