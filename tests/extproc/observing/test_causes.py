from collections.abc import Mapping

import pytest

from extproc.observing.outcomes import Circumstances, Outcome, likely_cause
from extproc.observing.usage import Usage
from extproc.routing.inputs.query import Media
from kvstate.overlap import Overlap

WELL = Circumstances("live", tokens_differ=False, block_size=16)


def held(**blocks: int) -> Mapping[str, Overlap]:
    """The blocks of the prompt that each worker holds; a prompt of 100 tokens has 6 whole ones."""
    return {name: Overlap(16, (count, 0, 0, 0)) for name, count in blocks.items()}


def outcome(predicted: int, cached: int | None, prompt_tokens: int = 100) -> Outcome:
    return Outcome(
        model="m",
        worker="w",
        is_moved=False,
        status=200,
        ttft_seconds=0.1,
        prompt_tokens=100,
        predicted_tokens=predicted,
        reported=Usage(prompt_tokens, cached),
        is_comparable=True,
        overlaps=held(w=predicted // 16),
    )


@pytest.mark.parametrize(
    ("predicted", "cached", "circumstances", "cause"),
    [
        (64, 64, WELL, ""),
        (64, None, WELL, ""),
        (64, 60, WELL, "block_size"),
        (64, 40, WELL, "block_size"),
        (64, 0, WELL._replace(state="stale"), "feed_not_live"),
        (64, 0, WELL._replace(state="stale", tokens_differ=True), "token_mismatch"),
    ],
)
def test_likely_cause_names_the_most_likely_one(
    predicted: int, cached: int | None, circumstances: Circumstances, cause: str
) -> None:
    assert likely_cause(outcome(predicted, cached), circumstances) == cause


def test_likely_cause_of_other_token_counts_is_a_token_mismatch() -> None:
    assert likely_cause(outcome(64, 0, prompt_tokens=101), WELL) == "token_mismatch"


@pytest.mark.parametrize(
    ("predicted", "cached", "now", "cause"),
    [
        (64, 0, held(w=0), "evicted"),
        (64, 0, held(), "evicted"),
        (64, 0, held(w=6), "evicted"),
        (64, 0, held(w=4), "unknown"),
        (64, 0, held(w=4, x=2), "unknown"),
        (64, 0, held(w=4, x=6), "feed_of_another"),
        (96, 0, held(w=6, x=6), "feed_of_another"),
        (32, 64, held(w=6), "stored_meanwhile"),
        (32, 64, held(w=6, x=6), "stored_meanwhile"),
        (32, 64, held(w=2, x=6), "feed_of_another"),
        (32, 64, held(w=2), "unknown"),
    ],
)
def test_likely_cause_follows_the_events_since_the_pick(
    predicted: int, cached: int, now: Mapping[str, Overlap], cause: str
) -> None:
    assert likely_cause(outcome(predicted, cached), WELL._replace(overlaps=now)) == cause


@pytest.mark.parametrize("reuse_cause", ["draft_drop", "group_missing"])
@pytest.mark.parametrize(
    ("predicted", "cached", "now", "cause"),
    [
        (64, 48, held(w=6), None),
        (64, 0, held(w=4), None),
        (64, 0, held(w=3), "evicted"),
        (64, 0, held(w=4, x=6), "feed_of_another"),
    ],
)
def test_likely_cause_is_that_of_the_engine_unless_the_feeds_explain_it(
    predicted: int, cached: int, now: Mapping[str, Overlap], cause: str | None, reuse_cause: str
) -> None:
    circumstances = WELL._replace(overlaps=now, reuse_cause=reuse_cause)
    assert likely_cause(outcome(predicted, cached), circumstances) == (cause or reuse_cause)


@pytest.mark.parametrize(
    ("uncertain", "cause"),
    [
        (4, "uncertain"),
        (5, "uncertain"),  # the last one is computed again, as with a draft
        (3, "stored_meanwhile"),
        (0, "stored_meanwhile"),
    ],
)
def test_likely_cause_is_uncertainty_if_what_was_uncertain_covers_the_report(
    uncertain: int, cause: str
) -> None:
    held_then = {"w": Overlap(16, (1, 0, 0, 0), uncertain - 1)} if uncertain else {}
    before = outcome(16 if uncertain else 0, 64)._replace(overlaps=held_then)
    now = WELL._replace(overlaps=held(w=6), reuse_cause="draft_drop")
    assert likely_cause(before, now) == cause


def test_likely_cause_of_a_silent_feed_is_that_it_is_not_live() -> None:
    before = outcome(0, 64)._replace(overlaps={"w": Overlap(16, uncertain=4)})
    for state in ("silent", "degraded"):
        assert likely_cause(before, WELL._replace(state=state)) == "feed_not_live"


def test_likely_cause_ignores_blocks_that_another_worker_held_before() -> None:
    before = outcome(96, 0)._replace(overlaps=held(w=6, x=6))
    assert likely_cause(before, WELL._replace(overlaps=held(w=6, x=6))) == "evicted"


def test_likely_cause_ignores_a_request_that_two_workers_began() -> None:
    moved = outcome(64, 0)._replace(is_moved=True)
    assert likely_cause(moved, WELL._replace(overlaps=held(w=4, x=6))) == "unknown"


@pytest.mark.parametrize("now", [held(w=4), held(w=6)])
def test_likely_cause_may_be_another_rank(now: Mapping[str, Overlap]) -> None:
    circumstances = WELL._replace(ranks=2, overlaps=now)
    named = outcome(64, 0)._replace(names_rank=True)
    assert likely_cause(outcome(64, 0), circumstances) == "other_rank"
    assert likely_cause(named, circumstances) == "rank_ignored"
    assert likely_cause(named._replace(is_moved=True), circumstances) == "other_rank"


@pytest.mark.parametrize(("predicted", "cached", "cause"), [(0, 64, "unknown_media"), (64, 0, "")])
def test_likely_cause_of_more_is_the_unknown_media(predicted: int, cached: int, cause: str) -> None:
    media = Media([], 100.0, is_whole=False, text_tokens=9)
    found = likely_cause(outcome(predicted, cached)._replace(media=media), WELL)
    assert (found == "unknown_media") == bool(cause)
