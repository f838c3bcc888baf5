"""Follows all discovery sources, keeps the last good view of each, and applies the merged fleet.

    view.py                       what a source reports, and the fleet that is merged from all
    sources.py                    the configured sources, and the file of workers
    dns_names.py                  the addresses of a name
    kubernetes.py, list_watch.py  pods of a cluster: what is followed there, and the copy of it
    pods.py                       turns pods into workers, without sockets
    api_access.py                 credentials for the API server
    deletion_costs.py             writes there which pod is missed least

It knows names, addresses and labels. It asks no worker anything and knows no record of one: the
fleet takes a list of members (`Workers.replace`) and compares it with its own.

The rule: a source reports its whole view or a fault, never a difference. What a view no longer
lists is gone; a source that fails takes no worker away, since its last good view stays. A source
that ends, however it ends, is begun again.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.fleet.discovery.view import (
    MAX_FOUND,
    STATIC,
    Fleet,
    Source,
    SourceReport,
    View,
    doubles,
    merged,
)

log = logging.getLogger("kvsteer.discovery")

Apply = Callable[[Fleet], Awaitable[None]]


@dataclass(slots=True)
class _LastReport:
    """The last report of a source."""

    view: View | None = None
    confirmed_at: float = 0.0
    fault: str = ""
    faults: int = 0
    note: str = ""
    doubled: str = ""


class Discovery:
    """The discovery sources of one router.

    static: the workers of the configuration. monotonic: returns seconds. max_found: the most
    workers of one source. begin_again_seconds: before a source that ended is restarted.
    """

    def __init__(
        self,
        static: View,
        sources: Sequence[Source],
        monotonic: Callable[[], float] = time.monotonic,
        *,
        max_found: int = MAX_FOUND,
        begin_again_seconds: float = 5.0,
    ) -> None:
        self._max_found = max_found
        self._begin_again_seconds = begin_again_seconds
        self._static = static
        self._sources = {source.name: source for source in sources}
        self._last_reports = {name: _LastReport() for name in self._sources}
        self._monotonic = monotonic
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_complete = not sources

    async def start(self, apply: Apply) -> None:
        """Starts following the sources. apply: called with the whole fleet when a view changes."""
        if self._sources:
            self._tasks.append(asyncio.create_task(self._keep_applying(apply)))
        for source in self._sources.values():
            self._tasks.append(asyncio.create_task(self._keep_running(source)))

    async def close(self) -> None:
        """Stops following the sources; the fleet stays as it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    @property
    def is_complete(self) -> bool:
        """Whether every source has reported a view and the fleet includes them all."""
        return self._is_complete

    def fault(self, source: str) -> str:
        """Returns what is wrong with a source or its last view, "" if nothing is known to be."""
        seen = self._last_reports.get(source)
        return seen.fault or seen.note or seen.doubled if seen else ""

    def status(self) -> list[dict[str, Any]]:
        """Returns every source as GET /discovery shows it; ages are in seconds."""
        now = self._monotonic()
        static = {"source": STATIC, "workers": len(self._static), "age_seconds": 0.0}
        return [
            {**static, "fault": "", "note": "", "faults": 0},
            *(
                {"source": name, **_report_as_json(seen, now)}
                for name, seen in self._last_reports.items()
            ),
        ]

    async def _keep_running(self, source: Source) -> None:
        seen = self._last_reports[source.name]
        report = SourceReport(
            view=functools.partial(self._take, source.name, seen),
            confirm=lambda: self._confirm(source.name, seen),
            fault=lambda fault: self._note(source.name, seen, fault),
        )
        while True:
            try:
                await source.run(report)
            except Exception as error:  # noqa: BLE001 - any fault of a source is shown
                self._note(source.name, seen, f"ended with {type(error).__name__}", error)
            await asyncio.sleep(self._begin_again_seconds)

    def _take(self, name: str, seen: _LastReport, view: View, note: str, fault: str = "") -> None:
        if len(view) > self._max_found:
            self._note(name, seen, f"lists {len(view)} workers; the limit is {self._max_found}")
            return
        if fault:
            seen.confirmed_at = self._monotonic()
            self._note(name, seen, fault)
        else:
            self._confirm(name, seen)
        if note != seen.note:
            seen.note = note
            if note:
                log.warning("discovery: %s: %s", name, note)
        if view != seen.view:
            log.info("discovery: %s lists %d workers", name, len(view))
            seen.view = view
            self._changed.set()

    def _confirm(self, name: str, seen: _LastReport) -> None:
        seen.confirmed_at = self._monotonic()
        if seen.fault:
            log.info("discovery: %s works again", name)
            seen.fault = ""

    def _note(
        self, name: str, seen: _LastReport, fault: str, ours: Exception | None = None
    ) -> None:
        if fault != seen.fault:  # reported once, however often it is retried
            seen.faults += 1
            stays = (
                "it has listed no workers yet"
                if seen.view is None
                else "its last list is still used"
            )
            log.warning("discovery: %s: %s; %s", name, fault, stays, exc_info=ours)
            seen.fault = fault

    async def _keep_applying(self, apply: Apply) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            views = {STATIC: self._static}
            views |= {name: seen.view or () for name, seen in self._last_reports.items()}
            for seen in self._last_reports.values():
                seen.doubled = ""
            for source, note in doubles(views):
                self._last_reports[source].doubled = note
            fleet = merged(views)
            # set in one step with what `apply` does before it first waits, so that both become
            # visible together
            self._is_complete = all(seen.view is not None for seen in self._last_reports.values())
            try:
                await apply(fleet)
            except Exception:  # the next view must be applied all the same
                log.exception("discovery: a view could not be applied")


def _report_as_json(seen: _LastReport, now: float) -> dict[str, Any]:
    return {
        "workers": None if seen.view is None else len(seen.view),
        "age_seconds": None if seen.view is None else round(now - seen.confirmed_at, 3),
        "fault": seen.fault,
        "note": "; ".join(filter(None, (seen.note, seen.doubled))),
        "faults": seen.faults,
    }


class DiscoveryCollector(Collector):
    """Exposes the sources at every scrape.

    status: returns what GET /discovery shows.
    """

    def __init__(self, status: Callable[[], list[dict[str, Any]]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yields all metric families of discovery."""
        workers = GaugeMetricFamily(
            "kvsteer_discovery_workers", "Workers in the last view of a source", labels=["source"]
        )
        age = GaugeMetricFamily(
            "kvsteer_discovery_age_seconds",
            "Time since a source last confirmed its view",
            labels=["source"],
        )
        fault = GaugeMetricFamily(
            "kvsteer_discovery_fault",
            "1 while a source cannot be read and its last view is used",
            labels=["source"],
        )
        faults = CounterMetricFamily(
            "kvsteer_discovery_faults", "Faults of a source", labels=["source"]
        )
        for one in self._status():
            source = [one["source"]]
            workers.add_metric(source, one["workers"] or 0)
            if one["age_seconds"] is not None:
                age.add_metric(source, one["age_seconds"])
            fault.add_metric(source, int(bool(one["fault"])))
            faults.add_metric(source, one["faults"])
        yield from (workers, age, fault, faults)
