"""An HTTP server that has one handler answer whatever it is asked."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from tests.ports import free_port

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BYTES = 1 << 20


@contextlib.asynccontextmanager
async def serving(
    answer: Handler, port: int = 0, *, max_bytes: int = MAX_BYTES, decompresses: bool = True
) -> AsyncIterator[str]:
    """Serves on loopback; yields its host:port.

    port: a free one for 0. max_bytes: of a body. decompresses: whether compressed bodies reach the
    handler as they were before.
    """
    application = web.Application(client_max_size=max_bytes)
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, auto_decompress=decompresses)
    await runner.setup()
    port = port or free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await runner.cleanup()
