"""Serving an HTTP application on an address."""

from aiohttp import web

from extproc.address import Address
from extproc.admin.server_log import ServerLog
from extproc.errors import StartError


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
    site = web.TCPSite(runner, address.host, address.port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise StartError(f"{what}.listen: cannot listen on {address}: {error.strerror}") from None
    return runner
