"""One test for each row of the feed's table where replays can be asked for, and where rows meet."""

import pytest

from kvstate.feeds import feed as feed_module
from kvstate.feeds.feed import Demote, Effect, Feed, Forget, Replay, State
from kvstate.feeds.feed_sources import Recovery
from tests.kvstate.feeding import applied, batch, live, undecodable


def test_first_connection_replays_from_0() -> None:
    feed = Feed(Recovery.REPLAY)
    assert feed.connected() == [Replay(0)]
    assert (feed.state, feed.certain) == (State.REPLAYING, False)
    assert feed.replayed(batch(0)) == applied(0)
    assert feed.replay_ended() == []
    assert (feed.state, feed.certain, feed.replays) == (State.LIVE, True, 1)


def test_publisher_without_history_is_live_at_once() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connected()
    assert feed.replay_ended() == []
    assert (feed.state, feed.last_sequence) == (State.LIVE, None)
    assert feed.received(batch(0)) == applied(0)


def test_live_batch_beyond_n_is_held_and_the_gap_is_replayed() -> None:
    feed = live(2)
    assert feed.received(batch(5)) == [Replay(2)]
    assert (feed.state, feed.reason) == (State.REPLAYING, "batches 3 to 4 were missed")
    assert feed.replayed(batch(2)) == []
    assert feed.replayed(batch(3)) == applied(3)
    assert feed.replayed(batch(4)) == applied(4)
    assert feed.replay_ended() == applied(5)
    assert (feed.state, feed.gaps) == (State.LIVE, 1)


def test_live_batch_before_n_with_another_stamp_is_a_restart() -> None:
    feed = live(4)
    assert feed.received(batch(1, "new")) == [Forget(), Replay(0)]
    assert (feed.state, feed.restarts, feed.last_sequence) == (State.REPLAYING, 1, None)
    assert feed.replayed(batch(0, "new")) == applied(0, life="new")
    assert feed.replayed(batch(1, "new")) == applied(1, life="new")
    assert feed.replay_ended() == []
    assert (feed.state, feed.last_sequence) == (State.LIVE, 1)


def test_replayed_batch_n_after_one_that_is_known_is_applied() -> None:
    feed = live(2)
    feed.disconnected()
    assert feed.connected() == [Replay(2)]
    assert feed.replayed(batch(2)) == []
    assert feed.replayed(batch(3)) == applied(3)
    assert feed.replay_ended() == []
    assert feed.state is State.LIVE


def test_replayed_batch_n_without_proof_of_the_same_publisher_is_behind_a_hole() -> None:
    feed = live(2)
    feed.disconnected()
    feed.connected()
    assert feed.replayed(batch(3, "new")) == [Demote(), *applied(3, life="new")]
    assert feed.replay_ended() == []
    assert feed.state is State.DEGRADED
    assert feed.reason == "batch 2 is gone: maybe another publisher"


def test_replayed_batch_beyond_n_is_behind_a_hole() -> None:
    feed = live(2)
    feed.disconnected()
    feed.connected()
    assert feed.replayed(batch(7)) == [Demote(), *applied(7)]
    assert feed.replay_ended() == []
    assert feed.state is State.DEGRADED
    assert feed.reason == "batches 3 to 6 are lost: no longer in the publisher's buffer"


def test_replayed_batch_before_n_with_another_stamp_is_a_restart() -> None:
    feed = live(2)
    feed.disconnected()
    feed.connected()
    assert feed.replayed(batch(2, "new")) == [Forget(), Replay(0)]
    assert feed.reason == "publisher restarted: batch 2 was replayed with different content"


def test_replay_that_ends_before_the_last_batch_is_a_restart() -> None:
    feed = live(2)
    feed.disconnected()
    feed.connected()
    assert feed.replay_ended() == [Forget(), Replay(0)]
    assert feed.reason == "publisher restarted: the publisher counts from 0 again"


