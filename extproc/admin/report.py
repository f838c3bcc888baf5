"""The report of this router: kept in a file across restarts, and served at GET /report.

GET /report includes the reports of the router's other processes. A thread decodes and compares the
encoded reports, since the event loop that answers also picks workers. One report is made at a time.
"""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from extproc.admin.report_page import CONTENT_SECURITY_POLICY, as_html, as_text
from extproc.admin.routes import bad_request
from extproc.base import address
from extproc.base.atomic_file import replace_file
from extproc.base.errors import ReportError
from extproc.config.schema import Config
from extproc.observing.report import DAYS, MAX_BYTES, Period, Report, encode_report, read
from extproc.observing.verdict import WINDOWS, ReportQuery, report_as_json

log = logging.getLogger("kvsteer.report")

WRITE_SECONDS = 60.0

# Periods that are encoded without a pause, on the event loop that picks: under a millisecond.
AT_ONCE = 16


async def encoded(report: Report, now: float) -> bytes:
    """Returns the encoded report; pauses between periods, so that picks do not wait."""
    parts: list[bytes] = []
    for period in list(report.periods(now)):
        parts.append(msgspec.json.encode(period))
        if len(parts) % AT_ONCE == 0:
            await asyncio.sleep(0)
    return encode_report(parts)


class ReportFile:
    """The file of one report, which is read once and then replaced as a whole.

    A file that is not a report is put aside. Errors are logged and never stop the router.

    clock: seconds since 1970.
    """

    def __init__(
        self,
        path: str,
        report: Report,
        clock: Callable[[], float] = time.time,
        write_seconds: float = WRITE_SECONDS,
    ) -> None:
        self._path = path
        self._report = report
        self._clock = clock
        self._write_seconds = write_seconds
        self._written_until = report.settled
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.fault = ""

    async def start(self) -> None:
        """Adds the file's content to the report, and starts writing it."""
        try:
            periods = await asyncio.to_thread(read_periods, self._path)
        except ReportError as error:
            log.error(
                "report.file: %s %s: kept as %s.broken; a new report begins",
                self._path,
                error,
                self._path,
            )
            with contextlib.suppress(OSError):  # if it fails, the next report replaces it
                await asyncio.to_thread(Path(self._path).replace, f"{self._path}.broken")
        except OSError as error:
            log.error("report.file: %s cannot be read: %s", self._path, error.strerror)
        else:
            self._report.merge(periods, self._clock())
        self._task = asyncio.create_task(self._keep_writing())

    async def close(self) -> None:
        """Writes the report one last time, and stops writing it."""
        self._closing.set()
        if self._task is not None:
            await self._task

    async def _keep_writing(self) -> None:
        is_last = False
        while not is_last:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._write_seconds)
            is_last = self._closing.is_set()
            await self.write()

    async def write(self) -> None:
        """Writes the report if it has new requests; a failed write is tried again later."""
        now = self._clock()
        self._report.settle(now)
        settled = self._report.settled
        if settled == self._written_until:
            return
        fault = ""
        try:
            content = await encoded(self._report, now)
            await asyncio.to_thread(replace_file, self._path, content, is_durable=True)
            self._written_until = settled
        except OSError as error:
            fault = f"{self._path} cannot be written: {error.strerror}"
        except Exception as error:
            log.exception("report.file: the report cannot be written")
            fault = f"the report cannot be written: {type(error).__name__}"
        if fault and fault != self.fault:
            log.error("report.file: %s; a restart would lose the report", fault)
        self.fault = fault


def read_periods(path: str) -> list[Period]:
    """Returns what the file has, nothing if there is none.

    Raises:
        ReportError: it is no report.
    """
    if not Path(path).exists():
        return []
    if not Path(path).is_file():  # reading a pipe would wait for its writer
        raise ReportError("is no file")
    with Path(path).open("rb") as file:
        return read(file.read(MAX_BYTES + 1))


# The format in which a process sends its report to another process, which adds them up.
COUNTS = "counts"
FORMATS = ("html", "json", "text", COUNTS)
_KINDS = {"html": "text/html", "json": "application/json", "text": "text/plain"}

# A process that does not answer in this time is left out, and named in a note.
PEER_SECONDS = 2.0

