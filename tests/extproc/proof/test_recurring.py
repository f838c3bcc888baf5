"""When a cause of wrong predictions is a state, and when that ends."""

import re
from pathlib import Path

import pytest

from extproc.proof.recurring import CAUSES, EXPLAINED, RECENT_SECONDS, RIGHT, RecurringCause

PAGE = Path(__file__).resolve().parents[3] / "docs" / "internals" / "reasons.md"
SWAPPED, IGNORED = "feed_of_another", "rank_ignored"


def after(*causes: str, apart: float = 1.0) -> RecurringCause:
    """What is known after predictions that came out so, this many seconds apart."""
    recurring = RecurringCause()
    for number, cause in enumerate(causes):
        recurring.note(cause, number * apart)
    return recurring


def test_cause_of_six_wrong_predictions_recurs() -> None:
    assert after(*[SWAPPED] * (EXPLAINED - 1)).cause == ""
    recurring = after(*[SWAPPED] * EXPLAINED)
    assert (recurring.cause, recurring.lowers) == (SWAPPED, True)
    assert recurring.in_words.startswith(
        "6 of its last 8 wrong predictions have one cause: another"
    )


def test_cause_recurs_between_right_predictions_and_others() -> None:
    assert after(*["", SWAPPED, SWAPPED] * 3).cause == SWAPPED
    assert after(*[IGNORED, SWAPPED, SWAPPED] * 3).cause == SWAPPED
    assert after(*[IGNORED, SWAPPED] * 6).cause == ""


def test_rare_wrong_predictions_are_no_state() -> None:
    assert after(*[*[""] * 8, SWAPPED] * 10).cause == ""


def test_old_wrong_predictions_do_not_count() -> None:
    assert after(*[SWAPPED] * 9, apart=RECENT_SECONDS).cause == ""


def test_state_ends_when_most_of_the_last_predictions_are_right() -> None:
    causes = [SWAPPED] * EXPLAINED
    assert after(*causes, *[""] * (RIGHT - 1)).cause == SWAPPED
    assert after(*causes, *[""] * RIGHT).cause == ""
    recurring = after(*causes)
    recurring.clear()
    assert (recurring.cause, recurring.lowers, recurring.in_words) == ("", False, "")


def test_races_and_what_has_a_state_of_its_own_are_no_fault() -> None:
    for cause in ("evicted", "stored_meanwhile", "feed_not_live", "other_rank", "unknown_media"):
        assert after(*[cause] * 9).cause == ""


def test_predictions_that_nothing_explains_lower_no_credit() -> None:
    recurring = after(*["unknown"] * EXPLAINED)
    assert (recurring.cause, recurring.lowers) == ("unknown", False)


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_is_documented(cause: str) -> None:
    assert re.search(rf"^\| `{cause}` \|", PAGE.read_text(), re.MULTILINE)
