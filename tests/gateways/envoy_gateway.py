"""Envoy Gateway without Kubernetes: its own control plane, from files, starts the Envoy here.

Its file provider knows no Services, so the two of the overlay become Backends: only they
and the port that the Gateway listens on differ from the published manifests.
"""

import contextlib
import copy
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import yaml

from tests.deploy.manifests import built
from tests.gateways.gateways import Place, Tree, answering, running_program
from tests.system.envoy_process import ENVOY

OVERLAY = "envoy-gateway"

_GROUP = "gateway.envoyproxy.io"
_CONTROLLER = f"{_GROUP}/gatewayclass-controller"
_NAMESPACE = "llm"

# Where Envoy Gateway looks before it downloads an Envoy: any version that it accepts will do.
ENVOY_VERSION = "1.40.0"


Change = Callable[[list[Tree], Place], list[Tree]]


def _as_published(manifests: list[Tree], place: Place) -> list[Tree]:
    return manifests


@contextlib.asynccontextmanager
async def running(
    binary: Path, place: Place, change: Change = _as_published
) -> AsyncIterator[None]:
    """Runs Envoy Gateway with the overlay's manifests, until the block ends.

    change: returns the manifests as an operator has changed them.
    """
    home = place.directory / "gateway"
    found = home / f"data/envoy-versions/{ENVOY_VERSION}/bin/envoy"
    found.parent.mkdir(parents=True)
    found.symlink_to(ENVOY)
    resources = home / "resources"
    resources.mkdir()
    (resources / "all.yaml").write_text(yaml.safe_dump_all(change(manifests(place), place)))
    config = home / "envoy-gateway.yaml"
    config.write_text(yaml.safe_dump(_settings(home, resources)))
    certificates = [str(binary), "certgen", "--local", "--config-home", str(home / "config")]
    async with running_program(certificates, home / "certgen.log") as program:
        assert await program.process.wait() == 0, program.log_tail()
    command = [str(binary), "server", "--config-path", str(config)]
    async with running_program(command, home / "envoy-gateway.log") as program:
        await answering(program, f"http://127.0.0.1:{place.port}/v1/models")
        yield


def _settings(home: Path, resources: Path) -> Tree:
    """Envoy Gateway's own configuration, as its documentation has it for use without Kubernetes."""
    folders = ("config", "data", "state", "runtime")
    keys = ("configHome", "dataHome", "stateHome", "runtimeDir")
    host = {key: str(home / folder) for key, folder in zip(keys, folders, strict=True)}
    return {
        "apiVersion": f"{_GROUP}/v1alpha1",
        "kind": "EnvoyGateway",
        "gateway": {"controllerName": _CONTROLLER},
        "provider": {
            "type": "Custom",
            "custom": {
                "resource": {"type": "File", "file": {"paths": [str(resources)]}},
                "infrastructure": {"type": "Host", "host": host},
            },
        },
        "extensionApis": {"enableBackend": True},
        "telemetry": {"metrics": {"prometheus": {"disable": True}}},
    }


def manifests(place: Place) -> list[Tree]:
    """The overlay's manifests that Envoy Gateway reads, with its class and this machine's ports."""
    told = [
        _with_backends(one)
        for one in built(OVERLAY)
        if one["apiVersion"].startswith(("gateway.networking.k8s.io/", f"{_GROUP}/"))
    ]
    for one in told:
        if one["kind"] == "Gateway":
            one["spec"]["listeners"][0]["port"] = place.port
    router = _backend("kvsteer", [f"127.0.0.1:{place.router_port}"])
    # as the Service's port says
    router["spec"]["appProtocols"] = ["gateway.envoyproxy.io/h2c"]
    return [*gateway_class(), *told, router, _backend("vllm", place.workers)]


def gateway_class() -> tuple[Tree, Tree]:
    """The class `eg` of docs/gateways.md, with the Envoy that is here."""
    proxy = {"group": _GROUP, "kind": "EnvoyProxy", "name": "here", "namespace": _NAMESPACE}
    return (
        {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "GatewayClass",
            "metadata": {"name": "eg"},
            "spec": {"controllerName": _CONTROLLER, "parametersRef": proxy},
        },
        {
            "apiVersion": f"{_GROUP}/v1alpha1",
            "kind": "EnvoyProxy",
            "metadata": {"name": "here", "namespace": _NAMESPACE},
            "spec": {
                "provider": {"type": "Host", "host": {"envoyVersion": ENVOY_VERSION}},
                "concurrency": 1,
            },
        },
    )


def _with_backends(manifest: Tree) -> Tree:
    """The manifest with each reference to a Service changed to a Backend of the same name."""
    told = copy.deepcopy(manifest)
    for part in [*told["spec"].get("rules", []), *told["spec"].get("extProc", [])]:
        for reference in part["backendRefs"]:
            del reference["port"]
            reference |= {"group": _GROUP, "kind": "Backend"}
    return told


def _backend(name: str, endpoints: Sequence[str]) -> Tree:
    pairs = [endpoint.rsplit(":", 1) for endpoint in endpoints]
    return {
        "apiVersion": f"{_GROUP}/v1alpha1",
        "kind": "Backend",
        "metadata": {"name": name, "namespace": _NAMESPACE},
        "spec": {"endpoints": [{"ip": {"address": at, "port": int(port)}} for at, port in pairs]},
    }
