"""A real Envoy, as `kvsteer envoy` has it, and with what is easily forgotten."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from extproc.config import Config, Envoy, ExtProc, RouterTls, Worker
from extproc.doctor.doctor import examine
from extproc.doctor.findings import Verdict
from extproc.envoy_config import render
from tests.e2e.envoy_process import running_envoy
from tests.extproc.doctor.fleet import MODEL, SECONDS
from tests.extproc.serving.identities import Identities
from tests.ports import free_port


def configuration() -> Config:
    return Config(
        extproc=ExtProc(listen=f"127.0.0.1:{free_port()}"),
        models=(MODEL,),
        workers=(Worker(f"127.0.0.1:{free_port()}"),),
        envoy=Envoy(listen=f"127.0.0.1:{free_port()}", admin=f"127.0.0.1:{free_port()}"),
    )


async def found_in(config: Config, text: str) -> list[tuple[Verdict, str]]:
    async with running_envoy(text, int(config.envoy.admin.rpartition(":")[2])):
        found = await examine(config, SECONDS, probes=False)
    return [(one.verdict, one.code) for one in found if one.check == "envoy"]


def spoil(tree: Any) -> None:
    """Takes out of a configuration what makes it steer well."""
    (listener,) = tree["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    del manager["early_header_mutation_extensions"]
    del manager["route_config"]["virtual_hosts"][0]["request_body_buffer_limit"]
    ext_proc = manager["http_filters"][0]["typed_config"]
    for key in ("message_timeout", "metadata_options", "failure_mode_allow"):
        del ext_proc[key]
    for cluster in tree["static_resources"]["clusters"]:
        cluster.pop("load_balancing_policy", None)


async def test_the_envoy_that_we_print_is_right() -> None:
    config = configuration()
    assert await found_in(config, render(config)) == [(Verdict.RIGHT, "")]


def with_tls(config: Config, files: Identities, *, is_mutual: bool = False) -> Config:
    """The same, with TLS from Envoy to the router."""
    certificate, key = files.tls_files() if is_mutual else (None, None)
    router_tls = RouterTls(ca=str(files.ca_file), certificate=certificate, key=key)
    return replace(
        config,
        extproc=replace(config.extproc, tls=files.tls(is_mutual=is_mutual)),
        envoy=replace(config.envoy, router_tls=router_tls),
    )


async def test_tls_that_only_one_side_speaks_is_found(tmp_path: Path) -> None:
    plain = configuration()
    encrypted = with_tls(plain, Identities(tmp_path))
    assert await found_in(encrypted, render(encrypted)) == [(Verdict.RIGHT, "")]
    found = await found_in(encrypted, render(plain))
    assert found == [(Verdict.WRONG, "envoy-plain-to-tls")]
    found = await found_in(plain, render(encrypted))
    assert found == [(Verdict.WRONG, "envoy-tls-to-plain")]


async def test_an_envoy_that_shows_no_certificate_is_found(tmp_path: Path) -> None:
    files = Identities(tmp_path)
    mutual = with_tls(configuration(), files, is_mutual=True)
    assert await found_in(mutual, render(mutual)) == [(Verdict.RIGHT, "")]
    found = await found_in(mutual, render(with_tls(mutual, files)))
    assert found == [(Verdict.WRONG, "envoy-no-client-certificate")]


async def test_what_is_forgotten_in_an_envoy_is_found() -> None:
    config = configuration()
    tree = yaml.safe_load(render(config))
    spoil(tree)
    found = await found_in(config, yaml.safe_dump(tree))
    assert {code for _, code in found} == {
        "envoy-message-timeout",
        "envoy-fails-closed",
        "envoy-namespaces",
        "envoy-client-header",
        "envoy-buffer-limit",
        "envoy-no-override",
    }
