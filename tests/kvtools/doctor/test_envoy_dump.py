"""What Envoy's admin server shows of filters, clusters and routes, right and wrong."""

import json
from dataclasses import replace
from typing import Any

import pytest

from extproc.config.schema import Accounting, Config, Envoy, ExtProc, Policy, Tls
from extproc.config.sections import HoldSettings, Isolation, Routers, SharingSettings
from kvtools.doctor.envoy_dump import (
    FilterContext,
    hosts_in,
    judge_buffers,
    judge_envoy,
    judge_hosts,
    judge_rewrites,
    judge_router_cluster,
    judge_routes,
    listing,
    mapping,
    nodes,
    number,
    type_of,
    typed,
)
from kvtools.doctor.findings import Severity, Subject

CONFIG = Config(extproc=ExtProc(deadline_ms=250, max_body_bytes=1024 * 1024))
TYPE = "type.googleapis.com/envoy"


def ext_proc(**changes: Any) -> dict[str, Any]:
    return {
        "@type": f"{TYPE}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "message_timeout": "0.500s",
        "failure_mode_allow": True,
        "allow_mode_override": True,
        "processing_mode": {"request_body_mode": "BUFFERED", "response_trailer_mode": "SEND"},
        "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
        **changes,
    }


DUPLEX = {
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
}


def host(**changes: Any) -> dict[str, Any]:
    return {"name": "v", "routes": [{"match": {"prefix": "/"}}], **changes}


def manager(*filters: Any, **changes: Any) -> dict[str, Any]:
    mutation = {"mutations": [{"remove": "X-Gateway-Destination-Endpoint"}]}
    return {
        "@type": f"{TYPE}.extensions.filters.network.x.v3.HttpConnectionManager",
        "early_header_mutation_extensions": [{"typed_config": mutation}],
        "normalize_path": True,
        "path_with_escaped_slashes_action": "UNESCAPE_AND_FORWARD",
        "http_filters": [{"typed_config": one} for one in filters],
        "route_config": {"virtual_hosts": [host()]},
        **changes,
    }


OVERRIDE = {
    "@type": f"{TYPE}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
    "override_host_sources": [{"metadata": {"key": "envoy.lb"}}],
}


def codes_of(one: Any, cluster: Any = OVERRIDE, routes: Any = None, **listener: Any) -> list[str]:
    chains = {"filter_chains": [{"filters": [{"typed_config": one}]}], **listener}
    configs = [
        {"@type": f"{TYPE}.admin.v3.BootstrapConfigDump", "bootstrap": chains},
        {"static_listeners": [{"listener": chains}]},
        {"static_clusters": [{"cluster": {"policies": [cluster]}}]},
        {"static_route_configs": [{"route_config": routes}]},
    ]
    dump = json.dumps({"configs": configs}).encode()
    return [found.code for found in judge_envoy(Subject("envoy"), CONFIG, dump, {}, {})]


def test_valid_envoy_is_right() -> None:
    assert codes_of(manager(ext_proc())) == [""]


@pytest.mark.parametrize("dump", [b"", b"[]", b'{"configs": 1}', b"[" * 100_000, b"\xff"])
def test_malformed_dump_is_unreadable(dump: bytes) -> None:
    (found,) = judge_envoy(Subject("envoy"), CONFIG, dump, {}, {})
    assert found.code == "envoy-unreadable"


def test_missing_filter_or_policy_is_found() -> None:
    assert codes_of(manager()) == ["envoy-no-ext-proc"]
    assert codes_of(manager(ext_proc()), cluster={"type": "STATIC"}) == ["envoy-no-override"]


