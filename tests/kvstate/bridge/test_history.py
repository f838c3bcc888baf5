from kvstate.bridge.rank import BatchHistory
from kvstate.pb.kvsteer_kv_events_pb2 import KvEventBatch
from kvstate.wire.grpc_encoding import encode_cleared


def history(batches: int = 0, max_batches: int = 10, max_bytes: int = 10_000) -> BatchHistory:
    made = BatchHistory(2, 100, 7.0, max_batches=max_batches, max_bytes=max_bytes)
    for number in range(batches):
        made.append([encode_cleared(number)], 8.0 + number)
    return made


def test_numbers_ascend_from_the_first() -> None:
    made = history(3)
    batches = [KvEventBatch.FromString(made.batch(number)) for number in range(100, 103)]
    assert [batch.sequence_number for batch in batches] == [100, 101, 102]
    assert [batch.timestamp for batch in batches] == [8.0, 9.0, 10.0]
    assert {batch.dp_rank for batch in batches} == {2}
    assert (made.last, made.next, made.timestamp, len(made)) == (102, 103, 10.0, 3)


def test_last_number_of_an_empty_history_is_the_one_before_the_first() -> None:
    made = history()
    assert (made.last, made.oldest, made.resumable, made.timestamp) == (99, 100, 100, 7.0)


def test_oldest_batches_are_dropped_first() -> None:
    made = history(12, max_batches=5)
    assert (made.oldest, made.resumable, len(made)) == (107, 107, 5)
    assert KvEventBatch.FromString(made.batch(107)).sequence_number == 107


def test_bytes_are_bounded_except_for_the_newest_batch() -> None:
    made = history(5, max_bytes=1)
    assert (made.oldest, made.size_bytes) == (104, len(made.batch(104)))


def test_hole_drops_all_earlier_batches() -> None:
    made = history(3)
    made.hole()
    assert (made.holes, made.last, made.next) == (1, 103, 104)
    assert (made.oldest, made.resumable, made.size_bytes) == (104, 104, 0)


def test_closed_past_stays_readable_but_not_resumable() -> None:
    made = history(3)
    made.close_past()
    assert (made.oldest, made.resumable) == (100, 103)
    made.append([], 9.0)
    assert made.resumable == 103
