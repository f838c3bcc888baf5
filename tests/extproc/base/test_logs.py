import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from extproc.base import logs

ROOT = Path(__file__).resolve().parents[3]
# Loggers without a limit, and why what clients, engines and other routers send writes no lines.
OUT_OF_REACH = {
    "kvsteer": "starting, stopping and reading the configuration again",
    "kvsteer.decisions": "decisions, of which `log.decisions_percent` says how many",
    "kvsteer.faults": "what the router finds wrong itself, when it begins and ends",
    "kvsteer.processes": "processes of this router that start and end",
    "kvsteer.recorder": "its file's faults, when they begin and end",
    "kvsteer.report": "its file's faults, when they begin and end",
    "kvsteer.state": "the state file and its socket, at the start and the stop",
}

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(autouse=True)
def own_handlers_only() -> Iterator[None]:
    root = logging.getLogger("kvsteer")
    handlers, level, last = root.handlers, root.level, logging.lastResort
    yield
    logging.lastResort = last
    root.handlers, root.level = handlers, level


def test_json_line_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    logging.getLogger("kvsteer.feed").warning("feed %s", "lost\n")
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["logger"]) == ("warning", "kvsteer.feed")
    assert line["message"] == "feed lost\n"
    assert "trace_id" not in line


def test_json_line_about_a_request_names_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug", "json")
    logging.getLogger("kvsteer.decision").debug("decision", extra={"trace_id": TRACE})
    assert json.loads(capsys.readouterr().err)["trace_id"] == TRACE


def test_text_line_is_readable_by_people(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "text")
    logging.getLogger("kvsteer.feed").debug("not said")
    logging.getLogger("kvsteer.feed").info("feed live")
    line = capsys.readouterr().err
    assert line.endswith("INFO    kvsteer.feed: feed live\n")
    assert "not said" not in line


def test_json_line_of_an_exception_names_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    try:
        raise ValueError
    except ValueError:
        logging.getLogger("kvsteer").exception("failed")
    assert "test_logs.py" in json.loads(capsys.readouterr().err)["exception"]


def test_less_often_drops_and_counts_frequent_lines_about_a_feed() -> None:
    less_often, written = logs.RateLimitFilter(), list[str]()

    def log(name: str, worker: str, at_seconds: float) -> None:
        line = logging.LogRecord(name, logging.INFO, "", 0, "feed of %s", (worker,), None)
        line.created = at_seconds
        if less_often.filter(line):
            written.append(line.getMessage())

    for _ in range(60_000):
        log("kvsteer.feed", "w", 1000.0)
    log("kvsteer.feed", "v", 1000.0)
    log("kvsteer.feed", "w", 1061.0)
    log("kvsteer.feed", "w", 1061.0)
    left_out = 60_000 - logs.MAX_LINES
    again = [f"feed of w ({left_out} more were left out)", "feed of w"]
    assert written == [*["feed of w"] * logs.MAX_LINES, "feed of v", *again]
    for _ in range(2 * logs.MAX_LINES):
        log("kvsteer.decisions", "w", 1061.0)
    assert len(written) == 3 * logs.MAX_LINES + 3


@pytest.mark.parametrize("name", ["kvsteer.extproc", "kvsteer.admin", "kvsteer.bridge"])
def test_less_often_drops_lines_that_a_client_causes(name: str) -> None:
    less_often, written = logs.RateLimitFilter(), 0
    for number in range(600):
        what = (f"rule {number}",)
        record = logging.LogRecord(name, logging.WARNING, "", 0, "ended: %s", what, None)
        written += less_often.filter(record)
    assert written == logs.MAX_LINES


def test_every_logger_is_limited_or_out_of_reach() -> None:
    files = [file for room in ("extproc", "kvstate") for file in (ROOT / room).rglob("*.py")]
    calls = (re.findall(r'getLogger\("(kvsteer[.a-z]*)"\)', file.read_text()) for file in files)
    named = {name for each in calls for name in each}
    assert named == {*logs.LIMITED, *OUT_OF_REACH}


def test_less_often_drops_lines_about_routers_under_any_name() -> None:
    less_often, written = logs.RateLimitFilter(), 0
    for number in range(2 * 600):
        said = ("router %s joined", "router %s is silent and no longer counted")[number % 2]
        name = (f"liar-{number}",)
        written += less_often.filter(
            logging.LogRecord("kvsteer.sharing", logging.INFO, "", 0, said, name, None)
        )
    assert written == 2 * logs.MAX_LINES


def test_less_often_remembers_a_bounded_number_of_kinds() -> None:
    less_often = logs.RateLimitFilter(max_kinds=3)
    for number in range(9):
        line = logging.LogRecord("kvsteer.feed", logging.INFO, "", 0, f"line {number}", None, None)
        assert less_often.filter(line)
    assert len(less_often.kinds) == 3


_WARNING = """
import logging
from extproc.base import logs
logs.configure("error", "{style}")
logging.getLogger("opentelemetry.sdk").warning("not exported, %s", "reason")
logging.getLogger("opentelemetry.sdk").info("not said")
"""


@pytest.mark.parametrize("style", ["json", "text"])
def test_library_warnings_have_the_same_form(style: str) -> None:
    command = [sys.executable, "-c", _WARNING.format(style=style)]
    (line,) = subprocess.run(command, capture_output=True, check=True).stderr.splitlines()
    if style == "json":
        written = json.loads(line)
        assert written["logger"] == "opentelemetry.sdk"
        assert written["message"] == "not exported, reason"
    else:
        assert line.endswith(b"WARNING opentelemetry.sdk: not exported, reason")


def test_json_line_of_a_decision_has_it_as_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug", "json")
    extra = {"decision": {"pick": ["w"]}, "request_id": "r-1"}
    logging.getLogger("kvsteer.decision").debug("as one text", extra=extra)
    line = json.loads(capsys.readouterr().err)
    assert (line["message"], line["decision"]) == ("decision", {"pick": ["w"]})
    assert line["request_id"] == "r-1"
