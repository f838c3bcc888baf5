"""The TLS that Envoy is configured to speak to the router; tests/e2e/test_tls.py runs it."""

from typing import Any

import pytest
import yaml

from extproc.config.reader import parse
from extproc.envoy_config import render
from extproc.errors import ConfigError

SERVED = 'models: [{name: m}]\nworkers: [{endpoint: "127.0.0.1:1"}]\n'


def transport_socket(sections: str) -> dict[str, Any] | None:
    tree = yaml.safe_load(render(parse(SERVED + sections, "c")))
    (found,) = [one for one in tree["static_resources"]["clusters"] if one["name"] == "kvsteer"]
    socket: dict[str, Any] | None = found.get("transport_socket")
    return socket


def test_plain_text_is_spoken_to_a_router_that_serves_it() -> None:
    assert transport_socket("") is None


def test_the_authority_is_checked_and_the_name_where_there_is_one() -> None:
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


def test_envoy_shows_its_own_certificate_where_it_has_one() -> None:
    socket = transport_socket("envoy: {router_tls: {ca: /ca, certificate: /crt, key: /key}}")
    assert socket is not None
    (own,) = socket["typed_config"]["common_tls_context"]["tls_certificates"]
    assert own == {"certificate_chain": {"filename": "/crt"}, "private_key": {"filename": "/key"}}


def test_a_router_that_serves_tls_is_not_put_behind_an_envoy_that_does_not() -> None:
    config = parse(SERVED + "extproc: {tls: {certificate: c, key: k}}", "c")
    with pytest.raises(ConfigError, match=r"envoy\.router_tls: missing"):
        render(config)
