"""What is sent to OpenTelemetry, as a collector receives it."""

import asyncio
import os
import subprocess
import sys
from array import array
from collections.abc import Callable
from random import Random

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from prometheus_client import Gauge

from extproc.base.errors import StartError
from extproc.observing.decisions import Timeline
from extproc.observing.metrics import Metrics
from extproc.observing.telemetry import TelemetryOptions, options_in, telemetry
from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.decide import decide
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from kvstate.overlap import Prompt
from tests.extproc.nobody import Nobody
from tests.extproc.observing.otlp_sink import running_sink
from tests.ports import free_port

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def sdk_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, str]]:
    """Sets the environment variables that the SDK reads itself; returns them."""

    def set_for(url: str) -> dict[str, str]:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
            "OTEL_SERVICE_NAME": "router-7",
            "OTEL_METRIC_EXPORT_INTERVAL": "100",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return environment

    return set_for


def decision() -> Decision:
    snapshot = Snapshot([Candidate("a", "a:1")], [{}], lambda *_: Load(), "cost", 0)
    return decide(
        PLAIN_REQUEST, Query("m", [Prompt("m", array("I", range(9)))]), snapshot, 0.0, Random(0)
    )


def timeline(traceparent: str = "") -> Timeline:
    one = Timeline.begin(asyncio.get_running_loop().time, traceparent)
    one.picked_at = one.clock()
    return one


async def test_spans_arrive_in_the_trace_of_their_request(
    sdk_environment: Callable[[str], dict[str, str]],
) -> None:
    async with running_sink() as sink:
        async with telemetry(sdk_environment(sink.url), Metrics(Nobody())) as traces:
            assert traces is not None
            traces.record(decision(), timeline(PARENT))
        spans = {span.name: span for span in sink.spans()}
        whole = spans["kvsteer decision"]
        assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, SPAN)
        assert spans["pick"].parent_span_id == whole.span_id
        (resource,) = sink.traces[0].resource_spans
        told = {one.key: one.value.string_value for one in resource.resource.attributes}
        assert told["service.name"] == "router-7"


async def test_metrics_arrive_as_the_registry_has_them(
    sdk_environment: Callable[[str], dict[str, str]],
) -> None:
    async with running_sink() as sink:
        metrics = Metrics(Nobody())
        async with telemetry(sdk_environment(sink.url), metrics):
            await sink.exported(1)
            metrics.observe_decision(decision(), timeline())
            await sink.exported(2)
            latest = sink.latest()
        (point,) = latest["kvsteer_decisions"].sum.data_points
        assert {one.key: one.value.string_value for one in point.attributes} == {
            "model": "m",
            "reason": "nothing_cached",
        }
        assert point.as_double == 1
        assert latest["kvsteer_decisions"].sum.is_monotonic
        assert latest["kvsteer_decision_seconds_count"].sum.data_points[0].as_double == 1
        assert latest["kvsteer_open_streams"].gauge.data_points[0].as_double == 0


async def test_metrics_are_sent_once_more_at_the_end(
    sdk_environment: Callable[[str], dict[str, str]],
) -> None:
    async with running_sink() as sink:
        environment = sdk_environment(sink.url) | {"OTEL_METRIC_EXPORT_INTERVAL": "3600000"}
        metrics = Metrics(Nobody())
        async with telemetry(environment, metrics):
            metrics.protocol_errors.inc()
        assert sink.latest()["kvsteer_protocol_errors"].sum.data_points[0].as_double == 1


