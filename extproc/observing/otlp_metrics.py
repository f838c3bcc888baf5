"""The metrics of a registry as an export of OpenTelemetry.

They are the figures of /metrics, read when they are sent. They are made without the SDK's
instruments, which remember every series that ever existed and merge all beyond some 2,000 into one:
workers come and go, and each has its own series.
"""

from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
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

# The parts of a family by its type, each sent as a separate metric: how the names of its samples
# end, and how the metric's name ends. Families of other types are sent as gauges.
_PARTS: Mapping[str, Sequence[tuple[str, str]]] = {
    "counter": (("_total", ""),),
    "histogram": (("_bucket", "_bucket"), ("_count", "_count"), ("_sum", "_sum")),
}
_GAUGE = (("", ""),)


class Origin(NamedTuple):
    """Whose figures these are; started_ns: when counting began, in nanoseconds since 1970."""

    resource: Resource
    scope: InstrumentationScope
    started_ns: int


def metrics_data(families: Iterable[Family], origin: Origin, now_ns: int) -> MetricsData:
    """Returns the families of a registry as one export; counters are cumulative."""
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
