from typing import Any

import pytest

from extproc.config import Config, Envoy, ExtProc, Tls
from extproc.doctor.envoy_dump import hosts_in, judge_hosts, judge_router_cluster
from extproc.doctor.findings import About

PLAIN = Config()
ENCRYPTED = Config(extproc=ExtProc(tls=Tls(certificate="c", key="k")))
TYPE = "type.googleapis.com/envoy"
TLS = {"typed_config": {"@type": f"{TYPE}.extensions.transport_sockets.tls.v3.UpstreamTlsContext"}}
FILTER = {"grpc_service": {"envoy_grpc": {"cluster_name": "router"}}}


CLUSTER = f"{TYPE}.config.cluster.v3.Cluster"
OPTIONS = f"{TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions"


def http_options(**options: Any) -> dict[str, Any]:
    return {"typed_extension_protocol_options": {"x": {"@type": OPTIONS, **options}}}


HTTP2 = http_options(explicit_http_config={"http2_protocol_options": {}})


def codes_of(
    config: Config, ext_proc: Any = FILTER, hosts: Any = None, **cluster: Any
) -> list[str]:
    one = {"@type": CLUSTER, "name": "router", **HTTP2, **cluster}
    other = {"@type": CLUSTER, "name": "workers"}
    parts = [{"static_clusters": [{"cluster": one}, {"cluster": other}]}]
    found = judge_router_cluster(About("envoy"), config, ext_proc, parts, {"router": hosts or ()})
    return [one.code for one in found]


def test_both_in_plain_text_or_both_in_tls_is_right() -> None:
    assert codes_of(PLAIN) == []
    assert codes_of(ENCRYPTED, transport_socket=TLS) == []
    wrapped = {"typed_config": {"@type": "proxy protocol", "transport_socket": TLS}}
    assert codes_of(ENCRYPTED, transport_socket=wrapped) == []


def test_tls_on_one_side_only_is_found() -> None:
    assert codes_of(ENCRYPTED) == ["envoy-plain-to-tls"]
    assert codes_of(ENCRYPTED, transport_socket={"name": "raw"}) == ["envoy-plain-to-tls"]
    assert codes_of(PLAIN, transport_socket=TLS) == ["envoy-tls-to-plain"]


def showing(**common: Any) -> Any:
    return {"typed_config": TLS["typed_config"] | {"common_tls_context": common}}


def test_an_envoy_that_shows_no_certificate_where_one_is_asked_for_is_found() -> None:
    tls = Tls(certificate="c", key="k", client_ca="ca")
    mutual = Config(extproc=ExtProc(tls=tls))
    assert codes_of(mutual, transport_socket=TLS) == ["envoy-no-client-certificate"]
    assert codes_of(mutual, transport_socket=showing(tls_certificates=[{}])) == []
    by_sds = showing(tls_certificate_sds_secret_configs=[{"name": "own"}])
    assert codes_of(mutual, transport_socket=by_sds) == []
    assert codes_of(mutual) == ["envoy-plain-to-tls"]


@pytest.mark.parametrize("ext_proc", [{}, {"grpc_service": {"google_grpc": {}}}])
def test_nothing_is_said_of_a_cluster_that_is_not_told(ext_proc: Any) -> None:
    assert codes_of(ENCRYPTED, ext_proc) == []


def test_nothing_is_said_where_it_depends_on_the_endpoint() -> None:
    assert codes_of(ENCRYPTED, transport_socket_matches=[{"transport_socket": TLS}]) == []
    assert codes_of(ENCRYPTED, name="another") == []


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
def test_a_router_that_is_spoken_to_without_http2_is_found(options: Any, codes: list[str]) -> None:
    assert codes_of(PLAIN, **options) == codes


