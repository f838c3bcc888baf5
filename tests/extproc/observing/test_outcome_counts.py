import pytest

from extproc.observing.outcomes import Outcome, OutcomeCounts, status_label
from extproc.observing.usage import UNKNOWN, Usage
from tests.extproc.observing.records import records


def outcome(worker: str = "w", cached: int | None = None, status: int | None = 200) -> Outcome:
    reported = UNKNOWN if cached is None else Usage(100, cached)
    return Outcome("m", worker, worker != "w", status, 0.2, 100, 64, reported, is_comparable=True)


def test_responses_are_counted_by_worker_and_status() -> None:
    workers = records("w", "other")
    counts = OutcomeCounts(workers)
    for status in (200, 200, 503):
        counts.count(outcome(status=status))
    counts.count(outcome("other"))
    counts.count(outcome(""))
    assert workers["w"].outcomes.responses == {"2xx": 2, "503": 1}
    assert workers["other"].outcomes.responses == {"2xx": 1}
    assert (counts.strangers, counts.moved) == ({"2xx": 1}, {"m": 2})


def test_prediction_errors_are_counted_by_sign() -> None:
    counts = OutcomeCounts(records("w"))
    for cached in (None, 64, 0, 80):
        counts.count(outcome(cached=cached))
    assert counts.reported_tokens == {"m": 144}
    totals = {key[1]: buckets.total for key, buckets in counts.error_tokens.items()}
    assert totals == {"exact": 0, "over": 64, "under": 16}


def test_request_without_a_response_has_no_time() -> None:
    counts = OutcomeCounts(records("w"))
    counts.count(outcome(status=None)._replace(ttft_seconds=None))
    assert not counts.first_byte_seconds
    counts.count(outcome())
    assert counts.first_byte_seconds["m"].total == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("status", "label"),
    [
        (None, "none"),
        (204, "2xx"),
        (429, "429"),
        (404, "4xx"),
        (503, "503"),
        (500, "5xx"),
        (0, "other"),
        (999, "other"),
    ],
)
def test_status_label_is_one_of_a_few_for_any_status(status: int | None, label: str) -> None:
    assert status_label(status) == label
