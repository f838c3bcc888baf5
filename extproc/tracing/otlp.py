"""The OTLP exporters, over HTTP or gRPC; what they read of OTEL_* themselves is not repeated."""

import asyncio
import contextlib
import importlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib.metadata import version
from types import ModuleType

from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.registry import Collector

from extproc.tracing.metrics_data import Origin, metrics_data
from extproc.tracing.spans import SpanRecorder

log = logging.getLogger("kvsteer.tracing")

# How long the last spans and figures may take at the end.
FLUSH_SECONDS = 2.0

_SCOPE = "kvsteer"
_PACKAGES = {"http/protobuf": "http", "grpc": "grpc"}


@contextlib.asynccontextmanager
async def exporting_spans(protocol: str) -> AsyncIterator[SpanRecorder]:
    """Sends spans until the block ends."""
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
    """Sends all metrics at an interval, and once more at the end.

    read: reads them in its own loop; what is collected from them then, in a thread.
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
        with _faults_told():  # the next figures are to be sent all the same
            await asyncio.to_thread(await sender())


@contextlib.contextmanager
def _faults_told() -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("the metrics could not be sent")


async def _end(send: Callable[[], object], exporter: SpanExporter | MetricExporter) -> None:
    """Sends what is left; a collector that is away is not waited for."""
    sending = asyncio.create_task(asyncio.to_thread(send))
    await asyncio.wait({sending}, timeout=FLUSH_SECONDS)
    if not sending.done():
        exporter.shutdown()  # gives up its tries; the call under way ends with its own timeout
    await asyncio.gather(sending, return_exceptions=True)


def _resource() -> Resource:
    # what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say counts more
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
