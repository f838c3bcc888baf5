"""The two HTTP servers beside the gRPC one: admin for the operator, metrics for scrapers."""

import asyncio
import ipaddress
import json
from collections.abc import Callable
from importlib.metadata import version
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from extproc.address import Address
from extproc.errors import StartError
from extproc.metrics import Metrics
from extproc.requests.request import path_of
from extproc.router import Router
from extproc.serving.stream import Head
from extproc.workers.workers import Workers
from kvstate.core_choice import default_core_name


def admin_application(
    router: Router, workers: Workers, max_body_bytes: int, host: str
) -> web.Application:
    """GET /, GET /workers, POST /explain, GET and POST /events.

    host: where it listens, which requests may name besides loopback.
    """
    # /explain wraps the body in an envelope, whose text escapes it once more at the worst
    application = web.Application(
        client_max_size=2 * max_body_bytes, middlewares=[_same_host_only(host)]
    )

    async def get_about(_: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": version("kvsteer"),
                "index_core": default_core_name(),
                "index_bytes": workers.index_bytes(),
                "paths": ["/workers", "/explain", "/events"],
            }
        )

    async def get_workers(_: web.Request) -> web.Response:
        return web.json_response(workers.status(router.in_flight))

    async def post_explain(request: web.Request) -> web.Response:
        head, body = _explained(await _json(request))
        return web.json_response(await router.explain(head, body))

    async def get_events(_: web.Request) -> web.Response:
        return web.json_response({"enabled": workers.events_enabled})

    async def post_events(request: web.Request) -> web.Response:
        raw = await _json(request)
        enabled = raw.get("enabled") if isinstance(raw, dict) else None
        if not isinstance(enabled, bool):
            raise _bad_request('want {"enabled": true} or {"enabled": false}')
        await workers.enable_events(enabled=enabled)
        return web.json_response({"enabled": workers.events_enabled})

    application.add_routes(
        [
            web.get("/", get_about),
            web.get("/workers", get_workers),
            web.post("/explain", post_explain),
            web.get("/events", get_events),
            web.post("/events", post_events),
        ]
    )
    return application


def metrics_application(metrics: Metrics, is_ready: Callable[[], bool]) -> web.Application:
    """GET /metrics, /healthz, /readyz."""

    async def get_metrics(_: web.Request) -> web.Response:
        body = metrics.exposition()
        return web.Response(body=body, headers={"Content-Type": metrics.content_type})

    async def get_healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def get_readyz(_: web.Request) -> web.Response:
        if is_ready():
            return web.Response(text="ready\n")
        return web.Response(text="replays under way\n", status=503)

    application = web.Application()
    application.add_routes(
        [
            web.get("/metrics", get_metrics),
            web.get("/healthz", get_healthz),
            web.get("/readyz", get_readyz),
        ]
    )
    return application


async def listen(application: web.Application, address: Address, what: str) -> web.AppRunner:
    """Serves an application until its runner is cleaned up.

    Raises:
        StartError: the address cannot be bound.
    """
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, address.host, address.port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise StartError(f"{what}.listen: cannot listen on {address}: {error.strerror}") from None
    return runner


def _explained(raw: object) -> tuple[Head, bytes]:
    if not isinstance(raw, dict):
        raise _bad_request('want {"path": ..., "headers": {...}, "body": {...}}')
    path = raw.get("path", "/v1/chat/completions")
    if not isinstance(path, str):
        raise _bad_request("path must be text")
    return Head("POST", path_of(path), None), json.dumps(raw.get("body")).encode()


async def _json(request: web.Request) -> object:
    try:
        return await asyncio.to_thread(json.loads, await request.read())
    except (ValueError, RecursionError):
        raise _bad_request("the body is not JSON") from None


def _bad_request(message: str) -> web.HTTPBadRequest:
    return web.HTTPBadRequest(text=json.dumps({"error": message}), content_type="application/json")


def _same_host_only(host: str) -> Middleware:
    """Refuses what a web page elsewhere could make a browser send (DNS rebinding, cross-site)."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        named = _host_in(request.host)
        if not (_is_loopback(named) or named == host):
            raise web.HTTPForbidden(text=f"Host {named!r} is not served here\n")
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.host:
            raise web.HTTPForbidden(text="requests from other origins are refused\n")
        return await handler(request)

    return check


def _host_in(authority: str) -> str:
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""  # as a bracket that is not closed


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