def test_replay_that_ends_short_of_what_is_held_is_asked_on() -> None:
    feed = live(2)
    feed.received(batch(9))
    feed.replayed(batch(2))
    feed.replayed(batch(3))
    assert feed.replay_ended() == [Replay(3)]
    assert (feed.state, feed.reason) == (State.REPLAYING, "more was missed meanwhile")


def test_held_batch_that_does_not_follow_is_behind_a_hole_when_the_replay_ends() -> None:
    feed = live(2)
    feed.received(batch(4))
    feed.received(batch(5))
    feed.replayed(batch(2))
    assert feed.replay_ended() == [Demote(), *applied(4, 5)]
    assert feed.reason == "batches 3 to 3 are lost: missing in the replay"


def test_held_batches_are_behind_a_hole_when_the_replay_fails() -> None:
    feed = live(2)
    feed.received(batch(4))
    assert feed.replay_failed("no answer") == [Demote(), Demote(), *applied(4)]
    assert feed.state is State.DEGRADED
    assert feed.reason == "batches 3 to 3 are lost: replay failed: no answer"


def test_first_replay_that_fails_leaves_the_past_unknown() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connected()
    feed.received(batch(5))
    assert feed.replay_failed("no answer") == applied(5)
    assert feed.state is State.DEGRADED
    assert feed.reason == "replay failed: no answer; earlier blocks are unknown"


def test_reconnection_replays_what_may_be_missing() -> None:
    feed = live(2)
    assert feed.disconnected() == []
    assert (feed.state, feed.reason, feed.certain) == (State.STALE, "connection lost", False)
    assert feed.received(batch(3)) == []
    assert feed.connected() == [Replay(2)]
    assert (feed.state, feed.reason, feed.certain) == (State.REPLAYING, "connected", False)


def test_silence_asks_once_from_the_last_batch() -> None:
    feed = live(2)
    assert feed.quiet() == [Replay(2)]
    assert (feed.state, feed.certain) == (State.LIVE, True)
    assert feed.replayed(batch(2)) == []
    assert feed.replayed(batch(3)) == applied(3)
    assert feed.replay_ended() == []
    assert (feed.state, feed.last_sequence) == (State.LIVE, 3)


def test_nothing_to_probe_without_batches_replay_or_connection() -> None:
    empty: Feed = Feed(Recovery.REPLAY)
    stale = live(2)
    stale.disconnected()
    assert [empty.quiet(), stale.quiet(), live(2, Recovery.NONE).quiet()] == [[], [], []]


def test_silence_after_a_connection_asks_whether_a_batch_slipped_through() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connected()
    feed.replay_ended()
    assert (feed.quiet(), feed.quiet()) == ([Replay(0)], [])
    feed.disconnected()
    feed.connected()
    feed.replay_ended()
    assert (feed.quiet(), feed.quiet()) == ([Replay(0)], [])


def test_long_silence_asks_again_even_if_nothing_was_ever_heard() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connected()
    feed.replay_ended()
    feed.quiet()
    feed.replay_ended()
    assert feed.quiet() == []
    assert feed.quiet(for_long=True) == [Replay(0)]
    assert feed.replayed(batch(0)) == applied(0)
    assert (feed.replay_ended(), feed.state) == ([], State.LIVE)


def test_degraded_feed_is_probed_too() -> None:
    feed = live(2)
    feed.received(undecodable(3))
    assert feed.quiet() == [Replay(3)]
    assert feed.replayed(undecodable(3)) == []
    assert feed.replay_ended() == []
    assert (feed.state, feed.reason) == (State.DEGRADED, "batch 3 could not be decoded: no batch")


def test_probe_that_fails_says_nothing() -> None:
    feed = live(2)
    feed.quiet()
    assert feed.replay_failed("no answer") == []
    assert feed.state is State.LIVE


def test_probe_that_the_live_stream_overtakes_is_no_restart() -> None:
    feed = live(2)
    feed.quiet()
    assert feed.received(batch(3)) == applied(3)
    assert feed.received(batch(4)) == applied(4)
    assert feed.replayed(batch(4)) == []  # a short buffer: batch 2 is gone
    assert feed.replay_ended() == []
    assert (feed.state, feed.restarts) == (State.LIVE, 0)