def test_override_by_header_or_original_destination_is_right() -> None:
    by_header = OVERRIDE | {"override_host_sources": [{"header": "x-gateway-destination-endpoint"}]}
    assert codes_of(manager(ext_proc()), cluster=by_header) == [""]
    assert codes_of(manager(ext_proc()), cluster={"type": "ORIGINAL_DST"}) == [""]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"message_timeout": "0.2s"}, "envoy-message-timeout"),
        ({"message_timeout": None}, "envoy-message-timeout"),
        ({"failure_mode_allow": False}, "envoy-fails-closed"),
        ({"processing_mode": {"response_trailer_mode": "SEND"}}, "envoy-body-mode"),
        ({"allow_mode_override": False}, "envoy-mode-override"),
        ({"metadata_options": {}}, "envoy-namespaces"),
        ({"metadata_options": {"receiving_namespaces": {"untyped": 1}}}, "envoy-namespaces"),
    ],
)
def test_wrong_filter_setting_is_found(change: dict[str, Any], code: str) -> None:
    assert codes_of(manager(ext_proc(**change))) == [code]


def test_response_without_trailers_is_noted() -> None:
    quiet = manager(ext_proc(processing_mode={"request_body_mode": "BUFFERED"}))
    dump = json.dumps({"configs": [{"filter_chains": [quiet]}, OVERRIDE]}).encode()
    (found,) = judge_envoy(Subject("envoy"), CONFIG, dump, {}, {})
    assert found.verdict is Severity.NOTE
    assert found.says.startswith("response_trailer_mode is not SEND")


def test_header_that_lets_a_client_steer_is_found() -> None:
    one = manager(ext_proc(), early_header_mutation_extensions=[])
    assert codes_of(one) == ["envoy-client-header"]


def test_path_normalization_that_differs_from_engines_is_found() -> None:
    assert codes_of(manager(ext_proc(), normalize_path=False)) == ["envoy-path"]
    kept = manager(ext_proc(), path_with_escaped_slashes_action="KEEP_UNCHANGED")
    dump = json.dumps({"configs": [{"filter_chains": [kept]}, OVERRIDE]}).encode()
    assert any("%2F" in one.says for one in judge_envoy(Subject("envoy"), CONFIG, dump, {}, {}))


@pytest.mark.parametrize("limit", ["1024", 1024])
def test_buffer_limit_below_the_limit_of_the_router_is_found(limit: object) -> None:
    small = {"request_body_buffer_limit": limit}
    hosts = ({"virtual_hosts": [host(**small)]}, {"virtual_hosts": [host(routes=[small])]})
    for one in hosts:
        assert codes_of(manager(ext_proc(), route_config=one)) == ["envoy-buffer-limit"]
    listener = {"per_connection_buffer_limit_bytes": 1024}
    assert codes_of(manager(ext_proc()), **listener) == ["envoy-buffer-limit"]
    streamed = ext_proc(processing_mode=DUPLEX)
    assert codes_of(manager(streamed), **listener) == [""]


def test_named_route_configurations_are_found() -> None:
    apart = manager(ext_proc(), route_config=None, rds={"route_config_name": "r"})
    routes = {"name": "r", "virtual_hosts": [host(request_body_buffer_limit="1")]}
    assert codes_of(apart, routes=routes) == ["envoy-buffer-limit"]
    assert codes_of(apart, routes=routes | {"name": "other"}) == [""]


def test_message_timeout_below_the_deadline_is_found() -> None:
    slow = replace(CONFIG, extproc=replace(CONFIG.extproc, deadline_ms=500))
    dump = {"configs": [{"filter_chains": [manager(ext_proc())]}, OVERRIDE]}
    (found,) = judge_envoy(Subject("envoy"), slow, json.dumps(dump).encode(), {}, {})
    assert found.code == "envoy-message-timeout"


def test_response_headers_must_be_sent_for_accounting() -> None:
    unseen = {"request_body_mode": "BUFFERED", "response_header_mode": "SKIP"}
    unseen["response_trailer_mode"] = "SEND"
    one = manager(ext_proc(processing_mode=unseen))
    assert codes_of(one) == [""]
    accounting = replace(CONFIG, accounting=Accounting(responses="usage"))
    dump = {"configs": [{"filter_chains": [one]}, OVERRIDE]}
    found = judge_envoy(Subject("envoy"), accounting, json.dumps(dump).encode(), {}, {})
    assert [one.code for one in found] == ["envoy-response-headers"]


