"""A simulated worker: an engine's server with its HTTP API, ranks and publishers.

The OpenAI endpoints are vLLM's; which endpoints describe the cache depends on the dialect. Every
dialect has POST /reset_prefix_cache.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtools.simulator import requests, responses
from kvtools.simulator.anthropic_messages import MessagesRequest
from kvtools.simulator.block_transfer import BlockTransfer
from kvtools.simulator.dialects import EngineName
from kvtools.simulator.generation import Generator
from kvtools.simulator.openai_responses import ResponsesRequest
from kvtools.simulator.publisher import HIGH_WATER_MARK_BATCHES, LOAD_TOPIC, Publisher
from kvtools.simulator.rank import Rank
from kvtools.simulator.requests import CachedPrefix, ChatRequest, Completion, Misbehave, Tokenize
from kvtools.simulator.responses import AnswerWriter, ApiError, bad_request, decoded, json_response
from kvtools.simulator.settings import Settings, split_address
from kvtools.simulator.tokens import ModelTokens
from kvtools.simulator.worker import Faults, SimulatedWorker

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Far above any prompt that fits a context; prevents a client from filling the memory."""

_BACKLOG = 1024

# The engines' names for themselves, as the owners of their models.
_OWNERS: dict[EngineName, str] = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
__all__ = ["SimulatedWorker", "running"]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Body = dict[str, Any]


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[SimulatedWorker]:
    """Starts a worker in the current event loop, and stops it on leaving.

    Raises:
        OSError: an address is taken.
        ValueError: the model's directory cannot be used.
    """
    tokens, writer = _read_model(settings.model_dir, settings.chat_template)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(_listen(settings.listen))
        ranks: list[Rank] = []
        for number in range(settings.ranks):
            rank = Rank(number, settings, writer, end_of_turn=tokens.end_of_turn)
            ranks.append(stack.enter_context(closing(rank)))
        endpoint = _address_of(listener)
        worker = SimulatedWorker(
            name=settings.name or endpoint,
            endpoint=endpoint,
            settings=settings,
            ranks=ranks,
            faults=Faults(ranks),
            transfer=BlockTransfer(settings, ranks),
        )
        stack.push_async_callback(worker.transfer.close)
        if settings.transfer_listen is not None:
            handing = stack.enter_context(_listen(settings.transfer_listen))
            await _serve(stack, settings, worker.transfer.application(), handing)
        api = Api(tokens, Generator(tokens, writer, worker), worker)
        await _serve(stack, settings, api.application(), listener)
        yield worker


@cache
def _read_model(directory: Path, template: Path | None) -> tuple[ModelTokens, AnswerWriter]:
    """Reads a model once for all workers of a process: it takes longer than starting one."""
    tokens = ModelTokens(directory, template)
    return tokens, AnswerWriter(tokens)


