import pytest

from kvstate.bridge.rank import Standing, Status
from kvstate.feeds.feed import State


def status(standing: Standing) -> Status | None:
    return None if standing.fault is None else standing.fault.status


def test_engine_that_never_connected_is_unavailable() -> None:
    standing = Standing()
    assert status(standing) is Status.UNAVAILABLE
    standing.note(State.REPLAYING, "connected")
    assert status(standing) is Status.UNAVAILABLE


@pytest.mark.parametrize("state", [State.LIVE, State.DEGRADED])
def test_feed_that_can_be_believed_is_told(state: State) -> None:
    standing = Standing()
    standing.note(state, "")
    assert status(standing) is None


def test_gap_that_is_being_replayed_ends_nothing() -> None:
    standing = Standing()
    standing.note(State.LIVE, "")
    standing.note(State.REPLAYING, "batches 3 to 4 were missed")
    assert status(standing) is None


def test_lost_connection_is_unavailable_until_the_engine_is_proven_the_same() -> None:
    standing = Standing()
    standing.note(State.LIVE, "")
    standing.note(State.STALE, "connection lost")
    standing.note(State.REPLAYING, "connected")
    assert standing.fault is not None
    assert standing.fault.reason == "the engine's feed is replaying: connected"
    standing.note(State.LIVE, "")
    assert standing.fault is None


def test_engine_without_events_is_unimplemented() -> None:
    standing = Standing()
    standing.note(State.UNSUPPORTED, "event_buffer_max_size is 0")
    assert standing.fault is not None
    assert standing.fault.status is Status.UNIMPLEMENTED
    assert standing.fault.reason == "it publishes no events: event_buffer_max_size is 0"
