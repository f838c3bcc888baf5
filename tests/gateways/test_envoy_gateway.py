"""What docs/gateways.md says can be changed in the manifests for Envoy Gateway."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

# The name in the router's certificate.
from tests.extproc.serving.identities import NAME
from tests.gateways import envoy_gateway
from tests.gateways.gateways import MODEL, Place, Tree, behind, published
from tests.gateways.install import PROGRAMS
from tests.system.system import System, chat, long_text
from tests.waiting import until

pytestmark = pytest.mark.gateway


def with_response_attributes(manifests: list[Tree], place: Place) -> list[Tree]:
    for one in manifests:
        if one["kind"] == "EnvoyExtensionPolicy":
            mode = one["spec"]["extProc"][0]["processingMode"]
            mode["response"] = {"attributes": ["upstream.address"]}
    return manifests


def with_tls(manifests: list[Tree], place: Place) -> list[Tree]:
    authority = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "authority", "namespace": "llm"},
        "data": {"ca.crt": (place.directory / "ca.pem").read_text()},
    }
    policy = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "BackendTLSPolicy",
        "metadata": {"name": "kvsteer", "namespace": "llm"},
        "spec": {
            "targetRefs": [
                {"group": "gateway.envoyproxy.io", "kind": "Backend", "name": "kvsteer"}
            ],
            "validation": {
                "caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": "authority"}],
                "hostname": NAME,
            },
        },
    }
    return [*manifests, authority, policy]


async def steered(system: System) -> None:
    body = chat(long_text("alpha"), model=MODEL)
    _, holder, _ = await system.send(body)
    await system.learned(body, holder)
    answers = [await system.send(body) for _ in range(16)]
    assert {(status, worker) for status, worker, _ in answers} == {(200, holder)}
    assert await system.metric(f'kvsteer_decisions_total{{model="{MODEL}",reason="overlap"}}') == 16


async def test_response_attributes_name_the_served_endpoint(
    program: Callable[[str], Path], ran: Callable[[str], None], tmp_path: Path
) -> None:
    run = partial(envoy_gateway.running, program("envoy-gateway"), change=with_response_attributes)
    async with behind(tmp_path, run, published(envoy_gateway.OVERLAY)) as system:
        await steered(system)
        told = f'kvsteer_steered_total{{model="{MODEL}",result="delivered"}}'

        async def is_told() -> bool:
            return await system.metric(told) > 0

        await until(is_told, "the router knows who answered")
    ran(f"envoy-gateway {PROGRAMS['envoy-gateway'].version}: response attributes")


async def test_backend_tls_policy_makes_envoy_speak_tls_to_the_router(
    program: Callable[[str], Path], ran: Callable[[str], None], tmp_path: Path
) -> None:
    configuration = published(envoy_gateway.OVERLAY)
    configuration["extproc"]["tls"] = {}
    run = partial(envoy_gateway.running, program("envoy-gateway"), change=with_tls)
    async with behind(tmp_path, run, configuration) as system:
        await steered(system)
    ran(f"envoy-gateway {PROGRAMS['envoy-gateway'].version}: TLS to the router")