async def _serve(
    stack: AsyncExitStack, settings: Settings, application: web.Application, listener: socket.socket
) -> None:
    # Without handler_cancellation, the blocks of a client that disconnects would stay in use to the
    # end.
    runner = web.AppRunner(
        application, handler_cancellation=True, shutdown_timeout=settings.shutdown_seconds
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.SockSite(runner, listener, backlog=_BACKLOG).start()
    stack.push_async_callback(_stop_accepting, listener)


async def _stop_accepting(listener: socket.socket) -> None:
    """Accepts no more connections, and lets those that were accepted begin.

    A server that closes before one begins would leave it open, without an owner to close it.
    """
    asyncio.get_running_loop().remove_reader(listener)
    await asyncio.sleep(0)


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        resolving = isinstance(error, socket.gaierror)
        reason = error.strerror if resolving else os.strerror(error.errno or 0)
        raise OSError(error.errno, f"cannot listen on {address}: {reason}") from error


def _address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# What vLLM's Rust front end (0.33) answers by its name; other paths of the Python one are unknown.
_LACKING_IN_RUST = (
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/batch",
    "/is_scaling_elastic_ep",
)


async def _not_in_rust(request: web.Request) -> web.Response:
    says = (
        f"{request.method} {request.path} is not supported by the Rust frontend yet."
        " Set VLLM_USE_RUST_FRONTEND=0 to use the Python frontend."
    )
    error = {"message": says, "type": "NotImplementedError", "param": None, "code": 501}
    return web.json_response({"error": error}, status=501)


class Api:
    """The endpoints of one worker."""

    def __init__(self, tokens: ModelTokens, generator: Generator, worker: SimulatedWorker) -> None:
        self._settings = worker.settings
        self._tokens = tokens
        self._generator = generator
        self._worker = worker
        self._metrics = registry(worker)
        self._created = int(time.time())

    def application(self) -> web.Application:
        """Returns the application with all routes."""
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
            web.post("/reset_prefix_cache", self._reset_prefix_cache),
            web.get("/v1/models", self._models),
            web.get("/health", self._health),
            web.get("/metrics", self._show_metrics),
            *self._route_of_version(),
        ]

    def _route_of_version(self) -> list[web.RouteDef]:
        """Returns the route by which all but SGLang name their release."""
        if self._settings.event_dialect.engine == "sglang":
            return []
        return [web.get("/version", self._version)]

    def _routes_of_dialect(self) -> list[web.RouteDef]:
        dialect, is_rust = self._settings.event_dialect, self._settings.rust_front_end
        if is_rust and dialect.engine == "vllm":
            return [
                web.get("/kv_event_sources", self._kv_event_sources),
                web.post("/tokenize", self._tokenize),
                *(web.post(path, _not_in_rust) for path in _LACKING_IN_RUST),
            ]
        if dialect.lists_sources:
            return [
                web.get("/kv_event_sources", self._kv_event_sources),
                web.post("/v1/messages", self._message),
                web.post("/v1/responses", self._response),
                web.post("/tokenize", self._tokenize),
            ]
        if dialect.engine == "sglang":
            return [
                web.get("/server_info", self._server_info),
                *([] if is_rust else [web.get("/get_server_info", self._server_info)]),
                web.post("/flush_cache", self._reset_prefix_cache),
                web.post("/tokenize", self._tokenize),
            ]
        if dialect.engine == "trtllm":
            return [web.post("/kv_cache_events", self._kv_cache_events)]
        return [web.post("/tokenize", self._tokenize)]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generator.chat(request, await decoded(request, ChatRequest))

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generator.completion(request, await decoded(request, Completion))

    async def _message(self, request: web.Request) -> web.StreamResponse:
        return await self._generator.message(request, await decoded(request, MessagesRequest))

    async def _response(self, request: web.Request) -> web.StreamResponse:
        return await self._generator.response(request, await decoded(request, ResponsesRequest))

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await decoded(request, Tokenize)
        self._generator.check_model(body.model)
        if body.messages is not None and self._settings.event_dialect.engine == "sglang":
            raise bad_request("a prompt is needed", "prompt")  # like releases without messages
        tokens = await requests.of_tokenize(self._tokens, body)
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
                owner=_OWNERS[settings.event_dialect.engine],
            )
        )

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _show_metrics(self, _: web.Request) -> web.Response:
        text = generate_latest(self._metrics)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _kv_event_sources(self, _: web.Request) -> web.Response:
        return json_response(kv_event_sources(self._worker))

    async def _server_info(self, _: web.Request) -> web.Response:
        return json_response(server_info(self._worker))

    async def _kv_cache_events(self, _: web.Request) -> web.Response:
        return json_response([event for rank in self._worker.ranks for event in rank.drain()])

    async def _version(self, _: web.Request) -> web.Response:
        return json_response({"version": self._settings.named_version})

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


class Inspection:
    """The endpoints that Settings.misbehave opens."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker

    def routes(self) -> list[web.RouteDef]:
        """Returns the routes to add to the worker's API."""
        return [
            web.post("/misbehave", self._misbehave),
            web.get("/cache", self._cache),
            web.post("/cache/prefix", self._prefix),
        ]

    async def _misbehave(self, request: web.Request) -> web.Response:
        body = await decoded(request, Misbehave)
        self._check_rank(body.rank)
        self._break(body)
        return json_response({"success": True})

    def _break(self, body: Misbehave) -> None:
        """Applies the faults, a restart first and garbage last; leaves others unchanged."""
        faults, rank = self._worker.faults, body.rank
        if body.restart:
            faults.restart(rank=rank)
        if body.hide_replay is not msgspec.UNSET:
            faults.hide_replay(body.hide_replay, rank=rank)
        if body.hide_events is not None:
            faults.hide_events(hidden=body.hide_events, rank=rank)
        for batches, method in (
            (body.drop, faults.drop),
            (body.lose, faults.lose),
            (body.duplicate, faults.duplicate),
        ):
            if batches is not None:
                method(batches, rank=rank)
        if body.reorder:
            faults.reorder(rank=rank)
        if body.corrupt is not None:
            faults.corrupt(body.corrupt, rank=rank)
        if body.garbage is not None:
            faults.garbage(body.garbage, rank=rank)

    async def _cache(self, _: web.Request) -> web.Response:
        """Returns the blocks held on and off the device, and the next batch's number, by rank."""
        return json_response([self._of_rank(rank.number) for rank in self._worker.ranks])

    def _of_rank(self, number: int) -> dict[str, int]:
        blocks, host_blocks = self._worker.ranks[number].engine.cache.blocks_held
        return {
            "rank": number,
            "blocks": blocks,
            "host_blocks": host_blocks,
            "next_sequence": self._worker.next_sequence(number),
        }

    async def _prefix(self, request: web.Request) -> web.Response:
        """Returns how many leading tokens of a prompt a rank holds, not counting the last one."""
        body = await decoded(request, CachedPrefix)
        self._check_rank(body.rank)
        if body.lora is not None and body.lora not in self._worker.settings.adapters:
            raise bad_request("no such adapter", "lora")
        held = self._worker.held_prefix_tokens(body.tokens, body.salt, body.lora, body.rank)
        return json_response({"held_tokens": held})

    def _check_rank(self, rank: int | None) -> None:
        if rank is not None and rank >= len(self._worker.ranks):
            raise bad_request("no such rank", "rank")


