"""The HTTP server for scrapers and probes: it may be opened to them, and tells nothing else."""

from collections.abc import Callable

from aiohttp import web

from extproc.metrics import Metrics


def metrics_application(metrics: Metrics, hindrance: Callable[[], str]) -> web.Application:
    """GET /metrics, /healthz, /readyz.

    hindrance: why the router is not ready, in words, "" if it is.
    """

    async def get_metrics(request: web.Request) -> web.Response:
        body, content_type = await metrics.exposed(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def get_healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def get_readyz(_: web.Request) -> web.Response:
        reason = hindrance()
        return web.Response(text=f"{reason or 'ready'}\n", status=503 if reason else 200)

    application = web.Application()
    application.add_routes(
        [
            web.get("/metrics", get_metrics),
            web.get("/healthz", get_healthz),
            web.get("/readyz", get_readyz),
        ]
    )
    return application
