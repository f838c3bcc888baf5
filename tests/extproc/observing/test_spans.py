from array import array
from random import Random

from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler

from extproc.observing.decisions import Timeline, TraceContext
from extproc.observing.spans import SpanRecorder
from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.decide import decide
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from kvstate.overlap import Prompt

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NOW_NS = 1_000_000_000_000


def decision() -> Decision:
    snapshot = Snapshot([Candidate("a", "a:1")], [{}], lambda *_: Load(), "cost", 0)
    return decide(
        PLAIN_REQUEST, Query("m", [Prompt("m", array("I", range(9)))]), snapshot, 0.0, Random(0)
    )


def timeline(traceparent: str = "") -> Timeline:
    """A timeline with one second per phase; the lookup is half a second of the last one."""
    times = iter((10.0, 11.0, 12.0, 12.5, 13.0))
    one = Timeline.begin(lambda: next(times), traceparent)
    one.parsed_at = one.clock()
    one.tokenized_at = one.clock()
    one.looked_at = one.clock()
    one.picked_at = one.clock()
    return one


class Recording:
    """A recorder whose spans stay in memory."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(ParentBased(sampler), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.recorder = SpanRecorder(provider.get_tracer("test"), lambda: NOW_NS)

    def record(self, traceparent: str = "") -> TraceContext:
        return self.recorder.record(decision(), timeline(traceparent))


def test_span_is_recorded_for_the_decision_and_each_phase() -> None:
    recording = Recording()
    trace = recording.record()
    *phases, whole = recording.exporter.get_finished_spans()
    assert [span.name for span in phases] == ["parse", "tokens", "lookup", "pick"]
    assert whole.name == "kvsteer decision"
    assert {span.parent.span_id for span in phases if span.parent} == {whole.context.span_id}
    assert trace == TraceContext(f"{whole.context.trace_id:032x}", is_sampled=True)


def test_spans_cover_the_times_of_their_phases() -> None:
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


def test_span_joins_the_trace_of_its_request() -> None:
    recording = Recording()
    assert recording.record(f"00-{TRACE}-{SPAN}-01").trace_id == TRACE
    whole = recording.exporter.get_finished_spans()[-1]
    assert whole.parent is not None
    assert (f"{whole.parent.span_id:016x}", f"{whole.context.trace_id:032x}") == (SPAN, TRACE)


def test_span_is_not_recorded_if_its_parent_is_not_sampled() -> None:
    recording = Recording()
    assert recording.record(f"00-{TRACE}-{SPAN}-00") == TraceContext(TRACE, is_sampled=False)
    assert recording.exporter.get_finished_spans() == ()


def test_sampler_decides_where_no_parent_does() -> None:
    recording = Recording(ALWAYS_OFF)
    assert not recording.record("no trace").is_sampled
    assert recording.exporter.get_finished_spans() == ()


def test_span_holds_counts_and_reasons_and_nothing_of_the_prompt() -> None:
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


def test_span_fault_does_not_fail_the_request() -> None:
    class Broken(SpanProcessor):
        def on_start(self, *_: object) -> None:
            raise RuntimeError

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Broken())
    recorder = SpanRecorder(provider.get_tracer("test"), lambda: NOW_NS)
    assert recorder.record(decision(), timeline()) == TraceContext()
