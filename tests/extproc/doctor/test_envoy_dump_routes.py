"""Routes as Envoy shows them, to the workers and elsewhere."""

from typing import Any

import pytest

from extproc.config import Config, ExtProc
from extproc.doctor.envoy_dump import Around, judge_buffers, judge_routes
from extproc.doctor.findings import About

FILTER = "ext_proc"
RETRIES = {"retry_on": "connect-failure,refused-stream"}
PER_ROUTE = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
DISABLED = {"typed_per_filter_config": {FILTER: {"@type": PER_ROUTE, "disabled": True}}}


def route(
    match: Any = None, cluster: str = "workers", action: Any = None, config: Any = None
) -> dict[str, Any]:
    """config: what is set for its filters."""
    to = {"cluster": cluster, "timeout": "0s", "retry_policy": RETRIES, **(action or {})}
    return {"match": match or {"prefix": "/"}, "route": to, **(config or {})}


def codes_of(*routes: Any, host: Any = None, **config: Any) -> list[str]:
    tree = {"virtual_hosts": [{"name": "v", "routes": list(routes), **(host or {})}], **config}
    around = Around(FILTER, {}, {"route_config": tree}, [], {"workers"})
    return [one.code for one in judge_routes(About("envoy"), around)]


def test_a_route_as_it_should_be_is_right() -> None:
    assert codes_of(route()) == []


@pytest.mark.parametrize(
    ("timeout", "codes"),
    [("0s", []), ("600s", []), ("15s", ["envoy-route-timeout"]), (None, ["envoy-route-timeout"])],
)
def test_a_route_that_ends_long_generations_is_found(timeout: Any, codes: list[str]) -> None:
    assert codes_of(route(action={"timeout": timeout})) == codes


@pytest.mark.parametrize("policy", [None, {}, {"retry_on": "retriable-status-codes"}])
def test_a_route_without_retries_is_found(policy: Any) -> None:
    bare = route(action={"retry_policy": policy})
    assert codes_of(bare) == ["envoy-no-retries"]
    inherits = codes_of(bare, host={"retry_policy": RETRIES})
    assert inherits == ([] if not policy else ["envoy-no-retries"])


def test_a_filter_that_is_disabled_for_the_workers_is_found() -> None:
    assert codes_of(route(config=DISABLED)) == ["envoy-route-disabled"]
    assert codes_of(route(), host=DISABLED) == ["envoy-route-disabled"]
    assert codes_of(route(), **DISABLED) == ["envoy-route-disabled"]
    enabled = {"typed_per_filter_config": {FILTER: {"@type": PER_ROUTE, "overrides": {}}}}
    assert codes_of(route(config=enabled), host=DISABLED) == []


def test_a_filter_that_is_disabled_for_what_is_no_llm_api_is_right() -> None:
    assert codes_of(route({"prefix": "/api/"}, config=DISABLED)) == []
    assert codes_of(route({"prefix": "/api/"}, config=DISABLED), route()) == []
    assert codes_of(route({"prefix": "/"}, "website", config=DISABLED)) == []


@pytest.mark.parametrize(
    "match",
    [
        {"prefix": "/v1/"},
        {"path": "/v1/chat/completions"},
        {"path_separated_prefix": "/v1"},
        {"prefix": "/", "headers": [{"name": "x-model"}]},
    ],
)
def test_every_kind_of_match_is_read(match: Any) -> None:
    assert codes_of(route(match, config=DISABLED), route()) == ["envoy-route-disabled"]


@pytest.mark.parametrize(
    "match", [{"path": "/v1"}, {"path_separated_prefix": "/v"}, {"safe_regex": {"regex": ".*"}}]
)
def test_what_another_match_takes_is_left_alone(match: Any) -> None:
    assert codes_of(route(match, config=DISABLED), route()) == []


def test_a_route_behind_one_that_takes_everything_is_never_taken() -> None:
    assert codes_of(route(cluster="website"), route(config=DISABLED)) == []


@pytest.mark.parametrize(
    "action",
    [
        {"cluster": None, "cluster_header": "x-kvsteer-model"},
        {"cluster": None, "weighted_clusters": {"clusters": [{"name": "workers"}]}},
    ],
)
def test_every_way_to_name_the_workers_cluster_is_read(action: Any) -> None:
    assert codes_of(route(action=action, config=DISABLED)) == ["envoy-route-disabled"]


def test_a_route_that_leads_to_another_cluster_is_no_way_to_the_workers() -> None:
    some = route({"prefix": "/v1/", "headers": [{"name": "x"}]}, "website", config=DISABLED)
    assert codes_of(some, route({"path": "/v1/completions"}), route(cluster="website")) == []


@pytest.mark.parametrize(
    ("limit", "codes"), [("1024", ["envoy-buffer-limit"]), (1 << 20, []), (None, [])]
)
def test_bodies_that_the_router_reads_have_to_fit(limit: object, codes: list[str]) -> None:
    config = Config(extproc=ExtProc(max_body_bytes=1 << 20))
    hosts = [
        {"request_body_buffer_limit": limit},
        {"routes": [{"request_body_buffer_limit": limit}]},
    ]
    for one in hosts:
        tree = {"route_config": {"virtual_hosts": [one]}}
        around = Around(FILTER, {}, tree, [], {"workers"})
        assert [found.code for found in judge_buffers(About("envoy"), config, around)] == codes
    apart = {"rds": {"route_config_name": "r"}}
    around = Around(FILTER, {}, apart, [{"name": "r", "virtual_hosts": hosts[:1]}], {"workers"})
    assert [found.code for found in judge_buffers(About("envoy"), config, around)] == codes
