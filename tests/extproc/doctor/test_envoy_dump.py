import json
from dataclasses import replace
from typing import Any

import pytest

from extproc.config import Accounting, Config, ExtProc
from extproc.doctor.envoy_dump import judge_envoy
from extproc.doctor.findings import About, Verdict

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
    return [found.code for found in judge_envoy(About("envoy"), CONFIG, dump, {}, {})]


def test_an_envoy_as_it_should_be_is_right() -> None:
    assert codes_of(manager(ext_proc())) == [""]


@pytest.mark.parametrize("dump", [b"", b"[]", b'{"configs": 1}', b"[" * 100_000, b"\xff"])
def test_what_is_no_dump_is_unreadable(dump: bytes) -> None:
    (found,) = judge_envoy(About("envoy"), CONFIG, dump, {}, {})
    assert found.code == "envoy-unreadable"


def test_a_missing_filter_or_policy_is_found() -> None:
    assert codes_of(manager()) == ["envoy-no-ext-proc"]
    assert codes_of(manager(ext_proc()), cluster={"type": "STATIC"}) == ["envoy-no-override"]


def test_an_override_by_header_or_original_destination_is_one_too() -> None:
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
def test_a_filter_that_is_set_otherwise_is_found(change: dict[str, Any], code: str) -> None:
    assert codes_of(manager(ext_proc(**change))) == [code]


def test_a_response_whose_end_may_not_be_told_is_noted() -> None:
    quiet = manager(ext_proc(processing_mode={"request_body_mode": "BUFFERED"}))
    dump = json.dumps({"configs": [{"filter_chains": [quiet]}, OVERRIDE]}).encode()
    (found,) = judge_envoy(About("envoy"), CONFIG, dump, {}, {})
    assert found.verdict is Verdict.NOTE
    assert found.says.startswith("response_trailer_mode is not SEND")


def test_a_client_that_could_steer_is_found() -> None:
    one = manager(ext_proc(), early_header_mutation_extensions=[])
    assert codes_of(one) == ["envoy-client-header"]


@pytest.mark.parametrize("limit", ["1024", 1024])
def test_a_limit_below_what_the_router_reads_is_found(limit: object) -> None:
    small = {"request_body_buffer_limit": limit}
    hosts = ({"virtual_hosts": [host(**small)]}, {"virtual_hosts": [host(routes=[small])]})
    for one in hosts:
        assert codes_of(manager(ext_proc(), route_config=one)) == ["envoy-buffer-limit"]
    listener = {"per_connection_buffer_limit_bytes": 1024}
    assert codes_of(manager(ext_proc()), **listener) == ["envoy-buffer-limit"]
    streamed = ext_proc(processing_mode=DUPLEX)
    assert codes_of(manager(streamed), **listener) == [""]


def test_routes_that_are_kept_apart_are_found_by_their_name() -> None:
    apart = manager(ext_proc(), route_config=None, rds={"route_config_name": "r"})
    routes = {"name": "r", "virtual_hosts": [host(request_body_buffer_limit="1")]}
    assert codes_of(apart, routes=routes) == ["envoy-buffer-limit"]
    assert codes_of(apart, routes=routes | {"name": "other"}) == [""]


def test_a_longer_deadline_needs_a_longer_timeout() -> None:
    slow = replace(CONFIG, extproc=replace(CONFIG.extproc, deadline_ms=500))
    dump = {"configs": [{"filter_chains": [manager(ext_proc())]}, OVERRIDE]}
    (found,) = judge_envoy(About("envoy"), slow, json.dumps(dump).encode(), {}, {})
    assert found.code == "envoy-message-timeout"


def test_responses_that_are_accounted_for_have_to_be_shown() -> None:
    unseen = {"request_body_mode": "BUFFERED", "response_header_mode": "SKIP"}
    unseen["response_trailer_mode"] = "SEND"
    one = manager(ext_proc(processing_mode=unseen))
    assert codes_of(one) == [""]
    accounting = replace(CONFIG, accounting=Accounting(responses="usage"))
    dump = {"configs": [{"filter_chains": [one]}, OVERRIDE]}
    found = judge_envoy(About("envoy"), accounting, json.dumps(dump).encode(), {}, {})
    assert [one.code for one in found] == ["envoy-response-headers"]
