"""The sentences of a report say no more than its intervals allow."""

import re
from random import Random
from statistics import median
from typing import Any

import pytest

from extproc.observing.outcomes import Outcome
from extproc.observing.report import Report
from extproc.observing.verdict import (
    UNREPORTED,
    WINDOWS,
    ReportQuery,
    percent,
    report_as_json,
)
from tests.extproc.observing.simulated import BEGIN, Traffic, over


def many(count: int, cached: int, tokens: int = 1_000, **changes: Any) -> list[Outcome]:
    """Requests that are alike."""
    return [over(cached, tokens, **changes)] * count


def window_of(*kinds: list[Outcome], minutes: int = 10) -> dict[str, Any]:
    """The requests of each kind are spread over some minutes."""
    report = Report(BEGIN)
    for minute in range(minutes):
        for outcomes in kinds:
            for outcome in outcomes[minute::minutes]:
                report.feed(outcome, 1_000.0, BEGIN + 60 * minute)
    found = report_as_json(
        report, ReportQuery({"the last 10 minutes": 600}), BEGIN + 60 * minutes - 1
    )
    window: dict[str, Any] = found["windows"][0]
    assert found["headline"] == f"The last 10 minutes: {window['headline']}"
    return window


def test_headline_compares_both_sides() -> None:
    window = window_of(many(400, 710), many(300, 220, is_steered=False))
    assert window["headline"] == (
        "Steered requests found 71 % of their prompt tokens cached, the others 22 % (difference 49"
        " points, 95 % interval 48 to 50)."
    )
    assert window["steered"]["computed_tokens"] == 400 * 290
    assert window["others"]["saved_prefill_seconds"] == pytest.approx(66.0)
    assert window["warnings"] == []


def unaware(count: int, cached: int) -> list[Outcome]:
    return many(count, cached, is_cache_aware=False)


def test_cache_unaware_requests_are_compared_where_the_proxy_chose_for_none() -> None:
    window = window_of(many(400, 710), unaware(300, 220))
    assert window["headline"] == (
        "Steered requests found 71 % of their prompt tokens cached, those of a cache-unaware policy"
        " 22 % (difference 49 points, 95 % interval 48 to 50)."
    )
    assert window["compared_with"] == "cache_unaware"
    assert (window["others"]["requests"], window["cache_unaware"]["requests"]) == (0, 300)
    assert window_of(unaware(20, 220))["headline"].endswith(
        "A cache-unaware policy placed all, so there is nothing to compare with."
    )


def test_cache_unaware_requests_are_named_beside_the_comparison_with_the_proxy() -> None:
    window = window_of(many(400, 710), many(300, 700, is_steered=False), unaware(300, 220))
    assert window["compared_with"] == "others"
    assert window["headline"].endswith(
        "interval 0 to 2). Requests of a cache-unaware policy found 22 %."
    )
    none = window_of(many(20, 700, is_steered=False), unaware(20, 220))["headline"]
    assert none.endswith("No request was steered. Requests of a cache-unaware policy found 22 %.")
    few = window_of(many(20, 700), many(20, 700, is_steered=False), unaware(20, 220))["headline"]
    assert few.endswith(" found 22 %.")


def test_headline_names_no_difference_and_the_time_until_it_narrows() -> None:
    report, now = Traffic(60, 200, shares=(0.5, 0.5)).report(Random(5))
    found = report_as_json(report, ReportQuery({"the last hour": 3_600}), now)
    assert found["headline"].startswith("The last hour: No difference seen: steered requests found")
    assert re.search(r" It takes about [\d.]+ hours more of such traffic ", found["headline"])
    assert found["windows"][0]["difference"]["seconds_until_narrow"] > 3_600


def until_narrow(minutes: int) -> float:
    """The median of how long it takes until the interval is narrow, after so many minutes."""
    found: list[float] = []
    for seed in range(15):
        report, now = Traffic(minutes, 33 * minutes, pause_seconds=2.0).report(Random(seed))
        (window,) = report_as_json(report, ReportQuery({"": 60 * minutes}), now)["windows"]
        found.append(window["difference"]["seconds_until_narrow"] / 60)
    return median(found)


@pytest.mark.slow
def test_headline_counts_down_the_time_until_the_interval_narrows() -> None:
    assert until_narrow(15) + 15 == pytest.approx(until_narrow(45) + 45, rel=0.4)
    assert until_narrow(15) > until_narrow(45)


NO_TOKENS = "2 requests ended, but no prompt tokens are known"
ALONE = "All requests were steered, so there is nothing to compare with."
NOT_STEERED = "No request was steered."
FOUND_HALF = "Steered requests found 50 % of their prompt tokens cached"
FOUND_LITTLE = "Requests found 0.3 % of their prompt tokens cached"
EQUAL = f"{FOUND_HALF}, the others 50 % (difference 0 points; no interval yet:"
KNOWN = "with known prompt tokens so far"
FEW = f"7 of 100 requests not steered {KNOWN}"
BRIEF = "it takes 6 minutes with requests, so 5 minutes more"


