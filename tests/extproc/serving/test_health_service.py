import pytest

from extproc.pb.kvsteer_health_pb2 import HealthCheckResponse
from extproc.serving.health_service import EXT_PROC, LIVENESS, READINESS, Health


def test_liveness_serves_before_the_router_is_ready() -> None:
    assert Health(lambda: False).status_of(LIVENESS) == HealthCheckResponse.SERVING


@pytest.mark.parametrize("service", ["", READINESS, EXT_PROC])
def test_readiness_serves_while_the_router_is_ready_and_not_stopping(service: str) -> None:
    health = Health(lambda: True)
    assert health.status_of(service) == HealthCheckResponse.SERVING
    health.is_stopping = True
    assert health.status_of(service) == HealthCheckResponse.NOT_SERVING
    assert Health(lambda: False).status_of(service) == HealthCheckResponse.NOT_SERVING


def test_health_of_another_service_is_unknown() -> None:
    assert Health(lambda: True).status_of("nobody") == HealthCheckResponse.SERVICE_UNKNOWN