_SINCE = re.compile(r"([1-9][0-9]{0,4})([mhd])", re.ASCII)
_UNITS = {"m": (60, "minutes"), "h": (3_600, "hours"), "d": (86_400, "days")}

_PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


# What to turn on, and what it costs; both are in docs/envoy.md.
_TURN_ON = (
    "set `accounting: {responses: usage}` and restart the router, then add the same to Envoy with"
    " `kvsteer envoy`: Envoy then sends the router one more message for each piece of an answer"
)
_NOTES = {
    "none": "responses are not read, so requests are missing here, and cached tokens are"
    " predictions: set accounting.responses to usage",
    "headers": "what responses report is not read, so cached tokens are predictions and times are"
    " those of response headers: set accounting.responses to usage",
}
_MISSING = {
    "none": f"Nothing to report, because the router does not read responses: {_TURN_ON}.",
    "headers": "Nothing to report yet: no request with known prompt tokens ended, and what engines"
    f" report is not read: {_TURN_ON}.",
}


def notes_of(config: Config) -> list[str]:
    """Returns notes on what is not known about requests with this configuration."""
    note = _NOTES.get(config.accounting.responses)
    return [] if note is None else [note]


def missing_in(config: Config) -> str:
    """Returns what to turn on if nothing could be counted with this configuration, else ""."""
    return _MISSING.get(config.accounting.responses, "")


def classes_of(config: Config) -> list[str]:
    """Returns the names of the configured classes of requests."""
    rules = config.policy.classes
    return [] if rules is None else [one.name for one in rules.of]


def report_routes(
    report: Report,
    notes: Sequence[str] = (),
    missing: str = "",
    peers: Mapping[int, str] | None = None,
    classes: Sequence[str] = (),
    clock: Callable[[], float] = time.time,
    found: Callable[[], Sequence[str]] = tuple,
) -> list[web.RouteDef]:
    """Returns GET /report.

    notes: shown above it. missing: the first line, as long as nothing was counted. peers:
    addresses of the other processes' admin servers, by number. classes: the configured ones.
    clock: seconds since 1970. found: returns further notes, on what was found by then.
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
            parts, absent = await _parts(others)
            parts.append(await encoded(report, clock()))
            asked = ReportQuery(windows, (*notes, *absent, *found()), missing, classes)
            body = await asyncio.to_thread(_rendered, parts, asked, clock(), form)
        headers = _PAGE_HEADERS if form == "html" else {}
        return web.Response(body=body, content_type=_KINDS[form], charset="utf-8", headers=headers)

    return [web.get("/report", get_report)]


def windows_of(since: str | None) -> dict[str, int]:
    """Returns the lengths of the windows to show, in seconds, by name: one if `since` is given.

    since: a time such as 90m.

    Raises:
        HTTPBadRequest: it is not a time, or longer than reports are kept.
    """
    if since is None:
        return WINDOWS
    found = _SINCE.fullmatch(since)
    if found is None:
        raise bad_request("since must be a number of minutes, hours or days: 90m, 12h, 7d")
    seconds, unit = _UNITS[found[2]]
    count = int(found[1])
    if count * seconds > DAYS.seconds * DAYS.max_periods:
        raise bad_request(f"since must be at most {DAYS.max_periods}d: no more is kept")
    name = f"the last {unit[:-1]}" if count == 1 else f"the last {count} {unit}"
    return {name: count * seconds}


def _rendered(parts: Sequence[bytes], asked: ReportQuery, now: float, form: str) -> bytes:
    whole, notes = Report(now), list(asked.notes)
    for part in parts:
        try:
            whole.merge(read(part), now)
        except ReportError as error:
            notes.append(f"the answer of a process {error}: its requests are missing")
    found: dict[str, Any] = report_as_json(whole, asked._replace(notes=tuple(notes)), now)
    match form:
        case "json":
            return json.dumps(found).encode()
        case "text":
            return as_text(found).encode()
    return as_html(found).encode()


def _url(listen: str) -> str:
    host, port = address.parse(listen)
    loopback = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}
    return f"http://{address.Address(loopback.get(host, host), port)}/report?format={COUNTS}"


async def _parts(others: Mapping[int, str]) -> tuple[list[bytes], list[str]]:
    """Returns the reports of the other processes, and a note for each missing one."""
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
    """Returns the report of one process, None if it does not answer with one."""
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
