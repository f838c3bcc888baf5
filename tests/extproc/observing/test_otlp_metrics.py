from collections.abc import Iterable

from opentelemetry.sdk.metrics.export import Gauge, Metric, Sum
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    UnknownMetricFamily,
)
from prometheus_client.core import Metric as Family

from extproc.observing.otlp_metrics import Origin, metrics_data

ORIGIN = Origin(Resource({}), InstrumentationScope("test"), 5)


def sent(*families: Family) -> dict[str, Metric]:
    data = metrics_data(families, ORIGIN, 9)
    ((scope,),) = [one.scope_metrics for one in data.resource_metrics]
    return {one.name: one for one in scope.metrics}


def by_worker(names: Iterable[str]) -> Family:
    family = CounterMetricFamily("c", "counts", labels=["worker"])
    for name in names:
        family.add_metric([name], 3)
    return family


def test_counter_is_sent_as_a_cumulative_sum() -> None:
    one = sent(by_worker(["w"]))["c"]
    assert isinstance(one.data, Sum)
    assert one.data.is_monotonic
    (point,) = one.data.data_points
    assert (point.attributes, point.value) == ({"worker": "w"}, 3.0)
    assert (point.start_time_unix_nano, point.time_unix_nano) == (5, 9)


def test_gauges_and_unknown_types_are_sent_as_gauges() -> None:
    found = sent(GaugeMetricFamily("g", "is", value=1), UnknownMetricFamily("u", "is", value=2))
    assert all(isinstance(one.data, Gauge) for one in found.values())
    assert sorted(found) == ["g", "u"]


def test_histogram_is_sent_as_three_sums() -> None:
    family = HistogramMetricFamily("h", "took", buckets=[("1.0", 1), ("+Inf", 2)], sum_value=4.5)
    found = sent(family)
    points = {name: one.data.data_points for name, one in found.items()}
    values = {name: [getattr(point, "value", None) for point in points[name]] for name in points}
    assert values == {"h_bucket": [1.0, 2.0], "h_count": [2.0], "h_sum": [4.5]}


def test_family_without_series_is_not_sent() -> None:
    assert sent(by_worker([])) == {}


def test_worker_series_are_sent_for_any_number_of_workers() -> None:
    for first in range(0, 5_000, 1_000):
        names = [f"w{number}" for number in range(first, first + 1_000)]
        points = sent(by_worker(names))["c"].data.data_points
        assert [(point.attributes or {})["worker"] for point in points] == names
