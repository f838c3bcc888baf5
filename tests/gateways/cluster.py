"""A Kubernetes API on loopback for control planes: objects to list, watch and write.

It admits everything, knows no schemas and starts no pods. A Service with a selector gets an
EndpointSlice of the pods that are here, as the real cluster's controller would make it.
"""

import asyncio
import contextlib
import copy
import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, NamedTuple

import yaml
from aiohttp import web

Tree = dict[str, Any]

_SERVICE_LABEL = "kubernetes.io/service-name"


# group, version, resource
_Kind = tuple[str, str, str]


class _Where(NamedTuple):
    """What a path names. part: a subresource, or ""."""

    kind: _Kind
    namespace: str
    name: str
    part: str


class Cluster:
    """The objects, by kind, namespace and name, and all events about them."""

    def __init__(self) -> None:
        self._objects: dict[_Kind, dict[tuple[str, str], Tree]] = {}
        self._events: list[tuple[_Kind, str, Tree]] = []
        self._changed = asyncio.Condition()

    @property
    def version(self) -> int:
        """The version of the last change."""
        return len(self._events)

    def objects(self, kind: _Kind) -> list[Tree]:
        """All objects of a kind."""
        return list(self._objects.get(kind, {}).values())

    async def apply(self, manifests: Iterable[Tree], namespace: str) -> None:
        """Writes manifests as `kubectl apply -n` would."""
        for one in manifests:
            group, _, version = one["apiVersion"].rpartition("/")
            kind = (group, version, _plural(one["kind"]))
            place = "" if one["kind"] in _OF_THE_CLUSTER else namespace
            await self.write(_Where(kind, one["metadata"].get("namespace", place), "", ""), one)

    async def write(self, where: _Where, given: Tree) -> Tree:
        """Writes an object; an equal one again is no change."""
        name = where.name or given["metadata"]["name"]
        held = self._objects.setdefault(where.kind, {})
        before = held.get((where.namespace, name))
        one = copy.deepcopy(given)
        if where.part == "status" and before is not None:
            one = before | {"status": one.get("status", {})}
        elif before is not None and "status" in before:
            one.setdefault("status", before["status"])
        group, version, resource = where.kind
        one.setdefault("apiVersion", f"{group}/{version}" if group else version)
        one.setdefault("kind", next((k for k in _KINDS if _plural(k) == resource), resource))
        own = {"namespace": where.namespace} if where.namespace else {}
        old = (before or {}).get("metadata", {})
        one["metadata"] = (
            one.get("metadata", {})
            | own
            | {
                "name": name,
                "uid": old.get("uid") or f"00000000-0000-0000-0000-{self.version:012d}",
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "generation": 1,
                "resourceVersion": old.get("resourceVersion", "0"),
            }
        )
        if one == before:
            return one
        one["metadata"]["resourceVersion"] = str(self.version + 1)
        held[(where.namespace, name)] = one
        await self._happened(where.kind, "MODIFIED" if before else "ADDED", one)
        if where.kind == ("", "v1", "services"):
            await self._list_endpoints(one)
        return one

    async def remove(self, where: _Where) -> Tree | None:
        """Removes an object, and returns it if it was there."""
        one = self._objects.get(where.kind, {}).pop((where.namespace, where.name), None)
        if one is not None:
            gone = copy.deepcopy(one)
            gone["metadata"]["resourceVersion"] = str(self.version + 1)
            await self._happened(where.kind, "DELETED", gone)
        return one

    def get(self, where: _Where) -> Tree | None:
        """Returns an object, or None."""
        return self._objects.get(where.kind, {}).get((where.namespace, where.name))

    async def since(self, kind: _Kind, version: int) -> AsyncIterator[tuple[str, Tree]]:
        """Yields the changes of objects of a kind after a version, without end."""
        while True:
            async with self._changed:
                while len(self._events) <= version:
                    await self._changed.wait()
                news, version = self._events[version:], len(self._events)
            for of, what, one in news:
                if of == kind:
                    yield what, one

    async def _happened(self, kind: _Kind, what: str, one: Tree) -> None:
        async with self._changed:
            self._events.append((kind, what, one))
            self._changed.notify_all()

    async def _list_endpoints(self, service: Tree) -> None:
        """Writes the pods of a Service as an EndpointSlice."""
        spec, meta = service["spec"], service["metadata"]
        pods = [
            one
            for one in self.objects(("", "v1", "pods"))
            if one["metadata"]["namespace"] == meta["namespace"]
            and spec.get("selector")
            and spec["selector"].items() <= one["metadata"]["labels"].items()
        ]
        if not pods:
            return
        slice_ = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": meta["name"], "labels": {_SERVICE_LABEL: meta["name"]}},
            "addressType": "IPv4",
            "endpoints": [_endpoint(one) for one in pods],
            "ports": [
                {"name": port.get("name", ""), "protocol": "TCP", "port": _number(port, pods[0])}
                for port in spec["ports"]
            ],
        }
        await self.apply([slice_], meta["namespace"])


def _endpoint(pod: Tree) -> Tree:
    meta = pod["metadata"]
    return {
        "addresses": [pod["status"]["podIP"]],
        "conditions": {"ready": True, "serving": True, "terminating": False},
        "targetRef": {"kind": "Pod", "name": meta["name"], "namespace": meta["namespace"]},
    }


def _number(port: Tree, pod: Tree) -> int:
    """The port of a pod that a Service's port leads to."""
    target = port.get("targetPort", port["port"])
    if isinstance(target, int):
        return target
    named = [one for box in pod["spec"]["containers"] for one in box["ports"]]
    return int(next(one["containerPort"] for one in named if one["name"] == target))


# ---- HTTP ----------------------------------------------------------------------------------------