def test_probe_finds_a_restart() -> None:
    feed = live(2)
    feed.quiet()
    assert feed.replay_ended() == [Forget(), Replay(0)]


def test_late_join_says_since_when_it_knows() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connected()
    assert feed.replayed(batch(7)) == applied(7)
    assert feed.replay_ended() == []
    assert (feed.state, feed.certain) == (State.DEGRADED, True)
    assert feed.reason == "batches before 7 are no longer available"


def test_live_batch_behind_an_empty_replay_does_not_pass_for_the_first() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connected()
    feed.received(batch(5))
    assert feed.replay_ended() == applied(5)
    assert (feed.state, feed.reason) == (State.DEGRADED, "batches before 5 are unknown")


def test_gap_before_anything_was_taken_is_replayed_from_0() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connected()
    feed.replay_ended()
    assert feed.received(batch(1)) == [Replay(0)]


def test_live_batches_during_a_replay_keep_their_order() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connected()
    assert [feed.received(batch(number)) for number in (2, 3)] == [[], []]
    effects = [effect for number in range(4) for effect in feed.replayed(batch(number))]
    assert effects == applied(0, 1, 2, 3)
    assert feed.received(batch(4)) == []
    assert feed.replay_ended() == applied(4)


def test_restart_during_a_replay_is_found_among_the_held_batches() -> None:
    feed = live(4)
    feed.received(batch(6))
    for number in (0, 1):
        feed.received(batch(number, "new"))
    feed.replayed(batch(4))
    feed.replayed(batch(5))
    assert feed.replay_ended() == [*applied(6), Forget(), Replay(0)]
    assert feed.replayed(batch(0, "new")) == applied(0, life="new")
    assert feed.replay_ended() == applied(1, life="new")


def test_restart_among_the_held_batches_without_an_answer_to_the_replay() -> None:
    feed = live(4)
    feed.received(batch(6))
    feed.received(batch(0, "new"))
    assert feed.replay_failed("silent") == [Demote(), Demote(), *applied(6), Forget(), Replay(0)]


def test_undecodable_batch_that_was_held_is_a_hole() -> None:
    feed = live(2)
    feed.received(batch(4))
    feed.received(undecodable(5))
    feed.replayed(batch(2))
    feed.replayed(batch(3))
    assert feed.replay_ended() == [*applied(4), Demote()]
    assert feed.state is State.DEGRADED


def test_restart_is_found_behind_an_undecodable_batch() -> None:
    feed = live(2)
    feed.received(undecodable(3))
    feed.disconnected()
    assert feed.connected() == [Replay(3)]
    assert feed.replayed(batch(3, "new")) == [Forget(), Replay(0)]


def test_batches_beyond_what_can_be_held_are_asked_for() -> None:
    feed = live(0)
    feed.received(batch(2))
    overflow = 2 + feed_module.MAX_HELD_BATCHES
    for number in range(3, overflow + 1):
        feed.received(batch(number))
    feed.replayed(batch(0))
    feed.replayed(batch(1))
    assert feed.replay_ended() == [Replay(1)]  # batch 2 did not fit
    feed.replayed(batch(1))
    assert feed.replayed(batch(2)) == applied(2)
    assert feed.replay_ended() == applied(*range(3, overflow + 1))
    assert feed.state is State.LIVE


def test_disconnection_forgets_what_was_held() -> None:
    feed = live(2)
    feed.received(batch(9))
    feed.disconnected("router stopped listening")
    assert feed.reason == "router stopped listening"
    feed.connected()
    feed.replayed(batch(2))
    assert feed.replay_ended() == []
    assert feed.last_sequence == 2


def test_healing_during_a_replay_waits_for_its_end() -> None:
    feed = live(2)
    feed.received(undecodable(3))
    feed.received(batch(5))
    feed.healed()
    assert not feed.certain
    feed.replayed(undecodable(3))
    feed.replayed(batch(4))
    assert feed.replay_ended() == applied(5)
    assert feed.state is State.LIVE


