"""A proxy in front of real engines, which may take out a field, or send to another engine."""

import contextlib
import json
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from tests.engines.vllm_engine import Engine, Ports


class FrontProxy:
    """Passes requests on to an engine; its events come from the first one.

    engine: which gets the requests. strips: the member that is taken out of bodies, "" for none.
    ports: by which a router reaches it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.strips = ""
        self.ranks = engine.ranks
        self.ports = engine.ports

    async def answer(self, request: web.Request) -> web.Response:
        """Returns what the engine answers."""
        body = await request.read()
        if self.strips and body:
            body = json.dumps({**json.loads(body), self.strips: None}).encode()
        url = f"http://{self.engine.ports.endpoint}{request.rel_url}"
        headers = {"content-type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, url, data=body, headers=headers) as answer,
        ):
            return web.Response(
                body=await answer.read(), status=answer.status, content_type=answer.content_type
            )


@contextlib.asynccontextmanager
async def before(engine: Engine) -> AsyncIterator[FrontProxy]:
    """Runs a proxy in front of an engine."""
    proxy = FrontProxy(engine)
    application = web.Application(client_max_size=2**26)
    application.router.add_route("*", "/{path:.*}", proxy.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    http = runner.addresses[0][1]
    proxy.ports = Ports(http, engine.ports.events, engine.ports.replay)
    try:
        yield proxy
    finally:
        await runner.cleanup()
