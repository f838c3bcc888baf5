"""One worker, composed of its parts and listening."""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing

from aiohttp import web

from simulator.answers import Writer
from simulator.api import Api
from simulator.endpoints import split_address
from simulator.faults import Faults
from simulator.generation import Generator
from simulator.rank import Rank
from simulator.settings import Settings
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
        ranks: list[Rank] = []
        for number in range(settings.ranks):
            rank = Rank(number, settings, writer, end_of_turn=tokens.end_of_turn)
            ranks.append(stack.enter_context(closing(rank)))
        endpoint = _address_of(listener)
        worker = Worker(
            name=settings.name or endpoint,
            endpoint=endpoint,
            settings=settings,
            ranks=ranks,
            faults=Faults(ranks),
        )
        api = Api(tokens, Generator(tokens, writer, worker), worker)
        # Without handler_cancellation a client that leaves would keep its blocks to the end.
        runner = web.AppRunner(
            api.application(), handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        yield worker


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
