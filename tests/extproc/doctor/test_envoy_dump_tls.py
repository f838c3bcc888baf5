from typing import Any

import pytest

from extproc.config import Config, ExtProc, Tls
from extproc.doctor.envoy_dump_tls import judge_tls
from extproc.doctor.findings import About

PLAIN = Config()
ENCRYPTED = Config(extproc=ExtProc(tls=Tls(certificate="c", key="k")))
TYPE = "type.googleapis.com/envoy"
TLS = {"typed_config": {"@type": f"{TYPE}.extensions.transport_sockets.tls.v3.UpstreamTlsContext"}}
FILTER = {"grpc_service": {"envoy_grpc": {"cluster_name": "router"}}}


def codes_of(config: Config, ext_proc: Any = FILTER, **cluster: Any) -> list[str]:
    one = {"@type": f"{TYPE}.config.cluster.v3.Cluster", "name": "router", **cluster}
    other = {"@type": f"{TYPE}.config.cluster.v3.Cluster", "name": "workers"}
    parts = [{"static_clusters": [{"cluster": one}, {"cluster": other}]}]
    return [found.code for found in judge_tls(About("envoy"), config, ext_proc, parts)]


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
