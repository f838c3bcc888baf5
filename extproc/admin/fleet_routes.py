"""The workers, the switch for their events, and what would become of a request."""

import msgspec
from aiohttp import web

from extproc.admin.bodies import answered, bad_request, json_of, listed
from extproc.requests.request import path_of
from extproc.router import Router
from extproc.serving.stream import Head
from extproc.workers.workers import Workers


class _Envelope(msgspec.Struct):
    """A request to be explained; its body stays as it was sent."""

    path: str = "/v1/chat/completions"
    headers: dict[str, object] = {}
    body: msgspec.Raw = msgspec.Raw(b"null")


def fleet_routes(
    router: Router, workers: Workers, policy_header: str | None = None
) -> list[web.RouteDef]:
    """GET /workers, POST /explain, GET and POST /events.

    policy_header: the request header that may name a policy, None if none may.
    """

    async def get_workers(_: web.Request) -> web.Response:
        return answered(await listed(workers.statuses(router.in_flight)))

    async def post_explain(request: web.Request) -> web.Response:
        envelope = _envelope_of(await request.read())
        policy = _header_of(envelope, policy_header)
        head = Head("POST", path_of(envelope.path), None, policy)
        return answered(await router.explain(head, bytes(envelope.body)))

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


def _envelope_of(raw: bytes) -> _Envelope:
    try:
        return msgspec.json.decode(raw, type=_Envelope)
    except msgspec.ValidationError as error:
        raise bad_request(
            f'want {{"path": ..., "headers": {{...}}, "body": {{...}}}}: {error}'
        ) from None
    except (ValueError, RecursionError):
        raise bad_request("the body is not JSON") from None


def _header_of(envelope: _Envelope, name: str | None) -> str | None:
    """The value of a header, whose name is in lower case; None where it has none."""
    for key, value in envelope.headers.items():
        if key.lower() == name and isinstance(value, str):
            return value
    return None
