"""Istio's control plane with the manifests of an overlay, and an Envoy that it configures by xDS.

It reads a cluster of tests/gateways/cluster.py, and gives Envoy everything over its ADS. Istio's
agent and its build of Envoy are not run: what only that Envoy knows (metadata exchange, the ALPN
filter) is switched off in the control plane, and so is automatic mTLS. The pods and the gateway's
Service, which other controllers would make of the manifests, are written here.
"""

import contextlib
import copy
import json
from collections.abc import AsyncIterator
from pathlib import Path

from tests.deploy.manifests import built, pod_templates
from tests.gateways.cluster import Cluster, kubeconfig, serving
from tests.gateways.gateways import Place, Program, Tree, answering, running_program
from tests.ports import free_port
from tests.system.envoy_process import running_envoy
from tests.system.ingresses.existing_envoy import address
from tests.system.ingresses.ingresses import router_cluster

ENVOY_FILTER = "istio-envoyfilter"
INFERENCE_POOL = "istio-inferencepool"

_NAMESPACE = "llm"
_GATEWAY = {"gateway.networking.k8s.io/gateway-name": "inference"}
_KINDS = {"EnvoyFilter", "Gateway", "HTTPRoute", "InferencePool", "Service"}

_ENVIRONMENT = {
    "ENABLE_GATEWAY_API_INFERENCE_EXTENSION": "true",
    # features that upstream's Envoy lacks
    "PILOT_ENABLE_ALPN_FILTER": "false",
    "PILOT_ENABLE_METADATA_EXCHANGE": "false",
    # no certificates, no injection, no Deployments: nothing here would use them
    "PILOT_CERT_PROVIDER": "none",
    "ENABLE_CA_SERVER": "false",
    "INJECT_ENABLED": "false",
    "PILOT_ENABLE_GATEWAY_API_DEPLOYMENT_CONTROLLER": "false",
    # the protocol that our cluster speaks
    "ISTIO_KUBE_CLIENT_CONTENT_TYPE": "json",
    "KUBE_FEATURE_WatchListClient": "false",
    "POD_NAME": "istiod",
    "POD_NAMESPACE": "istio-system",
}


@contextlib.asynccontextmanager
async def running(overlay: str, binary: Path, place: Place) -> AsyncIterator[None]:
    """Runs the control plane and its Envoy, until the block ends."""
    home = place.directory / "istio"
    home.mkdir()
    cluster = Cluster()
    await cluster.apply(_of_the_cluster(), "")
    await cluster.apply(_pods(overlay, place), _NAMESPACE)
    await cluster.apply([*_manifests(overlay, place), _gateway_service(place)], _NAMESPACE)
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(cluster))
        (home / "kubeconfig").write_text(kubeconfig(url))
        (home / "mesh").write_text("enableAutoMtls: false\n")
        xds, monitoring, http = (free_port() for _ in range(3))
        command = [
            str(binary),
            "discovery",
            "--kubeconfig",
            str(home / "kubeconfig"),
            "--meshConfig",
            str(home / "mesh"),
            "--networksConfig",
            str(home / "networks"),
            "--grpcAddr",
            f"127.0.0.1:{xds}",
            "--secureGRPCAddr",
            "",
            "--httpsAddr",
            "",
            "--httpAddr",
            f"127.0.0.1:{http}",
            "--monitoringAddr",
            f"127.0.0.1:{monitoring}",
            "--ctrlz_port",
            "0",
        ]
        log = home / "pilot-discovery.log"
        program: Program = await stack.enter_async_context(
            running_program(command, log, _ENVIRONMENT)
        )
        await answering(program, f"http://127.0.0.1:{http}/ready")
        admin = free_port()
        await stack.enter_async_context(running_envoy(json.dumps(_bootstrap(xds, admin)), admin))
        await answering(program, f"http://127.0.0.1:{place.port}/v1/models")
        yield


