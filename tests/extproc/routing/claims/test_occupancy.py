"""How much of the caches live conversations fill."""

import pytest

from extproc.routing.claims.claim_table import Holdings
from extproc.routing.claims.live_contexts import LIVE_SECONDS, Context
from extproc.routing.claims.occupancy import MARGIN, Occupancy, occupancy_of


def record(*contexts: Context, capacity: int | None = 1_000) -> Holdings:
    made = Holdings("w")
    made.capacity_tokens = capacity
    for one in contexts:
        made.contexts.count(1.0, one)
    return made


def test_live_contexts_are_summed_with_each_shared_prefix_once_a_worker() -> None:
    shared = Context(100.0, 50.0, 7, has_returned=True)
    records = [record(shared, shared), record(shared, Context(30.0))]
    assert occupancy_of(records, 2.0) == Occupancy(430.0, 2_000.0, 100.0, 100.0)


def test_what_conversations_held_until_they_returned_is_needed() -> None:
    one = record()
    one.contexts.note_return(60.0, 30.0, Context(100.0))
    (occupancy,) = [occupancy_of([one], 120.0)]
    assert occupancy is not None
    assert occupancy.needed == 30.0 * 100.0 / 60.0


def test_conversations_that_are_silent_for_long_fill_nothing() -> None:
    records = [record(Context(100.0, has_returned=True))]
    assert occupancy_of(records, 1.0 + LIVE_SECONDS) == Occupancy(0.0, 1_000.0, 0.0)


def test_nothing_is_known_with_a_cache_of_unknown_size() -> None:
    assert occupancy_of([record(), record(capacity=None)], 0.0) is None
    assert occupancy_of([record(capacity=0)], 0.0) is None
    assert occupancy_of([], 0.0) is None


@pytest.mark.parametrize(
    ("needed", "missing"), [(0.0, 0), (1_000.0 / MARGIN, 0), (1_001.0 / MARGIN, 1), (2_200.0, 4)]
)
def test_workers_that_would_hold_what_is_needed_are_counted(needed: float, missing: int) -> None:
    assert Occupancy(9_000.0, 1_000.0, 0.0, needed).missing_workers(2) == missing
