"""What the running router itself finds wrong, in one list.

Every part that can see a fault is a source of faults, and all are asked every two seconds. GET
/faults, /readyz, the log, the page, `top`, `doctor` and the metric `kvsteer_faults` show what was
found last, so that they agree.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.base.fault import KINDS, MAX_SHOWN, Fault, FaultSource
from extproc.base.logs import log_fault

log = logging.getLogger("kvsteer.faults")

# Time between two looks for faults that appeared or ended.
INTERVAL_SECONDS = 2.0


class _Seen(NamedTuple):
    """A fault as it was last seen, and when it was seen first, in seconds since the epoch."""

    fault: Fault
    since: float


class Faults:
    """The faults of one router, as the last look found them.

    Only `look` asks the sources: some of them watch what changes between two looks, and those who
    read the list may be many.

    clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._sources: list[FaultSource] = []
        self._clock = clock
        self._seen: dict[tuple[str, str], _Seen] = {}  # by code and subject
        self._failing: set[FaultSource] = set()

    def add(self, source: FaultSource) -> None:
        """Adds a part that can see faults; it only reads what it knows."""
        self._sources.append(source)

    def present(self) -> list[Fault]:
        """Returns the faults of the last look in the order of their sources, and the first
        `MAX_SHOWN` of them.
        """
        return [one.fault for one in self._seen.values()]

    async def look(self) -> tuple[list[Fault], list[Fault]]:
        """Asks all sources; returns the faults that appeared since the last look, and those that
        have ended.
        """
        before, now = self._seen, self._clock()
        found = {(one.code, one.subject): one async for one in self._found()}
        self._seen = {
            key: _Seen(fault, before[key].since if key in before else now)
            for key, fault in itertools.islice(found.items(), MAX_SHOWN)
        }
        appeared = [one.fault for key, one in self._seen.items() if key not in before]
        return appeared, [one.fault for key, one in before.items() if key not in self._seen]

    async def _found(self) -> AsyncIterator[Fault]:
        """Yields what all sources find; one that fails is logged once, until it does not fail."""
        for source in self._sources:
            try:
                for one in source():
                    if one is None:
                        await asyncio.sleep(0)
                    else:
                        yield one
                self._failing.discard(source)
            except Exception as error:  # noqa: BLE001 - it must not hide what the others find
                if source not in self._failing:
                    log_fault(log, "faults could not be looked for: %s", error)
                self._failing.add(source)

    def as_json(self) -> list[dict[str, Any]]:
        """Returns the answer of GET /faults; since: seconds since the epoch."""
        return [
            {
                "code": fault.code,
                "subject": fault.subject,
                "says": fault.says,
                "fix": fault.fix,
                "since": round(since, 3),
            }
            for fault, since in self._seen.values()
        ]

    async def follow(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        """Looks again and again, and logs each fault when it appears and when it has ended, until
        it is cancelled.
        """
        while True:
            self._tell(*await self.look())
            await asyncio.sleep(interval_seconds)

    def _tell(self, appeared: Sequence[Fault], ended: Sequence[Fault]) -> None:
        for fault in appeared:
            if not KINDS[fault.code].is_logged:
                log.warning("%s: %s", fault.code, fault)
        for fault in ended:
            if not KINDS[fault.code].is_logged:
                log.info("%s: %s: has ended", fault.code, fault.subject)


class FaultCollector(Collector):
    """Shows the number of present faults of each kind at every scrape."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def collect(self) -> Iterator[Metric]:
        """Yields the metric family, with a sample for every kind: what is not present is 0."""
        counts = Counter(fault.code for fault in self._faults.present())
        family = GaugeMetricFamily(
            "kvsteer_faults",
            "Faults that the router itself sees now, by kind (GET /faults)",
            labels=["code"],
        )
        for code in KINDS:
            family.add_metric([code], counts[code])
        yield family
