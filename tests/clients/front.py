"""A worker's front: it answers agents as a scripted model, and has a simulated worker compute.

The simulated worker gets each prompt's token ids from vLLM's own renderer, so its cache and its
events are what a real engine's would be. Without a renderer it computes nothing, and the worker has
a cache of which nobody hears.
"""

import asyncio
import contextlib
import itertools
import json
import re
from asyncio.subprocess import PIPE, Process
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from simulator.worker import SimulatedWorker
from tests.clients.scripted_model import (
    CHAT,
    MESSAGES,
    RESPONSES,
    Body,
    Event,
    Usage,
    answer_to,
    turns_of,
)
from tests.clients.sessions import MODEL
from tests.ports import free_port
from tests.system.gateway import served
from tests.system.system import System, running

# The release that a front names.
RELEASE = "0.32.0"

WORKERS = 3

_TASK = re.compile(r"Task ([a-z-]+)-(\d+):")
_numbers = itertools.count(1)


class RefusedError(AssertionError):
    """vLLM's renderer refused an agent's request."""


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


class Renderer:
    """A process that renders prompts with vLLM, one at a time."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._turn = asyncio.Lock()

    async def ids_of(self, path: str, body: Body | bytes) -> list[int]:
        """Returns a prompt's token ids. body: bytes are read as vLLM's server reads them.

        Raises:
            RefusedError: vLLM would answer with an error.
        """
        assert self._process.stdin
        assert self._process.stdout
        async with self._turn:
            said = {"raw": b64encode(body).decode()} if isinstance(body, bytes) else {"body": body}
            self._process.stdin.write(json.dumps({"path": path, **said}).encode() + b"\n")
            await self._process.stdin.drain()
            answer = json.loads(await self._process.stdout.readline())
        if "refused" in answer:
            raise RefusedError(f"{path}: {answer['refused']}")
        ids: list[int] = answer["ids"]
        return ids


@contextlib.asynccontextmanager
async def rendering(python: str, model: Path) -> AsyncIterator[Renderer]:
    """Runs vLLM's renderer of a model until the block ends."""
    script = Path(__file__).with_name("vllm_renderer.py")
    process = await asyncio.create_subprocess_exec(
        python, str(script), str(model), stdin=PIPE, stdout=PIPE, limit=1 << 24
    )
    try:
        assert process.stdout
        assert await process.stdout.readline() == b"{}\n", "vLLM's renderer did not start"
        yield Renderer(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class Front:
    """One worker as the router and Envoy see it.

    seconds: how long an answer takes. names_engine: whether it says which engine it runs. worker:
    the simulated one behind it, None before that starts. turns: all requests, oldest first.
    """

    def __init__(self, seconds: float, renderer: Renderer | None, *, names_engine: bool) -> None:
        self.port = free_port()
        self.worker: SimulatedWorker | None = None
        self.turns: list[Turn] = []
        self.faults: list[str] = []
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
        return web.json_response({"version": RELEASE})

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
        await asyncio.sleep(self._seconds)
        events, whole = answer_to(request.path, body, next(_numbers), usage)
        named = {"x-worker": self.endpoint}
        if not body.get("stream"):
            return web.json_response(whole, headers=named)
        return await _stream(request, events, named, is_marked=request.path == CHAT)

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
        return Usage(len(ids), cached)


@contextlib.asynccontextmanager
async def fronted(
    changes: dict[str, Any],
    seconds: float = 0.0,
    renderer: Renderer | None = None,
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


async def _stream(
    request: web.Request, events: Sequence[Event], named: Mapping[str, str], *, is_marked: bool
) -> web.StreamResponse:
    """Sends server-sent events; is_marked: whether the last of them says that it is over."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream", **named})
    await response.prepare(request)
    for name, data in events:
        head = f"event: {name}\n" if name else ""
        await response.write(f"{head}data: {json.dumps(data)}\n\n".encode())
    if is_marked:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
