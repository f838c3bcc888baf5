"""Opens what is to be sent to OpenTelemetry; loads nothing of it where nothing is wanted."""

import contextlib
from collections.abc import AsyncIterator, Mapping

from extproc.errors import StartError
from extproc.metrics import Metrics
from extproc.observing.traces import Traces
from extproc.tracing.wanted import wanted


@contextlib.asynccontextmanager
async def telemetry(
    environment: Mapping[str, str], metrics: Metrics
) -> AsyncIterator[Traces | None]:
    """Sends what an environment asks for until the block ends; gives what records the spans.

    Raises:
        StartError: it asks for what we cannot do, or the extra `otel` is not installed.
    """
    asked = wanted(environment)
    if not (asked.traces or asked.metrics):
        yield None
        return
    try:
        from extproc.tracing import otlp  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise StartError(
            "OTEL_* variables ask for OpenTelemetry, which is not installed: install"
            f" kvsteer[otel], or set OTEL_SDK_DISABLED=true ({error})"
        ) from None
    async with contextlib.AsyncExitStack() as stack:
        traces: Traces | None = None
        if asked.traces:
            traces = await stack.enter_async_context(otlp.exporting_spans(asked.traces))
        if asked.metrics:
            await stack.enter_async_context(
                otlp.exporting_metrics(metrics.read, asked.metrics, asked.interval_ms)
            )
        yield traces
