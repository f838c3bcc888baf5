"""Serving an HTTP application on an address."""

import asyncio
from typing import cast

from aiohttp import web

from extproc.address import Address
from extproc.admin.server_log import ServerLog
from extproc.errors import StartError
from extproc.serving.listening import http_connections

# So many are accepted in one go, before any of them is counted.
_BACKLOG = 16


class _Site(web.TCPSite):
    """Has so many connections at most: for one more, the oldest is closed."""

    async def start(self) -> None:
        """Listens."""
        await web.BaseSite.start(self)
        server = cast("web.Server", self._runner.server)  # set up before

        def accepted() -> asyncio.Protocol:
            connections = server.connections
            if len(connections) >= http_connections():
                connections[0].force_close()
            return server()

        self._server = await asyncio.get_running_loop().create_server(
            accepted, self._host, self._port, backlog=_BACKLOG
        )


async def listen(application: web.Application, address: Address, what: str) -> web.AppRunner:
    """Serves an application until its runner is cleaned up.

    what: the server is called in the configuration and the log.

    Raises:
        StartError: the address cannot be bound.
    """
    runner = web.AppRunner(
        application, access_log=None, logger=ServerLog(what), shutdown_timeout=1.0
    )
    await runner.setup()
    site = _Site(runner, address.host, address.port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise StartError(f"{what}.listen: cannot listen on {address}: {error.strerror}") from None
    return runner
