"""GET /report: the report of this router, and of the other processes beside it.

It is read and compared in a thread, from what is encoded of it: the loop that answers here also
picks workers. One report is made at a time.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from extproc import address
from extproc.admin.report_file import encoded
from extproc.admin.report_page import CONTENT_SECURITY_POLICY, as_html, as_text
from extproc.admin.routes import bad_request
from extproc.config.schema import Config
from extproc.errors import ReportError
from extproc.observing.report import DAYS, MAX_BYTES, Report, read
from extproc.observing.verdict import WINDOWS, Asked, told

# What is sent of a report to another process, which adds them up.
COUNTS = "counts"
FORMATS = ("html", "json", "text", COUNTS)
_KINDS = {"html": "text/html", "json": "application/json", "text": "text/plain"}

# A process that does not answer within is left out, and named.
PEER_SECONDS = 2.0

_SINCE = re.compile(r"([1-9][0-9]{0,4})([mhd])", re.ASCII)
_UNITS = {"m": (60, "minutes"), "h": (3_600, "hours"), "d": (86_400, "days")}

_PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


_NOTES = {
    "none": "responses are not read, so requests may be missing here, and cached tokens are"
    " predictions: set accounting.responses to usage",
    "headers": "what responses report is not read, so cached tokens are predictions and times are"
    " those of response headers: set accounting.responses to usage",
}


def notes_of(config: Config) -> list[str]:
    """Returns what of requests is not known, with this configuration."""
    note = _NOTES.get(config.accounting.responses)
    return [] if note is None else [note]


def report_routes(
    report: Report,
    notes: Sequence[str] = (),
    peers: Mapping[int, str] | None = None,
    clock: Callable[[], float] = time.time,
) -> list[web.RouteDef]:
    """Returns GET /report.

    notes: what is said above it. peers: where the admin servers of the other processes are, by
    number. clock: seconds since 1970.
    """
    others = {number: _url(listen) for number, listen in (peers or {}).items()}
    one_at_a_time = asyncio.Lock()

    async def get_report(request: web.Request) -> web.Response:
        form = request.query.get("format", "html")
        if form not in FORMATS:
            raise bad_request(f"format must be one of {', '.join(FORMATS)}")
        windows = windows_of(request.query.get("since"))
        if form == COUNTS:
            counts = await encoded(report, clock())
            return web.Response(body=counts, content_type="application/json")
        async with one_at_a_time:
            parts, missing = await _parts(others)
            parts.append(await encoded(report, clock()))
            asked = Asked(windows, (*notes, *missing))
            body = await asyncio.to_thread(_rendered, parts, asked, clock(), form)
        headers = _PAGE_HEADERS if form == "html" else {}
        return web.Response(body=body, content_type=_KINDS[form], charset="utf-8", headers=headers)

    return [web.get("/report", get_report)]


def windows_of(since: str | None) -> dict[str, int]:
    """Returns the windows to show, by name, in seconds: one if a time is asked for, as 90m.

    Raises:
        HTTPBadRequest: that is no time, or more than is kept.
    """
    if since is None:
        return WINDOWS
    found = _SINCE.fullmatch(since)
    if found is None:
        raise bad_request("since must be a number of minutes, hours or days: 90m, 12h, 7d")
    seconds, unit = _UNITS[found[2]]
    count = int(found[1])
    if count * seconds > DAYS.seconds * DAYS.kept:
        raise bad_request(f"since must be at most {DAYS.kept}d: no more is kept")
    name = f"the last {unit[:-1]}" if count == 1 else f"the last {count} {unit}"
    return {name: count * seconds}


def _rendered(parts: Sequence[bytes], asked: Asked, now: float, form: str) -> bytes:
    whole, notes = Report(now), list(asked.notes)
    for part in parts:
        try:
            whole.merge(read(part), now)
        except ReportError as error:
            notes.append(f"a process told what {error}: its requests are missing")
    found: dict[str, Any] = told(whole, asked._replace(notes=tuple(notes)), now)
    match form:
        case "json":
            return json.dumps(found).encode()
        case "text":
            return as_text(found).encode()
    return as_html(found).encode()


def _url(listen: str) -> str:
    host, port = address.parse(listen)
    loopback = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}  # noqa: S104
    return f"http://{address.Address(loopback.get(host, host), port)}/report?format={COUNTS}"


async def _parts(others: Mapping[int, str]) -> tuple[list[bytes], list[str]]:
    """Returns the reports of the other processes, and which are missing, in words."""
    if not others:
        return [], []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PEER_SECONDS)) as session:
        found = await asyncio.gather(*(_part(session, url) for url in others.values()))
    missing = [
        f"process {number} does not answer: its requests are missing"
        for number, part in zip(others, found, strict=True)
        if part is None
    ]
    return [part for part in found if part is not None], missing


async def _part(session: aiohttp.ClientSession, url: str) -> bytes | None:
    """Returns the report of one process, None where it does not answer as it should."""
    try:
        async with session.get(url) as response:
            response.raise_for_status()
            text = bytearray()
            async for piece in response.content.iter_any():
                text += piece
                if len(text) > MAX_BYTES:
                    return None
            return bytes(text)
    except (aiohttp.ClientError, TimeoutError):
        return None
