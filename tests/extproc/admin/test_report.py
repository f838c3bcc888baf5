"""GET /report with the figures of other processes, `kvsteer report`, and the report file."""

import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extproc import __main__ as cli
from extproc.admin.application import errors_as_json, listen
from extproc.admin.report import ReportFile, encoded, missing_in, notes_of, report_routes
from extproc.admin.report_page import CONTENT_SECURITY_POLICY
from extproc.base.address import Address
from extproc.config.reader import parse
from extproc.observing.report import MAX_BYTES, Period, Report, read
from extproc.running.processes import ProcessMember
from tests.extproc.observing.simulated import BEGIN, over
from tests.page.background import in_background
from tests.ports import free_port
from tests.unprivileged import unprivileged
from tests.waiting import until


def a_report(requests: int = 1) -> Report:
    report = Report(BEGIN)
    for _ in range(requests):
        report.feed(over(500), 1_000.0, BEGIN)
    return report


@contextlib.asynccontextmanager
async def serving(
    routes: Sequence[web.RouteDef], port: int | None = None
) -> AsyncIterator[Address]:
    place = Address("127.0.0.1", port or free_port())
    application = web.Application(middlewares=[errors_as_json()])
    application.add_routes(routes)
    runner = await listen(application, place, "admin")
    try:
        yield place
    finally:
        await runner.cleanup()


async def asked(place: Address, query: str = "") -> tuple[aiohttp.ClientResponse, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{place}/report{query}") as response,
    ):
        return response, await response.text()


async def test_report_page_for_a_browser_runs_no_script() -> None:
    async with serving(report_routes(a_report(), clock=lambda: BEGIN)) as place:
        response, text = await asked(place)
    assert (response.status, response.content_type) == (200, "text/html")
    assert response.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
    assert "1 of 100 steered requests with known prompt tokens so far" in text


@pytest.mark.parametrize(
    ("since", "name", "periods"),
    [
        ("1m", "the last minute", 1),
        ("90m", "the last 90 minutes", 2),
        ("31d", "the last 31 days", 31),
    ],
)
async def test_report_accepts_any_time(since: str, name: str, periods: int) -> None:
    async with serving(report_routes(a_report(), ["a note"], clock=lambda: BEGIN)) as place:
        response, text = await asked(place, f"?format=json&since={since}")
    assert response.content_type == "application/json"
    found = json.loads(text)
    (window,) = found["windows"]
    assert (window["name"], len(window["periods"])) == (name, periods)
    assert window["steered"]["requests"] == 1
    assert found["notes"] == ["a note"]


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("?format=pdf", "format must be one of html, json, text, counts"),
        ("?since=soon", "since must be a number of minutes, hours or days: 90m, 12h, 7d"),
        ("?since=0m", "since must be"),
        ("?since=1000000m", "since must be"),
        ("?since=%D9%A1h", "since must be"),
        ("?since=32d", "since must be at most 31d: no more is kept"),
    ],
)
async def test_report_refuses_malformed_queries_in_words(query: str, fault: str) -> None:
    async with serving(report_routes(a_report())) as place:
        response, text = await asked(place, query)
    assert response.status == 400
    assert json.loads(text)["error"].startswith(fault)


async def test_report_adds_up_all_processes() -> None:
    ports = [free_port(), free_port()]
    peers = {number: f"127.0.0.1:{port}" for number, port in enumerate(ports)}
    own = report_routes(a_report(1), peers={0: peers[0]}, clock=lambda: BEGIN)
    other = report_routes(a_report(4), peers={1: peers[1]}, clock=lambda: BEGIN)
    async with serving(other, ports[0]), serving(own, ports[1]) as place:
        _, text = await asked(place, "?format=json")
        _, counts = await asked(place, "?format=counts")
    found = json.loads(text)
    assert {window["steered"]["requests"] for window in found["windows"]} == {5}
    assert found["notes"] == []
    assert sum(one.steered.requests for one in read(counts.encode())) == 3


