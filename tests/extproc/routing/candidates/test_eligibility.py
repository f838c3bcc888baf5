import pytest

from extproc.routing.candidates.eligibility import (
    ANY,
    MAX_SUBSET,
    Candidate,
    Demand,
    subset_of,
    why_excluded,
)

WORKER = Candidate("a", "10.0.0.1:8000")


def test_why_excluded_is_empty_for_an_eligible_worker() -> None:
    assert why_excluded(WORKER, ANY, {}) == ""
    assert why_excluded(WORKER, Demand("x", frozenset({"10.0.0.1:8000"})), {}) == ""


def test_why_excluded_names_the_configured_cause_first() -> None:
    worker = Candidate("a", "10.0.0.1:8000", "serves n", frozenset())
    assert why_excluded(worker, Demand("x", frozenset()), {}) == "serves n"


def test_adapter_is_served_by_the_workers_that_name_it() -> None:
    worker = Candidate("a", "10.0.0.1:8000", loras=frozenset({"x"}))
    assert why_excluded(worker, Demand(lora="x"), {}) == ""
    assert why_excluded(worker, Demand(lora="y"), {}) == "does not serve the adapter y"
    assert why_excluded(worker, ANY, {}) == ""


def test_why_excluded_names_the_subset() -> None:
    why = why_excluded(WORKER, Demand(subset=frozenset({"10.0.0.2:8000"})), {})
    assert why == "not in the subset that the proxy allows"


def test_why_excluded_names_the_cause_of_an_unfit_worker() -> None:
    assert why_excluded(WORKER, ANY, {"10.0.0.1:8000": "draining"}) == "draining"
    assert why_excluded(WORKER, ANY, {"10.0.0.2:8000": "draining"}) == ""


@pytest.mark.parametrize(
    ("hint", "subset"),
    [
        (None, None),
        ("10.0.0.1:1", {"10.0.0.1:1"}),
        ("10.0.0.1:1, [::1]:2,", {"10.0.0.1:1", "[::1]:2"}),
        (["10.0.0.1:1", " b:2 ", 3, ""], {"10.0.0.1:1", "b:2"}),
        ("", set()),
        (7, set()),
        ({"a": 1}, set()),
    ],
)
def test_subset_of_reads_a_list_or_a_text(hint: object, subset: set[str] | None) -> None:
    assert subset_of(hint) == (None if subset is None else frozenset(subset))


def test_subset_of_is_bounded() -> None:
    assert len(subset_of([f"h:{n}" for n in range(MAX_SUBSET + 5)]) or ()) == MAX_SUBSET