TO_ROUTER = {"grpc_service": {"envoy_grpc": {"cluster_name": "router"}}}
MANY = {"thresholds": [{"max_requests": 100_000}]}


def hold_codes(
    *, changes: Any = None, route: Any = None, breakers: Any = None, **manager_: Any
) -> list[str]:
    """The findings of an Envoy before a router that holds requests for up to two minutes."""
    holding = replace(CONFIG, policy=Policy(hold=HoldSettings(enabled=True, bound_seconds=120)))
    to_workers = {"cluster": "w", "timeout": "0s", "retry_policy": {"retry_on": "reset"}}
    routes = [{"match": {"prefix": "/"}, "route": to_workers | (route or {})}]
    settings = ext_proc(max_message_timeout="130s") | TO_ROUTER | (changes or {})
    hosts = {"virtual_hosts": [host(routes=routes)]}
    one = manager(settings, route_config=hosts, **manager_)
    workers = {"@type": f"{TYPE}.config.cluster.v3.Cluster", "name": "w", "policies": [OVERRIDE]}
    router: dict[str, Any] = {"@type": f"{TYPE}.config.cluster.v3.Cluster", "name": "router"}
    router |= {"http2_protocol_options": {}, "circuit_breakers": breakers or MANY}
    dump = {"configs": [{"filter_chains": [one]}, workers, router]}
    found = judge_envoy(Subject("envoy"), holding, json.dumps(dump).encode(), {}, {})
    return [each.code for each in found]


def test_envoy_that_waits_as_long_as_the_router_may_hold_is_right() -> None:
    assert hold_codes() == [""]
    assert hold_codes(stream_idle_timeout="0s", request_timeout="9s") == [""]
    assert hold_codes(route={"idle_timeout": "130s"}, stream_idle_timeout="60s") == [""]


@pytest.mark.parametrize("limit", ["129.9s", "0s", None])
def test_max_message_timeout_below_what_the_router_asks_for_is_found(limit: str | None) -> None:
    assert hold_codes(changes={"max_message_timeout": limit}) == ["envoy-hold-message-timeout"]
    streamed = {"max_message_timeout": limit, "processing_mode": DUPLEX}
    assert hold_codes(changes=streamed) == [""]


@pytest.mark.parametrize("limit", [{}, {"max_requests": 1_023}, {"priority": "HIGH"}])
def test_too_few_streams_for_held_requests_are_found(limit: dict[str, Any]) -> None:
    few = {"thresholds": [limit]}
    expected = ["envoy-hold-requests"] if "max_requests" in limit else [""]
    assert hold_codes(breakers=few) == expected


def test_limit_that_ends_held_requests_is_found() -> None:
    whole = {"common_http_protocol_options": {"max_stream_duration": "60s"}}
    for limits in ({"stream_idle_timeout": "60s"}, whole):
        assert hold_codes(**limits) == ["envoy-hold-limit"]
        assert codes_of(manager(ext_proc(), **limits)) == [""]
    assert hold_codes(route={"idle_timeout": "60s"}) == ["envoy-hold-limit"]


@pytest.mark.parametrize(
    ("kind", "found"), [("ring_hash.v3.RingHash", [""]), ("random.v3.Random", ["envoy-fallback"])]
)
def test_cluster_that_does_not_hash_as_configured_is_found(kind: str, found: list[str]) -> None:
    hashing = replace(CONFIG, envoy=replace(CONFIG.envoy, fallback="ring_hash"))
    policy = {"@type": f"{TYPE}.extensions.load_balancing_policies.{kind}"}
    cluster = {"@type": f"{TYPE}.config.cluster.v3.Cluster", "name": "w"}
    cluster["policies"] = [OVERRIDE | {"fallback_policy": {"policies": [policy]}}]  # type: ignore[assignment]
    dump = {"configs": [{"filter_chains": [manager(ext_proc())]}, cluster]}
    text = json.dumps(dump).encode()
    for config, codes in ((hashing, found), (CONFIG, [""])):
        shown = judge_envoy(Subject("envoy"), config, text, {}, {})
        assert [one.code for one in shown] == codes