class GrpcSink(TraceServiceServicer):
    """A collector over gRPC."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def Export(  # noqa: N802 - as the service has it
        self, request: ExportTraceServiceRequest, _: object
    ) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            self.names += [span.name for scope in resource.scope_spans for span in scope.spans]
        return ExportTraceServiceResponse()


async def test_spans_arrive_over_grpc(
    sdk_environment: Callable[[str], dict[str, str]],
) -> None:
    server, sink = grpc.aio.server(), GrpcSink()
    add_TraceServiceServicer_to_server(sink, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    own = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_METRICS_EXPORTER": "none"}
    environment = sdk_environment(f"http://127.0.0.1:{port}") | own
    async with telemetry(environment, Metrics(Nobody())) as traces:
        assert traces is not None
        traces.record(decision(), timeline(PARENT))
    await server.stop(None)
    assert sink.names == ["pick", "kvsteer decision"]


@pytest.mark.slow
async def test_absent_collector_does_not_delay_the_end(
    sdk_environment: Callable[[str], dict[str, str]],
) -> None:
    async with asyncio.timeout(60):
        url = f"http://127.0.0.1:{free_port()}"
        async with telemetry(sdk_environment(url), Metrics(Nobody())) as traces:
            assert traces is not None
            assert traces.record(decision(), timeline(PARENT)).is_sampled


async def test_telemetry_is_none_unless_configured() -> None:
    async with telemetry({}, Metrics(Nobody())) as traces:
        assert traces is None


async def test_start_error_names_the_missing_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "extproc.observing.otlp", None)
    monkeypatch.delattr("extproc.observing.otlp", raising=False)
    with pytest.raises(StartError, match=r"install '.\[otel\]' in a clone"):
        async with telemetry({"OTEL_TRACES_EXPORTER": "otlp"}, Metrics(Nobody())):
            pass


def test_opentelemetry_is_not_loaded_unless_asked_for() -> None:
    script = (
        "import sys, extproc.running.lifetime;"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    assert subprocess.run([sys.executable, "-c", script], env=clean, check=False).returncode == 0


async def test_metrics_that_fail_once_are_sent_the_next_time(
    sdk_environment: Callable[[str], dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    faults = [RuntimeError()]

    def figure() -> float:
        if faults:
            raise faults.pop()
        return 7.0

    async with running_sink() as sink:
        metrics = Metrics(Nobody())
        Gauge("kvsteer_later", "fails", registry=metrics.registry).set_function(figure)
        async with telemetry(sdk_environment(sink.url), metrics):
            await sink.exported(1)
            latest = sink.latest()
    assert latest["kvsteer_later"].gauge.data_points[0].as_double == 7
    assert caplog.messages.count("the metrics could not be sent") == 1


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SERVICE_NAME": "router"},
        ENDPOINT | {"OTEL_SDK_DISABLED": "TRUE"},
        ENDPOINT | {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "prometheus"},
    ],
)
def test_options_are_empty_unless_configured(environment: dict[str, str]) -> None:
    assert options_in(environment) == TelemetryOptions()


def test_endpoint_asks_for_metrics_and_traces() -> None:
    assert options_in(ENDPOINT) == TelemetryOptions("http/protobuf", "http/protobuf")


def test_endpoint_of_one_signal_asks_for_that_signal() -> None:
    assert options_in({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c/v1/metrics"}).traces == ""
    assert options_in({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/v1/traces"}).metrics == ""


def test_exporter_may_be_named_without_an_endpoint() -> None:
    assert options_in({"OTEL_TRACES_EXPORTER": "otlp"}) == TelemetryOptions(traces="http/protobuf")


def test_protocol_may_differ_by_signal() -> None:
    own = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert options_in(ENDPOINT | own) == TelemetryOptions("grpc", "grpc")
    own["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
    assert options_in(ENDPOINT | own) == TelemetryOptions("http/protobuf", "grpc")


def test_interval_of_the_metrics_is_read() -> None:
    assert options_in(ENDPOINT | {"OTEL_METRIC_EXPORT_INTERVAL": "500"}).interval_ms == 500


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_METRICS_EXPORTER", "console"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "soon"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "99"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "-1"),
    ],
)
def test_options_in_refuses_unsupported_values_by_name(name: str, value: str) -> None:
    with pytest.raises(StartError, match=name):
        options_in(ENDPOINT | {name: value})
