"""Bodies and parameters of admin requests, and what is answered where they make no sense."""

import asyncio
import json
from collections.abc import Iterable

import msgspec
from aiohttp import web

# Numbers of more digits are no number of ours, and slow to read.
MAX_DIGITS = 15

# Entries of a list that are made in one go, on the loop that picks: under a millisecond.
AT_ONCE = 32


async def json_of(request: web.Request) -> object:
    """The request's body.

    Raises:
        HTTPBadRequest: it is not JSON.
    """
    try:
        return await asyncio.to_thread(json.loads, await request.read())
    except (ValueError, RecursionError):
        raise bad_request("the body is not JSON") from None


def answered(told: object) -> web.Response:
    """200, and what is told as JSON; made on the loop that picks, so by the fastest encoder."""
    return web.Response(body=msgspec.json.encode(told), content_type="application/json")


async def listed(entries: Iterable[object]) -> msgspec.Raw:
    """All entries as a JSON list, made in turns: picks are made between them.

    entries: each is looked at when its turn comes, so it must bear that others change meanwhile.
    """
    parts: list[bytes] = []
    for entry in entries:
        parts.append(msgspec.json.encode(entry))
        if len(parts) % AT_ONCE == 0:
            await asyncio.sleep(0)
    return msgspec.Raw(b"[%b]" % b",".join(parts))


def number_of(text: str, what: str) -> int:
    """A number in a path or a query.

    Raises:
        HTTPBadRequest: it is none.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS):
        raise bad_request(f"{what} must be a number")
    return int(text)


def bad_request(message: str) -> web.HTTPBadRequest:
    """400, with the reason as JSON."""
    return web.HTTPBadRequest(text=json.dumps({"error": message}), content_type="application/json")


def no_such_worker() -> web.HTTPNotFound:
    """404, with the reason as JSON."""
    return web.HTTPNotFound(
        text='{"error": "there is no such worker"}', content_type="application/json"
    )
