import pytest

from extproc.observing.outcomes import Outcome
from extproc.observing.usage import Usage


def outcome(reported: Usage, *, is_comparable: bool = True) -> Outcome:
    return Outcome(
        model="m",
        worker="w",
        is_moved=False,
        status=200,
        ttft_seconds=0.1,
        prompt_tokens=100,
        predicted_tokens=64,
        reported=reported,
        is_comparable=is_comparable,
    )


@pytest.mark.parametrize(("cached", "error"), [(64, 0), (0, 64), (96, -32), (100, -36)])
def test_error_tokens_are_those_predicted_in_excess(cached: int, error: int) -> None:
    assert outcome(Usage(100, cached)).error_tokens == error


def test_error_tokens_are_none_without_a_report() -> None:
    assert outcome(Usage()).error_tokens is None


def test_error_tokens_are_none_for_more_cached_tokens_than_the_prompt_has() -> None:
    assert outcome(Usage(100, 101)).error_tokens is None


def test_error_tokens_are_none_for_incomparable_outcomes() -> None:
    assert outcome(Usage(100, 64), is_comparable=False).error_tokens is None
