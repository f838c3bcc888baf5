"""Keeps a copy of all Kubernetes objects of one kind, from one list and watches.

Watches from the list's version keep the copy current, as the API conventions describe: each watch
continues from the last resourceVersion seen, in an event or a bookmark. 410 Gone, as a status or as
an event, means that the version is too old, and the objects are listed again: at once, unless the
last list did not help. Whatever fails is tried again, and the copy stays meanwhile.

The copy is confirmed only while it is known to be current. An accepted watch proves nothing: a
restarted server answers 200, and only then sends an event that the version is gone.

The watch helper of the client is not used: it does not report when a watch was accepted, so a quiet
watch could not be confirmed; it decodes whole objects; and lists would have to be bounded here
anyway.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec

from extproc.base.errors import DiscoveryError
from extproc.fleet.discovery.pods import (
    PAGE,
    Thing,
    WatchEvent,
    read_event,
    read_listing,
    read_refusal,
    read_thing,
    read_version,
)
from extproc.fleet.discovery.view import SourceReport
from kvstate.feeds.backoff import Backoff

T = TypeVar("T", bound=Thing)

# Requests the objects with these query parameters, passed as the client's keywords. May raise a
# DiscoveryError.
Ask = Callable[..., Awaitable[aiohttp.ClientResponse]]

# Objects that are read before other tasks run.
AT_ONCE = 20


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """How long lists and watches take, and how much they bring."""

    # The most objects in the copy.
    max_things: int = 10_000
    # The most pages of a list.
    max_pages: int = 200
    # The most bytes of an event, and of a page: etcd keeps no object above 1.5 MiB by default, and
    # a page of ordinary pods is a few megabytes.
    max_line_bytes: int = 4 * 1024 * 1024
    max_page_bytes: int = 32 * 1024 * 1024
    # After which the server ends a watch. A longer watch would be silent for up to a minute between
    # bookmarks, and a hung server would be noticed only then. A bookmark precedes the end, so that
    # the next watch begins at a recent version.
    watch_seconds: int = 10
    # A watch that lasts so much longer counts as hung.
    patience_seconds: float = 5.0
    # If the version is gone, the server says so at once: a watch that is quiet for this long shows
    # that the copy is current.
    quiet_seconds: float = 1.0
    # The most time for a connection, for a list, and between two pieces of a list.
    connect_seconds: float = 5.0
    list_seconds: float = 60.0
    list_silence_seconds: float = 15.0
    # The first and the longest pause while the server does not answer or refuses. They stay short,
    # since only the next try shows that it is back.
    wait_seconds: tuple[float, float] = (0.5, 4.0)
    # A list costs the server far more than a watch. After one that did not help, because its
    # version was gone within the first time or it was too long, the pauses grow up to the second.
    list_helps_seconds: float = 10.0
    last_list_wait_seconds: float = 30.0


USUAL = WatchLimits()

_OK, _GONE = 200, 410


class _RefusedError(Exception):
    """The server's answer is not what was requested."""


class _UselessListError(_RefusedError):
    """The list cannot be used, and the next one probably cannot either."""


class _GoneError(Exception):
    """The requested version is too old."""