PLAIN = Config()
ENCRYPTED = Config(extproc=ExtProc(tls=Tls(certificate="c", key="k")))
TLS = {"typed_config": {"@type": f"{TYPE}.extensions.transport_sockets.tls.v3.UpstreamTlsContext"}}
CLUSTER = f"{TYPE}.config.cluster.v3.Cluster"
OPTIONS = f"{TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions"


def http_options(**options: Any) -> dict[str, Any]:
    return {"typed_extension_protocol_options": {"x": {"@type": OPTIONS, **options}}}


HTTP2 = http_options(explicit_http_config={"http2_protocol_options": {}})


def router_codes(
    config: Config, ext_proc: Any = TO_ROUTER, hosts: Any = None, **cluster: Any
) -> list[str]:
    one = {"@type": CLUSTER, "name": "router", **HTTP2, **cluster}
    other = {"@type": CLUSTER, "name": "workers"}
    parts = [{"static_clusters": [{"cluster": one}, {"cluster": other}]}]
    reached = hosts if isinstance(hosts, dict) else dict.fromkeys(hosts or (), 0)
    found = judge_router_cluster(Subject("envoy"), config, ext_proc, parts, {"router": reached})
    return [one.code for one in found]


def test_router_cluster_in_plain_text_or_tls_on_both_sides_is_right() -> None:
    assert router_codes(PLAIN) == []
    assert router_codes(ENCRYPTED, transport_socket=TLS) == []
    wrapped = {"typed_config": {"@type": "proxy protocol", "transport_socket": TLS}}
    assert router_codes(ENCRYPTED, transport_socket=wrapped) == []


def test_router_cluster_with_tls_on_one_side_is_found() -> None:
    assert router_codes(ENCRYPTED) == ["envoy-plain-to-tls"]
    assert router_codes(ENCRYPTED, transport_socket={"name": "raw"}) == ["envoy-plain-to-tls"]
    assert router_codes(PLAIN, transport_socket=TLS) == ["envoy-tls-to-plain"]


def showing(**common: Any) -> Any:
    return {"typed_config": TLS["typed_config"] | {"common_tls_context": common}}


def test_router_cluster_without_a_required_certificate_is_found() -> None:
    tls = Tls(certificate="c", key="k", client_ca="ca")
    mutual = Config(extproc=ExtProc(tls=tls))
    assert router_codes(mutual, transport_socket=TLS) == ["envoy-no-client-certificate"]
    assert router_codes(mutual, transport_socket=showing(tls_certificates=[{}])) == []
    by_sds = showing(tls_certificate_sds_secret_configs=[{"name": "own"}])
    assert router_codes(mutual, transport_socket=by_sds) == []
    assert router_codes(mutual) == ["envoy-plain-to-tls"]


@pytest.mark.parametrize("ext_proc", [{}, {"grpc_service": {"google_grpc": {}}}])
def test_router_cluster_that_is_not_in_the_dump_is_not_judged(ext_proc: Any) -> None:
    assert router_codes(ENCRYPTED, ext_proc) == []


