"""One test for each row of the feed's table where there are no replays, and where rows meet."""

from kvstate.feeds.feed import SNAPSHOT_LATE, Demote, Feed, FeedState, Forget
from kvstate.feeds.feed_sources import Recovery
from tests.kvstate.feeding import applied, batch, live


def test_live_batch_beyond_n_is_a_hole_without_replay() -> None:
    feed = live(2, Recovery.NONE, why_lost="no such thing")
    assert feed.receive(batch(5)) == [Demote(), *applied(5)]
    assert feed.state is FeedState.DEGRADED
    assert feed.reason == "batches 3 to 4 are lost: no such thing"
    assert feed.certain


def test_restart_without_replay_starts_over_with_its_first_batch() -> None:
    feed = live(4, Recovery.NONE)
    assert feed.receive(batch(1, "new")) == [Forget(), *applied(1, life="new")]
    assert feed.state is FeedState.DEGRADED
    assert feed.reason.startswith("publisher restarted: batch 1 came again with different content")
    again = live(4, Recovery.NONE)
    assert again.receive(batch(0, "new")) == [Forget(), *applied(0, life="new")]
    assert (again.state, again.reason) == (FeedState.LIVE, "")


def test_reconnection_without_replay_is_a_hole() -> None:
    feed = live(2, Recovery.NONE, why_lost="no such thing")
    feed.disconnect()
    assert feed.connect() == [Demote()]
    assert feed.state is FeedState.DEGRADED
    assert feed.reason == "the connection was lost and there is no such thing"
    assert feed.receive(batch(3)) == applied(3)


def test_late_join_without_replay_is_degraded() -> None:
    feed = Feed(Recovery.NONE, why_lost="no such thing")
    assert feed.connect() == []
    assert feed.reason == "no such thing: blocks stored before this connection are unknown"
    assert feed.receive(batch(7)) == applied(7)
    assert feed.state is FeedState.DEGRADED


def resuming(last: int) -> Feed:
    """A feed over a connection that resumes, lost after batch `last` and made again."""
    feed = live(last, Recovery.RESUME)
    feed.disconnect()
    assert feed.connect() == []
    assert (feed.state, feed.reason) == (FeedState.REPLAYING, f"resuming after batch {last}")
    return feed


def test_resumed_connection_that_repeats_the_last_batch_is_live() -> None:
    feed = resuming(4)
    assert feed.receive(batch(4)) == []
    assert (feed.state, feed.reason) == (FeedState.LIVE, "")
    assert feed.receive(batch(5)) == applied(5)


def test_resumed_connection_without_the_last_batch_is_behind_a_hole() -> None:
    feed = resuming(4)
    assert feed.receive(batch(5)) == [Demote(), *applied(5)]
    assert feed.reason == "batch 4 is gone: maybe another publisher"
    assert feed.receive(batch(6)) == applied(6)


def test_resumed_connection_that_stays_silent_is_behind_a_hole() -> None:
    feed = resuming(4)
    assert feed.quiet() == [Demote()]
    assert feed.reason == "batch 4 did not come again: another publisher?"
    assert feed.receive(batch(5)) == applied(5)


def test_resumed_connection_to_a_restarted_publisher_starts_over() -> None:
    feed = resuming(4)
    assert feed.receive(batch(4, "new")) == [Forget(), *applied(4, life="new")]
    assert (feed.state, feed.restarts) == (FeedState.DEGRADED, 1)
    again = resuming(4)
    assert again.receive(batch(0, "new")) == [Forget(), *applied(0, life="new")]
    assert (again.state, again.reason) == (FeedState.LIVE, "")


def test_gap_on_a_resuming_feed_is_a_hole() -> None:
    feed = live(4, Recovery.RESUME, why_lost="they were skipped")
    assert feed.receive(batch(7)) == [Demote(), *applied(7)]
    assert feed.reason == "batches 5 to 6 are lost: they were skipped"


