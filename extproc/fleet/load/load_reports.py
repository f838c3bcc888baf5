"""Reads the load of workers from their feeds and from their metrics."""

import logging
from collections.abc import Callable, Sequence

import aiohttp

from extproc.fleet.asking.ask_interval import AskInterval
from extproc.fleet.asking.engine_metrics import (
    MAX_METRICS_BYTES,
    report_of_feeds,
    report_of_metrics,
)
from extproc.fleet.asking.polling import Client, PeriodicCheck
from extproc.fleet.records.table import Table
from extproc.fleet.records.worker import Worker
from extproc.routing.health.evidence import Judge
from extproc.routing.health.upstreams import Upstream
from extproc.routing.load.loads import REPORT_SECONDS, Loads
from kvstate.events import EngineLoad

log = logging.getLogger("kvsteer.workers")

_UNFIT = "does not answer on its endpoint"

_OK = 200


def _unread(_: Worker, __: bytes) -> None:
    pass


class LoadReports:
    """Keeps the load of all workers current, from their feeds and their metrics.

    feed_loads: returns the loads that a worker's feeds reported, each with its age in seconds.
    monotonic: the clock of the loads. read: takes the metrics of a worker, for all else.
    """

    def __init__(
        self,
        table: Table,
        loads: Loads,
        feed_loads: Callable[[str], Sequence[tuple[EngineLoad, float]]],
        interval: AskInterval,
        monotonic: Callable[[], float],
        read: Callable[[Worker, bytes], None] = _unread,
    ) -> None:
        self._table = table
        self._loads = loads
        self._feed_loads = feed_loads
        self._monotonic = monotonic
        self._read_metrics = read
        self.interval = interval
        self.question = interval.question("metrics")
        self.check = PeriodicCheck(self._read, "the load of feeds could not be read")

    def _read(self) -> None:
        for worker in self._table:
            now = self._monotonic()
            report = report_of_feeds(self._feed_loads(worker.name), now)
            if report is not None and worker.upstream is not None:
                self._loads.report(worker.endpoint, report, now)

    async def ask(self, client: Client, worker: Worker) -> float:
        """Scrapes one worker, and ejects one that fails repeatedly, until it answers again.

        A worker whose feeds report its load is not asked, unless scrapes ejected it. Returns the
        seconds until it is asked again.
        """
        asked_at, upstream = self._monotonic(), worker.upstream
        if upstream is not None and (
            upstream.is_ejected_by(Judge.SCRAPES, asked_at) or not self._has_feed_load(worker)
        ):
            await self._scrape(client, worker, upstream, asked_at)
        return self.interval.next_seconds(asked_at)

    def _has_feed_load(self, worker: Worker) -> bool:
        """Returns whether the worker's feeds reported its load lately."""
        ages = [age + load.age_ms / 1000 for load, age in self._feed_loads(worker.name)]
        return bool(ages) and max(ages) < REPORT_SECONDS

    async def _scrape(
        self, client: Client, worker: Worker, upstream: Upstream, asked_at: float
    ) -> None:
        seconds = self.interval.answer_seconds
        try:
            status, text = await client.get(
                upstream.endpoint, "/metrics", seconds, MAX_METRICS_BYTES
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._note_failure(worker, upstream, error)
            return
        was_unfit = self._table.upstreams.restore(upstream, Judge.SCRAPES)
        if was_unfit and not self._is_told(upstream):
            log.info("worker %s answers again", worker.name)
        if status != _OK or worker.upstream is not upstream:
            return
        self._read_metrics(worker, text)
        if self._has_feed_load(worker):
            return
        report = report_of_metrics(text, asked_at)
        if report is not None:
            self._loads.report(upstream.endpoint, report, self._monotonic())

    def _note_failure(self, worker: Worker, upstream: Upstream, error: Exception) -> None:
        now = self._monotonic()
        if self._table.upstreams.note_failure(upstream, Judge.SCRAPES, _UNFIT, now):
            worker.holdings.lose(now)
            if not self._is_told(upstream):
                log.warning("worker %s %s: %s", worker.name, _UNFIT, type(error).__name__)

    def _is_told(self, upstream: Upstream) -> bool:
        """Returns whether its health probe ejects it as well: then that logs what happens."""
        return upstream.is_ejected_by(Judge.PROBE, self._monotonic())
