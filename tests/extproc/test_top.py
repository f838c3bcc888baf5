import io

import pytest

from extproc.admin_client import ask
from extproc.errors import StartError
from extproc.top import run
from tests.extproc.admin.serving import serving
from tests.page.background import in_background
from tests.ports import free_port


class Terminal(io.StringIO):
    """One that is interrupted after it was drawn so many times."""

    def __init__(self, draws: int) -> None:
        super().__init__()
        self._draws = draws

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self._draws -= 1
        if self._draws == 0:
            raise KeyboardInterrupt


def test_the_fleet_and_the_decisions_are_shown_once() -> None:
    shown = io.StringIO()
    with in_background(serving()) as served:
        served.do(served.it.route(30))
        assert run(served.it.url, once=True, out=shown) == 0
    lines = shown.getvalue().splitlines()
    assert lines[0] == "1 worker: 1 unsupported; 1 in flight"
    assert "\x1b" not in shown.getvalue()
    assert lines[-1].split()[1:4] == ["127.0.0.1:1", "0/30", "nothing_cached"]


def test_a_terminal_is_drawn_until_it_is_interrupted_and_then_given_back() -> None:
    terminal = Terminal(draws=1)
    with in_background(serving()) as served:
        assert run(f"{served.it.url}/", once=False, out=terminal) == 0
    shown = terminal.getvalue()
    assert shown.startswith("\x1b[?1049h")
    assert "1 worker: 1 unsupported" in shown
    assert shown.endswith("\x1b[?25h\x1b[?1049l")


def test_without_a_terminal_it_is_shown_once() -> None:
    shown = io.StringIO()
    with in_background(serving()) as served:
        run(served.it.url, once=False, out=shown)
    assert "no request yet" in shown.getvalue()


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{port}", "no url", "http://[", "http://127.0.0.1:abc", "http://a b"]
)
def test_a_router_that_cannot_be_asked_is_told_in_one_line(url: str) -> None:
    with pytest.raises(StartError, match=r"^top: .*/decisions: "):
        run(url.format(port=free_port()), once=True, out=io.StringIO())


def test_a_router_that_goes_away_is_told_in_as_many_lines_as_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr("extproc.top.REFRESH_SECONDS", 0.0)
    terminal = Terminal(draws=2)
    with in_background(serving()) as served:
        admin = served.it.url
        asked = ask

        def gone(command: str, admin: str, path: str) -> object:
            return asked(command, f"{admin}{'/gone' if terminal.getvalue() else ''}", path)

        monkeypatch.setattr("extproc.top.ask", gone)
        assert run(admin, once=False, out=terminal) == 0
    shown = terminal.getvalue().replace("\x1b[K\n", " ")
    assert "/gone/decisions: there is no such path trying again" in shown
