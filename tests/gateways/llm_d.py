"""Envoy as the standalone chart of llm-d-router 0.10 configures it, and the settings of its picker.

The sidecar's default: Envoy reaches the picker by TLS without verifying it, and the header names
the address.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import yaml

from tests.deploy.manifests import KUBERNETES
from tests.gateways.gateways import Place
from tests.ports import free_port
from tests.system.envoy_process import running_envoy
from tests.system.ingresses.existing_envoy import connection_manager, load_assignment, plain_envoy

Tree = dict[str, Any]

FOLDER = KUBERNETES / "llm-d-router"
_EXTENSIONS = "type.googleapis.com/envoy.extensions"
_MANY = {"thresholds": [dict.fromkeys(("max_connections", "max_requests"), 40_000)]}


def configuration() -> Tree:
    """The router's configuration, from the chart's values."""
    values = yaml.safe_load((FOLDER / "values.yaml").read_text())
    told: Tree = yaml.safe_load(values["router"]["epp"]["pluginsCustomConfig"]["kvsteer.yaml"])
    return told


@contextlib.asynccontextmanager
async def running(place: Place) -> AsyncIterator[None]:
    """Runs that Envoy."""
    admin = free_port()
    tree = _envoy(plain_envoy(place.port, admin, []), place.router_port)
    async with running_envoy(yaml.safe_dump(tree), admin):
        yield


def _envoy(tree: Tree, router_port: int) -> Tree:
    (listener,) = tree["static_resources"]["listeners"]
    listener["per_connection_buffer_limit_bytes"] = 32_768
    manager = connection_manager(tree)
    manager["http_filters"].insert(0, _ext_proc())
    (host,) = manager["route_config"]["virtual_hosts"]
    (route,) = host["routes"]
    route["route"] = {
        "cluster": "original_destination_cluster",
        "timeout": "86400s",
        "idle_timeout": "86400s",
    }
    tree["static_resources"]["clusters"] = [_workers(), _picker(router_port)]
    return tree


def _ext_proc() -> Tree:
    sent = dict.fromkeys(("request_header_mode", "response_header_mode"), "SEND")
    sent |= dict.fromkeys(("request_trailer_mode", "response_trailer_mode"), "SEND")
    bodies = ("request_body_mode", "response_body_mode")
    config = {
        "@type": f"{_EXTENSIONS}.filters.http.ext_proc.v3.ExternalProcessor",
        "failure_mode_allow": True,
        "grpc_service": {
            "envoy_grpc": {"cluster_name": "ext_proc", "authority": "localhost:9002"},
            "timeout": "10s",
        },
        "processing_mode": sent | dict.fromkeys(bodies, "FULL_DUPLEX_STREAMED"),
        "message_timeout": "1000s",
    }
    return {"name": "envoy.filters.http.ext_proc", "typed_config": config}


def _workers() -> Tree:
    return {
        "name": "original_destination_cluster",
        "type": "ORIGINAL_DST",
        "connect_timeout": "1000s",
        "lb_policy": "CLUSTER_PROVIDED",
        "circuit_breakers": _MANY,
        "original_dst_lb_config": {
            "use_http_header": True,
            "http_header_name": "x-gateway-destination-endpoint",
        },
    }


def _picker(port: int) -> Tree:
    tls = f"{_EXTENSIONS}.transport_sockets.tls.v3.UpstreamTlsContext"
    http = f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions"
    windows = {"initial_stream_window_size": 65_536, "initial_connection_window_size": 1_048_576}
    service = "envoy.service.ext_proc.v3.ExternalProcessor"
    return {
        "name": "ext_proc",
        "type": "STATIC",
        "connect_timeout": "86400s",
        "lb_policy": "LEAST_REQUEST",
        "circuit_breakers": _MANY,
        "health_checks": [
            {
                "timeout": "2s",
                "interval": "10s",
                "unhealthy_threshold": 3,
                "healthy_threshold": 2,
                "reuse_connection": True,
                "grpc_health_check": {"service_name": service},
                "tls_options": {"alpn_protocols": ["h2"]},
            }
        ],
        "transport_socket": {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {"@type": tls, "common_tls_context": {"validation_context": {}}},
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": http,
                "explicit_http_config": {"http2_protocol_options": windows},
            }
        },
        "load_assignment": load_assignment("ext_proc", [f"127.0.0.1:{port}"]),
    }
