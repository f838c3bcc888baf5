"""The composition root: everything that runs in one router, put together and taken down."""

import asyncio
import contextlib
import gc
import logging
import random
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence

from extproc import address, logs
from extproc.admin import admin_application, listen, metrics_application
from extproc.config import Config, WorkerEvents
from extproc.config_reader import load
from extproc.errors import ConfigError
from extproc.grpc_server import GrpcServer
from extproc.metrics import Metrics
from extproc.router import Router
from extproc.tokens import Tokenizer
from extproc.workers import Workers
from kvstate.core_choice import default_core_name
from kvstate.fleet import Fleet
from kvstate.transport import Transport
from kvstate.zmq_transport import ZmqContext, ZmqSource, ZmqTransport

log = logging.getLogger("kvsteer")

# A router whose replays take longer than this serves anyway; what it lacks counts for nothing.
READY_DEADLINE_SECONDS = 10.0


def load_tokenizers(config: Config) -> dict[str, Tokenizer]:
    """The tokenizer of every model that has one.

    Raises:
        StartError: one cannot be loaded.
    """
    loaded = {model.name: Tokenizer.load(model) for model in config.models}
    return {name: tokenizer for name, tokenizer in loaded.items() if tokenizer is not None}


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
            Fleet(secrets.randbits(64), time.time),
            lambda events: _transports(context, events),
        )
        router = Router(config, workers, tokenizers, metrics, random.Random())  # noqa: S311 - ties
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
        server = GrpcServer(config, router, metrics, is_ready)
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


def _transports(context: ZmqContext, events: WorkerEvents) -> Sequence[Transport]:
    return [
        ZmqTransport(
            context,
            ZmqSource(
                events=_of_rank(events.zmq or "", rank),
                replay=None if events.replay is None else _of_rank(events.replay, rank),
                topic=events.topic,
            ),
        )
        for rank in range(events.ranks)
    ]


def _of_rank(endpoint: str, rank: int) -> str:
    """vLLM and SGLang publish rank r on the configured port + r."""
    place = address.parse_tcp(endpoint)
    return f"tcp://{place._replace(port=place.port + rank)}"


def _readiness(workers: Workers) -> Callable[[], bool]:
    deadline = time.monotonic() + READY_DEADLINE_SECONDS
    return lambda: workers.replays_done() or time.monotonic() > deadline