def kv_event_sources(worker: SimulatedWorker) -> Body:
    """Returns the answer to GET /kv_event_sources of vLLM 0.30 and later, by data-parallel rank."""
    return {
        str(rank.number): _source(rank.publisher, worker.settings)
        for rank in worker.ranks
        if rank.publisher
    }


def server_info(worker: SimulatedWorker) -> Body:
    """Returns the answer to GET /server_info of SGLang: its release, events and templates."""
    settings = worker.settings
    return {
        "version": settings.named_version,
        "model_path": str(settings.model_dir),
        "served_model_name": settings.model,
        "page_size": settings.block_size_tokens,
        "dp_size": settings.ranks,
        "chat_template": settings.chat_template and str(settings.chat_template),
        "tool_call_parser": None,
        "reasoning_parser": None,
        "disable_radix_cache": not settings.prefix_caching,
        "kv_events": _kv_events(worker),
    }


def _source(publisher: Publisher, settings: Settings) -> Body:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
        "buffer_steps": settings.buffer_batches,
        "hwm": HIGH_WATER_MARK_BATCHES,
        "max_queue_size": HIGH_WATER_MARK_BATCHES,
        "topic": settings.topic,
    }


def _kv_events(worker: SimulatedWorker) -> Body | None:
    if worker.events_endpoint is None:
        return None
    host, port = _host_and_port(worker.events_endpoint)
    body = {
        "publisher": "zmq",
        "endpoint_host": host,
        "endpoint_port_base": port,
        "topic": worker.settings.topic,
        "block_size": worker.settings.block_size_tokens,
        "dp_size": worker.settings.ranks,
    }
    if worker.replay_endpoint is not None:
        body["replay_endpoint_port_base"] = _host_and_port(worker.replay_endpoint)[1]
    if worker.load_endpoints:
        body["load_endpoint_port_base"] = _host_and_port(worker.load_endpoints[0])[1]
        body["load_topic"] = LOAD_TOPIC
    return body


def _host_and_port(endpoint: str) -> tuple[str, int]:
    """Splits an endpoint; SGLang writes "*" for every address of the host."""
    host, _, port = endpoint.partition("://")[2].rpartition(":")
    return "*" if host in {"0.0.0.0", "[::]"} else host, int(port)


def registry(worker: SimulatedWorker) -> CollectorRegistry:
    """Returns a registry with only this worker's metrics."""
    registry = CollectorRegistry()
    registry.register(WorkerCollector(worker))
    return registry


class WorkerCollector(Collector):
    """Reads the counters of all ranks at each scrape, and adds them up."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._engines = [rank.engine for rank in worker.ranks]
        self._model = worker.settings.model
        self._settings = worker.settings

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families, each with the label `model_name`."""
        counters = [engine.counters for engine in self._engines]
        running = sum(one.running for one in counters)
        yield self._gauge("num_requests_running", "Requests being computed.", running)
        waiting = sum(one.in_flight for one in counters) - running
        yield self._gauge("num_requests_waiting", "Requests waiting to be computed.", waiting)
        usage = fmean(engine.cache_usage for engine in self._engines)
        yield self._gauge("kv_cache_usage_perc", "Used share of the cache, 1 is all.", usage)
        queried = sum(one.queried_tokens for one in counters)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", queried)
        hit = sum(one.hit_tokens for one in counters)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", hit)
        settings = self._settings
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The cache.",
            labels=["block_size", "enable_prefix_caching", "engine", "num_gpu_blocks"],
        )
        size, is_cached = str(settings.block_size_tokens), str(settings.prefix_caching)
        for rank in range(settings.ranks):
            config.add_metric([size, is_cached, str(rank), str(settings.blocks)], 1)
        yield config

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", documentation, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", documentation, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