_KINDS = [
    "ConfigMap",
    "CustomResourceDefinition",
    "Deployment",
    "EndpointSlice",
    "EnvoyFilter",
    "Gateway",
    "GatewayClass",
    "HTTPRoute",
    "InferencePool",
    "Lease",
    "Namespace",
    "Pod",
    "Secret",
    "Service",
    "ServiceAccount",
]
_OF_THE_CLUSTER = {"Namespace", "GatewayClass", "CustomResourceDefinition"}


def _plural(kind: str) -> str:
    lower = kind.lower()
    return f"{lower}es" if lower.endswith("s") else f"{lower}s"


def _where(path: str) -> _Where:
    parts = path.strip("/").split("/")
    if parts[0] == "api":
        parts.insert(1, "")
    rest = parts[3:]
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    name, part = [*rest[1:], "", ""][:2]
    return _Where((parts[1], parts[2], rest[0]), namespace, name, part)


def _matches(one: Tree, query: Mapping[str, str], namespace: str) -> bool:
    meta = one["metadata"]
    if namespace and meta.get("namespace") != namespace:
        return False
    fields = {"metadata.name": meta["name"], "metadata.namespace": meta.get("namespace", "")}
    chosen = [(fields, term) for term in query.get("fieldSelector", "").split(",") if term]
    chosen += [(meta.get("labels", {}), term) for term in _terms(query.get("labelSelector", ""))]
    return all(_holds(values, term) for values, term in chosen)


def _terms(selector: str) -> list[str]:
    """The terms of a selector; a comma in brackets does not separate terms."""
    return [term.strip() for term in re.split(r",(?![^(]*\))", selector) if term.strip()]


def _holds(values: Mapping[str, str], term: str) -> bool:
    if found := re.fullmatch(r"(\S+) (not)?in ?\((.*)\)", term):
        listed = values.get(found[1]) in [one.strip() for one in found[3].split(",")]
        return listed is not bool(found[2])
    if "!=" in term:
        key, _, value = term.partition("!=")
        return values.get(key) != value
    if "=" in term:
        key, _, value = term.replace("==", "=").partition("=")
        return values.get(key) == value
    return term[1:] not in values if term.startswith("!") else term in values


def _merge(tree: Tree, other: Tree) -> Tree:
    merged = dict(tree)
    for key, value in other.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


class _Api:
    """The cluster's HTTP API."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/version":
            return web.json_response({"major": "1", "minor": "36", "gitVersion": "v1.36.2"})
        if len(request.path.strip("/").split("/")) < (3 if request.path.startswith("/api/") else 4):
            return self._refused(404, "NotFound")
        where = _where(request.path)
        if request.method != "GET":
            return await self._write(request, where)
        if where.name:
            one = self._cluster.get(where)
            return web.json_response(one) if one else self._refused(404, "NotFound")
        if request.query.get("watch") in {"1", "true"}:
            return await self._watch(request, where)
        return self._list(request, where)

    async def _write(self, request: web.Request, where: _Where) -> web.Response:
        if request.method == "DELETE":
            gone = await self._cluster.remove(where)
            return web.json_response(gone) if gone else self._refused(404, "NotFound")
        given = yaml.safe_load(await request.text())
        before = self._cluster.get(where)
        if request.method == "POST":
            named = where._replace(name=given["metadata"]["name"])
            if self._cluster.get(named) is not None:
                return self._refused(409, "AlreadyExists")
        elif request.method == "PATCH":
            if before is None and "apply" not in request.content_type:
                return self._refused(404, "NotFound")
            # nobody here depends on a patch that is a list of operations
            given = _merge(before or {}, given) if isinstance(given, dict) else before
        elif before is None:
            return self._refused(404, "NotFound")
        return web.json_response(await self._cluster.write(where, given))

    def _list(self, request: web.Request, where: _Where) -> web.Response:
        items = [
            one
            for one in self._cluster.objects(where.kind)
            if _matches(one, request.query, where.namespace)
        ]
        told: Tree = {"metadata": {"resourceVersion": str(self._cluster.version)}}
        if "PartialObjectMetadata" in request.headers.get("Accept", ""):
            told |= {"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadataList"}
            items = [_metadata(one) for one in items]
        return web.json_response(told | {"items": items})

    async def _watch(self, request: web.Request, where: _Where) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        partly = "PartialObjectMetadata" in request.headers.get("Accept", "")
        version = int(request.query.get("resourceVersion") or 0)
        with contextlib.suppress(ConnectionError):
            async for what, one in self._cluster.since(where.kind, version):
                if _matches(one, request.query, where.namespace):
                    told = _metadata(one) if partly else one
                    line = json.dumps({"type": what, "object": told})
                    await response.write(line.encode() + b"\n")
        return response

    @staticmethod
    def _refused(status: int, reason: str) -> web.Response:
        told = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason}
        return web.json_response(told | {"code": status, "message": reason}, status=status)


def _metadata(one: Tree) -> Tree:
    kind = {"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata"}
    return kind | {"metadata": one["metadata"]}


@contextlib.asynccontextmanager
async def serving(cluster: Cluster) -> AsyncIterator[str]:
    """Serves a cluster; yields the URL of its API."""
    application = web.Application(client_max_size=2**24)
    application.router.add_route("*", "/{path:.*}", _Api(cluster).answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def kubeconfig(url: str) -> str:
    """The kubeconfig of a client of this API."""
    named = {"clusters": [{"name": "here", "cluster": {"server": url}}]}
    named |= {"contexts": [{"name": "here", "context": {"cluster": "here", "user": "test"}}]}
    named |= {"users": [{"name": "test", "user": {}}]}
    return yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": "here"} | named)
