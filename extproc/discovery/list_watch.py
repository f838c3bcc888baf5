"""Keeps a copy of some objects of a Kubernetes API server: one list, then watches from its version.

As the API conventions have it: a watch goes on from the last resourceVersion that was seen, in an
event or a bookmark; 410 Gone, as a status or as an event, means that the version is too old, and
the objects are listed again, at once. Whatever fails is tried again, and the copy stays meanwhile.

The copy is confirmed only while it is known to be true. That a watch was accepted proves nothing: a
server that was restarted answers 200 and only then, as an event, that the version is gone.
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

# The server ends a watch after this time, and is taken for hung somewhat later. A longer watch
# would be silent for up to a minute, from bookmark to bookmark, and a hung server noticed as late.
# Before the end there is a bookmark, so that the next watch goes on from a recent version.
WATCH_SECONDS = 10
PATIENCE_SECONDS = 5.0
CONNECT_SECONDS = 5.0
LIST_SECONDS = 60.0
LIST_SILENCE_SECONDS = 15.0

# A version that is gone is answered at once: a watch that is quiet for this long goes on.
QUIET_SECONDS = 1.0

# Pauses while the server does not answer or refuses. They stay short: until the next try nobody
# knows that it is back.
FIRST_WAIT_SECONDS = 0.5
LAST_WAIT_SECONDS = 4.0

# A list costs the server far more than a watch: one that did not help, because its version was gone
# within this time or because it was too long, is followed by pauses that grow to a longer one.
LIST_HELPS_SECONDS = 10.0
LAST_LIST_WAIT_SECONDS = 30.0

_OK, _GONE = 200, 410

# Asks for the objects with these query parameters; the keywords are the client's. May raise a
# DiscoveryError.
Ask = Callable[..., Awaitable[aiohttp.ClientResponse]]


class _RefusedError(Exception):
    """The server answers something else than what was asked for."""


class _UselessListError(_RefusedError):
    """The list cannot be used; the next one can hardly be used either."""


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
        self._list_backoff = Backoff(FIRST_WAIT_SECONDS, LAST_LIST_WAIT_SECONDS, chance)
        self._things: dict[str, T] = {}
        self._version = ""
        self._listed_at = 0.0

    async def run(self) -> None:
        """Keeps the copy until it is cancelled."""
        while True:
            if pause := await self._go_on():
                await asyncio.sleep(pause)

    async def _go_on(self) -> float:
        """Lists if need be, and watches until the watch ends; returns the pause before the next."""
        try:
            if not self._version:
                await self._list()
            began = time.monotonic()
            await self._watch()
        except _GoneError:
            return self._pause_before_list()
        except _UselessListError as error:
            self._report.fault(str(error))
            return self._list_backoff.next_seconds()
        except (_RefusedError, DiscoveryError) as error:
            self._report.fault(str(error))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._report.fault(f"the API server does not answer: {_words(error)}")
        else:
            if time.monotonic() - began >= QUIET_SECONDS:
                self._confirm()
                return 0.0
        # also after a watch that ended at once: a server must not be asked in a tight loop
        return self._backoff.next_seconds()

    def _pause_before_list(self) -> float:
        """None, unless the last list was of no use."""
        self._version = ""
        if time.monotonic() - self._listed_at < LIST_HELPS_SECONDS:
            return self._list_backoff.next_seconds()
        self._list_backoff.reset()
        return 0.0

    def _confirm(self) -> None:
        """The copy is true now."""
        self._backoff.reset()
        self._report.confirm()

    async def _list(self) -> None:
        things: dict[str, T] = {}
        timeout = _timeout(LIST_SECONDS, LIST_SILENCE_SECONDS)
        options: dict[str, Any] = {"limit": PAGE, "_request_timeout": timeout}
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
        self._listed_at = time.monotonic()
        self._tell()

    async def _watch(self) -> None:
        options: dict[str, Any] = {
            "watch": True,
            "resource_version": self._version,
            "allow_watch_bookmarks": True,
            "timeout_seconds": WATCH_SECONDS,
            "_request_timeout": _timeout(WATCH_SECONDS + PATIENCE_SECONDS, None),
        }
        async with await self._ask(**options) as response:
            await _check(response)
            when_quiet = asyncio.get_running_loop().call_later(QUIET_SECONDS, self._confirm)
            try:
                await self._take_all(response)
            finally:
                when_quiet.cancel()

    async def _take_all(self, response: aiohttp.ClientResponse) -> None:
        rest = b""
        async for chunk in response.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                raise _RefusedError(f"an event has more than {MAX_LINE_BYTES} bytes")
            if sum([self._take(line) for line in lines if line.strip()]):
                self._tell()

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
        self._confirm()
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
            raise _UselessListError(f"there are more than {MAX_THINGS} objects")
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


def _timeout(total_seconds: float, silence_seconds: float | None) -> aiohttp.ClientTimeout:
    """Of a question as a whole, and between two pieces of its answer."""
    return aiohttp.ClientTimeout(
        total=total_seconds, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds
    )


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it said nothing in time"
    return " ".join(str(error).split())[:200] or type(error).__name__