def test_router_cluster_that_varies_by_endpoint_is_not_judged() -> None:
    assert router_codes(ENCRYPTED, transport_socket_matches=[{"transport_socket": TLS}]) == []
    assert router_codes(ENCRYPTED, name="another") == []


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        (HTTP2, []),
        (http_options(auto_config={}), []),
        (http_options(use_downstream_protocol_config={}), []),
        (
            http_options(explicit_http_config={"http_protocol_options": {}}),
            ["envoy-router-protocol"],
        ),
        ({"typed_extension_protocol_options": None}, ["envoy-router-protocol"]),
        ({"typed_extension_protocol_options": None, "http2_protocol_options": {}}, []),
    ],
)
def test_router_cluster_without_http2_is_found(options: Any, codes: list[str]) -> None:
    assert router_codes(PLAIN, **options) == codes


@pytest.mark.parametrize(
    ("listen", "hosts", "codes"),
    [
        ("127.0.0.1:9002", {"127.0.0.1:9002"}, []),
        ("127.0.0.1:9002", {"127.0.0.1:9003"}, ["envoy-router-place"]),
        ("0.0.0.0:9002", {"10.0.0.1:9002"}, []),
        ("0.0.0.0:9002", {"10.0.0.1:80"}, [""]),  # a Service may map it
        ("unix:/run/k.sock", {"unix:/run/k.sock"}, []),
        ("unix:/run/k.sock", {"unix:/run/x.sock"}, ["envoy-router-place"]),
        ("unix:/run/k.sock", {"127.0.0.1:9002"}, ["envoy-router-place"]),
        ("127.0.0.1:9002", {"unix:/run/k.sock"}, ["envoy-router-place"]),
    ],
)
def test_router_cluster_at_another_address_is_found(
    listen: str, hosts: set[str], codes: list[str]
) -> None:
    assert router_codes(Config(extproc=ExtProc(listen=listen)), hosts=hosts) == codes


def test_router_address_follows_the_configuration() -> None:
    config = Config(envoy=Envoy(router="router.llm:80"))
    assert router_codes(config, hosts={"10.0.0.1:80"}) == []
    assert router_codes(config, hosts={"10.0.0.1:9002"}) == ["envoy-router-place"]


def test_router_is_unreachable_where_all_connections_to_all_hosts_failed() -> None:
    config = Config(extproc=ExtProc(listen="0.0.0.0:9002"))
    in_vain = {"10.0.0.1:9002": 2, "10.0.0.2:9002": 1}
    shared = replace(config, sharing=SharingSettings(url="directory:/d"))
    assert router_codes(shared, hosts=in_vain) == ["envoy-router-unreachable"]
    assert router_codes(shared, hosts=in_vain | {"10.0.0.2:9002": 0}) == []


STEERED = {"@type": CLUSTER, "name": "workers", "load_balancing_policy": OVERRIDE}
WORKERS = {"10.0.0.1:8000": "a:8000", "10.0.0.2:8000": "b:8000"}


def host_codes(hosts: Any, cluster: Any = STEERED, workers: Any = WORKERS) -> list[str]:
    return [one.code for one in judge_hosts(Subject("envoy"), [cluster], hosts, workers)]


@pytest.mark.parametrize(
    ("hosts", "codes"),
    [
        ({"workers": {"10.0.0.1:8000", "10.0.0.2:8000"}}, []),
        ({"workers": {"10.0.0.1:8000"}}, ["envoy-worker-missing"]),
        ({"workers": set()}, ["envoy-worker-missing"]),
        ({"workers": {*WORKERS, "10.0.0.9:8000"}}, ["envoy-host-unknown"]),
        ({"workers": {"10.0.0.9:1"}}, ["envoy-worker-missing", "envoy-host-unknown"]),
        ({}, []),  # Envoy did not show its hosts
        ({"other": {"10.0.0.9:1"}}, []),
    ],
)
def test_hosts_and_workers_are_compared_in_both_directions(hosts: Any, codes: list[str]) -> None:
    assert host_codes(hosts) == codes


def test_hosts_are_not_compared_without_hosts_or_known_workers() -> None:
    any_address = {"@type": CLUSTER, "name": "workers", "type": "ORIGINAL_DST"}
    assert host_codes({"workers": set()}, any_address) == []
    assert host_codes({"workers": set()}, workers={}) == []


