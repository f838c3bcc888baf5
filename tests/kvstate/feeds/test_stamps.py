"""A feed tells a publisher that repeats itself from one that restarted, forgetful as it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.events import Batch
from kvstate.feeds.feed import Feed, Forget
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.stamps import STRANGE_BATCHES, Stamps

# Recoveries whose live stream shows a restart without an answer to a question.
LISTENING = [Recovery.NONE, Recovery.RESUME, Recovery.QUEUED]


# So few that feeds forget after a few batches.
MAX_LAST = MAX_SAMPLED = 4


def batch(life: int, number: int, stamp: float) -> Batch:
    # stamps of two batches differ: here in the fraction
    return Batch(number, f"{life} {number}".encode(), stamp + life / 8 + number / 2**20)


@st.composite
def histories(draw: st.DrawFn) -> list[Batch]:
    """The batches that a feed received of one publisher, late, with gaps and a stepping clock."""
    steps = draw(st.lists(st.sampled_from([1, 1, 1, 1, 2, 9]), min_size=1, max_size=120))
    clock = draw(st.lists(st.sampled_from([1.0, 1.0, 1.0, -50.0, 400.0]), min_size=len(steps)))
    number, now, made = draw(st.sampled_from([0, 0, 1, 70, 1_000])), 5_000.0, []
    for step, seconds in zip(steps, clock, strict=False):
        made.append(batch(0, number, now))
        number, now = number + step, now + seconds
    return made


def followed(history: list[Batch], recovery: Recovery) -> Feed:
    feed = Feed(recovery, stamps=Stamps(MAX_LAST, MAX_SAMPLED))
    feed.connect()
    for one in history:
        feed.receive(one)
    return feed


@given(
    history=histories(),
    recovery=st.sampled_from(LISTENING),
    seconds=st.sampled_from([-10_000.0, -60.0, 0.0, 60.0]),
    data=st.data(),
)
def test_restarted_publisher_is_detected_within_a_bounded_number_of_batches(
    history: list[Batch], recovery: Recovery, seconds: float, data: st.DataObject
) -> None:
    feed = followed(history, recovery)
    numbers = st.integers(0, 2 * history[-1].sequence + 2)
    # a publisher that goes on exactly where the other one ended shows nothing
    start = data.draw(numbers.filter(lambda number: number != history[-1].sequence + 1))
    noticed = (feed.restarts, feed.gaps)
    stride = 2 * max(1, len(history) // MAX_SAMPLED)
    dropped = 0
    for number in range(start, start + (STRANGE_BATCHES + 1) * stride + MAX_LAST):
        effects = feed.receive(batch(1, number, history[-1].stamp + seconds))
        if (feed.restarts, feed.gaps) != noticed:
            break
        assert effects == []
        dropped += 1
    else:
        pytest.fail(f"{dropped} batches were dropped in silence")
    assert feed.dropped == dropped


@given(history=histories(), recovery=st.sampled_from([*Recovery]), data=st.data())
def test_repeated_batches_are_never_taken_for_a_restart(
    history: list[Batch], recovery: Recovery, data: st.DataObject
) -> None:
    feed = followed(history, recovery)
    if recovery is Recovery.REPLAY:
        feed.end_replay()
    before = feed.state, feed.last_sequence
    orders = st.one_of(st.just(history), st.just(history[::-1]), st.permutations(history))
    for repeated in data.draw(st.lists(orders, max_size=2)):
        for one in repeated:
            assert feed.receive(one) == []
    assert (feed.restarts, feed.state, feed.last_sequence) == (0, *before)


def test_stamps_are_bounded_and_keep_the_first() -> None:
    stamps = Stamps(MAX_LAST, MAX_SAMPLED)
    for number in range(1_000):
        stamps.note(number, float(number))
        assert len(stamps) <= MAX_LAST + MAX_SAMPLED
        assert stamps.get(0) == 0.0
    assert [stamps.get(number) for number in (128, 256, 512)] == [None, 256.0, 512.0]


def test_silent_restart_is_verified_by_a_replay() -> None:
    feed = followed([batch(0, number, 1_000.0) for number in range(50, 60)], Recovery.REPLAY)
    feed.end_replay()
    asked = feed.replays
    for number in range(STRANGE_BATCHES):
        assert feed.restarts == 0
        feed.receive(batch(1, number, 1.0))
    assert feed.replays == asked + 1
    feed.end_replay()  # without the last batch of the old publisher
    assert feed.restarts == 1


def test_silent_restart_is_assumed_after_a_failed_replay() -> None:
    feed = followed([batch(0, number, 1_000.0) for number in range(50, 60)], Recovery.REPLAY)
    feed.end_replay()
    for number in range(STRANGE_BATCHES):
        feed.receive(batch(1, number, 1.0))
    feed.fail_replay("silent")
    effects = [
        effect
        for number in range(STRANGE_BATCHES, 2 * STRANGE_BATCHES)
        for effect in feed.receive(batch(1, number, 1.0))
    ]
    assert (feed.restarts, effects[:1]) == (1, [Forget()])


def test_silent_restart_is_verified_once_if_the_replay_refutes_it() -> None:
    feed = followed([batch(0, number, 1_000.0) for number in range(50, 60)], Recovery.REPLAY)
    feed.end_replay()
    asked = feed.replays
    for number in range(STRANGE_BATCHES):
        feed.receive(batch(1, number, 1.0))
    feed.receive_replayed(batch(0, 59, 1_000.0))
    feed.end_replay()
    for number in range(STRANGE_BATCHES, 3 * STRANGE_BATCHES):
        assert not feed.receive(batch(1, number, 1.0))
    assert (feed.replays, feed.restarts) == (asked + 1, 0)
