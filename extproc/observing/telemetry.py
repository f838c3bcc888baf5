"""Starts the telemetry that OpenTelemetry's environment variables request, and loads nothing else.

docs/metrics.md lists the variables. Nothing is sent unless they name an exporter or an endpoint; an
OpenTelemetry SDK alone would send to a collector on this host.
"""

import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

from extproc.base.errors import StartError
from extproc.observing.decisions import Traces
from extproc.observing.metrics import Metrics

# Other exporters that the variables may name; for these, nothing is sent as OTLP.
_ELSEWHERE = {"traces": ("none",), "metrics": ("none", "prometheus")}
_PROTOCOLS = ("http/protobuf", "grpc")

# The specification's default, and the minimum that is accepted: each export reads all metrics.
DEFAULT_INTERVAL_MS = 60_000
MIN_INTERVAL_MS = 100
_MILLISECONDS = re.compile(r"[0-9]{1,9}")


class TelemetryOptions(NamedTuple):
    """What to send, and how.

    traces, metrics: the OTLP protocol for each (http/protobuf or grpc), "" if it is not sent.
    interval_ms: milliseconds between two exports of the metrics.
    """

    traces: str = ""
    metrics: str = ""
    interval_ms: int = DEFAULT_INTERVAL_MS


def options_in(environment: Mapping[str, str]) -> TelemetryOptions:
    """Returns what an environment requests.

    Raises:
        StartError: it requests something that is not supported.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return TelemetryOptions()
    traces = _protocol("traces", environment)
    metrics = _protocol("metrics", environment)
    return TelemetryOptions(
        traces, metrics, _interval_ms(environment) if metrics else DEFAULT_INTERVAL_MS
    )


def _protocol(signal: str, environment: Mapping[str, str]) -> str:
    prefix, own = "OTEL_EXPORTER_OTLP", f"OTEL_EXPORTER_OTLP_{signal.upper()}"
    name = f"OTEL_{signal.upper()}_EXPORTER"
    exporter = environment.get(name, "")
    if not exporter:
        has_endpoint = environment.get(f"{own}_ENDPOINT") or environment.get(f"{prefix}_ENDPOINT")
        exporter = "otlp" if has_endpoint else "none"
    if exporter in _ELSEWHERE[signal]:
        return ""
    if exporter != "otlp":
        raise StartError(f"{name}: want otlp or {' or '.join(_ELSEWHERE[signal])}: {exporter!r}")
    protocol = (
        environment.get(f"{own}_PROTOCOL") or environment.get(f"{prefix}_PROTOCOL") or _PROTOCOLS[0]
    )
    if protocol not in _PROTOCOLS:
        raise StartError(f"{prefix}_PROTOCOL: want {' or '.join(_PROTOCOLS)}: {protocol!r}")
    return protocol


def _interval_ms(environment: Mapping[str, str]) -> int:
    text = environment.get("OTEL_METRIC_EXPORT_INTERVAL") or str(DEFAULT_INTERVAL_MS)
    if _MILLISECONDS.fullmatch(text) is None or int(text) < MIN_INTERVAL_MS:
        raise StartError(
            f"OTEL_METRIC_EXPORT_INTERVAL: want milliseconds, {MIN_INTERVAL_MS} or more: {text!r}"
        )
    return int(text)


@contextlib.asynccontextmanager
async def telemetry(
    environment: Mapping[str, str], metrics: Metrics
) -> AsyncIterator[Traces | None]:
    """Sends what an environment requests until the block ends; yields the span recorder, if any.

    Raises:
        StartError: it requests something that is not supported, or the extra `otel` is not
            installed.
    """
    asked = options_in(environment)
    if not (asked.traces or asked.metrics):
        yield None
        return
    try:
        from extproc.observing import otlp
    except ImportError as error:
        raise StartError(
            "OTEL_* variables ask for OpenTelemetry, which is not installed: pip"
            f" install '.[otel]' in a clone, or set OTEL_SDK_DISABLED=true ({error})"
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
