"""One test for each row of the feed's table where there are no replays, and where rows meet."""

from kvstate.feeds.feed import Demote, Feed, Forget, State
from kvstate.feeds.feed_sources import Recovery
from tests.kvstate.feeding import applied, batch, live


def test_live_batch_beyond_n_is_a_hole_without_replay() -> None:
    feed = live(2, Recovery.NONE)
    assert feed.received(batch(5)) == [Demote(), *applied(5)]
    assert feed.state is State.DEGRADED
    assert feed.reason == "batches 3 to 4 are lost: no replay endpoint"
    assert feed.certain


def test_restart_without_replay_starts_over_with_the_batch_that_told() -> None:
    feed = live(4, Recovery.NONE)
    assert feed.received(batch(1, "new")) == [Forget(), *applied(1, life="new")]
    assert feed.state is State.DEGRADED
    assert feed.reason.startswith("publisher restarted: batch 1 came again with different content")
    again = live(4, Recovery.NONE)
    assert again.received(batch(0, "new")) == [Forget(), *applied(0, life="new")]
    assert (again.state, again.reason) == (State.LIVE, "")


def test_reconnection_without_replay_is_a_hole() -> None:
    feed = live(2, Recovery.NONE)
    feed.disconnected()
    assert feed.connected() == [Demote()]
    assert feed.state is State.DEGRADED
    assert feed.reason == "the connection was lost and there is no replay endpoint"
    assert feed.received(batch(3)) == applied(3)


def test_late_join_without_replay_says_so() -> None:
    feed = Feed(Recovery.NONE)
    assert feed.connected() == []
    assert feed.reason == "no replay endpoint: blocks stored before this connection are unknown"
    assert feed.received(batch(7)) == applied(7)
    assert feed.state is State.DEGRADED


def resuming(last: int) -> Feed:
    """A feed over a connection that resumes, lost after batch `last` and made again."""
    feed = live(last, Recovery.RESUME)
    feed.disconnected()
    assert feed.connected() == []
    assert (feed.state, feed.reason) == (State.REPLAYING, f"resuming after batch {last}")
    return feed


def test_resumed_connection_that_repeats_the_last_batch_missed_nothing() -> None:
    feed = resuming(4)
    assert feed.received(batch(4)) == []
    assert (feed.state, feed.reason) == (State.LIVE, "")
    assert feed.received(batch(5)) == applied(5)


def test_resumed_connection_without_the_last_batch_is_behind_a_hole() -> None:
    feed = resuming(4)
    assert feed.received(batch(5)) == [Demote(), *applied(5)]
    assert feed.reason == "batch 4 is gone: maybe another publisher"
    assert feed.received(batch(6)) == applied(6)


def test_resumed_connection_that_stays_silent_is_behind_a_hole() -> None:
    feed = resuming(4)
    assert feed.quiet() == [Demote()]
    assert feed.reason == "batch 4 did not come again: another publisher?"
    assert feed.received(batch(5)) == applied(5)


def test_resumed_connection_to_a_restarted_publisher_starts_over() -> None:
    feed = resuming(4)
    assert feed.received(batch(4, "new")) == [Forget(), *applied(4, life="new")]
    assert (feed.state, feed.restarts) == (State.DEGRADED, 1)
    again = resuming(4)
    assert again.received(batch(0, "new")) == [Forget(), *applied(0, life="new")]
    assert (again.state, again.reason) == (State.LIVE, "")


def test_gap_on_a_connection_that_resumes_is_a_hole() -> None:
    feed = live(4, Recovery.RESUME)
    assert feed.received(batch(7)) == [Demote(), *applied(7)]
    assert feed.reason == "batches 5 to 6 are lost: the publisher skipped them"


def test_connection_that_resumes_knows_nothing_before_its_first_batch() -> None:
    feed = Feed(Recovery.RESUME)
    feed.connected()
    assert (feed.state, feed.reason.partition(":")[0]) == (
        State.DEGRADED,
        "nothing was received yet",
    )
    assert feed.received(batch(3)) == applied(3)
    assert feed.reason == "batches before 3 are unknown"


def test_silence_during_a_snapshot_waits_for_the_rest() -> None:
    feed = live(4, Recovery.RESUME)
    feed.snapshot(6, 7, unknown_before=0)
    assert feed.quiet() == []
    assert feed.state is State.REPLAYING


def test_queue_that_waits_at_the_publisher_loses_nothing_with_the_connection() -> None:
    feed = live(4, Recovery.QUEUED)
    feed.disconnected()
    assert feed.connected() == []
    assert not feed.certain
    assert feed.received(batch(5)) == applied(5)
    assert (feed.state, feed.reason) == (State.LIVE, "")


def test_queue_that_stays_empty_proves_nothing() -> None:
    feed = live(4, Recovery.QUEUED)
    feed.disconnected()
    feed.connected()
    assert (feed.quiet(), feed.certain) == ([], False)


def test_queue_of_a_restarted_publisher_begins_anew() -> None:
    feed = live(4, Recovery.QUEUED)
    feed.disconnected()
    feed.connected()
    assert feed.received(batch(0, "new")) == [Forget(), *applied(0, life="new")]


def test_gap_in_a_queue_tells_of_another_consumer() -> None:
    feed = live(4, Recovery.QUEUED)
    assert feed.received(batch(7)) == [Demote(), *applied(7)]
    assert "another consumer drains this worker" in feed.reason


def test_error_of_our_own_stays_a_hole_where_nothing_can_be_asked_for() -> None:
    feed = live(2, Recovery.RESUME)
    feed.failed("an error")
    feed.connected()
    feed.received(batch(2))
    assert (feed.state, feed.reason) == (State.DEGRADED, "an error")
    assert feed.ask_everything() == []
