"""The file that keeps a report: replaced as a whole, and never in the way of a start."""

import os
from pathlib import Path

import pytest

from extproc.admin.report_file import ReportFile, kept
from extproc.observing.report import MAX_BYTES, Report, read
from tests.e2e.system import until
from tests.extproc.observing.simulated import BEGIN, over


def now() -> float:
    return BEGIN


def fed(requests: int) -> Report:
    report = Report(BEGIN)
    for _ in range(requests):
        report.feed(over(500), 1_000.0, BEGIN)
    return report


def requests_of(report: Report) -> int:
    return report.window(60, BEGIN).periods[-1].steered.requests


def names_in(folder: Path) -> list[str]:
    return [one.name for one in folder.iterdir()]


async def stored(path: Path, report: Report) -> ReportFile:
    """Starts with a report, and ends."""
    file = ReportFile(str(path), report, now)
    await file.start()
    await file.close()
    return file


async def test_the_figures_of_one_run_are_in_the_next(tmp_path: Path) -> None:
    path = tmp_path / "report"
    await stored(path, fed(3))
    await stored(path, fed(4))
    again = Report(BEGIN)
    await stored(path, again)
    assert requests_of(again) == 7
    assert names_in(tmp_path) == ["report"]
    assert path.stat().st_mode & 0o777 == 0o600


async def test_it_is_written_while_the_router_runs_and_only_if_there_is_news(
    tmp_path: Path,
) -> None:
    path, report = tmp_path / "report", fed(1)
    file = ReportFile(str(path), report, now, write_seconds=0.01)
    await file.start()

    async def has(count: int) -> bool:
        if not path.exists():
            return False
        return max(one.steered.requests for one in read(path.read_bytes())) == count

    await until(lambda: has(1), "the report is written")
    number = path.stat().st_ino
    await file._write()
    assert path.stat().st_ino == number
    report.feed(over(500), 1_000.0, BEGIN)
    await until(lambda: has(2), "it is written again")
    await file.close()


@pytest.mark.parametrize("broken", [b"nothing", b"[9,[]]", b"x" * (MAX_BYTES + 1)])
async def test_a_broken_file_is_put_aside_and_named(
    tmp_path: Path, broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "report"
    path.write_bytes(broken)
    report = fed(2)
    await stored(path, report)
    assert requests_of(report) == 2
    assert (tmp_path / "report.broken").read_bytes() == broken
    assert len(read(path.read_bytes())) == 3
    assert f"kept as {path}.broken; a new report begins" in caplog.text


async def test_what_cannot_be_read_or_written_is_logged_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = fed(1)
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


async def test_a_pipe_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "report")
    await stored(tmp_path / "report", fed(1))
    assert "is no file" in caplog.text


async def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("extproc.admin.report_file._read", refused)
    await stored(tmp_path / "report", fed(0))
    assert f"{tmp_path}/report cannot be read: Permission denied" in caplog.text


async def test_a_fault_of_ours_is_logged_and_the_router_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.admin.report_file.written", lambda _: 1 / 0)
    await stored(tmp_path / "report", fed(1))
    assert "the report cannot be written: ZeroDivisionError" in caplog.text


async def test_without_a_file_nothing_is_kept(tmp_path: Path) -> None:
    async with kept(None, fed(1)):
        pass
    async with kept(str(tmp_path / "report"), Report(BEGIN)):
        pass
    assert names_in(tmp_path) == []
