"""One test for each row of the feed's table where replays can be asked for, and where rows meet."""

from kvstate.feeds.feed import (
    OTHER_PUBLISHER,
    Demote,
    Effect,
    Feed,
    FeedState,
    Forget,
    RequestReplay,
)
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.held_batches import MAX_HELD_BATCHES
from kvstate.feeds.replay_trust import MAX_RESTARTS_IN_A_ROW
from kvstate.feeds.stamps import Stamps
from tests.kvstate.feeding import applied, batch, live, undecodable


def test_first_connection_replays_from_0() -> None:
    feed = Feed(Recovery.REPLAY)
    assert feed.connect() == [RequestReplay(0)]
    assert (feed.state, feed.certain) == (FeedState.REPLAYING, False)
    assert feed.receive_replayed(batch(0)) == applied(0)
    assert feed.end_replay() == []
    assert (feed.state, feed.certain, feed.replays) == (FeedState.LIVE, True, 1)


def test_publisher_without_history_is_live_at_once() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connect()
    assert feed.end_replay() == []
    assert (feed.state, feed.last_sequence) == (FeedState.LIVE, None)
    assert feed.receive(batch(0)) == applied(0)


def test_live_batch_beyond_n_is_held_and_the_gap_is_replayed() -> None:
    feed = live(2)
    assert feed.receive(batch(5)) == [RequestReplay(2)]
    assert (feed.state, feed.reason) == (FeedState.REPLAYING, "batches 3 to 4 were missed")
    assert feed.receive_replayed(batch(2)) == []
    assert feed.receive_replayed(batch(3)) == applied(3)
    assert feed.receive_replayed(batch(4)) == applied(4)
    assert feed.end_replay() == applied(5)
    assert (feed.state, feed.gaps) == (FeedState.LIVE, 1)


def test_live_batch_before_n_with_another_stamp_is_a_restart() -> None:
    feed = live(4)
    assert feed.receive(batch(1, "new")) == [Forget(), RequestReplay(0)]
    assert (feed.state, feed.restarts, feed.last_sequence) == (FeedState.REPLAYING, 1, None)
    assert feed.receive_replayed(batch(0, "new")) == applied(0, life="new")
    assert feed.receive_replayed(batch(1, "new")) == applied(1, life="new")
    assert feed.end_replay() == []
    assert (feed.state, feed.last_sequence) == (FeedState.LIVE, 1)


def test_replayed_batch_n_after_one_that_is_known_is_applied() -> None:
    feed = live(2)
    feed.disconnect()
    assert feed.connect() == [RequestReplay(2)]
    assert feed.receive_replayed(batch(2)) == []
    assert feed.receive_replayed(batch(3)) == applied(3)
    assert feed.end_replay() == []
    assert feed.state is FeedState.LIVE


def test_replayed_batch_n_without_proof_of_the_same_publisher_is_behind_a_hole() -> None:
    feed = live(2)
    feed.disconnect()
    feed.connect()
    assert feed.receive_replayed(batch(3, "new")) == [Demote(), *applied(3, life="new")]
    assert feed.end_replay() == []
    assert feed.state is FeedState.DEGRADED
    assert feed.reason == "batch 2 is gone: maybe another publisher"


def test_replayed_batch_beyond_n_is_behind_a_hole() -> None:
    feed = live(2)
    feed.disconnect()
    feed.connect()
    assert feed.receive_replayed(batch(7)) == [Demote(), *applied(7)]
    assert feed.end_replay() == []
    assert feed.state is FeedState.DEGRADED
    assert feed.reason == "batches 3 to 6 are lost: no longer in the publisher's buffer"


def test_replayed_batch_before_n_with_another_stamp_is_a_restart() -> None:
    feed = live(2)
    feed.disconnect()
    feed.connect()
    assert feed.receive_replayed(batch(2, "new")) == [Forget(), RequestReplay(0)]
    assert feed.reason == "publisher restarted: batch 2 was replayed with different content"


def test_replay_that_ends_before_the_last_batch_is_a_restart() -> None:
    feed = live(2)
    feed.disconnect()
    feed.connect()
    assert feed.end_replay() == [Forget(), RequestReplay(0)]
    assert feed.reason == "publisher restarted: the publisher counts from 0 again"


