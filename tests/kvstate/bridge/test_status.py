import pytest

from kvstate.bridge.rank import Standing, StreamStatus
from kvstate.feeds.feed import FeedState


def status(standing: Standing) -> StreamStatus | None:
    return None if standing.fault is None else standing.fault.status


def test_engine_that_never_connected_is_unavailable() -> None:
    standing = Standing()
    assert status(standing) is StreamStatus.UNAVAILABLE
    standing.note(FeedState.REPLAYING, "connected")
    assert status(standing) is StreamStatus.UNAVAILABLE


@pytest.mark.parametrize("state", [FeedState.LIVE, FeedState.DEGRADED])
def test_live_or_degraded_feed_has_no_fault(state: FeedState) -> None:
    standing = Standing()
    standing.note(state, "")
    assert status(standing) is None


def test_gap_under_replay_has_no_fault() -> None:
    standing = Standing()
    standing.note(FeedState.LIVE, "")
    standing.note(FeedState.REPLAYING, "batches 3 to 4 were missed")
    assert status(standing) is None


def test_lost_connection_is_unavailable_until_the_feed_is_live() -> None:
    standing = Standing()
    standing.note(FeedState.LIVE, "")
    standing.note(FeedState.STALE, "connection lost")
    standing.note(FeedState.REPLAYING, "connected")
    assert standing.fault is not None
    assert standing.fault.reason == "the engine's feed is replaying: connected"
    standing.note(FeedState.LIVE, "")
    assert standing.fault is None


def test_engine_without_events_is_unimplemented() -> None:
    standing = Standing()
    standing.note(FeedState.UNSUPPORTED, "event_buffer_max_size is 0")
    assert standing.fault is not None
    assert standing.fault.status is StreamStatus.UNIMPLEMENTED
    assert standing.fault.reason == "it publishes no events: event_buffer_max_size is 0"