def _of_the_cluster() -> list[Tree]:
    """Namespaces, the kinds that are installed, Istio's class."""
    kinds = [f"{name}.gateway.networking.k8s.io" for name in _GATEWAY_KINDS]
    kinds += ["envoyfilters.networking.istio.io", "inferencepools.inference.networking.k8s.io"]
    versions = {"gateway.networking.k8s.io/bundle-version": "v1.6.1"}
    definitions = [
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": kind, "annotations": versions},
        }
        for kind in kinds
    ]
    istio = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "GatewayClass",
        "metadata": {"name": "istio"},
        "spec": {"controllerName": "istio.io/gateway-controller"},
    }
    namespaces = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": {}}}
        for name in (_NAMESPACE, "istio-system")
    ]
    return [*definitions, istio, *namespaces]


_GATEWAY_KINDS = ("gatewayclasses", "gateways", "httproutes")


def _manifests(overlay: str, place: Place) -> list[Tree]:
    """What Istio reads of an overlay, with this machine's ports."""
    told = [copy.deepcopy(one) for one in built(overlay) if one["kind"] in _KINDS]
    for one in told:
        if one["kind"] == "Gateway":
            one["spec"]["listeners"][0]["port"] = place.port
        if one["kind"] == "InferencePool":
            one["spec"]["targetPorts"] = [{"number": _port(place.workers[0])}]
        if one["kind"] == "Service":
            # the API server would assign one
            one["spec"].setdefault("clusterIP", "10.96.0.10")
    return told


def _gateway_service(place: Place) -> Tree:
    """The Service that Istio makes for a Gateway, together with its Deployment."""
    port = {"name": "http", "port": place.port, "targetPort": place.port, "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "inference-istio", "labels": _GATEWAY},
        "spec": {"clusterIP": "10.96.0.11", "selector": _GATEWAY, "ports": [port]},
    }


def _pods(overlay: str, place: Place) -> list[Tree]:
    """The pods of the overlay's workloads: the workers, the router."""
    found = []
    for template in pod_templates(overlay):
        name = template["metadata"]["labels"]["app.kubernetes.io/name"]
        router = name == "kvsteer"
        endpoints = [f"127.0.0.1:{place.router_port}"] if router else place.workers
        for number, endpoint in enumerate(endpoints):
            pod = _pod(template, endpoint, "grpc" if router else "http")
            pod["metadata"]["name"] = f"{name}-{number}"
            found.append(pod)
    return found


def _pod(template: Tree, endpoint: str, port_name: str) -> Tree:
    pod: Tree = {"apiVersion": "v1", "kind": "Pod"} | copy.deepcopy(template)
    for container in pod["spec"]["containers"]:
        for port in container["ports"]:
            if port["name"] == port_name:
                port["containerPort"] = _port(endpoint)
    host = endpoint.rpartition(":")[0]
    ready = [{"type": "Ready", "status": "True"}]
    status = {"phase": "Running", "podIP": host, "podIPs": [{"ip": host}], "conditions": ready}
    return pod | {"status": status}


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def _bootstrap(xds: int, admin: int) -> Tree:
    """What Istio's agent tells its Envoy to start with, reduced to the xDS server and the names."""
    source = {"ads": {}, "initial_fetch_timeout": "0s", "resource_api_version": "V3"}
    service = {"envoy_grpc": {"cluster_name": "xds-grpc"}}
    return {
        "node": {
            "id": f"router~127.0.0.1~inference-istio-0.{_NAMESPACE}~{_NAMESPACE}.svc.cluster.local",
            "cluster": f"inference-istio.{_NAMESPACE}",
            "metadata": {
                "CLUSTER_ID": "Kubernetes",
                "NAMESPACE": _NAMESPACE,
                "LABELS": _GATEWAY,
                "INSTANCE_IPS": "127.0.0.1",
                "ISTIO_VERSION": "1.32.0",
            },
        },
        "admin": {"address": address("127.0.0.1", admin)},
        "dynamic_resources": {
            "ads_config": {
                "api_type": "GRPC",
                "transport_api_version": "V3",
                "grpc_services": [service],
            },
            "cds_config": source,
            "lds_config": source,
        },
        "static_resources": {"clusters": [router_cluster("xds-grpc", xds)]},
    }
