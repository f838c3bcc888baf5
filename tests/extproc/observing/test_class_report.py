"""The part of a report on classes: figures for each configured one."""

from typing import Any

from extproc.admin.report_page import as_html, as_text
from extproc.observing.report import Report
from extproc.observing.verdict import ReportQuery, report_as_json
from tests.extproc.observing.simulated import BEGIN, over

NAMES = ("people", "batch", "idle")


def told(report: Report, *names: str) -> dict[str, Any]:
    return report_as_json(report, ReportQuery({"the last hour": 3_600}, classes=names), BEGIN)


def of_classes() -> Report:
    report = Report(BEGIN)
    for cached in (250, 750):
        report.feed(over(cached, of_class="people", ttft_seconds=1.0), 0.0, BEGIN)
    report.feed(over(status=503, of_class="batch"), 0.0, BEGIN)
    report.feed(over(status=None, of_class="batch"), 0.0, BEGIN)
    for _ in range(3):
        report.shed("batch", BEGIN)
    return report


def test_report_has_the_figures_of_each_class_in_their_order() -> None:
    (window,) = told(of_classes(), *NAMES)["windows"]
    people, batch, idle = window["classes"]
    assert [one["name"] for one in window["classes"]] == [*NAMES]
    assert (people["requests"], people["shed"], people["cached_share"]) == (2, 0, 0.5)
    assert 0.95 < people["first_byte_seconds"]["p90"] < 1.06
    assert (batch["shed"], batch["unanswered"], batch["status_5xx"]) == (3, 1, 1)
    assert (idle["requests"], idle["cached_share"]) == (0, None)
    assert set(idle["first_byte_seconds"].values()) == {None}


def test_text_and_page_have_a_line_for_each_class() -> None:
    report = told(of_classes(), "people")
    lines = as_text(report).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("class  "))
    assert lines[at + 1].split()[:6] == ["people", "2", "0", "0", "50", "%"]
    assert lines[at + 2].split()[:6] == ["no", "longer", "configured", "2", "3", "2"]
    page = as_html(report)
    assert page.count("<table") == 2
    assert '<th scope="row">people</th><td data-label="requests">2</td>' in page


def test_report_shows_what_was_shed_although_nothing_was_answered() -> None:
    report = Report(BEGIN)
    report.shed("batch", BEGIN)
    assert "<table" in as_html(told(report, "batch"))


def test_report_without_requests_of_classes_has_none() -> None:
    report = Report(BEGIN)
    report.feed(over(), 0.0, BEGIN)
    (window,) = told(report, *NAMES)["windows"]
    assert window["classes"] == []
