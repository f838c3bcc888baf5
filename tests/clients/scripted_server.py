"""Serves the scripted model's answers over HTTP."""

import itertools
import json
from collections.abc import Mapping, Sequence

from aiohttp import web
from aiohttp.typedefs import Handler

from tests.clients.scripted_model import (
    CHAT,
    MESSAGES,
    RESPONSES,
    Body,
    Event,
    Plan,
    Usage,
    answer_to,
    lists_files,
)
from tests.clients.starts import MODEL

_numbers = itertools.count(1)


def server_of(answer: Handler) -> web.Application:
    """Returns the server of a model whose requests are all answered by a handler."""
    app = web.Application(client_max_size=64 << 20)
    app.add_routes([web.post(path, answer) for path in (CHAT, MESSAGES, RESPONSES)])
    app.router.add_get("/v1/models", _models)
    return app


async def _models(_: web.Request) -> web.Response:
    listed = [{"id": MODEL, "object": "model", "owned_by": "vllm"}]
    return web.json_response({"object": "list", "data": listed})


async def respond(
    request: web.Request,
    body: Body,
    usage: Usage,
    headers: Mapping[str, str],
    plan: Plan = lists_files,
) -> web.StreamResponse:
    """Answers a request with a stream, if it asks for one, or with one object."""
    events, whole = answer_to(request.path, body, next(_numbers), usage, plan)
    if not body.get("stream"):
        return web.json_response(whole, headers=headers)
    return await _stream(request, events, headers, is_marked=request.path == CHAT)


async def _stream(
    request: web.Request, events: Sequence[Event], named: Mapping[str, str], *, is_marked: bool
) -> web.StreamResponse:
    """Sends server-sent events; is_marked: whether the last of them says that it is over."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream", **named})
    await response.prepare(request)
    for name, data in events:
        head = f"event: {name}\n" if name else ""
        await response.write(f"{head}data: {json.dumps(data)}\n\n".encode())
    if is_marked:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
