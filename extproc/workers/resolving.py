"""The IP addresses of workers that are configured by name."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from extproc.address import Address
from extproc.workers.record import Table, Worker

log = logging.getLogger("kvsteer.workers")

# Host names are looked up again so often; Envoy's own DNS clusters do it every 5 s.
RESOLVE_INTERVAL_SECONDS = 5.0

# How long start-up waits for the first answers; a resolver that is away must not hold it up.
FIRST_RESOLVE_SECONDS = 2.0


class Resolving:
    """Keeps the host names of workers resolved, once started.

    moved: is told the ip:port that a worker has now, whenever that is another one.
    """

    def __init__(self, table: Table, moved: Callable[[Worker, str], None]) -> None:
        self._table = table
        self._moved = moved
        self._task: asyncio.Task[None] | None = None
        self._resolved_once = asyncio.Event()
        self._is_started = False

    async def start(self) -> None:
        """Looks all names up once, then again and again."""
        self._is_started = True
        self.run_if_needed()
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

    def run_if_needed(self) -> None:
        """Begins where it was started and there are names to be looked up."""
        if self._is_started and self._task is None and self._named():
            self._task = asyncio.create_task(self._keep_resolved())

    def _named(self) -> list[Worker]:
        return [worker for worker in self._table if not worker.place.is_ip]

    async def _keep_resolved(self) -> None:
        while True:
            try:
                await asyncio.gather(*(self._resolve(worker) for worker in self._named()))
            except Exception:  # one name must not end the looking up of all
                log.exception("workers: a name cannot be looked up")
            self._resolved_once.set()
            await asyncio.sleep(RESOLVE_INTERVAL_SECONDS)

    async def _resolve(self, worker: Worker) -> None:
        """Looks a host name up; the last address that was found stays where none is found now."""
        loop, place = asyncio.get_running_loop(), worker.place
        try:
            found = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:  # the latter of what can be no name at all
            if worker.upstream is None:
                log.warning("worker %s: cannot be resolved yet: %s", worker.name, error)
            return
        endpoints = sorted({str(Address(str(entry[4][0]), place.port)) for entry in found})
        is_there = self._table.has(worker)  # it may have gone meanwhile
        if endpoints and is_there and worker.endpoint not in endpoints:
            log.info("worker %s is at %s", worker.name, endpoints[0])
            self._moved(worker, endpoints[0])
