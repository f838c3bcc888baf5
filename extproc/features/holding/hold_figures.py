"""Counts the requests that wait for room in the caches: `policy.hold`."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.observing.buckets import Buckets, histogram_family

# How waits end, besides those of `extproc.features.holding.hold`: the client left; the line was
# full; the proxy would not wait.
LEFT, FULL, UNHELD = "left", "full", "unheld"

# Bounds in seconds.
_BOUNDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 90, 120, 180, 300, 600)


class HoldFigures(Collector):
    """The figures of those who wait. waiting: returns how many do now, by model."""

    def __init__(self, waiting: Callable[[], Mapping[str, int]]) -> None:
        self._waiting = waiting
        self._ended: Counter[tuple[str, str]] = Counter()
        self._seconds: defaultdict[str, Buckets] = defaultdict(lambda: Buckets(_BOUNDS))

    def end(self, model: str, outcome: str, seconds: float) -> None:
        """Counts a wait that ended, after so many seconds unless there was none."""
        self._ended[model, outcome] += 1
        if outcome not in (FULL, UNHELD):
            self._seconds[model].observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of waits."""
        held = GaugeMetricFamily(
            "kvsteer_held_requests", "Requests that wait for room in the caches", labels=["model"]
        )
        for model, count in self._waiting().items():
            held.add_metric([model], count)
        yield held
        ended = CounterMetricFamily(
            "kvsteer_holds",
            "Requests that waited for room, by model and how that ended",
            labels=["model", "outcome"],
        )
        for labels, count in self._ended.items():
            ended.add_metric(labels, count)
        yield ended
        yield histogram_family(
            "kvsteer_hold_seconds",
            "How long requests waited for room",
            ["model"],
            [((model,), found) for model, found in self._seconds.items()],
        )
