"""The peers' configurations, each as its documentation recommends for prefix-aware routing.

llm-d: docs/discovery.md and config/charts/llm-d-router-standalone of llm-d-router, branch
release-0.10; plugins and weights as in deploy/config/epp-precise-prefix-cache-config.yaml there.
The light picker: the same Envoy settings; it has none of its own. AIBrix: deployment/standalone of
0.6.0, with the destination of dist/chart/templates/gateway-instance/envoy_config.yaml there.
"""

from typing import Any

import yaml

EXTENSIONS = "type.googleapis.com/envoy.extensions"
HEADER = "x-gateway-destination-endpoint"
# By this the hashes of Envoy tell conversations apart; KVSteer reads it by default, if it needs to.
SESSION = "x-session-id"
POOL, NAMESPACE = "peers", "llm"


def as_llm_d_has_it(rendered: str) -> str:
    """Returns KVSteer's Envoy configuration with llm-d's filter, destination and picker cluster.

    Left out: access logs and TLS to the picker, which KVSteer does not have here either.
    """
    tree: dict[str, Any] = yaml.safe_load(rendered)
    listener = tree["static_resources"]["listeners"][0]
    listener["per_connection_buffer_limit_bytes"] = 32768
    manager = _manager(tree)
    manager.pop("early_header_mutation_extensions")
    host = manager["route_config"]["virtual_hosts"][0]
    for key in ("retry_policy", "request_body_buffer_limit"):
        host.pop(key, None)
    host["routes"][0]["route"] |= {"timeout": "86400s", "idle_timeout": "86400s"}
    asks = _asks(manager)
    for key in ("allow_mode_override", "response_attributes", "metadata_options"):
        asks.pop(key, None)
    asks["failure_mode_allow"] = True
    asks["message_timeout"] = "1000s"
    asks["grpc_service"]["timeout"] = "10s"
    asks["processing_mode"] = {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_trailer_mode": "SEND",
    }
    clusters = tree["static_resources"]["clusters"]
    clusters[0] = _destination(clusters[0]["name"], HEADER)
    picker = clusters[1]
    picker.pop("outlier_detection")
    picker["connect_timeout"] = "86400s"
    picker["lb_policy"] = "LEAST_REQUEST"
    picker["health_checks"] = [
        {
            "timeout": "2s",
            "interval": "10s",
            "unhealthy_threshold": 3,
            "healthy_threshold": 2,
            "reuse_connection": True,
            "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
        }
    ]
    return yaml.safe_dump(tree)


def for_the_light_picker(rendered: str) -> str:
    """Returns llm-d's configuration, but with each body in one message, for the light picker.

    This picker answers the headers only after the last chunk of a body, but each chunk before that.
    So with FULL_DUPLEX_STREAMED, Envoy 1.40 answers 500 to every request whose body has two chunks,
    as all of HTTP/1.1 have; with STREAMED, it loses the pick (run with release 1.6.0). The buffer
    filter before the picker joins the chunks; the picker's documentation does not mention it.
    """
    tree: dict[str, Any] = yaml.safe_load(as_llm_d_has_it(rendered))
    listener = tree["static_resources"]["listeners"][0]
    manager = _manager(tree)
    listener.pop("per_connection_buffer_limit_bytes")
    buffer = {"@type": f"{EXTENSIONS}.filters.http.buffer.v3.Buffer", "max_request_bytes": 33554432}
    whole = {"name": "envoy.filters.http.buffer", "typed_config": buffer}
    manager["http_filters"].insert(0, whole)
    asks = _asks(manager)
    asks["send_body_without_waiting_for_header_response"] = True
    asks["processing_mode"] = {
        "request_header_mode": "SEND",
        "response_header_mode": "SKIP",
        "request_body_mode": "STREAMED",
        "request_trailer_mode": "SKIP",
        "response_trailer_mode": "SKIP",
    }
    return yaml.safe_dump(tree)


def as_aibrix_has_it(rendered: str) -> str:
    """Returns KVSteer's Envoy configuration with AIBrix's filter and destination.

    Access logs are left out.
    """
    tree: dict[str, Any] = yaml.safe_load(rendered)
    manager = _manager(tree)
    manager.pop("early_header_mutation_extensions")
    manager["route_config"]["virtual_hosts"][0].pop("retry_policy")
    asks = _asks(manager)
    for key in ("allow_mode_override", "response_attributes", "metadata_options"):
        asks.pop(key, None)
    asks["failure_mode_allow"] = False
    asks["message_timeout"] = "30s"
    asks["grpc_service"]["timeout"] = "30s"
    asks["processing_mode"] = {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": "BUFFERED",
        "response_body_mode": "STREAMED",
        "request_trailer_mode": "SKIP",
        "response_trailer_mode": "SKIP",
    }
    clusters = tree["static_resources"]["clusters"]
    clusters[0] = _destination(clusters[0]["name"], "target-pod")
    clusters[1].pop("outlier_detection")
    clusters[1]["connect_timeout"] = "5s"
    return yaml.safe_dump(tree)


