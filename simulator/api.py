"""The HTTP API of an engine's server, as far as clients, routers and operators use it.

The OpenAI endpoints are vLLM's; what tells of the cache depends on the dialect. Every dialect has
POST /reset_prefix_cache.
"""

import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from simulator import discovery, metrics, prompts, responses
from simulator.bodies import decoded, json_response
from simulator.generation import Generator
from simulator.inspection import Inspection
from simulator.requests import Chat, Completion, Message, Tokenize
from simulator.responses import ApiError
from simulator.tokens import ModelTokens
from simulator.worker import Worker

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Far above any prompt that fits a context; keeps a client from filling the memory."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """The endpoints of one worker."""

    def __init__(self, tokens: ModelTokens, generator: Generator, worker: Worker) -> None:
        self._settings = worker.settings
        self._tokens = tokens
        self._generator = generator
        self._worker = worker
        self._metrics = metrics.registry(worker)
        self._created = int(time.time())

    def application(self) -> web.Application:
        """All routes, ready to be served."""
        application = web.Application(
            client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_openai_sends_them]
        )
        application.add_routes([*self._routes(), *self._routes_of_dialect()])
        if self._settings.misbehave:
            application.add_routes(Inspection(self._worker).routes())
        application.on_response_prepare.append(self._sign)
        return application

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._completion),
            web.post("/tokenize", self._tokenize),
            web.post("/reset_prefix_cache", self._reset_prefix_cache),
            web.get("/v1/models", self._models),
            web.get("/health", self._health),
            web.get("/metrics", self._show_metrics),
            web.get("/version", self._version),
        ]

    def _routes_of_dialect(self) -> list[web.RouteDef]:
        dialect = self._settings.speaks
        if dialect.lists_sources:
            return [
                web.get("/kv_event_sources", self._kv_event_sources),
                web.post("/v1/messages", self._message),
            ]
        if dialect.engine == "sglang":
            return [
                web.get("/server_info", self._server_info),
                web.get("/get_server_info", self._server_info),
                web.post("/flush_cache", self._reset_prefix_cache),
            ]
        if dialect.engine == "trtllm":
            return [web.post("/kv_cache_events", self._kv_cache_events)]
        return []

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generator.chat(request, await decoded(request, Chat))

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generator.completion(request, await decoded(request, Completion))

    async def _message(self, request: web.Request) -> web.StreamResponse:
        return await self._generator.message(request, await decoded(request, Message))

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await decoded(request, Tokenize)
        self._generator.check_model(body.model)
        tokens = await prompts.of_tokenize(self._tokens, body)
        limit = self._settings.context_tokens
        return json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        return json_response({"success": self._worker.reset_prefix_cache()})

    async def _models(self, _: web.Request) -> web.Response:
        settings = self._settings
        return json_response(
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
        return json_response(discovery.kv_event_sources(self._worker))

    async def _server_info(self, _: web.Request) -> web.Response:
        return json_response(discovery.server_info(self._worker))

    async def _kv_cache_events(self, _: web.Request) -> web.Response:
        return json_response([event for rank in self._worker.ranks for event in rank.drain()])

    async def _version(self, _: web.Request) -> web.Response:
        return json_response({"version": self._settings.speaks.version})

    async def _sign(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-worker"] = self._worker.name


@web.middleware
async def _errors_as_openai_sends_them(
    request: web.Request, handler: Handler
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return json_response(error.body(), status=error.status)
    except web.HTTPException as error:
        kind = error.reason.replace(" ", "")
        body = responses.error(error.status, kind, error.text or error.reason)
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return json_response(body, status=error.status, headers=headers)
