import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.claims.live_contexts import (
    LIVE_SECONDS,
    MOST_PAUSE_SECONDS,
    MOST_SHARED,
    NEED_SECONDS,
    SPAN_SECONDS,
    Context,
    LiveContexts,
)


def live(one: LiveContexts, now: float) -> float:
    """How many conversations count."""
    one.expire(now)
    return one.once + one.returned


def test_conversation_counts_until_it_has_been_silent_for_a_while() -> None:
    one = LiveContexts()
    one.count(SPAN_SECONDS * 100)
    counts = [live(one, SPAN_SECONDS * (100 + spans)) for spans in (0, 1, 7, 8, 900)]
    assert counts == [1, 1, 1, 0, 0]


def test_conversation_that_left_counts_no_longer() -> None:
    one = LiveContexts()
    one.count(10.0)
    one.count(20.0)
    one.forget(10.0)
    assert live(one, 20.0) == 1
    one.count(20.0 + LIVE_SECONDS)
    one.forget(20.0)
    assert live(one, 20.0 + LIVE_SECONDS) == 1


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
        assert live(one, now) == sum(since >= oldest for since in seen)


CONTEXTS = st.builds(
    Context,
    own=st.integers(0, 100).map(float),
    shared=st.just(50.0),
    shared_key=st.integers(0, 3),
    has_returned=st.booleans(),
)


@given(st.lists(st.tuples(st.integers(0, 9), CONTEXTS), max_size=40))
def test_own_tokens_count_for_each_and_a_shared_prefix_once(
    turns: list[tuple[int, Context]],
) -> None:
    one, held = LiveContexts(), dict[int, Context]()
    for conversation, context in turns:
        if conversation in held:
            one.forget(5.0, held[conversation])
        one.count(5.0, context)
        held[conversation] = context
    assert one.shared == 50.0 * len({each.shared_key for _, each in turns} - {0})
    for has_returned, count, own in (
        (False, one.once, one.own_once),
        (True, one.returned, one.own_returned),
    ):
        found = [each.own for each in held.values() if each.has_returned is has_returned]
        assert count == len(found)
        assert own == pytest.approx(sum(found))


@given(st.integers(1, 9), st.floats(20.0, 400.0), st.integers(1, 9))
def test_what_conversations_need_is_what_they_hold_at_a_time(
    conversations: int, pause: float, own: int
) -> None:
    one = LiveContexts()
    times = [
        turn * pause + pause * number / conversations
        for number in range(conversations)
        for turn in range(1, int(5 * NEED_SECONDS / pause))
    ]
    for now in sorted(times):
        one.note_return(now, pause, Context(float(own)))
    held = conversations * own
    assert one.needed(max(times)) == pytest.approx(held, rel=0.1 + 2 * pause / NEED_SECONDS)


def test_pauses_that_are_too_long_and_returns_of_long_ago_are_not_needed() -> None:
    one = LiveContexts()
    one.note_return(60.0, 1e9, Context(1.0))
    assert one.needed(120.0) == MOST_PAUSE_SECONDS / 60.0
    assert one.needed(61.0 + NEED_SECONDS) == 0.0
    one.note_return(10 * NEED_SECONDS, 1.0, Context(1.0))
    assert len(one._held) == 1


def test_prefix_of_sub_agents_is_needed_as_far_as_they_shared_it_when_they_began() -> None:
    one = LiveContexts()
    one.count(1.0, Context(5.0, 50.0, 7, forked=40.0))
    assert (one.shared, one.needed(1.0)) == (50.0, 10.0)


def test_shared_prefixes_are_forgotten_in_time_and_bounded() -> None:
    one = LiveContexts()
    for key in range(1, 3 * MOST_SHARED):
        one.count(1.0, Context(0.0, 1.0, key))
    assert one.shared == MOST_SHARED
    one.expire(1.0 + LIVE_SECONDS)
    assert one.shared == 0.0