def test_resuming_feed_is_degraded_until_it_knows_the_first_batch() -> None:
    feed = Feed(Recovery.RESUME)
    feed.connect()
    assert (feed.state, feed.reason.partition(":")[0]) == (
        FeedState.DEGRADED,
        "nothing was received yet",
    )
    assert feed.receive(batch(3)) == applied(3)
    assert feed.reason == "batches before 3 are unknown"


def test_silence_during_a_snapshot_changes_nothing() -> None:
    feed = live(4, Recovery.RESUME)
    feed.snapshot(6, 7, unknown_before=0)
    assert feed.quiet() == []
    assert feed.state is FeedState.REPLAYING


def late() -> Feed:
    """A feed whose snapshot of batches 6 to 9 does not end."""
    feed = live(4, Recovery.RESUME)
    feed.snapshot(6, 9, unknown_before=0)
    assert feed.receive(batch(6)) == applied(6)
    assert feed.note_late_snapshot() == []
    assert (feed.state, feed.reason, feed.certain) == (FeedState.DEGRADED, SNAPSHOT_LATE, False)
    return feed


def test_late_snapshot_is_live_once_it_ends() -> None:
    feed = late()
    assert feed.receive(batch(7)) == applied(7)
    assert feed.receive(batch(8)) == applied(8)
    assert (feed.reason, feed.certain) == (SNAPSHOT_LATE, False)
    assert feed.receive(batch(9)) == applied(9)
    assert (feed.state, feed.reason, feed.certain) == (FeedState.LIVE, "", True)


def test_snapshot_begun_instead_of_a_late_one_has_to_end() -> None:
    feed = late()
    assert feed.snapshot(20, 21, unknown_before=0) == [Forget()]
    assert (feed.state, feed.reason, feed.certain) == (FeedState.DEGRADED, SNAPSHOT_LATE, False)
    feed.receive(batch(20))
    feed.receive(batch(21))
    assert (feed.state, feed.certain) == (FeedState.LIVE, True)


def test_hole_in_a_late_snapshot_leaves_it_uncertain() -> None:
    feed = late()
    assert feed.receive(batch(8)) == [Demote(), *applied(8)]
    feed.heal()
    assert (feed.state, feed.reason, feed.certain) == (FeedState.DEGRADED, SNAPSHOT_LATE, False)


def test_new_connection_ends_a_late_snapshot() -> None:
    feed = late()
    feed.disconnect()
    feed.connect()
    assert (feed.state, feed.is_in_snapshot) == (FeedState.REPLAYING, False)
    feed.receive(batch(6))
    assert feed.certain


def test_snapshot_is_late_only_while_it_lasts() -> None:
    feed = live(4, Recovery.RESUME)
    assert feed.note_late_snapshot() == []
    assert feed.certain


def test_queued_feed_is_live_again_with_the_next_batch_after_a_reconnection() -> None:
    feed = live(4, Recovery.QUEUED)
    feed.disconnect()
    assert feed.connect() == []
    assert not feed.certain
    assert feed.receive(batch(5)) == applied(5)
    assert (feed.state, feed.reason) == (FeedState.LIVE, "")


def test_queued_feed_stays_uncertain_while_the_queue_is_empty() -> None:
    feed = live(4, Recovery.QUEUED)
    feed.disconnect()
    feed.connect()
    assert (feed.quiet(), feed.certain) == ([], False)


def test_queued_feed_starts_over_with_a_restarted_publisher() -> None:
    feed = live(4, Recovery.QUEUED)
    feed.disconnect()
    feed.connect()
    assert feed.receive(batch(0, "new")) == [Forget(), *applied(0, life="new")]


def test_gap_in_a_queued_feed_is_attributed_to_another_consumer() -> None:
    feed = live(4, Recovery.QUEUED, why_lost="another consumer drains it")
    assert feed.receive(batch(7)) == [Demote(), *applied(7)]
    assert feed.reason == "batches 5 to 6 are lost: another consumer drains it"


def test_internal_error_stays_a_hole_without_replays() -> None:
    feed = live(2, Recovery.RESUME)
    feed.fail("an error")
    feed.connect()
    feed.receive(batch(2))
    assert (feed.state, feed.reason) == (FeedState.DEGRADED, "an error")
    assert feed.ask_everything() == []
