"""The part of a Kubernetes API server that a picker of one pool and its pods needs.

python benchmarks/peers_kubernetes.py IP:PORT ENDPOINT...

It answers discovery, lists of one InferencePool and of the pods that are its endpoints, and watches
in which nothing ever happens.
"""

import asyncio
import sys
from typing import Any

import measure  # noqa: F401 - before the packages that it needs
from aiohttp import web
from peers_settings import NAMESPACE, POOL

GROUP = "inference.networking.k8s.io"
Body = dict[str, Any]


def pod(number: int, ip: str) -> Body:
    """Returns a ready pod."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _named(f"worker-{number}") | {"labels": {"app": POOL}},
        "spec": {"containers": [{"name": "engine"}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def pool(port: int) -> Body:
    """Returns the pool that selects these pods."""
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "InferencePool",
        "metadata": _named(POOL),
        "spec": {
            "selector": {"matchLabels": {"app": POOL}},
            "targetPorts": [{"number": port}],
            "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
        },
    }


def _named(name: str) -> Body:
    return {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "resourceVersion": "1"}


def _resources(group: str, kind: str, plural: str) -> Body:
    resource = {
        "name": plural,
        "singularName": "",
        "namespaced": True,
        "kind": kind,
        "verbs": ["get", "list", "watch"],
    }
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group,
        "resources": [resource],
    }


def _serve(listen: str, endpoints: list[str]) -> None:
    split = [one.rpartition(":") for one in endpoints]
    pods = [pod(number, ip) for number, (ip, _, _) in enumerate(split)]
    version = {"groupVersion": f"{GROUP}/v1", "version": "v1"}
    groups = [{"name": GROUP, "versions": [version], "preferredVersion": version}]
    answers: dict[str, Body] = {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        "/api/v1": _resources("v1", "Pod", "pods"),
        f"/apis/{GROUP}": {"kind": "APIGroup", "apiVersion": "v1", **groups[0]},
        f"/apis/{GROUP}/v1": _resources(f"{GROUP}/v1", "InferencePool", "inferencepools"),
    }
    lists = {
        f"/api/v1/namespaces/{NAMESPACE}/pods": ("v1", "PodList", pods),
        f"/apis/{GROUP}/v1/namespaces/{NAMESPACE}/inferencepools": (
            f"{GROUP}/v1",
            "InferencePoolList",
            [pool(int(split[0][2]))],
        ),
    }

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path in answers:
            return web.json_response(answers[request.path])
        if request.path not in lists:
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}
            return web.json_response(status | {"reason": "NotFound"}, status=404)
        api, kind, items = lists[request.path]
        if request.query.get("watch") in ("true", "1"):
            if "sendInitialEvents" in request.query:
                status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 422}
                return web.json_response(status | {"reason": "Invalid"}, status=422)
            quiet = web.StreamResponse(headers={"Content-Type": "application/json"})
            await quiet.prepare(request)
            await asyncio.Event().wait()
        metadata = {"resourceVersion": "1"}
        return web.json_response(
            {"apiVersion": api, "kind": kind, "metadata": metadata, "items": items}
        )

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    host, _, port = listen.rpartition(":")
    # its watches never end by themselves
    web.run_app(application, host=host, port=int(port), print=None, shutdown_timeout=0.0)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
