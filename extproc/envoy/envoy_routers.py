"""How Envoy reaches routers: TLS, and for several routers their health checks, order and choice."""

from datetime import timedelta

from envoy_data_plane.envoy.config.cluster import v3 as cluster
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.extensions.retry.priority.previous_priorities import (
    v3 as previous_priorities,
)
from envoy_data_plane.envoy.extensions.transport_sockets.tls import v3 as tls
from envoy_data_plane.envoy.type import v3 as percent
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.google.protobuf import Any

from extproc.config.sections import CONVERSATION, STANDBY, Routers, RouterTls
from extproc.envoy.hashing import hashes_by, ring

# A router that reports that it is not ready is left out after one health check; one that does not
# answer, after two.
ASKED_EVERY = timedelta(milliseconds=500)
UNANSWERED = 2

# Limit for a header that names a conversation: the router accepts 32 KiB of headers in all.
MAX_NAME_BYTES = 128


def stream_metadata(routers: Routers | None) -> list[core.HeaderValue]:
    """Returns the stream's metadata by which Envoy chooses the router.

    A header that the request does not have is left out.
    """
    if routers is None or routers.choice != CONVERSATION:
        return []
    return [
        core.HeaderValue(key=name, value=f"%REQ({name}):{MAX_NAME_BYTES}%")
        for name in map(str.lower, routers.conversation_headers)
    ]


def conversation_hashes(routers: Routers | None) -> list[route.RouteActionHashPolicy]:
    """Returns the hash policies that choose a router: by the first of the headers present."""
    return hashes_by(one.key for one in stream_metadata(routers))


def at_another(retries: route.RetryPolicy, routers: Routers) -> route.RetryPolicy:
    """Makes retries go to a standby, until health checks leave the failed router out."""
    if routers.choice == STANDBY:
        tried = previous_priorities.PreviousPrioritiesConfig(update_frequency=1)
        retries.retry_priority = route.RetryPolicyRetryPriority(
            name="envoy.retry_priorities.previous_priorities", typed_config=Any.pack(tried)
        )
    return retries


def use_several(found: cluster.Cluster, routers: Routers, processes: int) -> None:
    """Makes a cluster of several routers choose among those that are ready.

    processes: per router; a router's processes are adjacent in the cluster's members.
    """
    found.health_checks = [_health_check()]
    # Any router is tried only if none is ready; by default, Envoy does so if half of them are not.
    # Changes of health apply at once; by default, Envoy collects them for a second.
    found.common_lb_config = cluster.ClusterCommonLbConfig(
        healthy_panic_threshold=percent.Percent(value=1.0), update_merge_window=timedelta()
    )
    if routers.choice == CONVERSATION:
        found.load_balancing_policy = ring()
    if routers.choice == STANDBY and found.load_assignment is not None:
        (together,) = found.load_assignment.endpoints
        members = together.lb_endpoints
        found.load_assignment.endpoints = [
            endpoint.LocalityLbEndpoints(
                lb_endpoints=members[first : first + processes], priority=first // processes
            )
            for first in range(0, len(members), processes)
        ]


def _health_check() -> core.HealthCheck:
    return core.HealthCheck(
        timeout=ASKED_EVERY,
        interval=ASKED_EVERY,
        # by default, a cluster without requests so far is checked once a minute
        no_traffic_interval=ASKED_EVERY,
        unhealthy_threshold=UNANSWERED,
        healthy_threshold=1,
        grpc_health_check=core.HealthCheckGrpcHealthCheck(),
    )


def transport_socket(options: RouterTls) -> core.TransportSocket:
    """Returns TLS settings that check the router's certificate, and its name if one is set."""
    trusted = tls.CertificateValidationContext(trusted_ca=core.DataSource(filename=options.ca))
    if options.name is not None:
        name = tls.SubjectAltNameMatcher(
            san_type=tls.SubjectAltNameMatcherSanType.DNS,
            matcher=matcher.StringMatcher(exact=options.name),
        )
        trusted.match_typed_subject_alt_names = [name]
    common = tls.CommonTlsContext(
        tls_params=tls.TlsParameters(
            tls_minimum_protocol_version=tls.TlsParametersTlsProtocol.TLSv1_2,
            tls_maximum_protocol_version=tls.TlsParametersTlsProtocol.TLSv1_3,
        ),
        alpn_protocols=["h2"],
        validation_context=trusted,
    )
    if options.certificate is not None and options.key is not None:
        own = tls.TlsCertificate(
            certificate_chain=core.DataSource(filename=options.certificate),
            private_key=core.DataSource(filename=options.key),
        )
        common.tls_certificates = [own]
    context = tls.UpstreamTlsContext(common_tls_context=common, sni=options.name or "")
    return core.TransportSocket(name="envoy.transport_sockets.tls", typed_config=Any.pack(context))