def test_replay_that_ends_before_the_held_batches_is_continued() -> None:
    feed = live(2)
    feed.receive(batch(9))
    feed.receive_replayed(batch(2))
    feed.receive_replayed(batch(3))
    assert feed.end_replay() == [RequestReplay(3)]
    assert (feed.state, feed.reason) == (FeedState.REPLAYING, "more was missed meanwhile")


def test_held_batch_that_does_not_follow_is_behind_a_hole_when_the_replay_ends() -> None:
    feed = live(2)
    feed.receive(batch(4))
    feed.receive(batch(5))
    feed.receive_replayed(batch(2))
    assert feed.end_replay() == [Demote(), *applied(4, 5)]
    assert feed.reason == "batches 3 to 3 are lost: missing in the replay"


def test_held_batches_are_behind_a_hole_when_the_replay_fails() -> None:
    feed = live(2)
    feed.receive(batch(4))
    assert feed.fail_replay("no answer") == [Demote(), Demote(), *applied(4)]
    assert feed.state is FeedState.DEGRADED
    assert feed.reason == "batches 3 to 3 are lost: replay failed: no answer"


def test_first_replay_that_fails_leaves_the_past_unknown() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connect()
    feed.receive(batch(5))
    assert feed.fail_replay("no answer") == applied(5)
    assert feed.state is FeedState.DEGRADED
    assert feed.reason == "replay failed: no answer; earlier blocks are unknown"


def test_reconnection_replays_from_the_last_batch() -> None:
    feed = live(2)
    assert feed.disconnect() == []
    assert (feed.state, feed.reason, feed.certain) == (FeedState.STALE, "connection lost", False)
    assert feed.receive(batch(3)) == []
    assert feed.connect() == [RequestReplay(2)]
    assert (feed.state, feed.reason, feed.certain) == (FeedState.REPLAYING, "connected", False)


def test_silence_requests_a_replay_from_the_last_batch() -> None:
    feed = live(2)
    assert feed.quiet() == [RequestReplay(2)]
    assert (feed.state, feed.certain) == (FeedState.LIVE, True)
    assert feed.receive_replayed(batch(2)) == []
    assert feed.receive_replayed(batch(3)) == applied(3)
    assert feed.end_replay() == []
    assert (feed.state, feed.last_sequence) == (FeedState.LIVE, 3)


def test_silence_requests_nothing_without_a_connection_or_replays() -> None:
    empty: Feed = Feed(Recovery.REPLAY)
    stale = live(2)
    stale.disconnect()
    assert [empty.quiet(), stale.quiet(), live(2, Recovery.NONE).quiet()] == [[], [], []]


def test_silence_after_a_connection_requests_one_replay_from_0() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connect()
    feed.end_replay()
    assert (feed.quiet(), feed.quiet()) == ([RequestReplay(0)], [])
    feed.disconnect()
    feed.connect()
    feed.end_replay()
    assert (feed.quiet(), feed.quiet()) == ([RequestReplay(0)], [])


def test_long_silence_requests_another_replay_from_0() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connect()
    feed.end_replay()
    feed.quiet()
    feed.end_replay()
    assert feed.quiet() == []
    assert feed.quiet(for_long=True) == [RequestReplay(0)]
    assert feed.receive_replayed(batch(0)) == applied(0)
    assert (feed.end_replay(), feed.state) == ([], FeedState.LIVE)


def test_silence_of_a_degraded_feed_requests_a_replay() -> None:
    feed = live(2)
    feed.receive(undecodable(3))
    assert feed.quiet() == [RequestReplay(3)]
    assert feed.receive_replayed(undecodable(3)) == []
    assert feed.end_replay() == []
    assert (feed.state, feed.reason) == (
        FeedState.DEGRADED,
        "batch 3 could not be decoded: no batch",
    )


def test_failed_probe_leaves_the_feed_live() -> None:
    feed = live(2)
    feed.quiet()
    assert feed.fail_replay("no answer") == []
    assert feed.state is FeedState.LIVE


def test_probe_overtaken_by_the_live_stream_is_no_restart() -> None:
    feed = live(2)
    feed.quiet()
    assert feed.receive(batch(3)) == applied(3)
    assert feed.receive(batch(4)) == applied(4)
    assert feed.receive_replayed(batch(4)) == []  # a short buffer: batch 2 is gone
    assert feed.end_replay() == []
    assert (feed.state, feed.restarts) == (FeedState.LIVE, 0)


