"""The metrics as OpenTelemetry has them: the same figures, read, never counted twice.

Made without the SDK's instruments, which remember every series that there ever was, and put all
beyond some 2,000 into one: workers come and go, and each has series of its own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric as Family

# The parts of a family, each a metric of its own: how its samples' names end, and how the metric's
# does. What is of another type is sent as a gauge.
_PARTS: Mapping[str, Sequence[tuple[str, str]]] = {
    "counter": (("_total", ""),),
    "histogram": (("_bucket", "_bucket"), ("_count", "_count"), ("_sum", "_sum")),
}
_GAUGE = (("", ""),)


class Origin(NamedTuple):
    """Whose figures they are; started_ns: nanoseconds since 1970 from which on is counted."""

    resource: Resource
    scope: InstrumentationScope
    started_ns: int


def metrics_data(families: Iterable[Family], origin: Origin, now_ns: int) -> MetricsData:
    """The families of a registry as one export; counters are cumulative."""
    metrics = [metric for family in families for metric in _metrics(family, origin, now_ns)]
    scope = ScopeMetrics(origin.scope, metrics, schema_url="")
    return MetricsData([ResourceMetrics(origin.resource, [scope], schema_url="")])


def _metrics(family: Family, origin: Origin, now_ns: int) -> Iterator[Metric]:
    is_counted = family.type in _PARTS
    for sample, ending in _PARTS.get(family.type, _GAUGE):
        points = [
            NumberDataPoint(one.labels, origin.started_ns, now_ns, float(one.value))
            for one in family.samples
            if one.name == family.name + sample
        ]
        if points:
            data = _sum(points) if is_counted else Gauge(points)
            yield Metric(family.name + ending, family.documentation, "", data)


def _sum(points: Sequence[NumberDataPoint]) -> Sum:
    return Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
