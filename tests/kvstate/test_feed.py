"""One test for each row of the table in kvstate.feed, then what happens where rows meet."""

import pytest

from kvstate import feed as feed_module
from kvstate.feed import Apply, Demote, Effect, Feed, Forget, Numbered, Replay, State

Effects = list[Effect[str]]


def batch(number: int, life: str = "old") -> Numbered[str]:
    """A batch of the publisher before (old) or after (new) its restart."""
    return Numbered(number, number + (1000.0 if life == "new" else 0.0), f"{life} {number}")


def undecodable(number: int) -> Numbered[str]:
    return Numbered(number, float("-inf"), None)


def applied(*numbers: int, life: str = "old") -> Effects:
    return [Apply(f"{life} {number}") for number in numbers]


def live(last: int, *, can_replay: bool = True) -> Feed[str]:
    """A feed that took the batches 0 to last."""
    feed: Feed[str] = Feed(can_replay=can_replay)
    feed.connected()
    for number in range(last + 1):
        feed.replayed(batch(number)) if can_replay else feed.received(batch(number))
    if can_replay:
        feed.replay_ended()
    assert (feed.state, feed.reason, feed.last_sequence) == (State.LIVE, "", last)
    return feed


def test_new_feed_is_connecting_and_credits_nothing() -> None:
    feed: Feed[str] = Feed(can_replay=True)
    assert (feed.state, feed.certain, feed.last_sequence) == (State.CONNECTING, False, None)
    assert feed.received(batch(0)) == []
    assert feed.last_sequence is None


def test_first_connection_replays_from_0() -> None:
    feed: Feed[str] = Feed(can_replay=True)
    assert feed.connected() == [Replay(0)]
    assert (feed.state, feed.certain) == (State.REPLAYING, False)
    assert feed.replayed(batch(0)) == applied(0)
    assert feed.replay_ended() == []
    assert (feed.state, feed.certain, feed.replays) == (State.LIVE, True, 1)


def test_publisher_without_history_is_live_at_once() -> None:
    feed: Feed[str] = Feed(can_replay=True)
    feed.connected()
    assert feed.replay_ended() == []
    assert (feed.state, feed.last_sequence) == (State.LIVE, None)
    assert feed.received(batch(0)) == applied(0)


def test_live_batch_n_is_applied() -> None:
    feed = live(2)
    assert feed.received(batch(3)) == applied(3)
    assert feed.last_sequence == 3


def test_live_batch_beyond_n_is_held_and_the_gap_is_replayed() -> None:
    feed = live(2)
    assert feed.received(batch(5)) == [Replay(2)]
    assert (feed.state, feed.reason) == (State.REPLAYING, "batches 3 to 4 were missed")
    assert feed.replayed(batch(2)) == []
    assert feed.replayed(batch(3)) == applied(3)
    assert feed.replayed(batch(4)) == applied(4)
    assert feed.replay_ended() == applied(5)
    assert (feed.state, feed.gaps) == (State.LIVE, 1)


def test_live_batch_beyond_n_is_a_hole_without_replay() -> None:
    feed = live(2, can_replay=False)
    assert feed.received(batch(5)) == [Demote(), *applied(5)]
    assert feed.state is State.DEGRADED
    assert feed.reason == "batches 3 to 4 are lost: no replay endpoint"
    assert feed.certain


def test_live_batch_before_n_with_a_known_stamp_is_a_duplicate() -> None:
    feed = live(4)
    assert feed.received(batch(3)) == []
    assert (feed.state, feed.last_sequence) == (State.LIVE, 4)


def test_live_batch_before_n_with_another_stamp_is_a_restart() -> None:
    feed = live(4)
    assert feed.received(batch(1, "new")) == [Forget(), Replay(0)]
    assert (feed.state, feed.restarts, feed.last_sequence) == (State.REPLAYING, 1, None)
    assert feed.replayed(batch(0, "new")) == applied(0, life="new")
    assert feed.replayed(batch(1, "new")) == applied(1, life="new")
    assert feed.replay_ended() == []
    assert (feed.state, feed.last_sequence) == (State.LIVE, 1)


def test_restart_without_replay_starts_over_with_the_batch_that_told() -> None:
    feed = live(4, can_replay=False)
    assert feed.received(batch(1, "new")) == [Forget(), *applied(1, life="new")]
    assert feed.state is State.DEGRADED
    assert feed.reason == "batch 1 came again with other contents; no replay endpoint"
    again = live(4, can_replay=False)
    assert again.received(batch(0, "new")) == [Forget(), *applied(0, life="new")]
    assert (again.state, again.reason) == (State.LIVE, "")


def test_old_batch_whose_stamp_is_no_longer_known_is_told_by_its_age(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_module, "MAX_STAMPS", 2)
    feed = live(4)
    assert feed.received(batch(1)) == []
    assert feed.received(batch(1, "new")) == [Forget(), Replay(0)]


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
    assert feed.reason == "batch 2 is gone: no proof of the same publisher"


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
    assert feed.reason == "publisher restarted: batch 2 was replayed with other contents"


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
    assert feed.reason == "batches 3 to 3 are lost: no answer"


def test_first_replay_that_fails_leaves_the_past_unknown() -> None:
    feed: Feed[str] = Feed(can_replay=True)
    feed.connected()
    feed.received(batch(5))
    assert feed.replay_failed("no answer") == applied(5)
    assert feed.state is State.DEGRADED
    assert feed.reason == "replay failed: no answer; earlier blocks are unknown"


def test_undecodable_batch_is_a_hole_of_one_batch() -> None:
    feed = live(2)
    assert feed.received(undecodable(3)) == [Demote()]
    assert feed.reason == "batch 3 could not be decoded"
    assert feed.received(batch(4)) == applied(4)