def test_probe_detects_a_restart() -> None:
    feed = live(2)
    feed.quiet()
    assert feed.end_replay() == [Forget(), RequestReplay(0)]


def test_late_join_is_degraded_and_names_its_first_batch() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connect()
    assert feed.receive_replayed(batch(7)) == applied(7)
    assert feed.end_replay() == []
    assert (feed.state, feed.certain) == (FeedState.DEGRADED, True)
    assert feed.reason == "batches before 7 are no longer available"


def test_live_batch_after_an_empty_replay_is_not_taken_for_the_first() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connect()
    feed.receive(batch(5))
    assert feed.end_replay() == applied(5)
    assert (feed.state, feed.reason) == (FeedState.DEGRADED, "batches before 5 are unknown")


def test_gap_before_the_first_batch_is_replayed_from_0() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connect()
    feed.end_replay()
    assert feed.receive(batch(1)) == [RequestReplay(0)]


def test_live_batches_during_a_replay_keep_their_order() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connect()
    assert [feed.receive(batch(number)) for number in (2, 3)] == [[], []]
    effects = [effect for number in range(4) for effect in feed.receive_replayed(batch(number))]
    assert effects == applied(0, 1, 2, 3)
    assert feed.receive(batch(4)) == []
    assert feed.end_replay() == applied(4)


def test_restart_during_a_replay_is_detected_in_the_held_batches() -> None:
    feed = live(4)
    feed.receive(batch(6))
    for number in (0, 1):
        feed.receive(batch(number, "new"))
    feed.receive_replayed(batch(4))
    feed.receive_replayed(batch(5))
    assert feed.end_replay() == [*applied(6), Forget(), RequestReplay(0)]
    assert feed.receive_replayed(batch(0, "new")) == applied(0, life="new")
    assert feed.end_replay() == applied(1, life="new")


def test_restart_in_the_held_batches_is_detected_after_a_failed_replay() -> None:
    feed = live(4)
    feed.receive(batch(6))
    feed.receive(batch(0, "new"))
    assert feed.fail_replay("silent") == [
        Demote(),
        Demote(),
        *applied(6),
        Forget(),
        RequestReplay(0),
    ]


def test_undecodable_held_batch_is_a_hole() -> None:
    feed = live(2)
    feed.receive(batch(4))
    feed.receive(undecodable(5))
    feed.receive_replayed(batch(2))
    feed.receive_replayed(batch(3))
    assert feed.end_replay() == [*applied(4), Demote()]
    assert feed.state is FeedState.DEGRADED


def test_restart_is_detected_behind_an_undecodable_batch() -> None:
    feed = live(2)
    feed.receive(undecodable(3))
    feed.disconnect()
    assert feed.connect() == [RequestReplay(3)]
    assert feed.receive_replayed(batch(3, "new")) == [Forget(), RequestReplay(0)]


def test_held_batches_beyond_the_limit_are_requested_by_replay() -> None:
    feed = live(0)
    feed.receive(batch(2))
    overflow = 2 + MAX_HELD_BATCHES
    for number in range(3, overflow + 1):
        feed.receive(batch(number))
    feed.receive_replayed(batch(0))
    feed.receive_replayed(batch(1))
    assert feed.end_replay() == [RequestReplay(1)]  # batch 2 did not fit
    feed.receive_replayed(batch(1))
    assert feed.receive_replayed(batch(2)) == applied(2)
    assert feed.end_replay() == applied(*range(3, overflow + 1))
    assert feed.state is FeedState.LIVE


def test_disconnection_drops_the_held_batches() -> None:
    feed = live(2)
    feed.receive(batch(9))
    feed.disconnect("router stopped listening")
    assert feed.reason == "router stopped listening"
    feed.connect()
    feed.receive_replayed(batch(2))
    assert feed.end_replay() == []
    assert feed.last_sequence == 2


def test_healing_during_a_replay_waits_for_its_end() -> None:
    feed = live(2)
    feed.receive(undecodable(3))
    feed.receive(batch(5))
    feed.heal()
    assert not feed.certain
    feed.receive_replayed(undecodable(3))
    feed.receive_replayed(batch(4))
    assert feed.end_replay() == applied(5)
    assert feed.state is FeedState.LIVE


