import pytest

from extproc.errors import StartError
from extproc.tracing.telemetry import Wanted, wanted

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
def test_nothing_is_sent_unless_asked_for(environment: dict[str, str]) -> None:
    assert wanted(environment) == Wanted()


def test_an_endpoint_asks_for_both() -> None:
    assert wanted(ENDPOINT) == Wanted("http/protobuf", "http/protobuf")


def test_an_endpoint_of_one_signal_asks_for_that_signal() -> None:
    assert wanted({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c/v1/metrics"}).traces == ""
    assert wanted({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/v1/traces"}).metrics == ""


def test_an_exporter_may_be_named_without_an_endpoint() -> None:
    assert wanted({"OTEL_TRACES_EXPORTER": "otlp"}) == Wanted(traces="http/protobuf")


def test_each_signal_may_have_its_protocol() -> None:
    own = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert wanted(ENDPOINT | own) == Wanted("grpc", "grpc")
    own["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
    assert wanted(ENDPOINT | own) == Wanted("http/protobuf", "grpc")


def test_the_interval_of_the_metrics_is_read() -> None:
    assert wanted(ENDPOINT | {"OTEL_METRIC_EXPORT_INTERVAL": "500"}).interval_ms == 500


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
def test_what_cannot_be_done_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(StartError, match=name):
        wanted(ENDPOINT | {name: value})
