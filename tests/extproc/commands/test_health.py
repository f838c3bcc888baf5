import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.__main__ import main
from extproc.commands.health import ClientTls, fault_of, faults_at
from extproc.pb.kvsteer_health_pb2 import HealthCheckResponse
from tests.extproc.serving.identities import NAME, Identities
from tests.extproc.serving.running import Running, listen_at
from tests.ports import free_port


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


def test_serving_router_is_healthy() -> None:
    with server(HealthCheckResponse.SERVING) as target:
        assert fault_of(target) is None


def test_unready_router_is_unhealthy() -> None:
    with server(HealthCheckResponse.NOT_SERVING) as target:
        assert fault_of(target) == f"{target}: NOT_SERVING"


def test_words_of_a_server_that_serves_something_else_are_shown() -> None:
    with ThreadPoolExecutor(1) as threads:
        running = grpc.server(threads)
        target = f"127.0.0.1:{running.add_insecure_port('127.0.0.1:0')}"
        running.start()
        assert fault_of(target) == f"{target}: UNIMPLEMENTED: Method not found!"
        running.stop(None).wait()


def test_absent_router_is_unhealthy() -> None:
    target = f"127.0.0.1:{free_port()}"
    fault = fault_of(target) or ""
    assert fault.startswith(f"{target}: UNAVAILABLE: ")
    assert fault.endswith("Connection refused: no router listens there")


def test_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("no_proxy", "")
    with server(HealthCheckResponse.SERVING) as target:
        assert fault_of(target) is None


def test_health_command_names_the_fault(capsys: pytest.CaptureFixture[str]) -> None:
    with server(HealthCheckResponse.SERVING) as target:
        assert main(["health", "--at", target]) == 0
    target = f"127.0.0.1:{free_port()}"
    assert main(["health", "--at", target]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"kvsteer: health: {target}: UNAVAILABLE: ")
    assert shown.count("\n") == 1


async def test_router_on_a_socket_is_asked(tmp_path: Path) -> None:
    one = Running(listen_at("unix", tmp_path))
    await one.server.start()
    assert await asyncio.to_thread(fault_of, one.listen) is None
    await one.stop()
    fault = await asyncio.to_thread(fault_of, one.listen)
    assert fault is not None
    assert fault.startswith(f"{one.listen}: UNAVAILABLE: ")


async def test_router_with_tls_is_asked_over_tls(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    one = Running(listen_at("tcp", tmp_path), identities.options(is_mutual=True))
    await one.server.start()
    ca, pair = str(identities.ca_file), tuple(identities.tls_files())
    assert await asyncio.to_thread(fault_of, one.listen, ClientTls(ca, NAME, *pair)) is None
    assert await asyncio.to_thread(fault_of, one.listen, ClientTls(ca, None, *pair)) is None
    for wrong in (None, ClientTls(ca), ClientTls(ca, "other.test", *pair)):
        fault = await asyncio.to_thread(fault_of, one.listen, wrong)
        assert fault is not None
        assert fault.startswith(f"{one.listen}: UNAVAILABLE: ")
    await one.stop()


@pytest.mark.parametrize(
    ("options", "shown", "status"),
    [
        (["--name", "router.test"], "TLS needs --ca", 2),
        (["--ca", "ca.pem", "--key", "tls.key"], "--certificate and --key belong together", 2),
        (["--ca", "/missing.pem"], "/missing.pem: No such file or directory", 1),
    ],
)
def test_health_command_names_missing_tls_options(
    options: list[str], shown: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["health", *options]) == status
    assert shown in capsys.readouterr().err


def frame(kind: int, flags: int, payload: bytes, stream: int = 1) -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    )


