"""The part of a worker's HTTP server with which it describes itself."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class Raw(str):
    """An answer that is no JSON."""

    __slots__ = ()


class Status(int):
    """An answer of another status than 200, without a body."""

    __slots__ = ()


@asynccontextmanager
async def worker(asked: list[str] | None = None, /, **answers: Any) -> AsyncIterator[str]:
    """Runs a worker that answers some paths, with JSON or as they are, and others with 404.

    Yields its host:port.

    asked: receives the requested paths.
    """

    async def answer(request: web.Request) -> web.Response:
        if asked is not None:
            asked.append(request.path)
        name = request.path.removeprefix("/")
        if isinstance(answers.get(name), Status):
            return web.Response(status=answers[name])
        if isinstance(answers.get(name), Raw):
            return web.Response(text=answers[name])
        return web.json_response(answers[name]) if name in answers else web.Response(status=404)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()