def test_reconnection_replays_what_may_be_missing() -> None:
    feed = live(2)
    assert feed.disconnected() == []
    assert (feed.state, feed.reason, feed.certain) == (State.STALE, "connection lost", False)
    assert feed.received(batch(3)) == []
    assert feed.connected() == [Replay(2)]
    assert (feed.state, feed.reason, feed.certain) == (State.REPLAYING, "connected", False)


def test_reconnection_without_replay_is_a_hole() -> None:
    feed = live(2, can_replay=False)
    feed.disconnected()
    assert feed.connected() == [Demote()]
    assert feed.state is State.DEGRADED
    assert feed.reason == "the connection was lost and there is no replay endpoint"
    assert feed.received(batch(3)) == applied(3)


def test_silence_asks_once_from_the_last_batch() -> None:
    feed = live(2)
    assert feed.probe() == [Replay(2)]
    assert (feed.state, feed.certain) == (State.LIVE, True)
    assert feed.replayed(batch(2)) == []
    assert feed.replayed(batch(3)) == applied(3)
    assert feed.replay_ended() == []
    assert (feed.state, feed.last_sequence) == (State.LIVE, 3)


def test_nothing_to_probe_without_batches_replay_or_connection() -> None:
    empty: Feed[str] = Feed(can_replay=True)
    stale = live(2)
    stale.disconnected()
    assert [empty.probe(), stale.probe(), live(2, can_replay=False).probe()] == [[], [], []]


def test_degraded_feed_is_probed_too() -> None:
    feed = live(2)
    feed.received(undecodable(3))
    assert feed.probe() == [Replay(3)]
    assert feed.replayed(undecodable(3)) == []
    assert feed.replay_ended() == []
    assert (feed.state, feed.reason) == (State.DEGRADED, "batch 3 could not be decoded")


def test_probe_that_fails_says_nothing() -> None:
    feed = live(2)
    feed.probe()
    assert feed.replay_failed("no answer") == []
    assert feed.state is State.LIVE


def test_probe_that_the_live_stream_overtakes_is_no_restart() -> None:
    feed = live(2)
    feed.probe()
    assert feed.received(batch(3)) == applied(3)
    assert feed.received(batch(4)) == applied(4)
    assert feed.replayed(batch(4)) == []  # a short buffer: batch 2 is gone
    assert feed.replay_ended() == []
    assert (feed.state, feed.restarts) == (State.LIVE, 0)


def test_probe_finds_a_restart() -> None:
    feed = live(2)
    feed.probe()
    assert feed.replay_ended() == [Forget(), Replay(0)]


def test_late_join_says_since_when_it_knows() -> None:
    feed: Feed[str] = Feed(can_replay=True)
    feed.connected()
    assert feed.replayed(batch(7)) == applied(7)
    assert feed.replay_ended() == []
    assert (feed.state, feed.certain) == (State.DEGRADED, True)
    assert feed.reason == "batches before 7 are no longer to be had"


def test_late_join_without_replay_says_so() -> None:
    feed: Feed[str] = Feed(can_replay=False)
    assert feed.connected() == []
    assert feed.reason == "no replay endpoint: blocks stored before this connection are unknown"
    assert feed.received(batch(7)) == applied(7)
    assert feed.state is State.DEGRADED


def test_live_batch_behind_an_empty_replay_does_not_pass_for_the_first() -> None:
    feed: Feed[str] = Feed(can_replay=True)
    feed.connected()
    feed.received(batch(5))
    assert feed.replay_ended() == applied(5)
    assert (feed.state, feed.reason) == (State.DEGRADED, "batches before 5 are unknown")


def test_gap_before_anything_was_taken_is_replayed_from_0() -> None:
    feed: Feed[str] = Feed(can_replay=True)
    feed.connected()
    feed.replay_ended()
    assert feed.received(batch(1)) == [Replay(0)]


def test_live_batches_during_a_replay_keep_their_order() -> None:
    feed: Feed[str] = Feed(can_replay=True)
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


def test_duplicate_of_an_undecodable_batch_is_no_restart() -> None:
    feed = live(2)
    feed.received(undecodable(3))
    assert feed.received(undecodable(3)) == []
    assert feed.restarts == 0


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


def test_degraded_feed_heals_when_nothing_uncertain_is_left() -> None:
    feed = live(2)
    feed.received(undecodable(3))
    feed.healed()
    assert (feed.state, feed.reason) == (State.LIVE, "")


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


def test_stamps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_STAMPS", 3)
    assert len(live(9)._stamps) == 3


def test_batch_replayed_again_without_a_known_stamp_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_module, "MAX_STAMPS", 1)
    feed = live(2)
    feed.probe()
    assert feed.replayed(batch(0)) == []
    assert feed.replayed(batch(2)) == []
    assert feed.replay_ended() == []


def test_what_a_batch_could_not_say_makes_a_live_feed_degraded() -> None:
    feed = live(2)
    feed.miss("an event was lost")
    assert (feed.state, feed.reason, feed.certain) == (State.DEGRADED, "an event was lost", True)
    feed.healed()
    assert feed.state is State.LIVE


def test_what_a_replayed_batch_could_not_say_shows_when_the_replay_ends() -> None:
    feed: Feed[str] = Feed(can_replay=True)
    feed.connected()
    feed.replayed(batch(0))
    feed.miss("an event was lost")
    assert feed.state is State.REPLAYING
    feed.replay_ended()
    assert (feed.state, feed.reason) == (State.DEGRADED, "an event was lost")
