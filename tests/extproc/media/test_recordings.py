"""Predictions for requests with images equal what real engines had cached."""

from collections import Counter

import pytest

from tests.extproc.media.replaying import HERE, Replay, requests_in

MODELS = ("llava", "qwen2vl")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("reads_usage", [False, True])
def test_predictions_equal_what_a_real_engine_had_cached(model: str, reads_usage: bool) -> None:
    replay = Replay(HERE / model, reads_usage=reads_usage)
    found = filter(None, map(replay.take, requests_in(HERE / f"vllm_0.32.0_{model}.jsonl.gz")))
    counts = Counter(
        "equal"
        if one.predicted == one.cached
        else "over"
        if one.predicted > one.cached
        else "under"
        for one in found
    )
    assert counts["over"] == 0
    assert counts["equal"] >= 98
    assert counts.total() == 100