@pytest.mark.parametrize(
    ("kinds", "minutes", "sentence"),
    [
        ([], 1, "No request was counted in this time."),
        (
            [many(37, 500), many(500, 500, is_steered=False)],
            10,
            f"{EQUAL} 37 of 100 steered requests {KNOWN}).",
        ),
        (
            [many(3, 500), many(4, 500, is_steered=False)],
            10,
            f"{EQUAL} 3 of 100 steered requests and 4 of 100 requests not steered {KNOWN}).",
        ),
        (
            [many(200, 500), many(200, 500, is_steered=False)],
            4,
            f"{EQUAL} it takes 6 minutes with requests, so 2 minutes more).",
        ),
        ([many(400, 500)], 10, f"{FOUND_HALF} (95 % interval 49 to 51). {ALONE}"),
        (
            [many(400, 500)],
            1,
            f"{FOUND_HALF} (no interval yet: {BRIEF}). {ALONE}",
        ),
        (
            [many(400, 3, is_steered=False)],
            10,
            f"{FOUND_LITTLE} (95 % interval 0 to 1). {NOT_STEERED}",
        ),
        (
            [many(7, 3, is_steered=False)],
            10,
            f"{FOUND_LITTLE} (no interval yet: {FEW}). {NOT_STEERED}",
        ),
        ([many(2, 0, 0)], 1, f"{NO_TOKENS}: {UNREPORTED}. {ALONE}"),
        (
            [many(2, 0, 0), many(200, 5, is_steered=False)],
            10,
            f"Nothing to compare yet: 0 of 100 steered requests {KNOWN}.",
        ),
    ],
)
def test_headline_names_missing_requests(
    kinds: list[list[Outcome]], minutes: int, sentence: str
) -> None:
    assert window_of(*kinds, minutes=minutes)["headline"] == sentence


def test_headline_names_requests_of_a_single_minute() -> None:
    outcomes = many(200, 500)
    report = Report(BEGIN)
    for at in range(10):
        for outcome in outcomes if at == 4 else outcomes[:2]:
            report.feed(outcome, 1.0, BEGIN + 60 * at)
    headline = report_as_json(report, ReportQuery({"": 600}), BEGIN + 599)["headline"]
    assert "no interval yet: most came at one time" in headline


def test_warnings_name_other_differences_of_the_sides() -> None:
    steered = [*many(150, 0, 4_000), *many(50, 0, status=503)]
    others = many(200, None or 0, 1_000, is_steered=False, is_comparable=False)
    warnings = window_of(steered, others)["warnings"]
    assert [one.partition(":")[0] for one in warnings] == [
        "the sides differ in prompt length",
        "the sides differ in failures",
        "the sides differ in how cached tokens are known",
    ]
    assert "on average 4,000 tokens in steered requests, 1,000 in the others" in warnings[0]
    assert "25 % of steered requests had no response or status 5xx, 0 %" in warnings[1]


def test_warnings_ignore_a_few_long_prompts() -> None:
    rng = Random(3)
    steered = [over(0, 20_000 if number < 3 else 900) for number in range(150)]
    rng.shuffle(steered)
    window = window_of(steered, many(150, 0, is_steered=False))
    assert window["warnings"] == []


def test_warnings_do_not_compare_lengths_of_unknown_tokens() -> None:
    assert window_of(many(5, 0, 0), many(5, 0, is_steered=False))["warnings"] == []


def test_load_spread_is_shown_for_each_side_with_enough_requests() -> None:
    steered = [over(0, worker=f"w:{number % 4}") for number in range(400)]
    others = [over(0, worker="w:0", is_steered=False) for _ in range(39)]
    window = window_of(steered, others)
    assert window["steered"]["load_spread"] == {
        "workers": 4,
        "busiest_to_mean": 1.0,
        "variation": 0.0,
    }
    assert window["others"]["load_spread"] is None


def test_headline_is_of_the_surest_window() -> None:
    report, now = Traffic(60, 300).report(Random(5))
    assert report_as_json(report, ReportQuery(WINDOWS), now)["headline"].startswith(
        "The last hour: Steered"
    )
    later = report_as_json(report, ReportQuery(WINDOWS), now + 3 * 3_600)
    assert later["headline"].startswith("The last day: Steered")


def test_headline_without_a_result_is_of_the_shortest_window_with_requests() -> None:
    report = Report(BEGIN)
    assert report_as_json(report, ReportQuery(WINDOWS), BEGIN)["headline"].startswith(
        "The last 7 days: No request"
    )
    report.feed(over(), 1.0, BEGIN)
    found = report_as_json(report, ReportQuery(WINDOWS), BEGIN + 1_800)["headline"]
    assert found.startswith("The last hour: Steered requests found 0 % of their prompt tokens")


@pytest.mark.parametrize(
    ("share", "shown"), [(0.71, "71 %"), (0.071, "7.1 %"), (0.0, "0 %"), (1.0, "100 %")]
)
def test_percent_is_rounded_for_readers(share: float, shown: str) -> None:
    assert percent(share) == shown
