"""The sentences of a report say no more than its intervals allow."""

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from extproc.observing.outcomes import Outcome
from extproc.observing.report import Report
from extproc.observing.verdict import WINDOWS, Asked, percent, told
from tests.extproc.observing.simulated import BEGIN, Traffic, over


def many(count: int, cached: int, tokens: int = 1_000, **changes: Any) -> list[Outcome]:
    """Requests, each of its own conversation."""
    return [
        over(cached, tokens, conversation=number * 1_000_003 + 1, **changes)
        for number in range(count)
    ]


def window_of(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    report = Report(BEGIN)
    for outcome in outcomes:
        report.feed(outcome, 1_000.0, BEGIN)
    found = told(report, Asked({"the last 10 minutes": 600}), BEGIN)
    window: dict[str, Any] = found["windows"][0]
    assert found["headline"] == f"The last 10 minutes: {window['headline']}"
    return window


def test_both_sides_are_set_side_by_side_in_one_sentence() -> None:
    window = window_of([*many(400, 710), *many(300, 220, is_steered=False)])
    assert window["headline"] == (
        "Steered requests found 71 % of their prompt tokens cached, the others 22 % (difference 49"
        " points, 95 % interval 48 to 50)."
    )
    assert window["steered"]["computed_tokens"] == 400 * 290
    assert window["others"]["saved_prefill_seconds"] == pytest.approx(66.0)
    assert window["warnings"] == []


def test_a_difference_that_may_be_chance_is_called_so() -> None:
    report, now = Traffic(60, 200, shares=(0.5, 0.5)).report(Random(5), knows_conversations=True)
    found = told(report, Asked(WINDOWS), now)
    assert found["headline"].startswith("The last ")
    assert "; this may be chance." in found["headline"]


ALONE = "All requests were steered, so there is nothing to compare with."
NOT_STEERED = "No request was steered."
FEW = "Not enough requests yet"
AT_ONCE = "they came in too short a time, or nearly all at once"
FOUND_HALF = "Steered requests found 50 % of their prompt tokens cached"
FOUND_LITTLE = "Requests found 0.3 % of their prompt tokens cached"
BRIEFLY = [over(500) for _ in range(200)]


@pytest.mark.parametrize(
    ("outcomes", "sentence"),
    [
        ([], "No request ended in this time."),
        (
            [*many(37, 500), *many(500, 500, is_steered=False)],
            f"{FEW} with known prompt tokens: 37 of 100 steered.",
        ),
        (
            [*many(3, 500), *many(4, 500, is_steered=False)],
            f"{FEW} with known prompt tokens: 3 of 100 steered and 4 of 100 of the others.",
        ),
        (
            [*BRIEFLY, *(over(0, is_steered=False) for _ in range(200))],
            f"No interval yet: there are enough requests, but {AT_ONCE}.",
        ),
        (many(400, 500), f"{FOUND_HALF} (95 % interval 49 to 51). {ALONE}"),
        (BRIEFLY, f"{FOUND_HALF} (no interval yet: {AT_ONCE}). {ALONE}"),
        (
            many(400, 3, is_steered=False),
            f"{FOUND_LITTLE} (95 % interval 0 to 1). {NOT_STEERED}",
        ),
        (
            many(7, 3, is_steered=False),
            f"{FEW}: 7 of 100 with known prompt tokens. {NOT_STEERED}",
        ),
        (many(2, 0, 0), f"2 requests ended, but no prompt tokens are known. {ALONE}"),
    ],
)
def test_what_is_missing_is_said(outcomes: list[Outcome], sentence: str) -> None:
    assert window_of(outcomes)["headline"] == sentence


def test_sides_that_differ_otherwise_are_warned_of() -> None:
    steered = [*many(150, 0, 4_000), *many(50, 0, status=503)]
    others = many(200, None or 0, 1_000, is_steered=False, is_comparable=False)
    warnings = window_of([*steered, *others])["warnings"]
    assert [one.partition(":")[0] for one in warnings] == [
        "the sides differ in prompt length",
        "the sides differ in failures",
        "the sides differ in how cached tokens are known",
    ]
    assert "on average 4,000 tokens in steered requests, 1,000 in the others" in warnings[0]
    assert "25 % of steered requests had no response or status 5xx, 0 %" in warnings[1]


def test_few_long_prompts_are_no_difference_of_the_sides() -> None:
    rng = Random(3)
    steered = [
        over(0, 20_000 if number < 3 else 900, conversation=rng.getrandbits(63))
        for number in range(150)
    ]
    window = window_of([*steered, *many(150, 0, is_steered=False)])
    assert window["warnings"] == []


def test_sides_without_known_tokens_are_not_compared_in_length() -> None:
    assert window_of([*many(5, 0, 0), *many(5, 0, is_steered=False)])["warnings"] == []


def test_load_is_told_of_each_side_once_there_is_enough_of_it() -> None:
    steered = [over(0, worker=f"w:{number % 4}") for number in range(400)]
    others = [over(0, worker="w:0", is_steered=False) for _ in range(39)]
    window = window_of([*steered, *others])
    assert window["steered"]["load_spread"] == {
        "workers": 4,
        "busiest_to_mean": 1.0,
        "variation": 0.0,
    }
    assert window["others"]["load_spread"] is None


def test_the_headline_is_of_the_window_that_is_surest() -> None:
    report, now = Traffic(60, 300).report(Random(5), knows_conversations=True)
    assert told(report, Asked(WINDOWS), now)["headline"].startswith("The last hour: Steered")
    later = told(report, Asked(WINDOWS), now + 3 * 3_600)
    assert later["headline"].startswith("The last day: Steered")


def test_without_any_result_the_headline_is_of_the_shortest_window_with_requests() -> None:
    report = Report(BEGIN)
    assert told(report, Asked(WINDOWS), BEGIN)["headline"].startswith("The last 7 days: No request")
    report.feed(over(), 1.0, BEGIN)
    found = told(report, Asked(WINDOWS), BEGIN + 1_800)["headline"]
    assert found.startswith("The last hour: Not enough requests yet: 1 of 100")


@pytest.mark.parametrize(
    ("share", "shown"), [(0.71, "71 %"), (0.071, "7.1 %"), (0.0, "0 %"), (1.0, "100 %")]
)
def test_shares_are_told_as_people_read_them(share: float, shown: str) -> None:
    assert percent(share) == shown
