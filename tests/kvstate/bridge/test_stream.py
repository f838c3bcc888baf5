from collections.abc import Iterable

from kvstate.bridge.bridge import Subscription, subscribe
from kvstate.bridge.mirror import Mirror
from kvstate.bridge.rank import MAX_BATCH_EVENTS, BatchHistory, BridgedRank, Ended, StreamStatus
from kvstate.events import BlocksStored, EventBatch
from kvstate.feeds.feed import Feed, FeedState
from kvstate.feeds.feed_sources import Recovery
from kvstate.overlap import Tokens
from kvstate.pb.kvsteer_kv_events_pb2 import KvEventBatch
from kvstate.steps import finished


def rank(number: int = 0, *, batches: int = 0, max_batches: int = 1000) -> BridgedRank:
    """A rank whose feed is live, with some batches of one block each."""
    history = BatchHistory(number, 100, 1.0, max_batches=max_batches, max_bytes=2**28)
    made = BridgedRank(history, Mirror(2**28), Feed(Recovery.NONE), lambda: None)
    made.feed.state = FeedState.LIVE
    made.trust(trusted=True)
    for block_hash in range(batches):
        publish(made, block_hash)
    return made


def publish(one: BridgedRank, *hashes: int) -> None:
    events = [BlocksStored([number], None, Tokens("I", [number]), 1) for number in hashes]
    finished(one.applying(EventBatch(2.0, list(events))))
    one.flush()


def begun(ranks: list[BridgedRank], start: int = 0) -> Subscription:
    stream = subscribe(ranks, start)
    assert isinstance(stream, Subscription)
    return stream


def taken(stream: Subscription) -> list[KvEventBatch]:
    """All messages that the stream has now."""
    messages: list[KvEventBatch] = []
    while isinstance(message := stream.take(), bytes):
        messages.append(KvEventBatch.FromString(message))
    return messages


def ended(stream: Subscription | Ended) -> tuple[StreamStatus, str]:
    end = stream if isinstance(stream, Ended) else stream.take()
    assert isinstance(end, Ended)
    return end.status, end.reason


def numbers(batches: Iterable[KvEventBatch], of_rank: int = 0) -> list[int]:
    return [batch.sequence_number for batch in batches if batch.dp_rank == of_rank]


def test_newcomer_gets_the_state_then_later_batches() -> None:
    one = rank(batches=3)
    stream = begun([one])
    (state,) = taken(stream)
    assert (state.sequence_number, state.snapshot.count, state.snapshot.blocks) == (102, 1, 3)
    assert state.events[0].HasField("cleared")
    assert [event.event_id for event in state.events] == [0] * 4
    publish(one, 7)
    (batch,) = taken(stream)
    assert (batch.sequence_number, batch.HasField("snapshot")) == (103, False)


def test_state_of_a_silent_engine_is_empty() -> None:
    (state,) = taken(begun([rank()]))
    assert (state.sequence_number, len(state.events), state.snapshot.count) == (99, 1, 1)


def test_snapshot_pieces_end_at_the_number_of_the_state() -> None:
    one = rank()
    publish(one, *range(2 * MAX_BATCH_EVENTS + 10))
    one.unknown_before = 4
    pieces = taken(begun([one]))
    assert numbers(pieces) == [100, 101, 102]
    assert [(piece.snapshot.index, piece.snapshot.count) for piece in pieces] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]
    assert {(piece.snapshot.blocks, piece.snapshot.unknown_before) for piece in pieces} == {
        (2 * MAX_BATCH_EVENTS + 10, 4)
    }
    assert sum(len(piece.events) for piece in pieces) == 2 * MAX_BATCH_EVENTS + 11


def test_snapshot_stays_unchanged_while_it_is_sent() -> None:
    one = rank()
    publish(one, *range(MAX_BATCH_EVENTS))
    stream = begun([one])
    stream.take()
    finished(one.forgetting())
    one.flush()
    piece, batch = taken(stream)
    assert [len(piece.events), piece.snapshot.index] == [1, 1]
    assert batch.events[0].HasField("cleared")


def test_start_within_the_history_resumes_there() -> None:
    one = rank(batches=5)
    assert numbers(taken(begun([one], 102))) == [102, 103, 104]
    stream = begun([one], 105)
    assert taken(stream) == []
    publish(one, 9)
    assert numbers(taken(stream)) == [105]


def test_start_outside_the_history_is_out_of_range() -> None:
    one = rank(batches=5, max_batches=3)
    assert ended(subscribe([one], 101)) == (
        StreamStatus.OUT_OF_RANGE,
        "batch 101 of rank 0 is not available; 102 to 105 are",
    )
    assert ended(subscribe([one], 106))[0] is StreamStatus.OUT_OF_RANGE


def test_start_within_a_snapshot_is_out_of_range() -> None:
    one = rank(batches=10)
    publish(one, *range(20, 20 + MAX_BATCH_EVENTS))
    pieces = numbers(taken(begun([one])))
    assert pieces == [109, 110]
    for number in pieces:
        assert ended(subscribe([one], number))[0] is StreamStatus.OUT_OF_RANGE
    publish(one, 7)
    assert numbers(taken(begun([one], 111))) == [111]


def test_stream_interleaves_ranks_under_their_own_numbers() -> None:
    ranks = [rank(0, batches=3), rank(1, batches=5)]
    stream = begun(ranks, 100)
    batches = taken(stream)
    assert [batch.dp_rank for batch in batches] == [0, 1, 0, 1, 0, 1, 1, 1]
    assert numbers(batches, 1) == [100, 101, 102, 103, 104]
    assert numbers(taken(begun(ranks)), 0) == [102]
    assert ended(subscribe(ranks, 104))[0] is StreamStatus.OUT_OF_RANGE


def test_hole_ends_a_stream_and_no_start_leads_past_it() -> None:
    one = rank(batches=3)
    stream = begun([one])
    finished(one.demoting())
    assert ended(stream) == (StreamStatus.DATA_LOSS, "batches of the engine's rank 0 were lost")
    for number in (102, 103):
        assert ended(subscribe([one], number))[0] is StreamStatus.OUT_OF_RANGE
    assert numbers(taken(begun([one]))) == [103]


def test_slow_subscriber_ends_with_data_loss_and_leaves_the_others() -> None:
    one = rank(max_batches=2)
    slow, fast = begun([one]), begun([one])
    taken(slow)
    for number in range(3):
        publish(one, number)
        taken(fast)
    assert ended(slow) == (
        StreamStatus.DATA_LOSS,
        "this subscriber is too slow: batch 100 of rank 0 is gone",
    )
    assert fast.take() is None


def test_lost_engine_ends_streams_and_refuses_new_ones() -> None:
    one, other = rank(0, batches=1), rank(1)
    stream = begun([one, other])
    other.feed.state, other.feed.reason = FeedState.STALE, "connection lost"
    other.trust(trusted=False)
    expected = (StreamStatus.UNAVAILABLE, "the engine's feed is stale: connection lost")
    assert ended(stream) == expected
    assert ended(subscribe([one, other], 0)) == expected
