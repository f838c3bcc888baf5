"""Where the workers come from, and which get no new requests."""

from aiohttp import web

from extproc.admin.bodies import bad_request, json_of, no_such_worker
from extproc.discovery.discovery import Discovery
from extproc.workers.workers import Workers

_WANTED = 'want {"endpoint": "ip:port", "draining": true} or the same with false'


def discovery_routes(workers: Workers, discovery: Discovery) -> list[web.RouteDef]:
    """GET /discovery, GET and POST /draining."""

    async def get_discovery(_: web.Request) -> web.Response:
        return web.json_response(discovery.status())

    async def get_draining(_: web.Request) -> web.Response:
        return web.json_response({"draining": sorted(workers.draining())})

    async def post_draining(request: web.Request) -> web.Response:
        raw = await json_of(request)
        asked = raw if isinstance(raw, dict) else {}
        endpoint, draining = asked.get("endpoint"), asked.get("draining")
        if not isinstance(endpoint, str) or not isinstance(draining, bool):
            raise bad_request(_WANTED)
        if not workers.drain(endpoint, draining=draining):
            raise no_such_worker()
        return web.json_response({"draining": sorted(workers.draining())})

    return [
        web.get("/discovery", get_discovery),
        web.get("/draining", get_draining),
        web.post("/draining", post_draining),
    ]