def test_worker_without_an_address_matches_any_host_and_hides_no_other() -> None:
    workers = {"10.0.0.1:8000": "a:8000", "": "b:8000"}
    assert host_codes({"workers": {"10.0.0.1:8000", "10.0.0.2:8000"}}, workers=workers) == []
    assert host_codes({"workers": {"10.0.0.2:8000"}}, workers=workers) == ["envoy-worker-missing"]


def test_worker_that_gets_no_requests_may_be_a_host_or_not() -> None:
    resting = {"10.0.0.1:8000": "a:8000", "10.0.0.2:8000": ""}
    for hosts in ({"10.0.0.1:8000"}, {"10.0.0.1:8000", "10.0.0.2:8000"}):
        assert host_codes({"workers": hosts}, workers=resting) == []


def test_hosts_in_reads_every_cluster() -> None:
    answer = b"""{"cluster_statuses": [
        {"name": "a", "host_statuses": [
            {"address": {"socket_address": {"address": "10.0.0.1", "port_value": 1}}},
            {"address": {"socket_address": {"address": "::1", "port_value": 2}}}]},
        {"name": "b", "host_statuses": [{"address": {"pipe": {"path": "/x"}}}]},
        {"name": "c"}]}"""
    hosts = {"a": {"10.0.0.1:1": 0, "[::1]:2": 0}, "b": {"unix:/x": 0}, "c": {}}
    assert hosts_in(answer) == hosts


@pytest.mark.parametrize(
    ("failed", "total", "in_vain"), [("2", "2", 2), ("2", "3", 0), (None, "1", 0), ("?", "?", 0)]
)
def test_hosts_in_finds_connections_that_all_failed(
    failed: str | None, total: str, in_vain: int
) -> None:
    fails = {"name": "cx_connect_fail"} | ({"value": failed} if failed else {})
    stats = [fails, {"name": "cx_total", "value": total}]
    host = {"address": {"pipe": {"path": "/x"}}, "stats": stats}
    answer = {"cluster_statuses": [{"name": "a", "host_statuses": [host]}]}
    assert hosts_in(json.dumps(answer).encode()) == {"a": {"unix:/x": in_vain}}


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"1", b'{"cluster_statuses": 1}', b"[" * 100_000, b"\xff"]
)
def test_hosts_in_is_empty_for_a_malformed_answer(answer: bytes) -> None:
    assert hosts_in(answer) == {}


FILTER = "ext_proc"
RETRIES = {"retry_on": "connect-failure,refused-stream"}
PER_ROUTE = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
DISABLED = {"typed_per_filter_config": {FILTER: {"@type": PER_ROUTE, "disabled": True}}}


def route(
    match: Any = None, cluster: str = "workers", action: Any = None, config: Any = None
) -> dict[str, Any]:
    """Returns a route; config: more keys of it, with the settings of its filters."""
    to = {"cluster": cluster, "timeout": "0s", "retry_policy": RETRIES, **(action or {})}
    return {"match": match or {"prefix": "/"}, "route": to, **(config or {})}


def route_codes(*routes: Any, host: Any = None, **config: Any) -> list[str]:
    tree = {"virtual_hosts": [{"name": "v", "routes": list(routes), **(host or {})}], **config}
    around = FilterContext(FILTER, {}, {"route_config": tree}, [], {"workers"})
    return [one.code for one in judge_routes(Subject("envoy"), around)]


def test_valid_route_is_right() -> None:
    assert route_codes(route()) == []


@pytest.mark.parametrize(
    ("timeout", "codes"),
    [("0s", []), ("600s", []), ("15s", ["envoy-route-timeout"]), (None, ["envoy-route-timeout"])],
)
def test_route_that_ends_long_generations_is_found(timeout: Any, codes: list[str]) -> None:
    assert route_codes(route(action={"timeout": timeout})) == codes


