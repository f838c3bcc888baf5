"""Probes the health of every worker regularly, and ejects those that fail."""

import errno
import logging
from collections.abc import Callable

import aiohttp

from extproc.fleet.asking.ask_interval import AskInterval
from extproc.fleet.asking.polling import Client
from extproc.fleet.records.table import Table
from extproc.fleet.records.worker import Worker
from extproc.routing.health.evidence import Judge
from extproc.routing.health.upstreams import Upstream

log = logging.getLogger("kvsteer.workers")

# The router itself has no socket left: that says nothing about the worker.
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})

_UNHEALTHY = "fails its health probe"


class HealthProbe:
    """Probes the health of workers regularly.

    monotonic: the clock of the loads.
    """

    def __init__(self, table: Table, interval: AskInterval, monotonic: Callable[[], float]) -> None:
        self._upstreams = table.upstreams
        self._monotonic = monotonic
        self.interval = interval
        self.question = interval.question("health")

    async def ask(self, client: Client, worker: Worker) -> float:
        """Asks one worker; returns the seconds until it is asked again.

        vLLM and SGLang answer 200 without a body if they are healthy.
        """
        asked_at, upstream = self._monotonic(), worker.upstream
        if upstream is not None:
            fault = await self._fault(client, upstream)
            if fault is not None:
                self._take(worker, upstream, fault)
        return self.interval.next_seconds(asked_at)

    async def _fault(self, client: Client, upstream: Upstream) -> str | None:
        """Returns what is wrong with a worker, "" if nothing is, None if it could not be asked."""
        try:
            status, _ = await client.get(upstream.endpoint, "/health", self.interval.answer_seconds)
        except aiohttp.ClientOSError as error:
            return None if error.errno in _OURS else type(error).__name__
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return type(error).__name__
        is_well = 200 <= status < 300
        return "" if is_well else f"HTTP status {status}"

    def _take(self, worker: Worker, upstream: Upstream, fault: str) -> None:
        now = self._monotonic()
        is_told = upstream.is_ejected_by(Judge.SCRAPES, now)  # then the scrapes log it
        if not fault:
            if self._upstreams.restore(upstream, Judge.PROBE) and not is_told:
                log.info("worker %s is healthy again", worker.name)
            return
        if self._upstreams.note_failure(upstream, Judge.PROBE, _UNHEALTHY, now):
            worker.holdings.lose(now)
            if not is_told:
                log.warning("worker %s %s: %s", worker.name, _UNHEALTHY, fault)