async def told_by(answer: bytes) -> dict[str, Any]:
    """The report if another process answers with this."""

    async def get(_: web.Request) -> web.Response:
        return web.Response(body=answer)

    async with serving([web.get("/report", get)]) as other:
        routes = report_routes(a_report(), peers={1: str(other)}, clock=lambda: BEGIN)
        async with serving(routes) as place:
            _, text = await asked(place, "?format=json&since=1h")
    found: dict[str, Any] = json.loads(text)
    assert found["windows"][0]["steered"]["requests"] == 1
    return found


async def test_report_names_a_process_that_does_not_answer() -> None:
    peers = {0: f"0.0.0.0:{free_port()}"}
    async with serving(report_routes(a_report(), peers=peers)) as place:
        _, text = await asked(place, "?format=text")
    assert "Note: process 0 does not answer: its requests are missing" in text


@pytest.mark.parametrize("answer", [b"[1,[[0", b"7" * (MAX_BYTES + 1)])
async def test_report_notes_a_malformed_answer_of_another_process(answer: bytes) -> None:
    (note,) = (await told_by(answer))["notes"]
    assert note.endswith("its requests are missing")


def test_others_are_the_addresses_of_the_other_processes() -> None:
    assert ProcessMember(1, 3, "d").other_addresses("127.0.0.1:9100") == {
        0: "127.0.0.1:9090",
        2: "127.0.0.1:9110",
    }
    assert ProcessMember(0, 2, "d").other_addresses("[::]:9090") == {1: "[::]:9100"}


def test_part_of_gives_each_process_a_file_of_its_own() -> None:
    config = parse("models: [{name: m}]\nworkers: [{endpoint: 'a:1'}]\nreport: {file: r}", "c")
    files = [ProcessMember(number, 2, "/d").part_of(config).report.file for number in (0, 1)]
    assert files == ["r", "r.1"]


@pytest.mark.parametrize(
    ("responses", "said"), [("none", "requests are missing"), ("headers", "predictions")]
)
def test_notes_of_name_responses_that_are_not_read(responses: str, said: str) -> None:
    text = "models: [{name: m}]\nworkers: [{endpoint: 'a:1'}]\naccounting: {responses: %s}"
    (note,) = notes_of(parse(text % responses, "c"))
    assert said in note
    usage = parse(text % "usage", "c")
    assert (notes_of(usage), missing_in(usage)) == ([], "")


@pytest.mark.parametrize("responses", ["none", "headers"])
async def test_report_begins_with_what_to_turn_on_while_nothing_is_counted(responses: str) -> None:
    config = "models: [{name: m}]\nworkers: [{endpoint: 'a:1'}]\naccounting: {responses: %s}"
    missing = missing_in(parse(config % responses, "c"))
    empty = report_routes(Report(BEGIN), missing=missing, clock=lambda: BEGIN)
    async with serving(empty) as place:
        _, text = await asked(place, "?format=text")
    lines = text.splitlines()
    assert lines[1].startswith("Nothing to report")
    assert "set `accounting: {responses: usage}`" in lines[1]
    assert "one more message for each piece of an answer" in lines[1]
    known = report_routes(a_report(), missing=missing, clock=lambda: BEGIN)
    async with serving(known) as place:
        _, text = await asked(place, "?format=text")
    assert missing not in text


def test_report_command_prints_text_or_json_or_writes_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    with in_background(serving(report_routes(a_report(), clock=lambda: BEGIN))) as served:
        admin = ["--admin", str(served.it)]
        assert cli.main(["report", *admin, "--since", "2h"]) == 0
        assert "The last 2 hours" in capsys.readouterr().out
        assert cli.main(["report", "--json", *admin]) == 0
        assert len(json.loads(capsys.readouterr().out)["windows"]) == 4
        assert cli.main(["report", "--html", str(page), *admin]) == 0
        assert page.read_text().startswith("<!doctype html>")
        assert cli.main(["report", "--html", str(tmp_path), *admin]) == 1
        assert cli.main(["report", "--since", "soon", *admin]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"kvsteer: report: {tmp_path}: ")
    assert said[1].endswith("since must be a number of minutes, hours or days: 90m, 12h, 7d")


