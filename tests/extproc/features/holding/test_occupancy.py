"""How much of the caches live conversations fill."""

from extproc.features.holding.occupancy import Occupancy, occupancy_of
from extproc.routing.claims.claim_table import Holdings
from extproc.routing.claims.live_contexts import LIVE_SECONDS, Context


def record(*contexts: Context, capacity: int | None = 1_000) -> Holdings:
    made = Holdings("w")
    made.capacity_tokens = capacity
    for one in contexts:
        made.contexts.count(1.0, one)
    return made


def test_live_contexts_are_summed_with_each_shared_prefix_once_a_worker() -> None:
    shared = Context(100.0, 50.0, 7, has_returned=True)
    records = [record(shared, shared), record(shared, Context(30.0))]
    assert occupancy_of(records, 2.0) == Occupancy(430.0, 2_000.0, 100.0)


def test_conversations_that_are_silent_for_long_fill_nothing() -> None:
    records = [record(Context(100.0, has_returned=True))]
    assert occupancy_of(records, 1.0 + LIVE_SECONDS) == Occupancy(0.0, 1_000.0, 0.0)


def test_nothing_is_known_with_a_cache_of_unknown_size_or_without_events() -> None:
    blind = record()
    blind.is_blind = True
    assert occupancy_of([record(), record(capacity=None)], 0.0) is None
    assert occupancy_of([record(), blind], 0.0) is None
    assert occupancy_of([record(capacity=0)], 0.0) is None
    assert occupancy_of([], 0.0) is None
