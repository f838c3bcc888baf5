"""Our own OpenTelemetry collector over HTTP: it keeps what it receives."""

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator, Iterator

from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WAIT_SECONDS = 60.0


class OtlpSink:
    """The exports that came, in order. url: where the sink listens."""

    def __init__(self) -> None:
        self.url = ""
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        self._changed = asyncio.Condition()

    def spans(self) -> Iterator[Span]:
        """All spans."""
        for export in self.traces:
            for resource in export.resource_spans:
                for scope in resource.scope_spans:
                    yield from scope.spans

    def latest(self) -> dict[str, Metric]:
        """The metrics of the last export, by name."""
        scopes = (scope for one in self.metrics[-1].resource_metrics for scope in one.scope_metrics)
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    async def exported(self, more: int) -> None:
        """Waits for this many more exports of metrics."""
        count = len(self.metrics) + more
        async with asyncio.timeout(WAIT_SECONDS), self._changed:
            await self._changed.wait_for(lambda: len(self.metrics) >= count)

    async def take_traces(self, request: web.Request) -> web.Response:
        """POST /v1/traces."""
        export = ExportTraceServiceRequest.FromString(await _body(request))
        async with self._changed:
            self.traces.append(export)
            self._changed.notify_all()
        return web.Response()

    async def take_metrics(self, request: web.Request) -> web.Response:
        """POST /v1/metrics."""
        export = ExportMetricsServiceRequest.FromString(await _body(request))
        async with self._changed:
            self.metrics.append(export)
            self._changed.notify_all()
        return web.Response()


async def _body(request: web.Request) -> bytes:
    body = await request.read()
    return gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body


@contextlib.asynccontextmanager
async def running_sink() -> AsyncIterator[OtlpSink]:
    """A sink on loopback until the block ends."""
    sink = OtlpSink()
    application = web.Application()
    application.add_routes(
        [web.post("/v1/traces", sink.take_traces), web.post("/v1/metrics", sink.take_metrics)]
    )
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    sink.url = f"http://{host}:{port}"
    try:
        yield sink
    finally:
        await runner.cleanup()
