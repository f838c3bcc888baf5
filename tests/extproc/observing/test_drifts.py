from typing import Any

from extproc.observing.outcomes import Circumstances, Drifts, Outcome, Usage
from kvstate.overlap import Overlap


def outcome(predicted: int, cached: int | None, worker: str = "w") -> Outcome:
    return Outcome(
        model="m",
        worker=worker,
        is_moved=False,
        status=200,
        ttft_seconds=0.1,
        prompt_tokens=100,
        predicted_tokens=predicted,
        reported=Usage(100, cached),
        is_comparable=True,
    )


def test_what_was_predicted_and_reported_is_summed_by_worker() -> None:
    held = {"w": Overlap(16, (6, 0, 0, 0))}
    drifts = Drifts(lambda _: Circumstances(block_size=16, held=held))
    for predicted, cached in ((64, 64), (64, 32), (0, 64)):
        drifts.count(outcome(predicted, cached))
    assert drifts.of("w") == {
        "requests": 3,
        "predicted_tokens": 128,
        "reported_tokens": 160,
        "causes": {"evicted": 1, "stored_meanwhile": 1},
    }


def test_what_cannot_be_compared_counts_for_nothing() -> None:
    drifts = Drifts()
    drifts.count(outcome(64, None))
    drifts.count(outcome(64, 64, worker=""))
    assert drifts.by_worker == {}
    assert drifts.of("w")["requests"] == 0


def test_a_worker_that_is_gone_is_forgotten() -> None:
    drifts = Drifts()
    drifts.count(outcome(64, 64, "stays"))
    drifts.count(outcome(64, 0, "goes"))
    drifts.keep(["stays"])
    assert set(drifts.by_worker) == {"stays"}


def completed(drifts: Drifts, cached: int | None, form: str = "prompt", **rest: Any) -> int | None:
    one = outcome(64, cached)._replace(reported=Usage(100, cached, form), **rest)
    return drifts.complete(one).reported.cached_tokens


def test_a_worker_that_names_cached_tokens_only_where_there_are_some_has_none_else() -> None:
    drifts = Drifts()
    assert completed(drifts, None) is None  # it may never tell
    assert completed(drifts, 64) == 64
    assert completed(drifts, None) == 0
    assert completed(drifts, None, is_whole=False) is None
    assert completed(drifts, None, is_comparable=False) is None
    assert completed(drifts, None, "messages") is None  # of another API nothing is known


def test_a_worker_that_names_0_leaves_nothing_out() -> None:
    drifts = Drifts()
    for cached in (64, 0):
        completed(drifts, cached)
    assert completed(drifts, None) is None


def test_of_a_stranger_nothing_is_remembered() -> None:
    drifts = Drifts()
    drifts.complete(outcome(64, 64, worker="")._replace(reported=Usage(100, 64, "prompt")))
    assert drifts.by_worker == {}
