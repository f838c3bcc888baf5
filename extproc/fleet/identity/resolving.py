"""Looks up the host names of workers, and again every few seconds."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from extproc.base.address import Address
from extproc.fleet.asking.asking_times import USUAL, AskingTimes
from extproc.fleet.asking.host_names import LookUp, addresses_of
from extproc.fleet.records.table import Table
from extproc.fleet.records.worker import Worker

log = logging.getLogger("kvsteer.workers")

SEVERAL = (
    "worker %s: its name leads to %s as well: its requests and its feed go to %s only;"
    " discovery.dns makes a worker of each address"
)


class Resolving:
    """Keeps the host names of workers resolved, once started.

    moved: called with a worker's new ip:port whenever that changes. look_up: see `LookUp`.
    """

    def __init__(
        self,
        table: Table,
        moved: Callable[[Worker, str], None],
        times: AskingTimes = USUAL,
        look_up: LookUp = addresses_of,
    ) -> None:
        self._look_up = look_up
        self._times = times
        self._table = table
        self._moved = moved
        self._task: asyncio.Task[None] | None = None
        self._resolved_once = asyncio.Event()
        self._is_started = False

    async def start(self) -> None:
        """Looks up all names, and keeps doing so; waits a limited time for the first answers."""
        self._is_started = True
        self.run_if_needed()
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._resolved_once.wait(), self._times.first_resolve_seconds
                )

    async def close(self) -> None:
        """Stops looking names up."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def run_if_needed(self) -> None:
        """Begins if it was started and there are names to look up."""
        if self._is_started and self._task is None and self._named():
            self._task = asyncio.create_task(self._keep_resolved())

    def _named(self) -> list[Worker]:
        return [worker for worker in self._table if not worker.place.is_ip]

    async def _keep_resolved(self) -> None:
        while True:
            try:
                async with asyncio.TaskGroup() as lookups:
                    for worker in self._named():
                        lookups.create_task(self._resolve(worker))
            except Exception:  # a failed look-up must not end the others
                log.exception("workers: a name cannot be looked up")
            self._resolved_once.set()
            await asyncio.sleep(self._times.resolve_seconds)

    async def _resolve(self, worker: Worker) -> None:
        """Looks up a host name; the last address found remains if none is found now."""
        place = worker.place
        try:
            found = await self._look_up(place.host)
        except (OSError, ValueError) as error:
            if worker.upstream is None:
                log.warning("worker %s: cannot be resolved yet: %s", worker.name, error)
            return
        endpoints = sorted({str(Address(one, place.port)) for one in found})
        is_there = self._table.has(worker)  # it may have gone meanwhile
        if not endpoints or not is_there:
            return
        if worker.endpoint not in endpoints:
            log.info("worker %s resolves to %s", worker.name, endpoints[0])
            self._moved(worker, endpoints[0])
        others = tuple(one for one in endpoints if one != worker.endpoint)
        if others and others != worker.other_endpoints:
            log.warning(SEVERAL, worker.name, ", ".join(others), worker.endpoint)
        worker.other_endpoints = others
