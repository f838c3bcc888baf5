"""Whether Envoy speaks TLS to the router where the router does, by Envoy's `GET /config_dump`.

Source: `envoy.config.cluster.v3.Cluster`, `transport_socket` and `transport_socket_matches`;
`envoy.extensions.transport_sockets.tls.v3.CommonTlsContext`.
"""

from collections.abc import Iterator, Sequence

from extproc.config import Config, Tls
from extproc.doctor.dump_tree import Node, mapping, typed
from extproc.doctor.findings import About, Finding

_CLUSTER = ".cluster.v3.Cluster"
_TLS = ".UpstreamTlsContext"

# Where a client's own certificate may come from: `CommonTlsContext`.
_CERTIFICATES = (
    "tls_certificates",
    "tls_certificate_sds_secret_configs",
    "tls_certificate_provider_instance",
    "custom_tls_certificate_selector",
)


def judge_tls(about: About, config: Config, ext_proc: Node, parts: object) -> Iterator[Finding]:
    """What is wrong between a filter and the router; nothing where the dump does not tell.

    parts: of the dump, with the clusters.
    """
    grpc = mapping(mapping(ext_proc.get("grpc_service")).get("envoy_grpc"))
    name = grpc.get("cluster_name")
    for cluster in typed(parts, _CLUSTER):
        is_it = name is not None and cluster.get("name") == name
        if is_it and not cluster.get("transport_socket_matches"):
            contexts = list(typed(cluster.get("transport_socket"), _TLS))
            yield from _judge(about, f"cluster {name}", config.extproc.tls, contexts)


def _judge(
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
