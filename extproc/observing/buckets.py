"""Prometheus histograms: observations counted by bounds, with traces as exemplars."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prometheus_client.core import Exemplar, HistogramMetricFamily


class TracedValue(NamedTuple):
    """An observation with a trace: its trace_id, its value, and its time in seconds since 1970."""

    trace_id: str
    value: float
    at: float


class Buckets:
    """Observations, counted by the least bound that they do not exceed.

    bounds: upper bounds, ascending and inclusive as in Prometheus; larger values are counted too.
    counts: for each bound, and for larger values, not cumulative. total: the sum of the values.
    exemplars: the last observation with a trace in each bucket.
    """

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(map(float, bounds))
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, TracedValue] = {}

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Counts many values."""
        for value in values:
            self.observe(value)

    def observe_spans(self, starts: Sequence[float], ends: Sequence[float]) -> None:
        """Counts many values, each an end less its start."""
        for start, end in zip(starts, ends, strict=True):
            self.observe(end - start)

    def show(self, seen: TracedValue) -> None:
        """Makes an observation the exemplar of its bucket."""
        self.exemplars[bisect_left(self.bounds, seen.value)] = seen

    def cumulative(self) -> list[tuple[str, int, TracedValue | None]]:
        """Returns each bound as text, the count up to it, and its exemplar."""
        shown: list[tuple[str, int, TracedValue | None]] = []
        count = 0
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        for at, (name, own) in enumerate(zip(names, self.counts, strict=True)):
            count += own
            shown.append((name, count, self.exemplars.get(at)))
        return shown


def histogram_family(
    name: str, what: str, labels: list[str], series: Iterable[tuple[tuple[str, ...], Buckets]]
) -> HistogramMetricFamily:
    """Returns a histogram of one or more series, each with the values of its labels."""
    family = HistogramMetricFamily(name, what, labels=labels)
    for values, buckets in series:
        family.add_metric(
            list(values),
            [
                (bound, count) if seen is None else (bound, count, _exemplar(seen))
                for bound, count, seen in buckets.cumulative()
            ],
            buckets.total,
        )
    return family


def _exemplar(seen: TracedValue) -> Exemplar:
    return Exemplar({"trace_id": seen.trace_id}, seen.value, seen.at)
