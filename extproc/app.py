"""The composition root: everything that runs in one router, put together and taken down."""

import asyncio
import contextlib
import functools
import gc
import logging
import random
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence

from extproc import address, logs
from extproc.admin import admin_application, listen, metrics_application
from extproc.config import Config
from extproc.config import RemoteTokenizer as RemoteTokenizerOptions
from extproc.config.reader import load
from extproc.errors import ConfigError
from extproc.metrics import Metrics
from extproc.picking.scrape import LoadReports
from extproc.router import Router
from extproc.serving.exchange import Service
from extproc.serving.grpc_server import GrpcServer
from extproc.tokenizing.prompt_tokens import AnyTokenizer
from extproc.tokenizing.remote_tokenizer import RemoteTokenizer
from extproc.tokenizing.tokens import Tokenizer
from extproc.workers.workers import Workers
from kvstate.core_choice import default_core_name
from kvstate.feeds.feed_sources import DrainSource, FeedSource, GrpcSource
from kvstate.feeds.grpc_transport import grpc_transports
from kvstate.feeds.transport import Transport
from kvstate.feeds.trtllm_transport import drain_transports
from kvstate.feeds.zmq_transport import ZmqContext, ZmqTransport
from kvstate.fleet import Fleet

log = logging.getLogger("kvsteer")

# A router whose replays take longer than this serves anyway; what it lacks counts for nothing.
READY_DEADLINE_SECONDS = 10.0


def load_tokenizers(config: Config) -> dict[str, Tokenizer]:
    """The tokenizer of every model that has one in files.

    Raises:
        StartError: one cannot be loaded.
    """
    local = [model for model in config.models if isinstance(model.tokenizer, str)]
    loaded = {model.name: Tokenizer.load(model) for model in local}
    return {name: tokenizer for name, tokenizer in loaded.items() if tokenizer is not None}


def remote_tokenizers(
    config: Config, workers: Workers, metrics: Metrics
) -> dict[str, RemoteTokenizer]:
    """The tokenizer of every model whose workers are asked for tokens; they are to be closed."""
    made: dict[str, RemoteTokenizer] = {}
    for model in config.models:
        options = model.tokenizer
        if isinstance(options, RemoteTokenizerOptions) and options.remote:
            endpoints = functools.partial(workers.endpoints, model.name)
            count = functools.partial(metrics.count_question, model.name)
            made[model.name] = RemoteTokenizer(model, options, endpoints, count)
    return made


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[Workers]:
    """Runs a router in this event loop; gives its workers.

    Raises:
        StartError: a port is taken, or a file cannot be read.
    """
    tokenizers = load_tokenizers(config)
    async with contextlib.AsyncExitStack() as stack:
        context = ZmqContext()
        stack.callback(context.destroy, 0)
        metrics = Metrics()
        workers = Workers(
            config,
            Fleet(secrets.randbits(64), time.time, random.random),
            lambda source: _open(context, source),
        )
        remote = remote_tokenizers(config, workers, metrics)
        for tokenizer in remote.values():
            stack.push_async_callback(tokenizer.close)
        known: dict[str, AnyTokenizer] = {**tokenizers, **remote}
        router = Router(config, workers, known, metrics, random.Random())  # noqa: S311 - ties
        stack.callback(router.close)
        metrics.add_workers(lambda: workers.status(router.in_flight), workers.index_bytes)
        is_ready = _readiness(workers)

        admin_at = address.parse(config.admin.listen)
        limit = config.extproc.max_body_bytes
        admin = admin_application(router, workers, limit, admin_at.host)
        stack.push_async_callback((await listen(admin, admin_at, "admin")).cleanup)
        metrics_at = address.parse(config.metrics.listen)
        scraped = metrics_application(metrics, is_ready)
        stack.push_async_callback((await listen(scraped, metrics_at, "metrics")).cleanup)

        stack.push_async_callback(workers.close)
        await workers.start()
        reports = LoadReports(
            router.placing,
            workers.places,
            workers.loads,
            config.policy.scrape_interval_ms / 1000,
            random.random,
            time.monotonic,
        )
        stack.push_async_callback(reports.close)
        await reports.start()
        server = GrpcServer(Service(config, router, metrics), is_ready)
        await server.start()
        stack.push_async_callback(server.stop)
        yield workers


async def serve(path: str) -> None:
    """Runs a router until SIGTERM or SIGINT; SIGHUP reads the kill switch anew.

    Raises:
        ConfigError, StartError: it cannot start.
    """
    config = load(path)
    logs.configure(config.log.level, config.log.format)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    # what it would reload has just been read; unhandled, it would end the process
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    async with running(config) as workers:
        reloads: set[asyncio.Task[None]] = set()

        def reload() -> None:
            task = loop.create_task(_reload(path, workers))
            reloads.add(task)
            task.add_done_callback(reloads.discard)

        loop.add_signal_handler(signal.SIGHUP, reload)
        gc.freeze()
        log.info("index core: %s", default_core_name())
        log.info(
            "serving ext_proc on %s, admin on http://%s, metrics on http://%s",
            config.extproc.listen,
            config.admin.listen,
            config.metrics.listen,
        )
        await stopped.wait()
        log.info("stopping")


async def _reload(path: str, workers: Workers) -> None:
    try:
        config = await asyncio.to_thread(load, path)  # thousands of workers take a second
    except ConfigError as error:
        for fault in error.faults:
            log.error("not reloaded: %s", fault)
        return
    await workers.enable_events(enabled=config.events.enabled)


def _open(context: ZmqContext, source: FeedSource) -> Sequence[Transport]:
    """A feed's transports, one a rank."""
    match source:
        case GrpcSource():
            return grpc_transports(source, random.random)
        case DrainSource():
            return drain_transports(source, random.random)
        case _:
            return [ZmqTransport(context, one, random.random) for one in source]


def _readiness(workers: Workers) -> Callable[[], bool]:
    deadline = time.monotonic() + READY_DEADLINE_SECONDS
    return lambda: workers.replays_done() or time.monotonic() > deadline
