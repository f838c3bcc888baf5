"""A small Kubernetes API server: pods and InferencePools of one namespace, listed and watched.

As with the real one (1.36), a watch from a version that is gone is answered with 200, and then with
an event of type ERROR and code 410; a watch that reaches its time limit ends with a bookmark.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

Body = dict[str, Any]
NAMESPACE = "llm"
TOKEN = "a-token"


class ApiServer:
    """What the server serves, and how it misbehaves.

    asked: the query of every request. listed_at: when each list was sent. refuses: a status that it
    answers instead; refuses_kind: only requests for pods, or for pools, are refused. lets_in: the
    only accepted token. unauthorized: how many requests came with another. annotated: the
    annotations that were written, by pod. allows_patches: what it says of the permission to write
    them. gone_below: versions below this one are gone; gone_as_status: it says so with the status,
    as a proxy in front of it may. page: most objects of a page, whatever is asked for.
    lists_without_end: each page names a next one.
    """

    def __init__(self) -> None:
        self.pods: dict[str, Body] = {}
        self.pools: dict[str, Body] = {}
        self.version = 100
        self.asked: list[dict[str, str]] = []
        self.listed_at: list[float] = []
        self.refuses: int | None = None
        self.refuses_kind = ""
        self.lets_in = TOKEN
        self.unauthorized = 0
        self.gone_below = 0
        self.gone_as_status = False
        self.page = 500
        self.lists_without_end = False
        self.allows_patches = True
        self.annotated: dict[str, dict[str, str]] = {}
        self.runner: web.AppRunner | None = None
        self.port = 0
        self._history: list[tuple[str, int, bytes]] = []
        self._speaks = asyncio.Event()
        self._speaks.set()
        self._watchers: set[tuple[str, asyncio.Queue[bytes | None]]] = set()

    async def start(self) -> None:
        """Listens on the same port as before, if there was one."""
        application = web.Application()
        core = f"/api/v1/namespaces/{NAMESPACE}/pods"
        extension = f"/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools"
        application.router.add_get(core, self._pods)
        application.router.add_get(extension, self._pools)
        reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        application.router.add_post(reviews, self._review)
        application.router.add_patch(f"{core}/{{name}}", self._annotate)
        self.runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        """Stops the server, and ends all watches."""
        self.end_watches()
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    def hang(self) -> None:
        """Accepts connections but sends nothing, on open ones either."""
        self._speaks.clear()

    def wake(self) -> None:
        """Continues where it hung."""
        self._speaks.set()

    def put(self, kind: str, thing: Body, event: str | None = None) -> None:
        """Adds or changes an object."""
        things = self._things(kind)
        name = thing["metadata"]["name"]
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        event = event or ("MODIFIED" if name in things else "ADDED")
        things[name] = thing
        self.emit(kind, event, thing)

    def delete(self, kind: str, name: str) -> None:
        """Removes an object."""
        thing = self._things(kind).pop(name)
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        self.emit(kind, "DELETED", thing)

    def emit(self, kind: str, event: str, thing: Body) -> None:
        """Sends an event to all watchers, and to later ones that begin at an older version."""
        data = json.dumps({"type": event, "object": thing}).encode() + b"\n"
        if event != "ERROR":
            self._history.append((kind, self.version, data))
        self.send(kind, data)

    def bookmark(self, kind: str) -> None:
        """Sends the version that all watchers have seen."""
        self.version += 10
        self.emit(kind, "BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})

    def send(self, kind: str, data: bytes) -> None:
        """Sends bytes to all watchers."""
        for watched, queue in self._watchers:
            if watched == kind:
                queue.put_nowait(data)

    def end_watches(self) -> None:
        """Ends the watches as a time limit does, but without a bookmark."""
        for _, queue in self._watchers:
            queue.put_nowait(None)

    @property
    def watches(self) -> int:
        """The current number of watches."""
        return len(self._watchers)

    def lists(self) -> int:
        """The number of requests for lists."""
        return sum("watch" not in query for query in self.asked)

    def _things(self, kind: str) -> dict[str, Body]:
        return self.pods if kind == "pods" else self.pools

    async def _review(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        asked = (await request.json())["spec"]["resourceAttributes"]
        allowed = self.allows_patches and asked["verb"] == "patch"
        review = {"spec": {"resourceAttributes": asked}, "status": {"allowed": allowed}}
        return web.json_response(review, status=self.refuses or 201)

    async def _annotate(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        is_patch = request.content_type == "application/merge-patch+json"
        status = self.refuses or (200 if is_patch else 415)
        if status == 200:
            patch = await request.json()
            found = self.annotated.setdefault(request.match_info["name"], {})
            found.update(patch["metadata"]["annotations"])
        return web.json_response({"kind": "Pod", "metadata": {}}, status=status)

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "pods")

    async def _pools(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "pools")

    async def _answer(self, request: web.Request, kind: str) -> web.StreamResponse:
        query = dict(request.query)
        self.asked.append(query)
        await self._speaks.wait()
        if self.refuses is not None and kind.startswith(self.refuses_kind):
            return web.json_response(
                {"kind": "Status", "code": self.refuses, "message": "not now"}, status=self.refuses
            )
        if request.headers.get("Authorization") != f"Bearer {self.lets_in}":
            self.unauthorized += 1
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        if query.get("watch") in ("True", "true"):
            return await self._watch(request, kind, int(query["resourceVersion"]))
        return self._list(kind, query)

    def _list(self, kind: str, query: dict[str, str]) -> web.Response:
        self.listed_at.append(time.monotonic())
        wanted = dict(one.split("=") for one in query.get("labelSelector", "").split(",") if one)
        things = [
            thing
            for thing in self._things(kind).values()
            if wanted.items() <= thing["metadata"].get("labels", {}).items()
        ]
        start = int(query.get("continue", "0"))
        metadata: Body = {"resourceVersion": str(self.version)}
        if start + self.page < len(things) or self.lists_without_end:
            metadata["continue"] = str(start + self.page)
        return web.json_response({"metadata": metadata, "items": things[start : start + self.page]})

    async def _watch(self, request: web.Request, kind: str, version: int) -> web.StreamResponse:
        gone = {"kind": "Status", "code": 410, "reason": "Expired"}
        if version < self.gone_below and self.gone_as_status:
            return web.json_response(gone, status=410)
        assert request.query["allowWatchBookmarks"] in ("True", "true")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if version < self.gone_below:
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        watcher = (kind, asyncio.Queue[bytes | None]())
        for watched, at, data in self._history:
            if watched == kind and at > version:
                watcher[1].put_nowait(data)
        self._watchers.add(watcher)
        limit = asyncio.get_running_loop().call_later(
            float(request.query["timeoutSeconds"]), self._end_in_time, watcher
        )
        try:
            while (more := await watcher[1].get()) is not None:
                await self._speaks.wait()
                await response.write(more)
            await self._speaks.wait()
        finally:
            limit.cancel()
            self._watchers.discard(watcher)
        return response

    def _end_in_time(self, watcher: tuple[str, asyncio.Queue[bytes | None]]) -> None:
        last = {"metadata": {"resourceVersion": str(self.version)}}
        watcher[1].put_nowait(json.dumps({"type": "BOOKMARK", "object": last}).encode() + b"\n")
        watcher[1].put_nowait(None)


@contextlib.asynccontextmanager
async def api_server(
    directory: Path, user: Body | None = None
) -> AsyncIterator[tuple[ApiServer, str]]:
    """Runs a server; yields it and the path of its kubeconfig. user: the entry in that file."""
    server = ApiServer()
    await server.start()
    kubeconfig = directory / "kubeconfig"
    name = {"name": "here"}
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [name | {"cluster": {"server": f"http://127.0.0.1:{server.port}"}}],
                "users": [name | {"user": {"token": TOKEN} if user is None else user}],
                "contexts": [name | {"context": {"cluster": "here", "user": "here"}}],
            }
        )
    )
    try:
        yield server, str(kubeconfig)
    finally:
        await server.stop()


def pod(name: str, ip: str = "10.0.0.1", **more: Any) -> Body:
    """A pod that is ready. more: labels, annotations, ready, phase, uid, created, deleted."""
    metadata: Body = {
        "name": name,
        "uid": more.get("uid", f"uid-{name}"),
        "creationTimestamp": more.get("created", "2026-01-01T00:00:00Z"),
        "labels": {"app": "vllm", **more.get("labels", {})},
        "annotations": more.get("annotations", {}),
        "managedFields": [{"manager": "x" * 100}],
    }
    if more.get("deleted"):
        metadata["deletionTimestamp"] = "2026-01-02T00:00:00Z"
    ready = "True" if more.get("ready", True) else "False"
    return {
        "metadata": metadata,
        "spec": {"containers": [{"name": "engine"}]},
        "status": {
            "phase": more.get("phase", "Running"),
            "podIP": ip,
            "conditions": [
                {"type": "Initialized", "status": "True"},
                {"type": "Ready", "status": ready},
            ],
        },
    }
