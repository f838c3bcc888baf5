"""A real Envoy that reaches the router by TLS."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from extproc.config.schema import Config
from extproc.envoy.envoy_config import render
from tests.extproc.serving.identities import NAME, Identities
from tests.ports import free_port
from tests.system.system import System, chat, long_text, running
from tests.waiting import until


@contextlib.asynccontextmanager
async def system(
    identities: Identities,
    router_tls: dict[str, str],
    envoy_config: Callable[[Config], str] = render,
) -> AsyncIterator[System]:
    """Workers, a router that requires a client certificate, and Envoy with `router_tls`."""
    tls = identities.tls(is_mutual=True)
    files = {"certificate": tls.certificate, "key": tls.key, "client_ca": tls.client_ca}
    extproc = {"listen": f"127.0.0.1:{free_port()}", "tls": files}
    listeners = {name: f"127.0.0.1:{free_port()}" for name in ("listen", "admin")}
    envoy = {**listeners, "router_tls": {"ca": str(identities.ca_file), **router_tls}}
    changes = {"extproc": extproc, "envoy": envoy}
    async with running(2, changes=changes, envoy_config=envoy_config) as one:
        yield one


def own(identities: Identities, name: str = NAME) -> dict[str, str]:
    """The router's name, and Envoy's certificate."""
    certificate, key = identities.tls_files()
    return {"name": name, "certificate": certificate, "key": key}


def without_certificate(config: Config) -> str:
    """The configuration of an Envoy that presents no certificate."""
    assert config.envoy.router_tls is not None
    router_tls = replace(config.envoy.router_tls, certificate=None, key=None)
    return render(replace(config, envoy=replace(config.envoy, router_tls=router_tls)))


@pytest.mark.slow
async def test_prefix_is_found_again_over_mutual_tls(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    async with system(identities, own(identities)) as one:
        body = chat(long_text("alpha"))
        _, worker, _ = await one.send(body)
        await one.learned(body, worker)
        assert [(await one.send(body))[:2] for _ in range(3)] == [(200, worker)] * 3
        steered = 'kvsteer_decisions_total{model="tiny",reason="overlap"}'
        assert await one.metric(steered) == 3


@pytest.mark.parametrize("fault", ["no certificate", "another name"])
@pytest.mark.slow
async def test_envoy_with_a_wrong_certificate_is_not_steered_and_loses_nothing(
    fault: str, tmp_path: Path
) -> None:
    identities = Identities(tmp_path)
    shows_none = fault == "no certificate"
    name, envoy_config = (NAME, without_certificate) if shows_none else ("other.test", render)
    async with system(identities, own(identities, name), envoy_config) as one:
        body = chat(long_text("alpha"))
        assert [(await one.send(body))[0] for _ in range(3)] == [200] * 3
        assert await one.metric("kvsteer_decision_seconds_count") == 0


@pytest.mark.slow
async def test_certificate_is_renewed_while_envoy_sends_requests(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    async with system(identities, own(identities)) as one:
        expiry = 'kvsteer_tls_certificate_expiry_seconds{listener="extproc"}'
        before = await one.metric(expiry)
        assert before > 1.7e9
        sent = 0
        identities.renew(days=7)

        async def renewed() -> bool:
            nonlocal sent
            sent += 1
            assert (await one.send(chat(long_text(str(sent)))))[0] == 200
            return await one.metric(expiry) != before

        await until(renewed, "the new certificate is used")
        assert await one.metric("kvsteer_decision_seconds_count") == sent
        assert await one.metric('kvsteer_tls_fault{listener="extproc"}') == 0
