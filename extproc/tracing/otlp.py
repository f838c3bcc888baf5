"""Spans and metrics for OpenTelemetry, and the OTLP exporters that send them over HTTP or gRPC.

A decision has one span, and one for each of its phases, made after they end. Their times are
measured in any case, so a request that is not sampled costs only the sampling. Spans carry counts
and reasons, never any part of a prompt.

Metrics are the figures of /metrics, read when they are sent and never counted twice. They are made
without the SDK's instruments, which remember every series that ever existed and merge all beyond
some 2,000 into one: workers come and go, and each has its own series.

The OTEL_* variables that the exporters read themselves are not handled here.
"""

import asyncio
import contextlib
import importlib
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from importlib.metadata import version
from types import ModuleType
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
    Tracer,
    format_trace_id,
    set_span_in_context,
)
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from extproc.observing.decisions import Course, Trace, parse
from extproc.picking.decision import Decision

log = logging.getLogger("kvsteer.tracing")

_NO_PARENT = Context()
_NANOSECONDS = 1_000_000_000


class SpanRecorder:
    """Records decisions with a tracer, whose sampler chooses which.

    clock_ns: returns nanoseconds since 1970.
    """

    def __init__(self, tracer: Tracer, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracer = tracer
        self._clock_ns = clock_ns

    def record(self, decision: Decision, course: Course) -> Trace:
        """Records a decision that was just made, if its trace is sampled; returns its trace.

        It never raises, whatever a sampler or an exporter of the environment does.
        """
        try:
            return self._record(decision, course)
        except Exception as error:  # noqa: BLE001 - a span is no matter of the request's
            log.error("a span could not be recorded: %s", type(error).__name__)
            return Trace()

    def _record(self, decision: Decision, course: Course) -> Trace:
        now = self._clock_ns()

        def at(moment: float) -> int:
            return now - int((course.picked_at - moment) * _NANOSECONDS)

        span = self._tracer.start_span(
            "kvsteer decision",
            _context_of(course.traceparent),
            kind=SpanKind.SERVER,  # its parent is the proxy's call to us
            start_time=at(course.started_at),
        )
        if span.is_recording():
            _describe(span, decision)
            around = set_span_in_context(span, _NO_PARENT)
            for phase, began, ended in course.phases():
                one = self._tracer.start_span(phase, around, start_time=at(began))
                one.end(at(ended))
            span.end(now)
        context = span.get_span_context()
        if not context.is_valid:
            return Trace()
        return Trace(format_trace_id(context.trace_id), context.trace_flags.sampled)


def _context_of(traceparent: str) -> Context:
    parent = parse(traceparent)
    if parent is None:
        return _NO_PARENT
    flags = TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT)
    context = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(context), _NO_PARENT)


def _describe(span: Span, decision: Decision) -> None:
    span.set_attributes(
        {
            "gen_ai.request.model": decision.model or "",
            "kvsteer.reason": decision.reason,
            "kvsteer.policy": decision.policy,
            "kvsteer.verdict": decision.verdict.value,
            "kvsteer.worker": decision.worker,
            "kvsteer.pick": decision.pick,
            "kvsteer.prompt_tokens": decision.prompt_tokens,
            "kvsteer.predicted_cached_tokens": decision.certain_tokens,
            "kvsteer.uncertain_tokens": decision.uncertain_tokens,
        }
    )


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


# How long sending the last spans, or the last metrics, is tried at the end.
FLUSH_SECONDS = 2.0

_SCOPE = "kvsteer"
_PACKAGES = {"http/protobuf": "http", "grpc": "grpc"}


@contextlib.asynccontextmanager
async def exporting_spans(protocol: str) -> AsyncIterator[SpanRecorder]:
    """Sends spans until the block ends; yields their recorder.

    protocol: http/protobuf or grpc.
    """
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    exporter = _span_exporter(protocol)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield SpanRecorder(provider.get_tracer(_SCOPE, version(_SCOPE)))
    finally:
        await _end(provider.force_flush, exporter)
        await asyncio.to_thread(provider.shutdown)


@contextlib.asynccontextmanager
async def exporting_metrics(
    read: Callable[[], Awaitable[Collector]], protocol: str, interval_ms: int
) -> AsyncIterator[None]:
    """Sends all metrics at an interval, and again at the end.

    read: reads the figures in the event loop; they are then collected in a thread. protocol:
    http/protobuf or grpc.
    """
    exporter = _metric_exporter(protocol)
    scope = InstrumentationScope(_SCOPE, version(_SCOPE))
    origin = Origin(_resource(), scope, time.time_ns())

    async def sender() -> Callable[[], object]:
        metrics = await read()
        return lambda: exporter.export(metrics_data(metrics.collect(), origin, time.time_ns()))

    task = asyncio.create_task(_keep_sending(sender, interval_ms / 1000))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with _faults_told():
            await _end(await sender(), exporter)
        await asyncio.to_thread(exporter.shutdown)


async def _keep_sending(
    sender: Callable[[], Awaitable[Callable[[], object]]], interval_seconds: float
) -> None:
    while True:
        await asyncio.sleep(interval_seconds)
        with _faults_told():  # the next metrics must still be sent
            await asyncio.to_thread(await sender())


@contextlib.contextmanager
def _faults_told() -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("the metrics could not be sent")


async def _end(send: Callable[[], object], exporter: SpanExporter | MetricExporter) -> None:
    """Sends what is left; after `FLUSH_SECONDS` it stops retrying: the collector may be down."""
    sending = asyncio.create_task(asyncio.to_thread(send))
    await asyncio.wait({sending}, timeout=FLUSH_SECONDS)
    if not sending.done():
        exporter.shutdown()  # stops retrying; the call in progress ends with its own timeout
    await asyncio.gather(sending, return_exceptions=True)


def _resource() -> Resource:
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence if they name the service
    own = Resource({"service.name": _SCOPE, "service.version": version(_SCOPE)})
    told = Resource.create()
    if str(told.attributes.get("service.name")).startswith("unknown_service"):
        return told.merge(own)
    return own.merge(told)


def _span_exporter(protocol: str) -> SpanExporter:
    exporter: SpanExporter = _exporters(protocol, "trace_exporter").OTLPSpanExporter()
    return exporter


def _metric_exporter(protocol: str) -> MetricExporter:
    exporter: MetricExporter = _exporters(protocol, "metric_exporter").OTLPMetricExporter()
    return exporter


def _exporters(protocol: str, signal: str) -> ModuleType:
    return importlib.import_module(
        f"opentelemetry.exporter.otlp.proto.{_PACKAGES[protocol]}.{signal}"
    )
