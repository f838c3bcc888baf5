import pytest

from kvstate.bridge.rank import RankStatus, StreamStatus
from kvstate.feeds.feed import FeedState


def status(rank: RankStatus) -> StreamStatus | None:
    return None if rank.fault is None else rank.fault.status


def test_engine_that_never_connected_is_unavailable() -> None:
    rank = RankStatus()
    assert status(rank) is StreamStatus.UNAVAILABLE
    rank.note(FeedState.REPLAYING, "connected")
    assert status(rank) is StreamStatus.UNAVAILABLE


@pytest.mark.parametrize("state", [FeedState.LIVE, FeedState.DEGRADED])
def test_live_or_degraded_feed_has_no_fault(state: FeedState) -> None:
    rank = RankStatus()
    rank.note(state, "")
    assert status(rank) is None


def test_gap_under_replay_has_no_fault() -> None:
    rank = RankStatus()
    rank.note(FeedState.LIVE, "")
    rank.note(FeedState.REPLAYING, "batches 3 to 4 were missed")
    assert status(rank) is None


def test_lost_connection_is_unavailable_until_the_feed_is_live() -> None:
    rank = RankStatus()
    rank.note(FeedState.LIVE, "")
    rank.note(FeedState.STALE, "connection lost")
    rank.note(FeedState.REPLAYING, "connected")
    assert rank.fault is not None
    assert rank.fault.reason == "the engine's feed is replaying: connected"
    rank.note(FeedState.LIVE, "")
    assert rank.fault is None


def test_engine_without_events_is_unimplemented() -> None:
    rank = RankStatus()
    rank.note(FeedState.UNSUPPORTED, "event_buffer_max_size is 0")
    assert rank.fault is not None
    assert rank.fault.status is StreamStatus.UNIMPLEMENTED
    assert rank.fault.reason == "it publishes no events: event_buffer_max_size is 0"