def test_batch_replayed_again_without_a_known_stamp_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_module, "MAX_STAMPS", 1)
    feed = live(2)
    feed.quiet()
    assert feed.replayed(batch(0)) == []
    assert feed.replayed(batch(2)) == []
    assert feed.replay_ended() == []


def replay_of_another(feed: Feed, last: int) -> list[Effect]:
    """The effects of a replay by another publisher."""
    effects = [each for number in range(last + 1) for each in feed.replayed(batch(number, "new"))]
    return effects + feed.replay_ended()


def swapped(last: int = 9) -> Feed:
    """A feed whose replay endpoint is another worker's, which has more batches."""
    feed = Feed(Recovery.REPLAY)
    feed.connected()
    replay_of_another(feed, last)
    feed.received(batch(3))
    for _ in range(feed_module.MAX_RESTARTS_IN_A_ROW - 1):
        replay_of_another(feed, last)
    assert (feed.state, feed.reason) == (State.DEGRADED, feed_module.OTHER_PUBLISHER)
    return feed


def test_replays_of_another_worker_are_told_and_not_asked_for_again() -> None:
    feed = swapped()
    assert (feed.restarts, feed.replays) == (3, 3)
    assert feed.received(batch(4)) == applied(4)
    assert feed.received(batch(7)) == [Demote(), *applied(7)]
    assert (feed.quiet(), feed.quiet(for_long=True), feed.ask_everything()) == ([], [], [])
    assert replay_of_another(feed, 9) == []  # a replay that was under way
    feed.healed()
    assert (feed.state, feed.reason) == (State.DEGRADED, feed_module.OTHER_PUBLISHER)


def test_replays_of_another_worker_leave_only_what_was_heard() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connected()
    replay_of_another(feed, 9)
    assert feed.received(batch(3)) == [Forget(), Replay(0)]
    assert replay_of_another(feed, 9)[-2:] == [Forget(), Replay(0)]
    assert replay_of_another(feed, 9)[-2:] == [Forget(), *applied(3)]
    assert feed.last_sequence == 3


def test_replays_of_another_worker_that_has_less_are_told_too() -> None:
    feed = Feed(Recovery.REPLAY)
    feed.connected()
    replay_of_another(feed, 1)
    for number in range(5, 8):
        assert feed.received(batch(number)) == [Replay(1)]
        feed.replayed(batch(1, "new"))
        feed.replay_ended()
        assert feed.quiet() == [Replay(number)]
        asked = feed.replay_ended()
        assert asked[0] == Forget()
        replay_of_another(feed, 1)
    assert (feed.state, feed.reason) == (State.DEGRADED, feed_module.OTHER_PUBLISHER)


def test_a_new_connection_asks_for_replays_again() -> None:
    feed = swapped()
    feed.disconnected()
    assert feed.connected() == [Replay(3)]
    assert feed.replayed(batch(3)) == []
    assert feed.replayed(batch(4)) == applied(4)
    assert feed.replay_ended() == []
    assert feed.ask_everything() == [Replay(0)]
    for number in range(5):
        feed.replayed(batch(number))
    assert (feed.replay_ended(), feed.state, feed.reason) == ([], State.LIVE, "")


def test_a_publisher_that_restarts_again_and_again_is_believed() -> None:
    feed = live(9)
    for life in range(5):
        assert feed.received(batch(1, f"life {life}")) == [Forget(), Replay(0)]
        for number in range(10):
            feed.replayed(batch(number, f"life {life}"))
        assert (feed.replay_ended(), feed.state) == ([], State.LIVE)


def test_restarts_without_an_answer_say_nothing_of_replays() -> None:
    feed = live(9)
    for life in range(5):
        feed.received(batch(1, f"life {life}"))
        feed.replay_failed("silent")
        feed.received(batch(9, f"life {life}"))
        feed.replay_failed("silent")
    assert feed.reason == "batches 2 to 8 are lost: replay failed: silent"


def degraded() -> Feed:
    """A feed whose replay of a gap failed."""
    feed = live(2)
    feed.received(batch(5))
    feed.replay_failed("silent")
    assert (feed.state, feed.wants_everything) == (State.DEGRADED, True)
    return feed


