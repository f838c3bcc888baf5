import pytest

from extproc.accounting.causes import Circumstances, likely_cause
from extproc.accounting.outcome import Outcome, Usage

WELL = Circumstances("live", tokens_differ=False, block_size=16)


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
    )


@pytest.mark.parametrize(
    ("predicted", "cached", "circumstances", "cause"),
    [
        (64, 64, WELL, ""),
        (64, None, WELL, ""),
        (64, 0, WELL, "evicted"),
        (32, 64, WELL, "stored_meanwhile"),
        (64, 60, WELL, "block_size"),
        (64, 40, WELL, "block_size"),
        (64, 0, WELL._replace(state="stale"), "feed_not_live"),
        (64, 0, WELL._replace(state="stale", tokens_differ=True), "token_mismatch"),
    ],
)
def test_the_likeliest_cause_is_named(
    predicted: int, cached: int | None, circumstances: Circumstances, cause: str
) -> None:
    assert likely_cause(outcome(predicted, cached), circumstances) == cause


def test_an_engine_that_counts_other_tokens_looks_for_other_blocks() -> None:
    assert likely_cause(outcome(64, 0, prompt_tokens=101), WELL) == "token_mismatch"
