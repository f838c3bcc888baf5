"""A worker's front: it answers agents as a scripted model, and has a simulated worker compute.

The simulated worker gets each prompt's token ids from vLLM's own renderer, so its cache and its
events are what a real engine's would be. Another renderer may take its place. Without one it
computes nothing, and the worker has a cache of which nobody hears.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from kvtools.simulator.worker import SimulatedWorker
from tests.clients.judging import FrontEnd
from tests.clients.rendering import RefusedError
from tests.clients.scripted_model import CHAT, MESSAGES, RESPONSES, Body, Usage, turns_of
from tests.clients.scripted_server import respond
from tests.clients.starts import MODEL
from tests.ports import free_port
from tests.system.gateway import served
from tests.system.system import System, running

# The release that a front without a renderer names.
RELEASE = "0.33.0"

WORKERS = 3

_TASK = re.compile(r"Task ([a-z-]+)-(\d+):")


class Turn(NamedTuple):
    """A request that a worker got.

    client, number: of the conversation, by its task. length: how many turns or items it has.
    request_id: Envoy's, by which its decision is found. ids: its prompt, where it was rendered.
    is_agent: whether it has tools, as all turns of a conversation have; a request for a title has
    none.
    """

    client: str
    number: int
    length: int
    worker: str
    request_id: str
    path: str
    body: Body
    ids: list[int]

    @property
    def is_agent(self) -> bool:
        return bool(self.body.get("tools"))


class Computed(NamedTuple):
    """A prompt that a worker computed, and what it told of its tokens."""

    request_id: str
    ids: list[int]
    usage: Usage


class Front:
    """One worker as the router and Envoy see it.

    seconds: how long an answer takes. names_engine: whether it says which engine it runs. worker:
    the simulated one behind it, None before that starts. turns: all requests, oldest first.
    computed: all prompts, of conversations or not.
    may_answer: while it is not set, turns are only noted; a request for a title is answered.
    """

    def __init__(self, seconds: float, renderer: FrontEnd | None, *, names_engine: bool) -> None:
        self.port = free_port()
        self.worker: SimulatedWorker | None = None
        self.turns: list[Turn] = []
        self.computed: list[Computed] = []
        self.faults: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._seconds = seconds
        self._renderer = renderer
        self._names_engine = names_engine

    @property
    def endpoint(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    def app(self) -> web.Application:
        """Returns its server."""
        app = web.Application(client_max_size=64 << 20)
        app.add_routes([web.post(path, self._answer) for path in (CHAT, MESSAGES, RESPONSES)])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        if self._names_engine:
            app.router.add_get("/version", self._version)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        release = RELEASE if self._renderer is None else self._renderer.release
        return web.json_response({"version": release})

    async def _models(self, _: web.Request) -> web.Response:
        owner = "vllm" if self._names_engine else "me"
        return web.json_response(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": owner}]}
        )

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body: Body = await request.json()
        request_id = request.headers.get("x-request-id", "")  # the router itself sends none
        try:
            usage = await self._compute(request.path, body, request_id)
        except RefusedError as error:
            self.faults.append(str(error))
            return web.json_response({"error": {"message": str(error)}}, status=400)
        if body.get("tools"):
            await self.may_answer.wait()
        await asyncio.sleep(self._seconds)
        return await respond(request, body, usage, {"x-worker": self.endpoint})

    async def _compute(self, path: str, body: Body, request_id: str) -> Usage:
        """Computes a prompt and notes the request."""
        said = _TASK.search(json.dumps(body))
        ids = [] if self._renderer is None else await self._renderer.ids_of(path, body)
        if said is not None:
            length = len(turns_of(body))
            place = (said[1], int(said[2]), length, self.endpoint, request_id)
            self.turns.append(Turn(*place, path, body, ids))
        if not ids:
            return Usage(1, 0)
        assert self.worker is not None
        asked = {"model": MODEL, "prompt": ids, "max_tokens": 1}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.worker.url}/v1/completions", json=asked) as answer,
        ):
            told: dict[str, Any] = await answer.json()
        cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.computed.append(Computed(request_id, ids, Usage(len(ids), cached)))
        return self.computed[-1].usage


@contextlib.asynccontextmanager
async def fronted(
    changes: dict[str, Any],
    seconds: float = 0.0,
    renderer: FrontEnd | None = None,
    *,
    names_engine: bool = False,
    **settings: Any,
) -> AsyncIterator[tuple[System, list[Front]]]:
    """Runs a system whose workers are behind fronts; see `tests.system.system.running`."""
    fronts = [Front(seconds, renderer, names_engine=names_engine) for _ in range(WORKERS)]
    waiting = iter(fronts)

    def proxied(worker: SimulatedWorker) -> str:
        front = next(waiting)
        front.worker = worker
        return front.endpoint

    async with contextlib.AsyncExitStack() as stack:
        for front in fronts:
            await stack.enter_async_context(served(front.app(), front.port))
        started = running(workers=WORKERS, changes=changes, proxied=proxied, **settings)
        yield await stack.enter_async_context(started), fronts
