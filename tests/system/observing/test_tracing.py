"""Traces through a real Envoy, as a collector receives them."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from extproc.config.schema import Config
from extproc.envoy.envoy_config import render
from tests.extproc.observing.otlp_sink import OtlpSink, running_sink
from tests.system.system import System, chat, long_text, running
from tests.waiting import until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
OURS = "kvsteer decision"
CALL = "async envoy.service.ext_proc.v3.ExternalProcessor.Process egress"


def export_to(sink: OtlpSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes routers that start later export their spans, with little delay, and their metrics."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


def traced_envoy(sink: OtlpSink) -> Callable[[Config], str]:
    """Returns a renderer of an Envoy configuration that exports Envoy's spans, too."""
    host, _, port = sink.url.removeprefix("http://").rpartition(":")
    place = {"socket_address": {"address": host, "port_value": int(port)}}
    collector = {
        "name": "collector",
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": "collector",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": place}}]}],
        },
    }
    kind = "type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig"
    uri = {"uri": f"{sink.url}/v1/traces", "cluster": "collector", "timeout": "5s"}
    tracer = {"@type": kind, "service_name": "envoy", "http_service": {"http_uri": uri}}
    provider = {"name": "envoy.tracers.opentelemetry", "typed_config": tracer}

    def traced(config: Config) -> str:
        tree: dict[str, Any] = yaml.safe_load(render(config))
        resources = tree["static_resources"]
        resources["clusters"].append(collector)
        filters = resources["listeners"][0]["filter_chains"][0]["filters"]
        filters[0]["typed_config"]["tracing"] = {"provider": provider}
        return yaml.safe_dump(tree)

    return traced


async def ours(system: System, sink: OtlpSink) -> Span:
    """A decision's span. On a busy machine Envoy may not wait for the first decisions."""

    async def is_recorded() -> bool:
        await system.send(chat(long_text("traced")), headers=CLIENT)
        return OURS in {span.name for span in sink.spans()}

    await until(is_recorded, "a decision is recorded")
    return next(span for span in sink.spans() if span.name == OURS)


@pytest.mark.slow
async def test_decision_span_is_a_child_of_the_span_of_envoy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_sink() as sink:
        export_to(sink, monkeypatch)
        async with running(envoy_config=traced_envoy(sink)) as system:
            decision = await ours(system, sink)

            async def is_called_by_envoy() -> bool:
                return decision.parent_span_id in {
                    span.span_id for span in sink.spans() if span.name == CALL
                }

            assert decision.trace_id.hex() == TRACE
            await until(is_called_by_envoy, "its parent is Envoy's call")


async def test_decision_span_joins_the_client_trace_where_envoy_traces_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_sink() as sink:
        export_to(sink, monkeypatch)
        async with running(changes={"log": {"level": "debug", "format": "json"}}) as system:
            decision = await ours(system, sink)
            assert (decision.trace_id.hex(), decision.parent_span_id.hex()) == (TRACE, SPAN)
            assert f'"trace_id": "{TRACE}"' in system.log.read_text()
            accept = {"Accept": "application/openmetrics-text"}
            async with system.session.get(f"{system.metrics}/metrics", headers=accept) as response:
                assert f'# {{trace_id="{TRACE}"}}' in await response.text()


async def test_router_sends_pending_spans_and_metrics_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_sink() as sink:
        export_to(sink, monkeypatch)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
        async with running() as system:

            async def is_decided() -> bool:
                await system.send(chat(long_text("traced")), headers=CLIENT)
                return await system.metric("kvsteer_decision_seconds_count") > 0

            await until(is_decided, "a decision is made")
            await system.stop_router(signal.SIGTERM)
            assert OURS in {span.name for span in sink.spans()}
            points = sink.latest()["kvsteer_decisions"].sum.data_points
            assert sum(point.as_double for point in points) > 0
            assert "Traceback" not in system.log.read_text()