def field(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


SETTINGS = frame(4, 0, b"", stream=0)
SERVING = b"\0\0\0\0\2\x08\1"
TRAILERS = frame(1, 5, field(b"grpc-status", b"0"))
REFUSAL = field(b"grpc-status", b"12") + field(b"grpc-message", b"no such\nmethod")


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that sends these bytes, whatever it is asked, and closes."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1024):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve)
        server.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        server.join()


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (SETTINGS + frame(1, 4, b"") + frame(0, 0, SERVING) + TRAILERS, None),
        (frame(6, 0, bytes(8), 0) + frame(0, 9, b"\2" + SERVING + b"\0\0"), None),
        (frame(0, 0, SERVING[:4]) + frame(0, 1, SERVING[4:]), None),
        (frame(0, 1, b"\0\0\0\0\0"), "UNKNOWN"),
        (frame(0, 1, b"\0\0\0\0\2\x08\2"), "NOT_SERVING"),
        (frame(0, 1, b"\0\0\0\0\2\x08\3"), "SERVICE_UNKNOWN"),
        (frame(1, 5, REFUSAL), "UNIMPLEMENTED: no such method"),
        (frame(1, 5, b"\xff\xff\xff"), "UNKNOWN"),
        (frame(1, 5, field(b"grpc-status", b"99")), "UNKNOWN"),
        (frame(3, 0, bytes(4)), "UNAVAILABLE: it refuses the call"),
        (frame(7, 0, bytes(8), 0), "UNAVAILABLE: it closes the connection"),
        (SETTINGS * 99, "UNAVAILABLE: it does not end its answer"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "UNAVAILABLE: it is no HTTP/2 server"),
        (b"", "UNAVAILABLE: it ended the connection"),
    ],
)
def test_answers_of_any_server_are_read(answer: bytes, fault: str | None) -> None:
    with answering(answer) as target:
        assert fault_of(target) == (fault and f"{target}: {fault}")


def test_silent_server_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        fault = fault_of(target, timeout_seconds=0.05)
        assert fault == f"{target}: UNAVAILABLE: no answer within 0.05 s"


@pytest.mark.parametrize("target", ["", "host", "host:", ":1", "host:port"])
def test_what_is_no_address_is_named(target: str) -> None:
    assert fault_of(target) == f"{target}: UNAVAILABLE: it is neither host:port nor unix:PATH"


def test_probe_loads_nothing_slow() -> None:
    code = (
        "import sys; from extproc.__main__ import main; main(['health', '--at', '127.0.0.1:1']);"
        "print({'grpc', 'msgspec', 'asyncio', 'ssl', 'json', 'email'} & sys.modules.keys())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


READYZ = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n"


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=20)
def test_any_answer_shows_short_printable_lines_or_none(content: bytes, is_readyz: bool) -> None:
    with answering(READYZ + content if is_readyz else content) as metrics:
        lines = faults_at(metrics)
    assert all(line.isprintable() and len(line) <= 300 for line in lines)
    assert is_readyz or not lines


def test_health_command_shows_the_faults_of_a_ready_router(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = READYZ + b"ready\nworker w:1: it is \x1b[31mdown; start it\n"
    with server(HealthCheckResponse.SERVING) as target, answering(answer) as metrics:
        assert main(["health", "--at", target, "--faults", metrics]) == 0
    assert capsys.readouterr().out == "ready, but: worker w:1: it is [31mdown; start it\n"


@pytest.mark.parametrize(
    "answer", [b"", b"\0\0", READYZ, READYZ + b"ready\nnote: x\n", b"HTTP/1.1 200 OK\r\n\r\na\nb\n"]
)
def test_answer_that_names_no_fault_shows_none(answer: bytes) -> None:
    with answering(answer) as metrics:
        assert faults_at(metrics) == []


def test_faults_that_cannot_be_asked_for_show_none() -> None:
    assert faults_at(f"127.0.0.1:{free_port()}") == []
    assert faults_at("nonsense") == []


def test_silent_server_of_metrics_delays_little() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert faults_at(f"127.0.0.1:{silent.getsockname()[1]}", 0.05) == []


def test_faults_are_bounded() -> None:
    with answering(READYZ + b"ready\n" + b"x" * 200_000) as metrics:
        (line,) = faults_at(metrics)
    assert len(line) == 300
