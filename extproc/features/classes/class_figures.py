"""Counts requests by the class that a trusted header names: `policy.classes`."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.observing.buckets import Buckets, histogram_family
from extproc.observing.outcomes import FIRST_BYTE_BOUNDS


class ClassFigures(Collector):
    """The figures of each class; there are none without classes."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str]] = Counter()
        self._in_flight: Counter[str] = Counter()
        self._first_bytes: defaultdict[str, Buckets] = defaultdict(
            lambda: Buckets(FIRST_BYTE_BOUNDS)
        )

    def begin(self, name: str, verdict: str, *, is_booked: bool) -> None:
        """Counts a request of a class. is_booked: whether it is in flight from now on."""
        self._requests[name, verdict] += 1
        self._in_flight[name] += is_booked

    def end(self, name: str, first_byte_seconds: float | None, *, is_booked: bool) -> None:
        """Counts a request that ended. first_byte_seconds: None if it is not known."""
        self._in_flight[name] -= is_booked
        if first_byte_seconds is not None:
            self._first_bytes[name].observe(first_byte_seconds)

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of the classes."""
        requests = CounterMetricFamily(
            "kvsteer_class_requests",
            "Requests by class, and by what was decided",
            labels=["class", "verdict"],
        )
        for labels, count in self._requests.items():
            requests.add_metric(labels, count)
        in_flight = GaugeMetricFamily(
            "kvsteer_class_in_flight", "Requests in flight by class", labels=["class"]
        )
        for name, count in self._in_flight.items():
            in_flight.add_metric([name], count)
        yield requests
        yield in_flight
        yield histogram_family(
            "kvsteer_class_first_byte_seconds",
            "Seconds from a request's headers to the first byte of its response, by class",
            ["class"],
            [((name,), found) for name, found in self._first_bytes.items()],
        )
