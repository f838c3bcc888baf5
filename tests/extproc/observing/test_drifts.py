from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from extproc.observing.outcomes import (
    Circumstances,
    Drift,
    Outcome,
    OutcomeCounts,
)
from extproc.observing.usage import Usage
from kvstate.overlap import Overlap
from tests.extproc.observing.records import records


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


def test_drift_adds_up_predicted_and_reported_tokens() -> None:
    held = {"w": Overlap(16, (6, 0, 0, 0), unusable=2)}
    workers = records("w")
    counts = OutcomeCounts(workers, lambda _: Circumstances(block_size=16, overlaps=held))
    for predicted, cached in ((64, 64), (64, 32)):
        counts.count(outcome(predicted, cached)._replace(overlaps=held))
    counts.count(outcome(0, 64))
    assert workers["w"].outcomes.drift.as_json() == {
        "requests": 3,
        "predicted_tokens": 128,
        "reported_tokens": 160,
        "unusable_tokens": 64,
        "causes": {"evicted": 1, "stored_meanwhile": 1},
        "uncertain_because": {},
    }


def test_drift_counts_why_predictions_were_uncertain() -> None:
    drift, held = Drift(), {"w": Overlap(16, uncertain=4)}
    for why in ("form", "form", "rank"):
        known = partial(Circumstances, block_size=16, overlaps=held, uncertain_because=why)
        drift.count(outcome(0, 64)._replace(overlaps=held), known)
    shown = drift.as_json()
    assert (shown["causes"], shown["uncertain_because"]) == (
        {"uncertain": 3},
        {"form": 2, "rank": 1},
    )


def test_drift_ignores_outcomes_without_a_report() -> None:
    drift = Drift()
    drift.count(outcome(64, None))
    assert (drift.requests, drift.is_logged) == (0, False)


def test_drift_of_an_unknown_or_removed_worker_is_not_counted() -> None:
    workers = records("stays")
    counts = OutcomeCounts(workers)
    for worker in ("stays", "goes", ""):
        counts.count(outcome(64, 0, worker))
    assert workers["stays"].outcomes.drift.as_json()["causes"] == {"evicted": 1}
    assert (set(workers), counts.strangers) == ({"stays"}, {"2xx": 1})


def completed(drift: Drift, cached: int | None, form: str = "prompt", **rest: Any) -> int | None:
    one = outcome(64, cached)._replace(reported=Usage(100, cached, form), **rest)
    return drift.complete(one).reported.cached_tokens


def test_completed_fills_in_0_for_workers_that_report_only_cached_tokens() -> None:
    drift = Drift()
    assert completed(drift, None) is None  # it may never name any
    assert completed(drift, 64) == 64
    assert completed(drift, None) == 0
    assert completed(drift, None, is_whole=False) is None
    assert completed(drift, None, is_comparable=False) is None
    assert completed(drift, None, "messages") is None  # nothing is known for another API


def test_completed_fills_in_no_figure_for_workers_that_report_0() -> None:
    drift = Drift()
    for cached in (64, 0):
        completed(drift, cached)
    assert completed(drift, None) is None


TOKENS = st.sampled_from([0, 16, 48, 64])


@given(TOKENS, TOKENS, st.booleans())
def test_circumstances_are_looked_up_at_most_once_and_only_if_asked_for(
    predicted: int, cached: int, is_asked: bool
) -> None:
    looked: list[Outcome] = []

    def circumstances(of: Outcome) -> Circumstances:
        looked.append(of)
        return Circumstances(block_size=16)

    def noted(_: Outcome, known: Callable[[], Circumstances]) -> None:
        if is_asked:
            known()

    OutcomeCounts(records("w"), circumstances, noted).count(outcome(predicted, cached))
    assert len(looked) == (is_asked or predicted != cached)
