from extproc.accounting.causes import Circumstances
from extproc.accounting.drifts import Drifts
from extproc.accounting.outcome import Outcome, Usage


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
    drifts = Drifts(lambda _: Circumstances(block_size=16))
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
