"""The report as text and as a page."""

import re
from html.parser import HTMLParser
from random import Random
from typing import Any

from extproc.admin.report_page import CONTENT_SECURITY_POLICY, STYLE, as_html, as_text
from extproc.observing.report import Report
from extproc.observing.verdict import WINDOWS, ReportQuery, report_as_json
from tests.extproc.observing.simulated import BEGIN, Traffic, over


def found(report: Report, now: float, *notes: str) -> dict[str, Any]:
    return report_as_json(report, ReportQuery(WINDOWS, notes), now)


def an_hour() -> dict[str, Any]:
    report, now = Traffic(60, 300).report(Random(2))
    return found(report, now, "a <note> & more")


def test_text_shows_each_window_with_its_sentence() -> None:
    text = as_text(an_hour())
    assert text.splitlines()[1].startswith("The last hour: Steered requests found ")
    assert "Note: a <note> & more" in text
    assert text.count("cached share of prompt tokens") == 2
    assert "The last day and the last 7 days have no more requests than the last hour." in text
    line = next(one for one in text.splitlines() if one.startswith("time to first byte p90"))
    assert re.search(r"0\.\d{3} s \(0\.\d{3} s to \d\.\d+ s\).* [+-]0\.\d{3} s \(", line)
    assert text.isascii()


def test_text_and_page_of_an_empty_report_have_no_tables() -> None:
    nothing = found(Report(BEGIN), BEGIN)
    assert "cached share" not in as_text(nothing)
    assert "<table" not in as_html(nothing)
    assert "No request was counted in this time." in as_text(nothing)


def test_text_leaves_the_column_of_a_missing_side_empty() -> None:
    report = Report(BEGIN)
    report.feed(over(500, ttft_seconds=None), 0.0, BEGIN)
    text = as_text(found(report, BEGIN))
    line = next(one for one in text.splitlines() if one.startswith("cached share"))
    assert text.count("cached share") == 1
    assert line.split(maxsplit=5)[5].split() == ["50", "%", "(no", "interval", "yet)", "-", "-"]
    assert "not enough requests yet" in text
    unanswered = Report(BEGIN)
    unanswered.feed(over(status=None, worker=""), 0.0, BEGIN)
    page = as_html(found(unanswered, BEGIN))
    assert page.count("<svg") == 3


def test_cache_unaware_requests_have_a_column_a_bar_and_a_key_of_their_own() -> None:
    report = Report(BEGIN)
    for cached, changes in (
        (500, {}),
        (400, {"is_steered": False}),
        (300, {"is_cache_aware": False}),
    ):
        report.feed(over(cached, **changes), 0.0, BEGIN)
    shown = found(report, BEGIN)
    lines = as_text(shown).splitlines()
    heads = next(one for one in lines if "not steered  " in one)
    assert heads.split("  ")[-1].strip() == "difference to not steered"
    share = next(one for one in lines if one.startswith("cached share"))
    assert re.findall(r"(\d+) % \(no", share) == ["50", "40", "30"]
    page = as_html(shown)
    assert "those of a cache-unaware policy" in page
    assert page.count('<rect class="cache_unaware"') == 1
    assert "cache-unaware" not in as_html(an_hour())


def test_tokens_handed_over_have_a_line_where_there_are_any() -> None:
    report = Report(BEGIN)
    report.feed(over(500, handed_tokens=12_345), 0.0, BEGIN)
    shown = found(report, BEGIN)
    line = next(one for one in as_text(shown).splitlines() if "handed over" in one)
    assert line.split() == ["handed", "over", "as", "ids", "12,345", "-"]
    assert "handed over as ids" in as_html(shown)
    assert "handed over" not in as_text(an_hour())


class Tags(HTMLParser):
    """Fails if a tag is closed that is not the last one opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not {name for name, _ in attrs} & {"style", "src", "href", "onload"}
        if tag not in {"meta", "line", "rect", "circle", "polyline"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_well_formed_and_self_contained() -> None:
    page, tags = as_html(an_hour()), Tags()
    tags.feed(re.sub(r"<(line|rect|circle|polyline)([^>]*)/>", r"<\1\2>", page))
    assert tags.open == []
    assert {"svg", "polyline", "rect", "table"} <= tags.seen
    assert not tags.seen & {"script", "link", "img", "iframe"}
    assert "a &lt;note&gt; &amp; more" in page
    assert "://" not in page
    assert "prefers-color-scheme: dark" in STYLE


def test_page_draws_a_single_period_as_a_dot() -> None:
    report = Report(BEGIN)
    report.feed(over(500), 1.0, BEGIN)
    assert '<circle class="steered"' in as_html(found(report, BEGIN))


def test_warnings_stand_beside_their_window() -> None:
    report = Report(BEGIN)
    for number in range(300):
        sides = over(0, 4_000 if number % 2 else 1_000, is_steered=bool(number % 2))
        report.feed(sides, 1.0, BEGIN)
    shown = found(report, BEGIN + 600)
    assert "Warning: the sides differ in prompt length" in as_text(shown)
    assert 'class="warning">the sides differ' in as_html(shown)


def test_text_names_long_windows_in_large_units() -> None:
    report = Report(BEGIN)
    report.feed(over(), 1.0, BEGIN)
    text = as_text(found(report, BEGIN + 5 * 86_400))
    assert "5 days of it seen" in text
    assert "seconds of it seen" in as_text(found(Report(BEGIN), BEGIN + 30))


def test_content_security_policy_allows_only_its_style() -> None:
    assert CONTENT_SECURITY_POLICY.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in CONTENT_SECURITY_POLICY


def test_text_shows_an_insignificant_difference_as_none_seen() -> None:
    report, now = Traffic(60, 2_000, shares=(0.5, 0.5)).report(Random(1))
    lines = as_text(found(report, now)).splitlines()
    gains = [line for line in lines if line.startswith("cached share")]
    assert all("none seen (-" in gain for gain in gains)
    assert gains