def test_report_command_prints_no_terminal_controls(capsys: pytest.CaptureFixture[str]) -> None:
    async def get(_: web.Request) -> web.Response:
        return web.Response(body=b"a\x1b[2Jb\n")

    with in_background(serving([web.get("/report", get)])) as served:
        cli.main(["report", "--url", str(served.it)])
    assert capsys.readouterr().out == "a?[2Jb\n"


async def test_encoded_holds_all_that_was_counted() -> None:
    assert len(read(await encoded(a_report(), BEGIN))) == 3


def now() -> float:
    return BEGIN


def requests_of(report: Report) -> int:
    return report.window(60, BEGIN).periods[-1].steered.requests


def names_in(folder: Path) -> list[str]:
    return [one.name for one in folder.iterdir()]


async def stored(path: Path, report: Report) -> ReportFile:
    """Starts the file of a report, and closes it."""
    file = ReportFile(str(path), report, now)
    await file.start()
    await file.close()
    return file


async def test_report_file_carries_figures_into_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "report"
    await stored(path, a_report(3))
    await stored(path, a_report(4))
    again = Report(BEGIN)
    await stored(path, again)
    assert requests_of(again) == 7
    assert names_in(tmp_path) == ["report"]
    assert path.stat().st_mode & 0o777 == 0o600


async def test_report_file_is_written_at_runtime_if_there_is_news(
    tmp_path: Path,
) -> None:
    path, report = tmp_path / "report", a_report(1)
    file = ReportFile(str(path), report, now, write_seconds=0.01)
    await file.start()

    async def has(count: int) -> bool:
        if not path.exists():
            return False
        return max(one.steered.requests for one in read(path.read_bytes())) == count

    await until(lambda: has(1), "the report is written")
    number = path.stat().st_ino
    await file.write()
    assert path.stat().st_ino == number
    report.feed(over(500), 1_000.0, BEGIN)
    await until(lambda: has(2), "it is written again")
    await file.close()


@pytest.mark.parametrize("broken", [b"nothing", b"[9,[]]", b"x" * (MAX_BYTES + 1)])
async def test_report_file_that_is_broken_is_renamed_and_logged(
    tmp_path: Path, broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "report"
    path.write_bytes(broken)
    report = a_report(2)
    await stored(path, report)
    assert requests_of(report) == 2
    assert (tmp_path / "report.broken").read_bytes() == broken
    assert len(read(path.read_bytes())) == 3
    assert f"kept as {path}.broken; a new report begins" in caplog.text


async def test_report_file_fault_is_logged_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = a_report(1)
    file = ReportFile(str(tmp_path / "away" / "report"), report, now, write_seconds=0.01)
    await file.start()

    async def failed() -> bool:
        return bool(file.fault)

    await until(failed, "writing failed")
    (tmp_path / "away").mkdir()

    async def works() -> bool:
        return not file.fault

    await until(works, "writing works")
    await file.close()
    assert len(read((tmp_path / "away" / "report").read_bytes())) == 3
    assert caplog.text.count("a restart would lose the report") == 1


async def test_report_file_that_is_a_pipe_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "report")
    await stored(tmp_path / "report", a_report(1))
    assert "is no file" in caplog.text


async def test_report_file_that_is_unreadable_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "report").write_bytes(b"")
    (tmp_path / "report").chmod(0)
    with unprivileged(tmp_path):
        await stored(tmp_path / "report", a_report(0))
    assert f"{tmp_path}/report cannot be read: Permission denied" in caplog.text


async def test_report_file_internal_fault_is_logged_and_the_router_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(Report):
        def periods(self, _: float) -> Iterator[Period]:
            raise ZeroDivisionError

    report = Faulty(BEGIN)
    report.feed(over(500), 1_000.0, BEGIN)
    await stored(tmp_path / "report", report)
    assert "the report cannot be written: ZeroDivisionError" in caplog.text


async def test_report_without_requests_is_not_written(tmp_path: Path) -> None:
    await stored(tmp_path / "report", Report(BEGIN))
    assert names_in(tmp_path) == []
