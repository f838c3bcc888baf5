import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from extproc.cli import main
from extproc.health import fault_of
from extproc.pb.kvsteer_health_pb2 import HealthCheckResponse
from tests.e2e.envoy_process import free_port


@contextlib.contextmanager
def server(status: HealthCheckResponse.ServingStatus) -> Iterator[str]:
    check = grpc.unary_unary_rpc_method_handler(
        lambda *_: HealthCheckResponse(status=status),
        response_serializer=HealthCheckResponse.SerializeToString,
    )
    health = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})
    with ThreadPoolExecutor(1) as threads:
        running = grpc.server(threads, handlers=[health])
        port = running.add_insecure_port("127.0.0.1:0")
        running.start()
        yield f"127.0.0.1:{port}"
        running.stop(None).wait()


def test_a_serving_router_is_healthy() -> None:
    with server(HealthCheckResponse.SERVING) as target:
        assert fault_of(target) is None


def test_a_router_that_is_not_ready_is_unhealthy() -> None:
    with server(HealthCheckResponse.NOT_SERVING) as target:
        assert fault_of(target) == f"{target}: NOT_SERVING"


def test_a_router_that_does_not_listen_is_unhealthy() -> None:
    target = f"127.0.0.1:{free_port()}"
    assert fault_of(target) == f"{target}: UNAVAILABLE"


def test_a_proxy_in_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("no_proxy", "")
    with server(HealthCheckResponse.SERVING) as target:
        assert fault_of(target) is None


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with server(HealthCheckResponse.SERVING) as target:
        assert main(["health", "--at", target]) == 0
    target = f"127.0.0.1:{free_port()}"
    assert main(["health", "--at", target]) == 1
    assert capsys.readouterr().err == f"kvsteer health: {target}: UNAVAILABLE\n"
