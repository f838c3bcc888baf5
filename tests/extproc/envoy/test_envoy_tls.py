"""The TLS that Envoy is configured to speak to the router; test_tls.py of tests/system runs it."""

from typing import Any

import pytest
import yaml

from extproc.base.errors import ConfigError
from extproc.config.reader import parse
from extproc.envoy.envoy_config import render

SERVED = 'models: [{name: m}]\nworkers: [{endpoint: "127.0.0.1:1"}]\n'


def transport_socket(sections: str) -> dict[str, Any] | None:
    tree = yaml.safe_load(render(parse(SERVED + sections, "c")))
    (found,) = [one for one in tree["static_resources"]["clusters"] if one["name"] == "kvsteer"]
    socket: dict[str, Any] | None = found.get("transport_socket")
    return socket


def test_transport_socket_is_none_for_a_router_in_plain_text() -> None:
    assert transport_socket("") is None


def test_transport_socket_verifies_the_authority_and_a_configured_name() -> None:
    socket = transport_socket("envoy: {router_tls: {ca: /ca.pem, name: router.test}}")
    assert socket is not None
    context = socket["typed_config"]
    assert context["sni"] == "router.test"
    trusted = context["common_tls_context"]["validation_context"]
    assert trusted["trusted_ca"] == {"filename": "/ca.pem"}
    (name,) = trusted["match_typed_subject_alt_names"]
    assert name == {"san_type": "DNS", "matcher": {"exact": "router.test"}}
    assert context["common_tls_context"]["alpn_protocols"] == ["h2"]
    socket = transport_socket("envoy: {router_tls: {ca: /ca.pem}}")
    assert socket is not None
    assert "sni" not in socket["typed_config"]


def test_transport_socket_presents_a_configured_certificate() -> None:
    socket = transport_socket("envoy: {router_tls: {ca: /ca, certificate: /crt, key: /key}}")
    assert socket is not None
    (own,) = socket["typed_config"]["common_tls_context"]["tls_certificates"]
    assert own == {"certificate_chain": {"filename": "/crt"}, "private_key": {"filename": "/key"}}


def test_tls_router_needs_router_tls_of_envoy() -> None:
    config = parse(SERVED + "extproc: {tls: {certificate: c, key: k}}", "c")
    with pytest.raises(ConfigError, match=r"envoy\.router_tls: missing"):
        render(config)
