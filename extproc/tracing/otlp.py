"""The OTLP exporters, over HTTP or gRPC; what they read of OTEL_* themselves is not repeated."""

import asyncio
import contextlib
import importlib
import math
from collections.abc import AsyncIterator
from importlib.metadata import version
from types import ModuleType

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from prometheus_client import CollectorRegistry

from extproc.tracing.instruments import Instruments
from extproc.tracing.spans import SpanRecorder

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
        await _end(provider, exporter)


@contextlib.asynccontextmanager
async def exporting_metrics(
    registry: CollectorRegistry, protocol: str, interval_ms: int
) -> AsyncIterator[None]:
    """Sends a registry's metrics at an interval, and once more at the end."""
    # no thread of its own: the registry is to be read in this loop before each export
    exporter = _metric_exporter(protocol)
    reader = PeriodicExportingMetricReader(exporter, math.inf)
    provider = MeterProvider([reader], _resource(), shutdown_on_exit=False)
    instruments = Instruments(registry, provider.get_meter(_SCOPE, version(_SCOPE)))
    task = asyncio.create_task(_keep_sending(instruments, provider, interval_ms / 1000))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        instruments.read()
        await _end(provider, exporter)


async def _keep_sending(
    instruments: Instruments, provider: MeterProvider, interval_seconds: float
) -> None:
    while True:
        await asyncio.sleep(interval_seconds)
        instruments.read()
        await asyncio.to_thread(provider.force_flush)


async def _end(
    provider: TracerProvider | MeterProvider, exporter: SpanExporter | MetricExporter
) -> None:
    """Sends what is left; a collector that is away is not waited for."""
    flushing = asyncio.create_task(asyncio.to_thread(provider.force_flush))
    await asyncio.wait({flushing}, timeout=FLUSH_SECONDS)
    if not flushing.done():
        exporter.shutdown()  # gives up its tries; the call under way ends with its own timeout
    await asyncio.gather(flushing, return_exceptions=True)
    await asyncio.to_thread(provider.shutdown)


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
