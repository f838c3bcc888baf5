"""A feed that begins where a saved one was: proven by its last batch again, or forgotten."""

import math

import pytest
from msgspec.structs import replace

from kvstate.feeds.feed import (
    RESTORING_TRIES,
    Demote,
    Feed,
    FeedState,
    Forget,
    RequestReplay,
    Restoration,
)
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.stamps import Stamps
from kvstate.rows.format import MAX_REASON, SavedFeed
from tests.kvstate.feeding import applied, batch, live, undecodable


def restored(last: int = 4) -> Feed:
    """A feed that begins where one was that took the batches 0 to last, and is connected."""
    saved = live(last).saved()
    assert saved is not None
    feed = Feed(Recovery.REPLAY)
    feed.restore(saved)
    assert (feed.certain, feed.restoration) == (False, Restoration.UNPROVEN)
    assert feed.connect() == [RequestReplay(last)]
    return feed


def test_last_batch_again_proves_what_was_restored() -> None:
    feed = restored()
    assert feed.receive_replayed(batch(4)) == []
    assert feed.receive_replayed(batch(5)) == applied(5)
    assert feed.receive(batch(6)) == []
    assert feed.end_replay() == applied(6)
    assert (feed.state, feed.restoration) == (FeedState.LIVE, Restoration.PROVEN)
    assert (feed.restarts, feed.last_sequence) == (0, 6)


def test_last_batch_with_another_stamp_is_a_restart() -> None:
    feed = restored()
    assert feed.receive_replayed(batch(4, "new")) == [Forget(), RequestReplay(0)]
    assert (feed.restoration, feed.restarts) == (Restoration.LOST, 1)


def test_replay_that_ends_before_the_last_batch_is_a_restart() -> None:
    feed = restored()
    assert feed.end_replay() == [Forget(), RequestReplay(0)]
    assert feed.restoration is Restoration.LOST


@pytest.mark.parametrize("first", [5, 9])
def test_proof_that_is_gone_forgets_what_was_restored(first: int) -> None:
    feed = restored()
    assert feed.receive(batch(first + 1)) == []
    assert feed.receive_replayed(batch(first)) == [Forget(), *applied(first)]
    assert feed.end_replay() == applied(first + 1)
    assert (feed.state, feed.restoration) == (FeedState.DEGRADED, Restoration.LOST)
    assert feed.reason == f"batches before {first} are no longer available"


def test_replay_that_fails_is_asked_for_again() -> None:
    feed = restored()
    assert (feed.ask_again(), feed.fail_replay("silence")) == ([], [])
    assert feed.receive(batch(5)) == []
    assert feed.wants_retry
    assert feed.ask_again() == [RequestReplay(4)]
    assert feed.receive_replayed(batch(4)) == []
    assert (feed.fail_replay("silence"), feed.ask_again()) == ([], [RequestReplay(4)])
    assert feed.receive_replayed(batch(4)) == []
    assert feed.end_replay() == applied(5)
    assert (feed.state, feed.restoration) == (FeedState.LIVE, Restoration.PROVEN)
    feed.quiet()
    assert not feed.wants_retry


def test_replays_that_fail_leave_what_was_restored_uncertain() -> None:
    feed = restored()
    for _ in range(RESTORING_TRIES - 1):
        feed.fail_replay("silence")
        feed.ask_again()
    assert feed.fail_replay("silence") == [Demote()]
    assert (feed.state, feed.restoration) == (FeedState.DEGRADED, Restoration.LOST)
    assert feed.wants_everything


def test_lost_connection_leaves_the_proof_to_the_next_one() -> None:
    feed = restored()
    feed.disconnect()
    found = [feed.restoration]
    assert feed.connect() == [RequestReplay(4)]
    feed.receive_replayed(batch(4))
    found.append(feed.restoration)
    assert found == [Restoration.UNPROVEN, Restoration.PROVEN]


def test_publisher_that_refuses_loses_what_was_restored() -> None:
    feed = restored()
    assert feed.refuse("no events") == [Forget()]
    assert feed.restoration is Restoration.LOST


def test_hole_is_restored_too() -> None:
    feed = live(4)
    feed.receive(undecodable(5))
    feed.receive(batch(6))
    saved = feed.saved()
    assert saved is not None
    again = Feed(Recovery.REPLAY)
    again.restore(saved)
    again.connect()
    again.receive_replayed(batch(6))
    again.end_replay()
    assert (again.state, again.reason) == (feed.state, feed.reason)
    assert again.state is FeedState.DEGRADED


def test_batches_older_than_the_restored_ones_are_not_taken() -> None:
    feed = restored(20)
    feed.receive_replayed(batch(20))
    feed.end_replay()
    assert feed.receive(batch(3)) == feed.receive(batch(18)) == []
    assert feed.dropped == 2


def test_restored_stamps_are_the_last_ones() -> None:
    stamps, again = Stamps(), Stamps()
    for number in range(9):
        stamps.note(number, 10.0 + number)
    again.restore(stamps.last(2), stamps.newest)
    assert stamps.last(2) == again.last(9) == ((7, 17.0), (8, 18.0))
    assert again.was_never_taken(6)
    assert not again.was_never_taken(7)
    assert again.is_other(6, 18.5)
    assert not again.is_other(6, 16.0)


def unsaved() -> list[Feed]:
    asking_all = live(4)
    asking_all.wants_everything = True
    asking_all.ask_everything()
    undecoded = live(4)
    undecoded.receive(undecodable(5))
    return [Feed(Recovery.REPLAY), live(4, Recovery.RESUME), asking_all, undecoded]


@pytest.mark.parametrize("feed", unsaved())
def test_feed_whose_publisher_could_not_be_proven_is_not_saved(feed: Feed) -> None:
    assert feed.saved() is None


def test_feed_without_replays_restores_nothing() -> None:
    saved = live(4).saved()
    assert saved is not None
    with pytest.raises(ValueError, match="without replays"):
        Feed(Recovery.RESUME).restore(saved)


SOUND = SavedFeed(5, ((3, 3.0), (4, 4.0)), 4.0, "", wants_everything=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"next": 6},
        {"next": -1},
        {"stamps": ()},
        {"stamps": ((4, 4.0), (3, 3.0))},
        {"stamps": ((4, 4.0), (4, 4.0))},
        {"stamps": ((-1, 4.0),), "next": 0},
        {"stamps": ((4, math.inf),)},
        {"stamps": ((4, math.nan),)},
        {"newest": 3.0},
        {"newest": math.inf},
        {"incomplete": "x" * (MAX_REASON + 1)},
        {"incomplete": "two\nlines"},
    ],
)
def test_unsound_feeds_are_refused(fields: dict[str, object]) -> None:
    assert SOUND.is_sound
    assert not replace(SOUND, **fields).is_sound
