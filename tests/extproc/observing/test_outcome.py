import pytest

from extproc.observing.outcomes import Outcome, Usage


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
def test_the_error_is_what_was_predicted_too_much(cached: int, error: int) -> None:
    assert outcome(Usage(100, cached)).error_tokens == error


def test_nothing_reported_is_no_error() -> None:
    assert outcome(Usage()).error_tokens is None


def test_more_cached_tokens_than_the_prompt_has_are_not_believed() -> None:
    assert outcome(Usage(100, 101)).error_tokens is None


def test_what_cannot_be_compared_has_no_error() -> None:
    assert outcome(Usage(100, 64), is_comparable=False).error_tokens is None
