"""The rules that all feeds share: kvstate.feeds.feed."""

from kvstate.feeds.feed import Demote, Feed, FeedState, Forget, RequestReplay
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.stamps import Stamps
from tests.kvstate.feeding import applied, batch, live, undecodable


def test_new_feed_is_connecting_and_credits_nothing() -> None:
    feed = Feed(Recovery.REPLAY)
    assert (feed.state, feed.certain, feed.last_sequence) == (FeedState.CONNECTING, False, None)
    assert feed.receive(batch(0)) == []
    assert feed.last_sequence is None


def test_live_batch_n_is_applied() -> None:
    feed = live(2)
    assert feed.receive(batch(3)) == applied(3)
    assert feed.last_sequence == 3


def test_live_batch_before_n_with_a_known_stamp_is_a_duplicate() -> None:
    feed = live(4)
    assert feed.receive(batch(3)) == []
    assert (feed.state, feed.last_sequence) == (FeedState.LIVE, 4)


def test_old_batch_without_a_kept_stamp_is_classified_by_its_time() -> None:
    feed = live(4, stamps=Stamps(2))
    assert feed.receive(batch(1)) == []
    assert feed.receive(batch(1, "new")) == [Forget(), RequestReplay(0)]


def test_undecodable_batch_is_a_hole_of_one_batch() -> None:
    feed = live(2)
    assert feed.receive(undecodable(3)) == [Demote()]
    assert feed.reason == "batch 3 could not be decoded: no batch"
    assert feed.receive(batch(4)) == applied(4)


def test_duplicate_of_an_undecodable_batch_is_no_restart() -> None:
    feed = live(2)
    feed.receive(undecodable(3))
    assert feed.receive(undecodable(3)) == []
    assert feed.restarts == 0


def test_degraded_feed_heals_when_nothing_uncertain_is_left() -> None:
    feed = live(2)
    feed.receive(undecodable(3))
    feed.heal()
    assert (feed.state, feed.reason) == (FeedState.LIVE, "")


def test_miss_degrades_a_live_feed() -> None:
    feed = live(2)
    feed.miss("an event was lost")
    assert (feed.state, feed.reason, feed.certain) == (
        FeedState.DEGRADED,
        "an event was lost",
        True,
    )
    feed.heal()
    assert feed.state is FeedState.LIVE


def test_miss_during_a_replay_degrades_the_feed_when_it_ends() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connect()
    feed.receive_replayed(batch(0))
    feed.miss("an event was lost")
    assert feed.state is FeedState.REPLAYING
    feed.end_replay()
    assert (feed.state, feed.reason) == (FeedState.DEGRADED, "an event was lost")


def test_snapshot_replaces_the_known_state() -> None:
    feed = live(4, Recovery.RESUME)
    assert feed.snapshot(6, 7, unknown_before=0) == [Forget()]
    assert (feed.state, feed.reason) == (FeedState.REPLAYING, "snapshot of batch 7")
    assert feed.receive(batch(6)) == applied(6)
    assert not feed.certain
    assert feed.receive(batch(7)) == applied(7)
    assert (feed.state, feed.reason) == (FeedState.LIVE, "")
    assert feed.receive(batch(8)) == applied(8)


def test_snapshot_with_lost_batches_degrades_the_feed() -> None:
    feed = live(4, Recovery.RESUME)
    feed.snapshot(7, 7, unknown_before=3)
    feed.receive(batch(7))
    assert (feed.state, feed.reason) == (FeedState.DEGRADED, "3 batches were never received")


def test_refused_feed_is_unsupported_until_it_is_connected() -> None:
    feed = live(4, Recovery.RESUME)
    assert feed.refuse("events are off") == [Forget()]
    assert (feed.state, feed.certain, feed.receive(batch(5))) == (FeedState.UNSUPPORTED, False, [])
    feed.connect()
    assert feed.receive(batch(0)) == applied(0)
    assert feed.state is FeedState.LIVE


def test_gap_across_a_lost_connection_is_counted() -> None:
    feed = live(2, Recovery.NONE)
    feed.fail("an error")
    assert (feed.state, feed.reason, feed.certain) == (FeedState.STALE, "an error", False)
    feed.connect()
    assert feed.receive(batch(7)) == [Demote(), *applied(7)]
    assert (feed.gaps, feed.last_sequence) == (1, 7)


def test_first_batch_beyond_0_degrades_the_feed() -> None:
    late: Feed = Feed(Recovery.QUEUED)
    late.connect()
    assert late.receive(batch(3)) == applied(3)
    assert (late.state, late.reason) == (FeedState.DEGRADED, "batches before 3 are unknown")


def test_replay_leaves_a_feed_without_replays_unchanged() -> None:
    feed = live(2, Recovery.RESUME)
    assert (feed.ask_everything(), feed.receive_replayed(batch(5, "new"))) == ([], [])
    assert (feed.end_replay(), feed.fail_replay("silent")) == ([], [])
    assert (feed.state, feed.reason, feed.last_sequence) == (FeedState.LIVE, "", 2)


def test_first_batch_beyond_0_keeps_a_reason_given_before() -> None:
    late: Feed = Feed(Recovery.NONE)
    late.connect()
    why = late.reason
    assert late.receive(batch(3)) == applied(3)
    assert (late.state, late.reason) == (FeedState.DEGRADED, why)


def test_healing_does_not_mend_a_lost_connection() -> None:
    feed = live(2, Recovery.NONE)
    feed.disconnect()
    feed.heal()
    assert (feed.state, feed.reason) == (FeedState.STALE, "connection lost")


def test_undecodable_batch_of_a_snapshot_degrades_the_feed_at_its_end() -> None:
    feed = live(4, Recovery.RESUME)
    feed.snapshot(6, 7, unknown_before=0)
    assert feed.receive(undecodable(6)) == [Demote()]
    assert feed.state is FeedState.REPLAYING
    assert feed.receive(batch(7)) == applied(7)
    assert (feed.state, feed.reason) == (
        FeedState.DEGRADED,
        "batch 6 could not be decoded: no batch",
    )


def test_feed_that_was_never_connected_is_not_stale() -> None:
    feed = Feed(Recovery.RESUME)
    feed.disconnect("cannot connect: Connection refused")
    assert (feed.state, feed.reason) == (FeedState.CONNECTING, "cannot connect: Connection refused")
    feed.connect()
    feed.disconnect()
    assert feed.state is FeedState.STALE
