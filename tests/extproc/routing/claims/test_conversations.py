from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.claims.conversations import LIVE_SECONDS, SPAN_SECONDS, Conversations


def test_conversation_counts_until_it_has_been_silent_for_a_while() -> None:
    one = Conversations()
    one.count(SPAN_SECONDS * 100)
    counts = [one.live(SPAN_SECONDS * (100 + spans)) for spans in (0, 1, 7, 8, 900)]
    assert counts == [1, 1, 1, 0, 0]


def test_conversation_that_left_counts_no_longer() -> None:
    one = Conversations()
    one.count(10.0)
    one.count(20.0)
    one.forget(10.0)
    assert one.live(20.0) == 1
    one.count(20.0 + LIVE_SECONDS)
    one.forget(20.0)
    assert one.live(20.0 + LIVE_SECONDS) == 1


@given(st.lists(st.tuples(st.floats(0.0, 60.0), st.booleans()), max_size=60))
def test_conversations_are_those_seen_lately_that_have_not_left(
    steps: list[tuple[float, bool]],
) -> None:
    now, one, seen = 1_000.0, Conversations(), list[float]()
    for seconds, leaves in steps:
        now += seconds
        if leaves and seen:
            one.forget(seen.pop(len(seen) // 2))
        else:
            one.count(now)
            seen.append(now)
        oldest = (now // SPAN_SECONDS) * SPAN_SECONDS + SPAN_SECONDS - LIVE_SECONDS
        assert one.live(now) == sum(since >= oldest for since in seen)
