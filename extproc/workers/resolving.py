"""The IP addresses of workers that are configured by name."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable

from extproc import address
from extproc.address import Address

log = logging.getLogger("kvsteer.workers")

# Host names are looked up again so often; Envoy's own DNS clusters do it every 5 s.
RESOLVE_INTERVAL_SECONDS = 5.0

# How long start-up waits for the first answers; a resolver that is away must not hold it up.
FIRST_RESOLVE_SECONDS = 2.0


class Resolving:
    """Keeps names resolved, once started.

    changed: is told the name of a worker whose address changed, and the ip:port that it had, None
    if it had none.
    """

    def __init__(self, names: Iterable[str], changed: Callable[[str, str | None], None]) -> None:
        self._changed = changed
        self._named: dict[str, Address] = {}  # those that are to be looked up
        self._endpoints: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self._resolved_once = asyncio.Event()
        self._is_started = False
        self._set(names)

    def endpoint(self, name: str) -> str | None:
        """ip:port of a worker now; None if it could not be resolved yet."""
        return self._endpoints.get(name)

    def items(self) -> list[tuple[str, str]]:
        """Name and ip:port of every worker that has one now."""
        return list(self._endpoints.items())

    async def start(self) -> None:
        """Looks all names up once, then again and again."""
        self._is_started = True
        self._run_if_needed()
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._resolved_once.wait(), FIRST_RESOLVE_SECONDS)

    async def close(self) -> None:
        """Looks nothing up any more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def replace(self, names: Iterable[str]) -> None:
        """Follows these names and no others; known addresses stay."""
        self._set(names)
        if self._is_started:
            self._run_if_needed()

    def _set(self, names: Iterable[str]) -> None:
        named, endpoints = self._named, self._endpoints
        self._named, self._endpoints = {}, {}
        for name in names:
            if name in named:
                self._named[name] = named[name]
            elif name not in endpoints:  # a new one
                place = address.parse(name)
                if place.is_ip:
                    endpoints[name] = str(place)
                else:
                    self._named[name] = place
            if name in endpoints:
                self._endpoints[name] = endpoints[name]

    def _run_if_needed(self) -> None:
        if self._named and self._task is None:
            self._task = asyncio.create_task(self._keep_resolved())

    async def _keep_resolved(self) -> None:
        while True:
            named = list(self._named.items())
            try:
                await asyncio.gather(*(self._resolve(name, place) for name, place in named))
            except Exception:  # one name must not end the looking up of all
                log.exception("workers: a name cannot be looked up")
            self._resolved_once.set()
            await asyncio.sleep(RESOLVE_INTERVAL_SECONDS)

    async def _resolve(self, name: str, place: Address) -> None:
        """Looks a host name up; the last address that was found stays where none is found now."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:  # the latter of what can be no name at all
            if name not in self._endpoints:
                log.warning("worker %s: cannot be resolved yet: %s", name, error)
            return
        endpoints = sorted({str(Address(str(entry[4][0]), place.port)) for entry in found})
        is_wanted = name in self._named  # it may have gone meanwhile
        before = self._endpoints.get(name)
        if endpoints and is_wanted and before not in endpoints:
            self._endpoints[name] = endpoints[0]
            log.info("worker %s is at %s", name, endpoints[0])
            self._changed(name, before)
