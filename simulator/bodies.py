"""JSON in and out of the API."""

from typing import Any, TypeVar

import msgspec
from aiohttp import web

from simulator.responses import bad_request

_Body = TypeVar("_Body")


async def decoded(request: web.Request, kind: type[_Body]) -> _Body:
    """The request's body as that type, or the error that the client gets for it."""
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(str(error)) from error


def json_response(
    body: dict[str, Any] | list[dict[str, Any]],
    *,
    status: int = 200,
    headers: dict[str, str] | None = None,
) -> web.Response:
    """An answer."""
    content = msgspec.json.encode(body)
    return web.Response(
        body=content, content_type="application/json", status=status, headers=headers
    )
