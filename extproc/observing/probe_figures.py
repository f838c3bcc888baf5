"""Counts what became of probes: POST /probe."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.observing.buckets import Buckets, histogram_family

# What becomes of a probe.
ANSWERED, UNAUTHORIZED, BUSY, REFUSED = "answered", "unauthorized", "busy", "refused"

# Bounds in seconds.
_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class ProbeFigures(Collector):
    """The figures of probes."""

    def __init__(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._seconds = Buckets(_BOUNDS)

    def end(self, outcome: str, seconds: float) -> None:
        """Counts a probe; the time counts of those that were answered."""
        self._outcomes[outcome] += 1
        if outcome == ANSWERED:
            self._seconds.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of probes."""
        ended = CounterMetricFamily(
            "kvsteer_probes", "Probes, by what became of them", labels=["outcome"]
        )
        for outcome, count in self._outcomes.items():
            ended.add_metric([outcome], count)
        yield ended
        yield histogram_family(
            "kvsteer_probe_seconds",
            "How long answered probes took, with the reading of their bodies",
            [],
            [((), self._seconds)],
        )
