"""The truth of a turn, by hand."""

import pytest

from tests.misses.truth import Truth, truth_of

BEFORE = list(range(100))


def truth(prompt: list[int], cached: int, **others: int | str) -> Truth:
    return truth_of(BEFORE, prompt, block=16, cached=cached, **others)  # type: ignore[arg-type]


def test_turn_that_goes_on_has_no_cause() -> None:
    found = truth([*BEFORE, *range(500, 550)], 96)
    assert found == ({"reused": 96, "block": 4, "new": 50}, 100, "", False)


def test_question_for_an_answer_need_not_be_kept() -> None:
    found = truth([*BEFORE[:97], *range(500, 550)], 96)
    assert found == ({"reused": 96, "block": 1, "new": 50}, 97, "", False)


def test_prompt_that_leaves_the_one_before_is_changed() -> None:
    found = truth([*BEFORE[:20], *range(500, 600)], 16)
    assert found == ({"reused": 16, "block": 4, "changed": 80, "new": 20}, 20, "changed", True)


@pytest.mark.parametrize("cause", ["evicted", "restarted", "cleared"])
def test_what_nobody_holds_is_lost_by_what_happened(cause: str) -> None:
    found = truth([*BEFORE, 7], 32, lost_by=cause)
    assert found == ({"reused": 32, cause: 64, "block": 4, "new": 1}, 100, cause, False)


def test_what_was_left_behind_is_elsewhere() -> None:
    found = truth([*BEFORE, 7], 0, left_behind=64, lost_by="evicted")
    assert found.tokens == {"elsewhere": 64, "evicted": 32, "block": 4, "new": 1}
    assert found.cause == "elsewhere"


def test_last_token_is_always_computed() -> None:
    found = truth_of(list(range(96)), list(range(96)), block=16, cached=80)
    assert found == ({"reused": 80, "block": 16}, 96, "", False)