def test_batch_replayed_again_without_a_known_stamp_is_dropped() -> None:
    feed = live(2, stamps=Stamps(1))
    feed.quiet()
    assert feed.receive_replayed(batch(0)) == []
    assert feed.receive_replayed(batch(2)) == []
    assert feed.end_replay() == []


def replay_of_another(feed: Feed, last: int) -> list[Effect]:
    """The effects of a replay by another publisher."""
    effects = [
        each for number in range(last + 1) for each in feed.receive_replayed(batch(number, "new"))
    ]
    return effects + feed.end_replay()


def swapped(last: int = 9) -> Feed:
    """A feed whose replay endpoint is another worker's, which has more batches."""
    feed = Feed(Recovery.REPLAY)
    feed.connect()
    replay_of_another(feed, last)
    feed.receive(batch(3))
    for _ in range(MAX_RESTARTS_IN_A_ROW - 1):
        replay_of_another(feed, last)
    assert (feed.state, feed.reason) == (FeedState.DEGRADED, OTHER_PUBLISHER)
    return feed


def test_replays_of_another_worker_degrade_the_feed_and_end() -> None:
    feed = swapped()
    assert (feed.restarts, feed.replays) == (3, 3)
    assert feed.receive(batch(4)) == applied(4)
    assert feed.receive(batch(7)) == [Demote(), *applied(7)]
    assert (feed.quiet(), feed.quiet(for_long=True), feed.ask_everything()) == ([], [], [])
    assert replay_of_another(feed, 9) == []  # a replay that was under way
    feed.heal()
    assert (feed.state, feed.reason) == (FeedState.DEGRADED, OTHER_PUBLISHER)


def test_replays_of_another_worker_leave_only_live_batches() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connect()
    replay_of_another(feed, 9)
    assert feed.receive(batch(3)) == [Forget(), RequestReplay(0)]
    assert replay_of_another(feed, 9)[-2:] == [Forget(), RequestReplay(0)]
    assert replay_of_another(feed, 9)[-2:] == [Forget(), *applied(3)]
    assert feed.last_sequence == 3


def test_replays_of_another_worker_with_fewer_batches_degrade_the_feed() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connect()
    replay_of_another(feed, 1)
    for number in range(5, 8):
        assert feed.receive(batch(number)) == [RequestReplay(1)]
        feed.receive_replayed(batch(1, "new"))
        feed.end_replay()
        assert feed.quiet() == [RequestReplay(number)]
        asked = feed.end_replay()
        assert asked[0] == Forget()
        replay_of_another(feed, 1)
    assert (feed.state, feed.reason) == (FeedState.DEGRADED, OTHER_PUBLISHER)


def test_reconnection_of_a_swapped_feed_requests_replays_again() -> None:
    feed = swapped()
    feed.disconnect()
    assert feed.connect() == [RequestReplay(3)]
    assert feed.receive_replayed(batch(3)) == []
    assert feed.receive_replayed(batch(4)) == applied(4)
    assert feed.end_replay() == []
    assert feed.ask_everything() == [RequestReplay(0)]
    for number in range(5):
        feed.receive_replayed(batch(number))
    assert (feed.end_replay(), feed.state, feed.reason) == ([], FeedState.LIVE, "")


def test_repeated_restarts_with_full_replays_leave_the_feed_live() -> None:
    feed = live(9)
    for life in range(5):
        assert feed.receive(batch(1, f"life {life}")) == [Forget(), RequestReplay(0)]
        for number in range(10):
            feed.receive_replayed(batch(number, f"life {life}"))
        assert (feed.end_replay(), feed.state) == ([], FeedState.LIVE)


def test_repeated_restarts_with_failed_replays_keep_their_own_reason() -> None:
    feed = live(9)
    for life in range(5):
        feed.receive(batch(1, f"life {life}"))
        feed.fail_replay("silent")
        feed.receive(batch(9, f"life {life}"))
        feed.fail_replay("silent")
    assert feed.reason == "batches 2 to 8 are lost: replay failed: silent"