def aibrix_endpoints(endpoints: list[str]) -> str:
    """Returns the endpoints file of AIBrix's standalone mode."""
    return yaml.safe_dump(
        {"models": [{"name": "tiny", "endpoints": [{"address": one} for one in endpoints]}]}
    )


def _manager(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns the HTTP connection manager."""
    listener = tree["static_resources"]["listeners"][0]
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def _asks(manager: dict[str, Any]) -> dict[str, Any]:
    """Returns the filter that calls the picker."""
    named = (one for one in manager["http_filters"] if "ext_proc" in one["name"])
    found: dict[str, Any] = next(named)["typed_config"]
    return found


def _destination(name: str, header: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "ORIGINAL_DST",
        "connect_timeout": "1000s",
        "lb_policy": "CLUSTER_PROVIDED",
        "circuit_breakers": {
            "thresholds": [
                {"max_connections": 40000, "max_pending_requests": 40000, "max_requests": 40000}
            ]
        },
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": header},
    }


def round_robin(rendered: str) -> str:
    """Returns KVSteer's Envoy configuration with round robin instead of a picker."""
    tree: dict[str, Any] = yaml.safe_load(rendered)
    cluster = tree["static_resources"]["clusters"][0]
    cluster.pop("load_balancing_policy")
    cluster["lb_policy"] = "ROUND_ROBIN"
    return yaml.safe_dump(tree)


def hashed(rendered: str, policy: str, percent: int | None = None) -> str:
    """Returns KVSteer's Envoy configuration with a hash of the session instead of a picker.

    policy: RING_HASH or MAGLEV. percent: its `hash_balance_factor`: no worker gets more than this
    share of the mean of requests in flight. The rest is as Envoy has it by default.
    """
    tree: dict[str, Any] = yaml.safe_load(rendered)
    cluster = tree["static_resources"]["clusters"][0]
    cluster.pop("load_balancing_policy")
    cluster["lb_policy"] = policy
    if percent is not None:
        bounded = {"hash_balance_factor": percent}
        cluster["common_lb_config"] = {"consistent_hashing_lb_config": bounded}
    route = _manager(tree)["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    route["hash_policy"] = [{"header": {"header_name": SESSION}}]
    return yaml.safe_dump(tree)


def llm_d(endpoints_file: str, renderer: str, events_port: int, replay_port: int) -> str:
    """Returns the picker's configuration: precise prefixes, tokens from vLLM's render endpoint."""
    plugins: list[dict[str, Any]] = [
        {"type": "file-discovery", "parameters": {"path": endpoints_file, "watchFile": True}},
        {
            "type": "token-producer",
            "parameters": {"modelName": "tiny", "vllm": {"url": f"http://{renderer}"}},
        },
        {"type": "endpoint-notification-source"},
        {"type": "metrics-data-source"},
        {"type": "core-metrics-extractor"},
        {"type": "single-profile-handler"},
        {
            "type": "precise-prefix-cache-producer",
            "parameters": {
                "tokenProcessorConfig": {"blockSizeTokens": 16},
                "speculativeIndexing": True,
                "kvEventsConfig": {
                    "topicFilter": "kv@",
                    "discoverPods": True,
                    "podDiscoveryConfig": {
                        "socketPort": events_port,
                        "replaySocketPort": replay_port,
                    },
                },
            },
        },
        {
            "type": "prefix-cache-scorer",
            "parameters": {"prefixMatchInfoProducerName": "precise-prefix-cache-producer"},
        },
        {"type": "kv-cache-utilization-scorer"},
        {"type": "queue-scorer"},
        {"type": "max-score-picker"},
    ]
    profile = [
        {"pluginRef": "prefix-cache-scorer", "weight": 2.0},
        {"pluginRef": "kv-cache-utilization-scorer", "weight": 1.0},
        {"pluginRef": "queue-scorer", "weight": 1.0},
        {"pluginRef": "max-score-picker"},
    ]
    sources = [
        ("metrics-data-source", "core-metrics-extractor"),
        ("endpoint-notification-source", "precise-prefix-cache-producer"),
    ]
    return yaml.safe_dump(
        {
            "apiVersion": "llm-d.ai/v1alpha1",
            "kind": "EndpointPickerConfig",
            "plugins": plugins,
            "dataLayer": {
                "discovery": {"pluginRef": "file-discovery"},
                "sources": [
                    {"pluginRef": source, "extractors": [{"pluginRef": extractor}]}
                    for source, extractor in sources
                ],
            },
            "schedulingProfiles": [{"name": "default", "plugins": profile}],
        }
    )


def llm_d_endpoints(endpoints: list[str]) -> str:
    """Returns the endpoints file of llm-d's discovery."""
    split = [one.rpartition(":") for one in endpoints]
    return yaml.safe_dump(
        {
            "endpoints": [
                {"name": f"worker-{number}", "address": ip, "port": port}
                for number, (ip, _, port) in enumerate(split)
            ]
        }
    )
