"""One worker, composed of its parts and listening."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from typing import Any

from aiohttp import web

from simulator.answers import Writer
from simulator.api import Api
from simulator.cache import PrefixCache
from simulator.engine import Engine
from simulator.generation import Generator
from simulator.latency import Latency
from simulator.publisher import Publisher
from simulator.settings import Settings, split_address
from simulator.tokens import ModelTokens
from simulator.worker import Worker

_SHUTDOWN_SECONDS = 0.2  # a stand-in has no answers worth waiting for
_BACKLOG = 1024

__all__ = ["Worker", "running"]


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Worker]:
    """Start a worker in the current event loop and stop it on leaving.

    Raises OSError if an address is taken, ValueError if the model's directory is of no use.
    """
    tokens = ModelTokens(settings.model_dir)
    writer = Writer(tokens)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(_listen(settings.listen))
        publisher = None
        if settings.events_endpoint is not None:
            publisher = stack.enter_context(
                closing(_open_publisher(settings.events_endpoint, settings))
            )
            await stack.enter_async_context(_background(publisher.answer_replays()))
        engine = Engine(
            PrefixCache(blocks=settings.blocks, block_size=settings.block_size_tokens),
            Latency(settings.prefill_tokens_per_second, settings.decode_tokens_per_second),
            writer,
            end_of_turn=tokens.end_of_turn,
            max_running=settings.max_running_requests,
            publish=publisher.publish if publisher else lambda _: None,
        )
        endpoint = _address_of(listener)
        worker = Worker(
            name=settings.name or endpoint,
            endpoint=endpoint,
            events_endpoint=publisher.endpoint if publisher else None,
            replay_endpoint=publisher.replay_endpoint if publisher else None,
            engine=engine,
        )
        generator = Generator(settings, tokens, writer, engine)
        api = Api(settings, tokens, generator, worker)
        # Without handler_cancellation a client that leaves would keep its blocks to the end.
        runner = web.AppRunner(
            api.application(), handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        yield worker


def _open_publisher(endpoint: str, settings: Settings) -> Publisher:
    return Publisher(
        endpoint,
        settings.replay_endpoint,
        topic=settings.topic,
        buffer_batches=settings.buffer_batches,
    )


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


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
