import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.claims.claim_table import Holdings
from extproc.routing.claims.live_contexts import (
    LIVE_SECONDS,
    MOST_SHARED,
    SPAN_SECONDS,
    Context,
    LiveContexts,
)
from extproc.routing.cost.room import Occupancy, occupancy_of


def occupancy(one: LiveContexts, now: float, returning: float = 1.0) -> Occupancy:
    """How full a cache of 1,000 tokens is."""
    holdings = Holdings("a")
    holdings.contexts, holdings.capacity_tokens = one, 1_000
    return occupancy_of(holdings, returning, now)


def test_conversation_counts_until_it_has_been_silent_for_a_while() -> None:
    one = LiveContexts()
    one.count(SPAN_SECONDS * 100)
    counts = [
        occupancy(one, SPAN_SECONDS * (100 + spans)).conversations for spans in (0, 1, 7, 8, 900)
    ]
    assert counts == [1, 1, 1, 0, 0]


def test_conversation_that_left_counts_no_longer() -> None:
    one = LiveContexts()
    one.count(10.0)
    one.count(20.0)
    one.forget(10.0)
    assert occupancy(one, 20.0).conversations == 1
    one.count(20.0 + LIVE_SECONDS)
    one.forget(20.0)
    assert occupancy(one, 20.0 + LIVE_SECONDS).conversations == 1


@given(st.lists(st.tuples(st.floats(0.0, 60.0), st.booleans()), max_size=60))
def test_conversations_are_those_seen_lately_that_have_not_left(
    steps: list[tuple[float, bool]],
) -> None:
    now, one, seen = 1_000.0, LiveContexts(), list[float]()
    for seconds, leaves in steps:
        now += seconds
        if leaves and seen:
            one.forget(seen.pop(len(seen) // 2))
        else:
            one.count(now)
            seen.append(now)
        oldest = (now // SPAN_SECONDS) * SPAN_SECONDS + SPAN_SECONDS - LIVE_SECONDS
        assert occupancy(one, now).conversations == sum(since >= oldest for since in seen)


CONTEXTS = st.builds(
    Context,
    own=st.integers(0, 100).map(float),
    shared=st.just(50.0),
    shared_key=st.integers(0, 3),
    has_returned=st.booleans(),
)


@given(st.lists(st.tuples(st.integers(0, 9), CONTEXTS), max_size=40), st.floats(0.0, 1.0))
def test_occupancy_counts_own_tokens_each_and_a_shared_prefix_once(
    turns: list[tuple[int, Context]], returning: float
) -> None:
    one, held = LiveContexts(), dict[int, Context]()
    for conversation, context in turns:
        if conversation in held:
            one.forget(5.0, held[conversation])
        one.count(5.0, context)
        held[conversation] = context
    weights = {True: 1.0, False: returning}
    own = sum(weights[each.has_returned] * each.own for each in held.values())
    shared = 50.0 * len({each.shared_key for _, each in turns} - {0})
    found = occupancy(one, 5.0, returning)
    assert found.tokens == pytest.approx(own + shared)
    assert found.conversations == pytest.approx(
        sum(weights[each.has_returned] for each in held.values())
    )
    assert found.share == pytest.approx(min(1.0, (own + shared) / 1_000))


def test_shared_prefixes_are_forgotten_in_time_and_bounded() -> None:
    one = LiveContexts()
    for key in range(1, 3 * MOST_SHARED):
        one.count(1.0, Context(0.0, 1.0, key))
    assert occupancy(one, 1.0).tokens == MOST_SHARED
    assert occupancy(one, 1.0 + LIVE_SECONDS).tokens == 0.0
