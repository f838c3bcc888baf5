from array import array
from collections.abc import Iterable
from random import Random

from opentelemetry.sdk.metrics.export import Gauge, Metric, Sum
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    UnknownMetricFamily,
)
from prometheus_client.core import Metric as Family

from extproc.observing.decisions import Course, Trace
from extproc.picking.decision import Decision, Query, Snapshot, decide
from extproc.picking.eligibility import Candidate
from extproc.picking.load import Load
from extproc.tracing.otlp import Origin, SpanRecorder, metrics_data
from kvstate.overlap import Prompt

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NOW_NS = 1_000_000_000_000


def decision() -> Decision:
    snapshot = Snapshot([Candidate("a", "a:1")], [{}], lambda *_: Load(), "cost", 0)
    return decide(Query("m", [Prompt("m", array("I", range(9)))]), snapshot, 0.0, Random(0))


def course(traceparent: str = "") -> Course:
    """A course with one second per phase; the lookup is half a second of the last one."""
    times = iter((10.0, 11.0, 12.0, 12.5, 13.0))
    one = Course(lambda: next(times), traceparent)
    one.parsed()
    one.tokenized()
    one.looked()
    one.picked()
    return one


class Recording:
    """A recorder whose spans stay in memory."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(ParentBased(sampler), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.recorder = SpanRecorder(provider.get_tracer("test"), lambda: NOW_NS)

    def record(self, traceparent: str = "") -> Trace:
        return self.recorder.record(decision(), course(traceparent))


def test_a_decision_is_a_span_and_so_is_each_phase() -> None:
    recording = Recording()
    trace = recording.record()
    *phases, whole = recording.exporter.get_finished_spans()
    assert [span.name for span in phases] == ["parse", "tokens", "lookup", "pick"]
    assert whole.name == "kvsteer decision"
    assert {span.parent.span_id for span in phases if span.parent} == {whole.context.span_id}
    assert trace == Trace(f"{whole.context.trace_id:032x}", is_sampled=True)


def test_spans_lie_where_the_phases_were() -> None:
    recording = Recording()
    recording.record()
    lengths = {
        span.name: ((span.start_time or 0) - NOW_NS, (span.end_time or 0) - NOW_NS)
        for span in recording.exporter.get_finished_spans()
    }
    second = 1_000_000_000
    assert lengths["kvsteer decision"] == (-3 * second, 0)
    assert lengths["tokens"] == (-2 * second, -second)
    assert lengths["lookup"] == (-second, -second // 2)
    assert lengths["pick"] == (-second // 2, 0)


def test_a_decision_joins_the_trace_of_its_request() -> None:
    recording = Recording()
    assert recording.record(f"00-{TRACE}-{SPAN}-01").trace_id == TRACE
    whole = recording.exporter.get_finished_spans()[-1]
    assert whole.parent is not None
    assert (f"{whole.parent.span_id:016x}", f"{whole.context.trace_id:032x}") == (SPAN, TRACE)


def test_what_its_sender_does_not_record_is_not_recorded() -> None:
    recording = Recording()
    assert recording.record(f"00-{TRACE}-{SPAN}-00") == Trace(TRACE, is_sampled=False)
    assert recording.exporter.get_finished_spans() == ()


def test_the_sampler_decides_where_nobody_did() -> None:
    recording = Recording(ALWAYS_OFF)
    assert not recording.record("no trace").is_sampled
    assert recording.exporter.get_finished_spans() == ()


def test_a_span_tells_counts_and_reasons_and_nothing_of_the_prompt() -> None:
    recording = Recording()
    recording.record()
    assert recording.exporter.get_finished_spans()[-1].attributes == {
        "gen_ai.request.model": "m",
        "kvsteer.reason": "nothing_cached",
        "kvsteer.policy": "cost",
        "kvsteer.verdict": "steer",
        "kvsteer.worker": "a",
        "kvsteer.pick": ("a:1",),
        "kvsteer.prompt_tokens": 9,
        "kvsteer.predicted_cached_tokens": 0,
        "kvsteer.uncertain_tokens": 0,
    }


def test_what_goes_wrong_with_a_span_is_no_matter_of_the_request() -> None:
    class Broken(SpanProcessor):
        def on_start(self, *_: object) -> None:
            raise RuntimeError

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Broken())
    recorder = SpanRecorder(provider.get_tracer("test"), lambda: NOW_NS)
    assert recorder.record(decision(), course()) == Trace()


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


def test_a_counter_is_a_cumulative_sum() -> None:
    one = sent(by_worker(["w"]))["c"]
    assert isinstance(one.data, Sum)
    assert one.data.is_monotonic
    (point,) = one.data.data_points
    assert (point.attributes, point.value) == ({"worker": "w"}, 3.0)
    assert (point.start_time_unix_nano, point.time_unix_nano) == (5, 9)


def test_a_gauge_and_what_is_of_no_known_type_are_gauges() -> None:
    found = sent(GaugeMetricFamily("g", "is", value=1), UnknownMetricFamily("u", "is", value=2))
    assert all(isinstance(one.data, Gauge) for one in found.values())
    assert sorted(found) == ["g", "u"]


def test_a_histogram_is_three_sums() -> None:
    family = HistogramMetricFamily("h", "took", buckets=[("1.0", 1), ("+Inf", 2)], sum_value=4.5)
    found = sent(family)
    points = {name: one.data.data_points for name, one in found.items()}
    values = {name: [getattr(point, "value", None) for point in points[name]] for name in points}
    assert values == {"h_bucket": [1.0, 2.0], "h_count": [2.0], "h_sum": [4.5]}


def test_a_family_without_series_is_not_sent() -> None:
    assert sent(by_worker([])) == {}


def test_every_worker_has_its_series_however_many_there_were() -> None:
    for first in range(0, 5_000, 1_000):
        names = [f"w{number}" for number in range(first, first + 1_000)]
        points = sent(by_worker(names))["c"].data.data_points
        assert [(point.attributes or {})["worker"] for point in points] == names
