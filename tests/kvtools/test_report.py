import argparse
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from extproc.base.errors import StartError
from kvtools.report import add_arguments


class _Echo(http.server.BaseHTTPRequestHandler):
    """Answers with the path that was asked, and a control character."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{self.path}\x1b\nend\n".encode())

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture
def router() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def report(*options: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(options)
    return int(arguments.run(arguments))


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ((), "/report?format=text"),
        (("--json",), "/report?format=json"),
        (("--since", "12h"), "/report?format=text&since=12h"),
    ],
)
def test_report_is_printed_without_control_characters(
    options: tuple[str, ...], asked: str, router: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report("--admin", router, *options) == 0
    assert capsys.readouterr().out == f"{asked}?\nend\n"


def test_page_of_the_report_is_written_as_it_is(router: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert report("--url", router, "--html", str(page)) == 0
    assert page.read_bytes() == b"/report?format=html\x1b\nend\n"
    with pytest.raises(StartError, match=r"^report: .*: Is a directory$"):
        report("--url", router, "--html", str(tmp_path))