def degraded() -> Feed:
    """A feed whose replay of a gap failed."""
    feed = live(2)
    feed.receive(batch(5))
    feed.fail_replay("silent")
    assert (feed.state, feed.wants_everything) == (FeedState.DEGRADED, True)
    return feed


def test_ask_everything_replays_from_0_after_a_failed_replay() -> None:
    feed = degraded()
    assert feed.ask_everything() == [RequestReplay(0)]
    assert feed.receive(batch(6)) == applied(6)
    assert feed.receive_replayed(batch(0)) == [Forget(), *applied(0)]
    assert feed.receive(batch(7)) == []
    for number in range(1, 7):
        assert feed.receive_replayed(batch(number)) == applied(number)
    assert feed.end_replay() == applied(7)
    assert (feed.state, feed.reason, feed.wants_everything) == (FeedState.LIVE, "", False)


def test_ask_everything_sends_one_request_until_it_is_answered() -> None:
    feed = degraded()
    assert (feed.ask_everything(), feed.ask_everything()) == ([RequestReplay(0)], [])
    feed.fail_replay("silent again")
    assert feed.ask_everything() == [RequestReplay(0)]


def test_ask_everything_requests_a_batch_that_overtook_the_answer() -> None:
    feed = degraded()
    feed.ask_everything()
    assert feed.receive(batch(6)) == applied(6)
    for number in range(6):  # sent before batch 6
        feed.receive_replayed(batch(number))
    assert feed.end_replay() == [RequestReplay(5)]
    assert not feed.certain
    assert feed.receive_replayed(batch(5)) == []
    assert feed.receive_replayed(batch(6)) == applied(6)
    assert (feed.end_replay(), feed.state) == ([], FeedState.LIVE)


def test_ask_everything_requests_a_lost_overtaking_batch_once() -> None:
    feed = degraded()
    feed.ask_everything()
    feed.receive(batch(6))
    feed.receive_replayed(batch(0, "new"))
    assert feed.end_replay() == [RequestReplay(0)]
    feed.receive_replayed(batch(0, "new"))
    assert (feed.end_replay(), feed.state) == ([], FeedState.LIVE)


def test_internal_error_is_a_hole_that_ask_everything_may_mend() -> None:
    feed = live(2)
    assert feed.fail("an error") == [Demote()]
    assert (feed.state, feed.reason) == (FeedState.STALE, "an error")
    assert feed.connect() == [RequestReplay(2)]
    feed.receive_replayed(batch(2))
    feed.end_replay()
    assert (feed.state, feed.reason) == (FeedState.DEGRADED, "an error")
    assert feed.ask_everything() == [RequestReplay(0)]


def test_ask_everything_in_vain_leaves_the_feed_as_it_is() -> None:
    feed = degraded()
    feed.ask_everything()
    assert feed.fail_replay("silent again") == []
    assert (feed.state, feed.wants_everything) == (FeedState.DEGRADED, True)
    assert feed.receive(batch(6)) == applied(6)


def test_ask_everything_with_an_empty_answer_is_a_restart() -> None:
    feed = degraded()
    feed.ask_everything()
    assert feed.end_replay() == [Forget(), RequestReplay(0)]


def test_ask_everything_needs_a_failed_replay_and_a_connection() -> None:
    healthy, lost = live(2), degraded()
    lost.disconnect()
    assert (healthy.ask_everything(), lost.ask_everything()) == ([], [])
    assert degraded().quiet() == [RequestReplay(5)]


def test_silence_requests_nothing_while_everything_is_requested() -> None:
    feed = degraded()
    feed.ask_everything()
    assert feed.quiet() == []


def test_ask_everything_requests_nothing_after_healing() -> None:
    feed = degraded()
    feed.heal()
    assert (feed.state, feed.ask_everything()) == (FeedState.LIVE, [])


def test_publisher_that_outruns_a_probe_is_not_taken_for_restarted() -> None:
    feed = live(2, stamps=Stamps(2))
    feed.receive(batch(3))
    assert feed.quiet() == [RequestReplay(3)]
    for number in (4, 5, 6):  # so many that the stamp of batch 3 is no longer kept
        assert feed.receive(batch(number)) == applied(number)
    assert feed.receive_replayed(batch(3)) == []
    assert feed.end_replay() == []
    assert (feed.state, feed.restarts, feed.last_sequence) == (FeedState.LIVE, 0, 6)
