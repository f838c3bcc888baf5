"""What the running router itself finds wrong, in one list.

Every part that can see a fault is a source of faults. GET /faults, /readyz, the log, the page,
`top`, `doctor` and the metric `kvsteer_faults` all show this list, so that they agree.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.base.fault import KINDS, Fault, FaultSource

log = logging.getLogger("kvsteer.faults")

# Most faults that are shown: of a hundred workers with the same fault, some are enough.
MAX_SHOWN = 50

# Time between two looks for faults that appeared or ended.
INTERVAL_SECONDS = 2.0


class Faults:
    """The faults of one router.

    clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._sources: list[FaultSource] = []
        self._clock = clock
        self._since: dict[tuple[str, str], float] = {}

    def add(self, source: FaultSource) -> None:
        """Adds a part that can see faults; it is asked often, so it only reads what it knows."""
        self._sources.append(source)

    def present(self) -> list[Fault]:
        """Returns the present faults in the order of their sources, at most `MAX_SHOWN`."""
        return [fault for source in self._sources for fault in source()][:MAX_SHOWN]

    def look(self) -> tuple[list[Fault], list[tuple[str, str]]]:
        """Returns the faults that appeared since the last look, and code and subject of those that
        ended.
        """
        present, now = self.present(), self._clock()
        since = {(one.code, one.subject): now for one in present} | {
            key: at
            for key, at in self._since.items()
            if key in {(one.code, one.subject) for one in present}
        }
        ended = [key for key in self._since if key not in since]
        appeared = [one for one in present if (one.code, one.subject) not in self._since]
        self._since = since
        return appeared, ended

    def as_json(self) -> list[dict[str, Any]]:
        """Returns the answer of GET /faults; since: seconds since the epoch."""
        now = self._clock()
        return [
            {
                "code": one.code,
                "subject": one.subject,
                "says": one.says,
                "fix": one.fix,
                "since": round(self._since.get((one.code, one.subject), now), 3),
            }
            for one in self.present()
        ]

    async def follow(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        """Logs every fault when it appears and when it has ended, until it is cancelled."""
        while True:
            appeared, ended = self.look()
            for fault in appeared:
                if not KINDS[fault.code].is_told:
                    log.warning("%s: %s", fault.code, fault)
            for code, subject in ended:
                if not KINDS[code].is_told:
                    log.info("%s: %s: has ended", code, subject)
            await asyncio.sleep(interval_seconds)


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
