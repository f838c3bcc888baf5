"""Keeps a copy of some objects of a Kubernetes API server: one list, then watches from its version.

As the API conventions have it: a watch goes on from the last resourceVersion that was seen, in an
event or a bookmark; 410 Gone, as a status or as an event, means that the version is too old, and
the objects are listed again. Whatever fails is tried again, and the copy stays meanwhile.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec

from extproc.discovery.kubernetes_wire import (
    Thing,
    WatchEvent,
    read_event,
    read_listing,
    read_refusal,
    read_thing,
    read_version,
)
from extproc.discovery.sources import Report
from extproc.errors import DiscoveryError
from kvstate.feeds.backoff import Backoff

T = TypeVar("T", bound=Thing)

PAGE = 500
MAX_THINGS = 10_000
# etcd keeps no object above 1.5 MiB by default; a page of ordinary pods has some megabytes.
MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_PAGE_BYTES = 256 * 1024 * 1024

# The server ends a watch after this time, and is taken for gone somewhat later.
WATCH_SECONDS = 240
PATIENCE_SECONDS = 15.0
CONNECT_SECONDS = 10.0
LIST_SECONDS = 60.0

FIRST_WAIT_SECONDS = 0.5
LAST_WAIT_SECONDS = 30.0

_OK, _GONE = 200, 410

# Asks for the objects with these query parameters; the keywords are the client's. May raise a
# DiscoveryError.
Ask = Callable[..., Awaitable[aiohttp.ClientResponse]]


class _RefusedError(Exception):
    """The server answers something else than what was asked for."""


class _GoneError(Exception):
    """The version that was asked for is too old."""


class ListWatch(Generic[T]):
    """One kind of objects; `changed` is given the whole copy, by uid, after each change.

    ask: lists or watches. chance: 0 to 1, for jitter.
    """

    def __init__(
        self,
        ask: Ask,
        kind: type[T],
        changed: Callable[[Mapping[str, T]], None],
        report: Report,
        chance: Callable[[], float],
    ) -> None:
        self._ask = ask
        self._kind = kind
        self._changed = changed
        self._report = report
        self._backoff = Backoff(FIRST_WAIT_SECONDS, LAST_WAIT_SECONDS, chance)
        self._things: dict[str, T] = {}
        self._version = ""

    async def run(self) -> None:
        """Keeps the copy until it is cancelled."""
        while True:
            began = time.monotonic()
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                if time.monotonic() - began > 1.0:
                    continue
            except _GoneError:
                self._version = ""
            except (_RefusedError, DiscoveryError) as error:
                self._report.fault(str(error))
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                self._report.fault(f"the API server does not answer: {_words(error)}")
            # also after a watch that ended at once: a server must not be asked in a tight loop
            await asyncio.sleep(self._backoff.next_seconds())

    async def _list(self) -> None:
        things: dict[str, T] = {}
        options: dict[str, Any] = {"limit": PAGE, "_request_timeout": _timeout(LIST_SECONDS)}
        while True:
            async with await self._ask(**options) as response:
                await _check(response)
                page = read_listing(await _bounded(response, MAX_PAGE_BYTES))
            if page is None or not (page.metadata.resource_version or page.metadata.continues):
                raise _RefusedError("the API server's answer is no list")
            for raw in page.items or ():
                self._put(things, raw)
            if not page.metadata.continues:
                break
            options["_continue"] = page.metadata.continues
        self._things, self._version = things, page.metadata.resource_version
        self._tell()

    async def _watch(self) -> None:
        options: dict[str, Any] = {
            "watch": True,
            "resource_version": self._version,
            "allow_watch_bookmarks": True,
            "timeout_seconds": WATCH_SECONDS,
            "_request_timeout": _timeout(None),
        }
        async with await self._ask(**options) as response:
            await _check(response)
            self._report.confirm()
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > MAX_LINE_BYTES:
                    raise _RefusedError(f"an event has more than {MAX_LINE_BYTES} bytes")
                if sum([self._take(line) for line in lines if line.strip()]):
                    self._tell()
        self._report.confirm()

    def _take(self, line: bytes) -> bool:
        """Applies one event; whether the copy changed."""
        event = read_event(line)
        if event is None:
            raise _RefusedError("the API server sent something that is no event")
        if event.type == "ERROR":
            refusal = read_refusal(event.object)
            if refusal.code == _GONE:
                raise _GoneError
            raise _RefusedError(f"the API server: {refusal.reason or refusal.code}")
        self._version = read_version(event.object) or self._version
        self._backoff.reset()
        self._report.confirm()
        return event.type != "BOOKMARK" and self._apply(event)

    def _apply(self, event: WatchEvent) -> bool:
        if event.type != "DELETED":
            return self._put(self._things, event.object)
        gone = read_thing(event.object, Thing)
        return gone is not None and self._things.pop(gone.metadata.uid, None) is not None

    def _put(self, things: dict[str, T], raw: msgspec.Raw) -> bool:
        """Takes an object; one that cannot be read, or is too many, is left out."""
        thing = read_thing(raw, self._kind)
        if thing is None:
            return False
        uid = thing.metadata.uid
        if uid not in things and len(things) >= MAX_THINGS:
            self._version = ""  # what is left out now must not be passed over later
            raise _RefusedError(f"there are more than {MAX_THINGS} objects")
        things[uid] = thing
        return True

    def _tell(self) -> None:
        self._changed(self._things)


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == _OK:
        return
    if response.status == _GONE:
        raise _GoneError
    refusal = read_refusal(await _bounded(response, MAX_LINE_BYTES))
    raise _RefusedError(f"the API server: {response.status} {refusal.message[:200]}".rstrip())


async def _bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise _RefusedError(f"the API server's answer has more than {limit} bytes")
    return bytes(body)


def _timeout(total_seconds: float | None) -> aiohttp.ClientTimeout:
    """Of a list as a whole; of a watch between two pieces, which bookmarks keep apart."""
    return aiohttp.ClientTimeout(
        total=total_seconds,
        sock_connect=CONNECT_SECONDS,
        sock_read=None if total_seconds else WATCH_SECONDS + PATIENCE_SECONDS,
    )


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