@pytest.mark.parametrize("policy", [None, {}, {"retry_on": "retriable-status-codes"}])
def test_route_without_retries_is_found(policy: Any) -> None:
    bare = route(action={"retry_policy": policy})
    assert route_codes(bare) == ["envoy-no-retries"]
    inherits = route_codes(bare, host={"retry_policy": RETRIES})
    assert inherits == ([] if not policy else ["envoy-no-retries"])


def test_disabled_filter_for_the_workers_is_found() -> None:
    assert route_codes(route(config=DISABLED)) == ["envoy-route-disabled"]
    assert route_codes(route(), host=DISABLED) == ["envoy-route-disabled"]
    assert route_codes(route(), **DISABLED) == ["envoy-route-disabled"]
    enabled = {"typed_per_filter_config": {FILTER: {"@type": PER_ROUTE, "overrides": {}}}}
    assert route_codes(route(config=enabled), host=DISABLED) == []


def test_disabled_filter_for_other_paths_is_right() -> None:
    assert route_codes(route({"prefix": "/api/"}, config=DISABLED)) == []
    assert route_codes(route({"prefix": "/api/"}, config=DISABLED), route()) == []
    assert route_codes(route({"prefix": "/"}, "website", config=DISABLED)) == []


@pytest.mark.parametrize(
    "match",
    [
        {"prefix": "/v1/"},
        {"path": "/v1/chat/completions"},
        {"path_separated_prefix": "/v1"},
        {"prefix": "/", "headers": [{"name": "x-model"}]},
    ],
)
def test_disabled_route_is_found_for_every_kind_of_match(match: Any) -> None:
    assert route_codes(route(match, config=DISABLED), route()) == ["envoy-route-disabled"]


@pytest.mark.parametrize(
    "match", [{"path": "/v1"}, {"path_separated_prefix": "/v"}, {"safe_regex": {"regex": ".*"}}]
)
def test_disabled_route_of_another_match_is_right(match: Any) -> None:
    assert route_codes(route(match, config=DISABLED), route()) == []


def test_disabled_route_behind_a_catch_all_is_right() -> None:
    assert route_codes(route(cluster="website"), route(config=DISABLED)) == []


@pytest.mark.parametrize(
    "action",
    [
        {"cluster": None, "cluster_header": "x-kvsteer-model"},
        {"cluster": None, "weighted_clusters": {"clusters": [{"name": "workers"}]}},
    ],
)
def test_disabled_route_is_found_for_every_kind_of_action(action: Any) -> None:
    assert route_codes(route(action=action, config=DISABLED)) == ["envoy-route-disabled"]


def test_disabled_route_to_another_cluster_is_right() -> None:
    some = route({"prefix": "/v1/", "headers": [{"name": "x"}]}, "website", config=DISABLED)
    assert route_codes(some, route({"path": "/v1/completions"}), route(cluster="website")) == []


@pytest.mark.parametrize(
    ("limit", "codes"), [("1024", ["envoy-buffer-limit"]), (1 << 20, []), (None, [])]
)
def test_buffer_limits_must_hold_the_bodies_that_the_router_reads(
    limit: object, codes: list[str]
) -> None:
    config = Config(extproc=ExtProc(max_body_bytes=1 << 20))
    hosts = [
        {"request_body_buffer_limit": limit},
        {"routes": [{"request_body_buffer_limit": limit}]},
    ]
    for one in hosts:
        tree = {"route_config": {"virtual_hosts": [one]}}
        around = FilterContext(FILTER, {}, tree, [], {"workers"})
        assert [found.code for found in judge_buffers(Subject("envoy"), config, around)] == codes
    apart = {"rds": {"route_config_name": "r"}}
    around = FilterContext(
        FILTER, {}, apart, [{"name": "r", "virtual_hosts": hosts[:1]}], {"workers"}
    )
    assert [found.code for found in judge_buffers(Subject("envoy"), config, around)] == codes


