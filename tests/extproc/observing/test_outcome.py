import pytest

from extproc.observing.outcomes import Outcome
from extproc.observing.usage import Usage
from extproc.routing.cost.fetch import Fetch, Peer


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


LOADED = Fetch(32, 16.0, None, "s", held=64)


@pytest.mark.parametrize(
    ("cached", "loaded"), [(96, 32), (99, 32), (80, 16), (64, 0), (16, 0), (None, None)]
)
def test_loaded_tokens_are_those_cached_beyond_the_workers_own(
    cached: int | None, loaded: int | None
) -> None:
    assert outcome(Usage(100, cached))._replace(fetch=LOADED).loaded_tokens == loaded


def test_loaded_tokens_are_none_of_what_was_not_offered_or_not_seen() -> None:
    whole = outcome(Usage(100, 96))._replace(fetch=LOADED)
    pulled = LOADED._replace(peer=Peer("p", "p:1", 1, 96, 0.0, 1.0))
    others = [
        whole._replace(fetch=None),
        whole._replace(fetch=pulled),
        whole._replace(is_moved=True),
        whole._replace(is_whole=False),
        whole._replace(is_comparable=False),
    ]
    assert [one.loaded_tokens for one in others] == [None] * 5
