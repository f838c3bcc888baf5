import gzip
import http.server
import json
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from extproc.__main__ import main
from extproc.base.errors import StartError
from extproc.commands.admin_client import ask, ask_for, fetch, find_decision
from extproc.commands.admin_json import Events
from tests.ports import free_port


class _Answers(http.server.BaseHTTPRequestHandler):
    """Answers a GET with the status and text in its path, and a POST with its own body."""

    def do_GET(self) -> None:
        status, _, text = self.path.removeprefix("/").partition("/")
        self.send_response(int(status))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.rfile.read(int(self.headers["Content-Length"])))

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


class _Cut(_Answers):
    """Announces more bytes than it sends."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "9")
        self.end_headers()
        self.wfile.write(b"[1]")


class _Nonsense(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.wfile.write(b"\x00\x00\x12\x04\r\n\r\n")


class _Hostile(socketserver.StreamRequestHandler):
    """Answers with the bytes of `answer`, whatever is asked."""

    answer = b""

    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(self.answer)


def _serving(handler: type[socketserver.BaseRequestHandler]) -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def answers() -> Iterator[str]:
    yield from _serving(_Answers)


@pytest.fixture
def nonsense() -> Iterator[str]:
    yield from _serving(_Nonsense)


@pytest.fixture
def cut() -> Iterator[str]:
    yield from _serving(_Cut)


@pytest.fixture
def hostile() -> Iterator[str]:
    yield from _serving(_Hostile)


def refusal(error: str) -> bytes:
    body = json.dumps({"error": error}).encode()
    return b"HTTP/1.0 400 no\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@given(
    st.one_of(
        st.text(min_size=1).map(refusal),
        st.binary().map(lambda reason: b"HTTP/1.0 500 " + reason + b"\r\n\r\n"),
        st.binary(),
    )
)
@example(refusal("\x1b[2J"))
@example(b"HTTP/1.0 500 \x1b[2J\r\n\r\n")
@example(b"\x1b[2J\r\n\r\n")
@example(refusal("x" * 100_000))
@example(b"HTTP/1.0 400 no\r\n\r\n" + 50_000 * b"[")
@example(b"HTTP/1.0 200 yes\r\n\r\n" + 50_000 * b"[")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_start_error_has_no_control_codes_for_any_answer(hostile: str, answer: bytes) -> None:
    _Hostile.answer = answer
    with pytest.raises(StartError) as caught:
        ask("top", hostile, "/workers")
    assert str(caught.value).isprintable()


@given(st.binary(max_size=40), st.integers(0, 40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_answer_is_returned_whole_or_not_at_all(hostile: str, answer: bytes, limit: int) -> None:
    _Hostile.answer = b"HTTP/1.0 200 yes\r\n\r\n" + answer
    if len(answer) <= limit:
        assert fetch("report", hostile, "/report", max_bytes=limit) == answer
    else:
        with pytest.raises(StartError, match=f"has more than {limit} bytes"):
            fetch("report", hostile, "/report", max_bytes=limit)


def test_endless_or_truncated_answer_is_a_fault(answers: str, cut: str) -> None:
    with pytest.raises(StartError, match=r"^report: .*: the answer ends too early$"):
        fetch("report", cut, "/report")
    assert fetch("report", answers, "/200/12345", max_bytes=5) == b"12345"
    with pytest.raises(StartError, match=r"^report: .*: the answer has more than 5 bytes$"):
        fetch("report", answers, "/200/123456", max_bytes=5)


def test_malformed_json_answer_is_a_fault(answers: str) -> None:
    with pytest.raises(StartError, match=r"^top: http://.*/200/none: .*value"):
        ask("top", answers, "/200/none")


def test_ask_returns_the_answer(answers: str) -> None:
    assert ask("top", answers, "/200/[1]") == [1]
    assert ask("explain", answers, "/", {"path": "/x"}) == {"path": "/x"}


@pytest.mark.parametrize(
    ("status", "body", "shown"),
    [
        (400, json.dumps({"error": "nonsense"}, separators=(",", ":")), "nonsense"),
        (400, "[]", "HTTP Error 400: Bad Request"),
        (403, "none", "HTTP Error 403: Forbidden"),
        (404, "none", r"HTTP Error 404: Not Found; is it a router's admin server .admin.listen.."),
        (501, "none", r"HTTP Error 501: Not Implemented; is it a router's admin server .+"),
        (404, '{"error":"gone"}', "gone"),
    ],
)
def test_ask_raises_a_refusal_with_its_reason(
    answers: str, status: int, body: str, shown: str
) -> None:
    path = f"/{status}/{body}"
    with pytest.raises(StartError, match=rf"^explain: http://.*: {shown}$"):
        ask("explain", answers, path)


def test_ask_accepts_an_address_for_a_url(answers: str) -> None:
    assert ask("top", answers.removeprefix("http://"), "/200/[1]") == [1]


def test_ask_names_an_absent_router_in_few_words() -> None:
    admin = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        StartError,
        match=rf"^top: http://{admin}/workers: Connection refused: no router runs there; ",
    ):
        ask("top", admin, "/workers")


def test_answer_that_is_no_http_is_a_fault(nonsense: str) -> None:
    with pytest.raises(StartError, match=r"^top: "):
        ask("top", nonsense, "/workers")


@pytest.mark.parametrize("kept", [b'{"decisions": []}', b"[]", b"7"])
def test_request_that_is_not_kept_has_no_decision(hostile: str, kept: bytes) -> None:
    _Hostile.answer = b"HTTP/1.0 200 OK\r\n\r\n" + kept
    with pytest.raises(StartError, match="none of the last decisions has the request_id"):
        find_decision(hostile, "request_id", "r-1")


def test_decision_on_a_request_is_found_by_its_id(hostile: str) -> None:
    kept = {"decisions": [{"id": 3}, {"id": 7}]}
    _Hostile.answer = b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(kept).encode()
    assert find_decision(hostile, "request_id", "r-1") == kept


def test_address_that_is_none_is_a_fault() -> None:
    with pytest.raises(StartError, match=r"^top: nothing://.*/workers: unknown url type"):
        ask("top", "nothing://127.0.0.1:1", "/workers")


def test_explain_sends_the_headers_of_the_request(answers: str) -> None:
    command = [sys.executable, "-m", "extproc", "explain", "--admin", answers, "--json"]
    command += ["--header", "x-tenant: a:b", "--header", "x-class:batch"]
    explained = subprocess.run(
        command, input='{"model": "m"}', capture_output=True, text=True, check=True
    )
    sent = json.loads(explained.stdout)
    assert sent["headers"] == {"x-tenant": "a:b", "x-class": "batch"}


def test_explain_takes_the_request_from_a_file(
    answers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "request.json").write_text('{"model": "m"}')
    assert main(["explain", "--admin", answers, "--json", f"{tmp_path}/request.json"]) == 0
    assert json.loads(capsys.readouterr().out)["body"] == {"model": "m"}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "No such file or directory"),
        (b"{", "is not JSON: "),
        (b"\xff", "is not JSON: "),
        (gzip.compress(b"{}", mtime=0), "put Envoy's decompressor before ext_proc"),
    ],
)
def test_explain_names_the_file_that_it_cannot_use(
    content: bytes | None, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "request.json"
    if content is not None:
        file.write_bytes(content)
    assert main(["explain", str(file)]) == 2
    shown = capsys.readouterr().err
    assert (shown.startswith(f"kvsteer: explain: {file}"), fault in shown) == (True, True), shown


@pytest.mark.parametrize("header", ["x-tenant", ":a"])
def test_explain_refuses_what_is_no_header(header: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--header", header])
    assert "want NAME:VALUE" in capsys.readouterr().err


def test_typed_answer_ignores_what_it_does_not_name_and_refuses_another_type(answers: str) -> None:
    assert ask_for(Events, "top", answers, '/200/{"enabled":true,"more":1}').enabled
    for other in ('{"enabled":1}', "{}", "[]"):
        with pytest.raises(StartError, match=r"^top: .*: its answer does not match this version$"):
            ask_for(Events, "top", answers, f"/200/{other}")
    with pytest.raises(StartError, match=r"^top: .*/200/"):
        ask_for(Events, "top", answers, "/200/{")
