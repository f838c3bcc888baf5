"""The rules that all feeds share: kvstate.feeds.feed."""

import pytest

from kvstate.feeds import feed as feed_module
from kvstate.feeds.feed import Demote, Feed, Forget, Replay, State
from kvstate.feeds.feed_sources import Recovery
from tests.kvstate.feeding import applied, batch, live, undecodable


def test_new_feed_is_connecting_and_credits_nothing() -> None:
    feed = Feed(Recovery.REPLAY)
    assert (feed.state, feed.certain, feed.last_sequence) == (State.CONNECTING, False, None)
    assert feed.received(batch(0)) == []
    assert feed.last_sequence is None


def test_live_batch_n_is_applied() -> None:
    feed = live(2)
    assert feed.received(batch(3)) == applied(3)
    assert feed.last_sequence == 3


def test_live_batch_before_n_with_a_known_stamp_is_a_duplicate() -> None:
    feed = live(4)
    assert feed.received(batch(3)) == []
    assert (feed.state, feed.last_sequence) == (State.LIVE, 4)


def test_old_batch_whose_stamp_is_no_longer_known_is_told_by_its_age(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_module, "MAX_STAMPS", 2)
    feed = live(4)
    assert feed.received(batch(1)) == []
    assert feed.received(batch(1, "new")) == [Forget(), Replay(0)]


def test_undecodable_batch_is_a_hole_of_one_batch() -> None:
    feed = live(2)
    assert feed.received(undecodable(3)) == [Demote()]
    assert feed.reason == "batch 3 could not be decoded: no batch"
    assert feed.received(batch(4)) == applied(4)


def test_duplicate_of_an_undecodable_batch_is_no_restart() -> None:
    feed = live(2)
    feed.received(undecodable(3))
    assert feed.received(undecodable(3)) == []
    assert feed.restarts == 0


def test_degraded_feed_heals_when_nothing_uncertain_is_left() -> None:
    feed = live(2)
    feed.received(undecodable(3))
    feed.healed()
    assert (feed.state, feed.reason) == (State.LIVE, "")


def test_stamps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_STAMPS", 3)
    assert len(live(9)._stamps) == 3


def test_what_a_batch_could_not_say_makes_a_live_feed_degraded() -> None:
    feed = live(2)
    feed.miss("an event was lost")
    assert (feed.state, feed.reason, feed.certain) == (State.DEGRADED, "an event was lost", True)
    feed.healed()
    assert feed.state is State.LIVE


def test_what_a_replayed_batch_could_not_say_shows_when_the_replay_ends() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connected()
    feed.replayed(batch(0))
    feed.miss("an event was lost")
    assert feed.state is State.REPLAYING
    feed.replay_ended()
    assert (feed.state, feed.reason) == (State.DEGRADED, "an event was lost")


def test_snapshot_replaces_what_was_held() -> None:
    feed = live(4, Recovery.RESUME)
    assert feed.snapshot(6, 7, unknown_before=0) == [Forget()]
    assert (feed.state, feed.reason) == (State.REPLAYING, "snapshot of batch 7")
    assert feed.received(batch(6)) == applied(6)
    assert not feed.certain
    assert feed.received(batch(7)) == applied(7)
    assert (feed.state, feed.reason) == (State.LIVE, "")
    assert feed.received(batch(8)) == applied(8)


def test_snapshot_of_a_part_says_so() -> None:
    feed = live(4, Recovery.RESUME)
    feed.snapshot(7, 7, unknown_before=3)
    feed.received(batch(7))
    assert (feed.state, feed.reason) == (State.DEGRADED, "3 batches were never received")


def test_publisher_that_refuses_is_forgotten_until_it_is_connected() -> None:
    feed = live(4, Recovery.RESUME)
    assert feed.refused("events are off") == [Forget()]
    assert (feed.state, feed.certain, feed.received(batch(5))) == (State.UNSUPPORTED, False, [])
    feed.connected()
    assert feed.received(batch(0)) == applied(0)
    assert feed.state is State.LIVE


def test_gap_before_and_behind_a_lost_connection_is_counted() -> None:
    feed = live(2, Recovery.NONE)
    feed.failed("an error")
    assert (feed.state, feed.reason, feed.certain) == (State.STALE, "an error", False)
    feed.connected()
    assert feed.received(batch(7)) == [Demote(), *applied(7)]
    assert (feed.gaps, feed.last_sequence) == (1, 7)


def test_first_batch_that_is_not_the_publishers_first_says_so() -> None:
    late: Feed = Feed(Recovery.QUEUED)
    late.connected()
    assert late.received(batch(3)) == applied(3)
    assert (late.state, late.reason) == (State.DEGRADED, "batches before 3 are unknown")


def test_a_replay_means_nothing_to_a_feed_that_asks_for_none() -> None:
    feed = live(2, Recovery.RESUME)
    assert (feed.ask_everything(), feed.replayed(batch(5, "new"))) == ([], [])
    assert (feed.replay_ended(), feed.replay_failed("silent")) == ([], [])
    assert (feed.state, feed.reason, feed.last_sequence) == (State.LIVE, "", 2)


def test_first_batch_leaves_a_better_reason_as_it_is() -> None:
    late: Feed = Feed(Recovery.NONE)
    late.connected()
    why = late.reason
    assert late.received(batch(3)) == applied(3)
    assert (late.state, late.reason) == (State.DEGRADED, why)


def test_healing_does_not_mend_a_lost_connection() -> None:
    feed = live(2, Recovery.NONE)
    feed.disconnected()
    feed.healed()
    assert (feed.state, feed.reason) == (State.STALE, "connection lost")


def test_undecodable_batch_of_a_snapshot_is_a_hole_when_that_is_complete() -> None:
    feed = live(4, Recovery.RESUME)
    feed.snapshot(6, 7, unknown_before=0)
    assert feed.received(undecodable(6)) == [Demote()]
    assert feed.state is State.REPLAYING
    assert feed.received(batch(7)) == applied(7)
    assert (feed.state, feed.reason) == (State.DEGRADED, "batch 6 could not be decoded: no batch")


def test_a_feed_that_was_never_connected_is_not_stale() -> None:
    feed = Feed(Recovery.RESUME)
    feed.disconnected("cannot connect: Connection refused")
    assert (feed.state, feed.reason) == (State.CONNECTING, "cannot connect: Connection refused")
    feed.connected()
    feed.disconnected()
    assert feed.state is State.STALE