class ListWatch(Generic[T]):
    """Keeps a copy of all objects of one kind.

    ask: lists or watches them. changed: called with the whole copy, by uid, after each change.
    chance: returns 0 to 1, for jitter.
    """

    def __init__(
        self,
        ask: Ask,
        kind: type[T],
        changed: Callable[[Mapping[str, T]], None],
        report: SourceReport,
        chance: Callable[[], float],
        limits: WatchLimits = USUAL,
    ) -> None:
        self._ask = ask
        self._limits = limits
        self._kind = kind
        self._changed = changed
        self._report = report
        self._backoff = Backoff(*limits.wait_seconds, chance)
        self._list_backoff = Backoff(limits.wait_seconds[0], limits.last_list_wait_seconds, chance)
        self._things: dict[str, T] = {}
        self._version = ""
        self._listed_at = 0.0

    async def run(self) -> None:
        """Keeps the copy current until it is cancelled."""
        while True:
            if pause := await self._go_on():
                await asyncio.sleep(pause)

    async def _go_on(self) -> float:
        """Lists if necessary, and watches until the watch ends; returns the pause in seconds."""
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
            if time.monotonic() - began >= self._limits.quiet_seconds:
                self._confirm()
                return 0.0
        # also after a watch that ended at once: a server must not be asked in a tight loop
        return self._backoff.next_seconds()

    def _pause_before_list(self) -> float:
        """Returns the pause in seconds: 0, or a growing one if the last list did not help."""
        self._version = ""
        if time.monotonic() - self._listed_at < self._limits.list_helps_seconds:
            return self._list_backoff.next_seconds()
        self._list_backoff.reset()
        return 0.0

    def _confirm(self) -> None:
        """Reports that the copy is current."""
        self._backoff.reset()
        self._report.confirm()

    async def _list(self) -> None:
        things: dict[str, T] = {}
        timeout = self._timeout(self._limits.list_seconds, self._limits.list_silence_seconds)
        options: dict[str, Any] = {"limit": PAGE, "_request_timeout": timeout}
        for _ in range(self._limits.max_pages):
            async with await self._ask(**options) as response:
                await self._check(response)
                page = read_listing(await _bounded(response, self._limits.max_page_bytes))
            if page is None or not (page.metadata.resource_version or page.metadata.continues):
                raise _RefusedError("the API server's answer is no list")
            for number, raw in enumerate(page.items or ()):
                if number % AT_ONCE == 0:
                    await asyncio.sleep(0)
                self._put(things, raw)
            if not page.metadata.continues:
                break
            options["_continue"] = page.metadata.continues
        else:
            raise _UselessListError(f"a list has more than {self._limits.max_pages} pages")
        self._things, self._version = things, page.metadata.resource_version
        self._listed_at = time.monotonic()
        self._tell()

    async def _watch(self) -> None:
        options: dict[str, Any] = {
            "watch": True,
            "resource_version": self._version,
            "allow_watch_bookmarks": True,
            "timeout_seconds": self._limits.watch_seconds,
            "_request_timeout": self._timeout(
                self._limits.watch_seconds + self._limits.patience_seconds, None
            ),
        }
        async with await self._ask(**options) as response:
            await self._check(response)
            when_quiet = asyncio.get_running_loop().call_later(
                self._limits.quiet_seconds, self._confirm
            )
            try:
                await self._take_all(response)
            finally:
                when_quiet.cancel()

    async def _take_all(self, response: aiohttp.ClientResponse) -> None:
        rest = b""
        async for chunk in response.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > self._limits.max_line_bytes:
                raise _RefusedError(f"an event has more than {self._limits.max_line_bytes} bytes")
            if sum([self._take(line) for line in lines if line.strip()]):
                self._tell()

    def _take(self, line: bytes) -> bool:
        """Applies one event; returns whether the copy changed."""
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
        """Adds or replaces an object; returns False for one that cannot be read, which is skipped.

        Raises:
            _UselessListError: there are more than `WatchLimits.max_things`.
        """
        thing = read_thing(raw, self._kind)
        if thing is None:
            return False
        uid = thing.metadata.uid
        if uid not in things and len(things) >= self._limits.max_things:
            self._version = ""  # list again, so that a skipped object is not missed
            raise _UselessListError(f"there are more than {self._limits.max_things} objects")
        things[uid] = thing
        return True

    def _tell(self) -> None:
        self._changed(self._things)

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status == _OK:
            return
        if response.status == _GONE:
            raise _GoneError
        refusal = read_refusal(await _bounded(response, self._limits.max_line_bytes))
        raise _RefusedError(f"the API server: {response.status} {refusal.message[:200]}".rstrip())

    def _timeout(
        self, total_seconds: float, silence_seconds: float | None
    ) -> aiohttp.ClientTimeout:
        """Returns the time limits of a request: as a whole, and between pieces of its answer."""
        return aiohttp.ClientTimeout(
            total=total_seconds,
            sock_connect=self._limits.connect_seconds,
            sock_read=silence_seconds,
        )


async def _bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise _RefusedError(f"the API server's answer has more than {limit} bytes")
    return bytes(body)


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it said nothing in time"
    return " ".join(str(error).split())[:200] or type(error).__name__
