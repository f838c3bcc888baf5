"""The workers, the switch for their events, and what would become of a request."""

import json

from aiohttp import web

from extproc.admin.bodies import bad_request, json_of
from extproc.requests.request import path_of
from extproc.router import Router
from extproc.serving.stream import Head
from extproc.workers.workers import Workers


def fleet_routes(router: Router, workers: Workers) -> list[web.RouteDef]:
    """GET /workers, POST /explain, GET and POST /events."""

    async def get_workers(_: web.Request) -> web.Response:
        return web.json_response(workers.status(router.in_flight))

    async def post_explain(request: web.Request) -> web.Response:
        head, body = _explained(await json_of(request))
        return web.json_response(await router.explain(head, body))

    async def get_events(_: web.Request) -> web.Response:
        return web.json_response({"enabled": workers.events_enabled})

    async def post_events(request: web.Request) -> web.Response:
        raw = await json_of(request)
        enabled = raw.get("enabled") if isinstance(raw, dict) else None
        if not isinstance(enabled, bool):
            raise bad_request('want {"enabled": true} or {"enabled": false}')
        await workers.enable_events(enabled=enabled)
        return web.json_response({"enabled": workers.events_enabled})

    return [
        web.get("/workers", get_workers),
        web.post("/explain", post_explain),
        web.get("/events", get_events),
        web.post("/events", post_events),
    ]


def _explained(raw: object) -> tuple[Head, bytes]:
    if not isinstance(raw, dict):
        raise bad_request('want {"path": ..., "headers": {...}, "body": {...}}')
    path = raw.get("path", "/v1/chat/completions")
    if not isinstance(path, str):
        raise bad_request("path must be text")
    return Head("POST", path_of(path), None), json.dumps(raw.get("body")).encode()
