"""The HTTP API of vLLM's server, as far as clients, routers and operators use it."""

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from simulator import metrics, prompts, responses
from simulator.generation import Generator
from simulator.publisher import HIGH_WATER_MARK_BATCHES
from simulator.requests import Chat, Completion, Tokenize
from simulator.responses import ApiError, bad_request
from simulator.settings import Settings
from simulator.tokens import ModelTokens
from simulator.worker import Worker

SIMULATED_VERSION = "0.32.0"
MAX_BODY_BYTES = 32 * 1024 * 1024
"""Far above any prompt that fits a context; keeps a client from filling the memory."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Body = TypeVar("_Body")


class Api:
    """The endpoints of one worker."""

    def __init__(
        self, settings: Settings, tokens: ModelTokens, generator: Generator, worker: Worker
    ) -> None:
        self._settings = settings
        self._tokens = tokens
        self._generator = generator
        self._worker = worker
        self._metrics = metrics.registry(worker.engine, settings.model)
        self._created = int(time.time())

    def application(self) -> web.Application:
        """All routes, ready to be served."""
        application = web.Application(
            client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_openai_sends_them]
        )
        application.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.post("/tokenize", self._tokenize),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._show_metrics),
                web.get("/kv_event_sources", self._kv_event_sources),
                web.get("/version", self._version),
            ]
        )
        application.on_response_prepare.append(self._sign)
        return application

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generator.chat(request, await _decoded(request, Chat))

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generator.completion(request, await _decoded(request, Completion))

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _decoded(request, Tokenize)
        self._generator.check_model(body.model)
        tokens = await prompts.of_tokenize(self._tokens, body)
        limit = self._settings.context_tokens
        return _json({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        return _json({"success": self._worker.engine.reset_prefix_cache()})

    async def _models(self, _: web.Request) -> web.Response:
        settings = self._settings
        return _json(
            responses.models(
                settings.model,
                settings.loras,
                created=self._created,
                max_model_len=settings.context_tokens,
            )
        )

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _show_metrics(self, _: web.Request) -> web.Response:
        text = generate_latest(self._metrics)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _kv_event_sources(self, _: web.Request) -> web.Response:
        """By data-parallel rank, of which a simulated worker has one."""
        worker, settings = self._worker, self._settings
        if worker.events_endpoint is None:
            return _json({})
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": worker.events_endpoint,
            "replay_endpoint": worker.replay_endpoint,
            "buffer_steps": settings.buffer_batches,
            "hwm": HIGH_WATER_MARK_BATCHES,
            "max_queue_size": HIGH_WATER_MARK_BATCHES,
            "topic": settings.topic,
        }
        return _json({"0": source})

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": SIMULATED_VERSION})

    async def _sign(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-worker"] = self._worker.name


@web.middleware
async def _errors_as_openai_sends_them(
    request: web.Request, handler: Handler
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return _json(error.body(), status=error.status)
    except web.HTTPException as error:
        kind = error.reason.replace(" ", "")
        body = responses.error(error.status, kind, error.text or error.reason)
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return _json(body, status=error.status, headers=headers)


async def _decoded(request: web.Request, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(str(error)) from error


def _json(
    body: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    content = msgspec.json.encode(body)
    return web.Response(
        body=content, content_type="application/json", status=status, headers=headers
    )