@pytest.mark.parametrize(
    ("listen", "hosts", "codes"),
    [
        ("127.0.0.1:9002", {"127.0.0.1:9002"}, []),
        ("127.0.0.1:9002", {"127.0.0.1:9003"}, ["envoy-router-place"]),
        ("0.0.0.0:9002", {"10.0.0.1:9002", "10.0.0.2:9002"}, []),
        ("0.0.0.0:9002", {"10.0.0.1:80"}, [""]),  # a Service may map it
        ("unix:/run/k.sock", {"unix:/run/k.sock"}, []),
        ("unix:/run/k.sock", {"unix:/run/x.sock"}, ["envoy-router-place"]),
        ("unix:/run/k.sock", {"127.0.0.1:9002"}, ["envoy-router-place"]),
        ("127.0.0.1:9002", {"unix:/run/k.sock"}, ["envoy-router-place"]),
    ],
)
def test_a_router_that_is_looked_for_elsewhere_is_found(
    listen: str, hosts: set[str], codes: list[str]
) -> None:
    assert codes_of(Config(extproc=ExtProc(listen=listen)), hosts=hosts) == codes


def test_where_envoy_reaches_the_router_is_what_the_configuration_says() -> None:
    config = Config(envoy=Envoy(router="router.llm:80"))
    assert codes_of(config, hosts={"10.0.0.1:80"}) == []
    assert codes_of(config, hosts={"10.0.0.1:9002"}) == ["envoy-router-place"]


OVERRIDE = {
    "@type": f"{TYPE}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
    "override_host_sources": [{"metadata": {"key": "envoy.lb"}}],
}
STEERED = {"@type": CLUSTER, "name": "workers", "load_balancing_policy": OVERRIDE}
WORKERS = {"10.0.0.1:8000": "a:8000", "10.0.0.2:8000": "b:8000"}


def host_codes(hosts: Any, cluster: Any = STEERED, workers: Any = WORKERS) -> list[str]:
    return [one.code for one in judge_hosts(About("envoy"), [cluster], hosts, workers)]


@pytest.mark.parametrize(
    ("hosts", "codes"),
    [
        ({"workers": {"10.0.0.1:8000", "10.0.0.2:8000"}}, []),
        ({"workers": {"10.0.0.1:8000"}}, ["envoy-worker-missing"]),
        ({"workers": set()}, ["envoy-worker-missing"]),
        ({"workers": {*WORKERS, "10.0.0.9:8000"}}, ["envoy-host-unknown"]),
        ({"workers": {"10.0.0.9:1"}}, ["envoy-worker-missing", "envoy-host-unknown"]),
        ({}, []),  # it did not tell
        ({"other": {"10.0.0.9:1"}}, []),
    ],
)
def test_workers_and_hosts_are_compared_in_both_directions(hosts: Any, codes: list[str]) -> None:
    assert host_codes(hosts) == codes


def test_hosts_are_not_compared_where_there_are_none_or_workers_are_not_known() -> None:
    any_address = {"@type": CLUSTER, "name": "workers", "type": "ORIGINAL_DST"}
    assert host_codes({"workers": set()}, any_address) == []
    assert host_codes({"workers": set()}, workers={}) == []


def test_a_worker_that_takes_no_requests_may_be_a_host_or_not() -> None:
    resting = {"10.0.0.1:8000": "a:8000", "10.0.0.2:8000": ""}
    for hosts in ({"10.0.0.1:8000"}, {"10.0.0.1:8000", "10.0.0.2:8000"}):
        assert host_codes({"workers": hosts}, workers=resting) == []


def test_the_hosts_of_every_cluster_are_read() -> None:
    answer = b"""{"cluster_statuses": [
        {"name": "a", "host_statuses": [
            {"address": {"socket_address": {"address": "10.0.0.1", "port_value": 1}}},
            {"address": {"socket_address": {"address": "::1", "port_value": 2}}}]},
        {"name": "b", "host_statuses": [{"address": {"pipe": {"path": "/x"}}}]},
        {"name": "c"}]}"""
    assert hosts_in(answer) == {"a": {"10.0.0.1:1", "[::1]:2"}, "b": {"unix:/x"}, "c": set()}


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"1", b'{"cluster_statuses": 1}', b"[" * 100_000, b"\xff"]
)
def test_an_answer_that_makes_no_sense_names_no_hosts(answer: bytes) -> None:
    assert hosts_in(answer) == {}