def test_all_is_asked_for_again_after_a_replay_failed() -> None:
    feed = degraded()
    assert feed.ask_everything() == [Replay(0)]
    assert feed.received(batch(6)) == applied(6)
    assert feed.replayed(batch(0)) == [Forget(), *applied(0)]
    assert feed.received(batch(7)) == []
    for number in range(1, 7):
        assert feed.replayed(batch(number)) == applied(number)
    assert feed.replay_ended() == applied(7)
    assert (feed.state, feed.reason, feed.wants_everything) == (State.LIVE, "", False)


def test_all_is_asked_for_once_until_there_is_an_answer() -> None:
    feed = degraded()
    assert (feed.ask_everything(), feed.ask_everything()) == ([Replay(0)], [])
    feed.replay_failed("silent again")
    assert feed.ask_everything() == [Replay(0)]


def test_batch_that_overtook_the_answer_is_asked_for_again() -> None:
    feed = degraded()
    feed.ask_everything()
    assert feed.received(batch(6)) == applied(6)
    for number in range(6):  # sent before batch 6
        feed.replayed(batch(number))
    assert feed.replay_ended() == [Replay(5)]
    assert not feed.certain
    assert feed.replayed(batch(5)) == []
    assert feed.replayed(batch(6)) == applied(6)
    assert (feed.replay_ended(), feed.state) == ([], State.LIVE)


def test_batch_that_overtook_the_answer_and_is_gone_is_asked_for_once() -> None:
    feed = degraded()
    feed.ask_everything()
    feed.received(batch(6))
    feed.replayed(batch(0, "new"))
    assert feed.replay_ended() == [Replay(0)]
    feed.replayed(batch(0, "new"))
    assert (feed.replay_ended(), feed.state) == ([], State.LIVE)


def test_error_of_our_own_is_a_hole_that_everything_is_asked_for_to_mend() -> None:
    feed = live(2)
    assert feed.failed("an error") == [Demote()]
    assert (feed.state, feed.reason) == (State.STALE, "an error")
    assert feed.connected() == [Replay(2)]
    feed.replayed(batch(2))
    feed.replay_ended()
    assert (feed.state, feed.reason) == (State.DEGRADED, "an error")
    assert feed.ask_everything() == [Replay(0)]


def test_all_that_is_asked_for_in_vain_changes_nothing() -> None:
    feed = degraded()
    feed.ask_everything()
    assert feed.replay_failed("silent again") == []
    assert (feed.state, feed.wants_everything) == (State.DEGRADED, True)
    assert feed.received(batch(6)) == applied(6)


def test_nothing_at_all_in_answer_to_everything_is_a_restart() -> None:
    feed = degraded()
    feed.ask_everything()
    assert feed.replay_ended() == [Forget(), Replay(0)]


def test_all_is_asked_for_only_where_a_replay_failed_and_the_connection_stands() -> None:
    healthy, lost = live(2), degraded()
    lost.disconnected()
    assert (healthy.ask_everything(), lost.ask_everything()) == ([], [])
    assert degraded().quiet() == [Replay(5)]


def test_silence_does_not_replace_the_question_for_everything() -> None:
    feed = degraded()
    feed.ask_everything()
    assert feed.quiet() == []


def test_what_was_to_be_asked_again_is_moot_once_the_cache_was_emptied() -> None:
    feed = degraded()
    feed.healed()
    assert (feed.state, feed.ask_everything()) == (State.LIVE, [])


def test_publisher_that_went_on_while_it_was_asked_did_not_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_module, "MAX_STAMPS", 2)
    feed = live(2)
    feed.received(batch(3))
    assert feed.quiet() == [Replay(3)]
    for number in (4, 5, 6):  # so many that the stamp of batch 3 is no longer kept
        assert feed.received(batch(number)) == applied(number)
    assert feed.replayed(batch(3)) == []
    assert feed.replay_ended() == []
    assert (feed.state, feed.restarts, feed.last_sequence) == (State.LIVE, 0, 6)
