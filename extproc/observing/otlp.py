"""Sends spans and metrics to an OpenTelemetry collector by OTLP, over HTTP or gRPC.

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
    Iterator,
    Mapping,
)
from importlib.metadata import version
from types import ModuleType

from opentelemetry.sdk.metrics.export import (
    MetricExporter,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.registry import Collector

from extproc.observing.otlp_metrics import Origin, metrics_data
from extproc.observing.spans import SpanRecorder

log = logging.getLogger("kvsteer.tracing")


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
        with _logging_faults():
            await _end(await sender(), exporter)
        await asyncio.to_thread(exporter.shutdown)


async def _keep_sending(
    sender: Callable[[], Awaitable[Callable[[], object]]], interval_seconds: float
) -> None:
    while True:
        await asyncio.sleep(interval_seconds)
        with _logging_faults():  # the next metrics must still be sent
            await asyncio.to_thread(await sender())


@contextlib.contextmanager
def _logging_faults() -> Iterator[None]:
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
    named = Resource.create()
    if str(named.attributes.get("service.name")).startswith("unknown_service"):
        return named.merge(own)
    return own.merge(named)


def _span_exporter(protocol: str) -> SpanExporter:
    exporters = _exporters(protocol, "trace_exporter")
    exporter: SpanExporter = exporters.OTLPSpanExporter(**_options(protocol))
    return exporter


def _metric_exporter(protocol: str) -> MetricExporter:
    exporters = _exporters(protocol, "metric_exporter")
    exporter: MetricExporter = exporters.OTLPMetricExporter(**_options(protocol))
    return exporter


def _options(protocol: str) -> Mapping[str, object]:
    """Returns what bounds a collector's answers; over gRPC the library does."""
    if _PACKAGES[protocol] != "http":
        return {}
    from extproc.observing.otlp_http import bounded_session

    return bounded_session()


def _exporters(protocol: str, signal: str) -> ModuleType:
    return importlib.import_module(
        f"opentelemetry.exporter.otlp.proto.{_PACKAGES[protocol]}.{signal}"
    )