def test_buffer_limit_of_a_disabled_route_may_be_small() -> None:
    large = {"request_body_buffer_limit": Config().extproc.max_body_bytes}
    elsewhere = {"match": {"prefix": "/api/"}, **DISABLED}
    for routes in ([elsewhere, large], [elsewhere]):
        tree = {"route_config": {"virtual_hosts": [{"routes": routes}]}}
        around = FilterContext(FILTER, {}, tree, [], {"workers"})
        assert list(judge_buffers(Subject("envoy"), Config(), around)) == []


TREE = {"a": [{"@type": "x.Y", "b": 1}, 2, [{"@type": "x.Z"}]], "c": {"@type": "w.Y"}}


def test_nodes_finds_every_mapping_of_a_tree() -> None:
    assert len(list(nodes(TREE))) == 4
    assert list(nodes("nothing")) == []


def test_typed_finds_mappings_by_type() -> None:
    assert [one["@type"] for one in typed(TREE, ".Y")] == ["w.Y", "x.Y"]
    assert (type_of({"@type": "x"}), type_of({}), type_of(1)) == ("x", "", "")


def test_mapping_and_listing_are_empty_for_another_shape() -> None:
    assert (mapping({"a": 1}), mapping([1]), mapping(None)) == ({"a": 1}, {}, {})
    assert (listing([1]), listing({"a": 1}), listing(None)) == ([1], [], [])


@pytest.mark.parametrize(
    ("value", "expected"),
    [("12", 12), (12, 12), (None, 7), ("-1", 7), ("1" * 20, 7), ("\N{SUPERSCRIPT TWO}", 7)],
)
def test_number_reads_numbers_or_returns_the_default(value: object, expected: int) -> None:
    assert number(value, 7) == expected


def rewrite_codes(config: Config, *routes: Any) -> list[str]:
    tree = {"virtual_hosts": [{"name": "v", "routes": list(routes)}]}
    around = FilterContext(FILTER, {}, {"route_config": tree}, [], {"workers"})
    return [one.code for one in judge_rewrites(Subject("envoy"), config, around)]


def test_route_that_rewrites_paths_is_found_where_its_requests_are_not_recognized() -> None:
    isolated = Config(isolation=Isolation(header="x-tenant", secret_file="s"))
    match, action = {"prefix": "/llm/"}, {"prefix_rewrite": "/"}
    assert rewrite_codes(isolated, route(match, action=action)) == ["envoy-path-rewritten"]
    assert rewrite_codes(PLAIN, route(match, action=action)) == []
    assert rewrite_codes(isolated, route(match, "website", action=action)) == []
    assert rewrite_codes(isolated, route(match, action=action, config=DISABLED)) == []


def apart(config: Config, hosts: int, **cluster: Any) -> bool:
    reached = {f"10.0.0.{number}:9002" for number in range(hosts)}
    return "routers-share-nothing" in router_codes(config, hosts=reached, **cluster)


def test_several_routers_in_turn_that_do_not_share_are_found() -> None:
    listening = ExtProc(listen="0.0.0.0:9002")
    assert apart(Config(extproc=listening), 2)
    assert not apart(Config(extproc=listening), 1)
    assert not apart(Config(extproc=replace(listening, processes=2)), 2)
    shared = Config(extproc=listening, sharing=SharingSettings(url="directory:/d"))
    assert not apart(shared, 2)
    shown = Envoy(routers=Routers(("10.0.0.0:9002", "10.0.0.1:9002")))
    assert not apart(Config(extproc=listening, envoy=shown), 2)


def test_standby_and_conversations_are_not_in_turn() -> None:
    config = Config(extproc=ExtProc(listen="0.0.0.0:9002"))
    assert not apart(config, 2, lb_policy="RING_HASH")
    assert not apart(config, 2, load_assignment={"endpoints": [{}, {"priority": 1}]})
    assert apart(config, 2, load_assignment={"endpoints": [{}, {}]})
