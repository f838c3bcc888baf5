import contextlib
import gc
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.errors import WireError
from kvstate.events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineLoad,
    EventBatch,
)
from kvstate.pb.kvsteer_kv_events_pb2 import (
    EngineLoad as LoadRecord,
)
from kvstate.pb.kvsteer_kv_events_pb2 import (
    KvBlock,
    KvBlockExtraKey,
    KvBlocksRemoved,
    KvBlocksStored,
    KvCacheCleared,
    KvCacheEvent,
    KvEventBatch,
    KvSnapshotChunk,
)
from kvstate.steps import Steps, finished
from kvstate.wire.grpc_wire import (
    MAX_BLOCKS,
    Piece,
    SnapshotSpan,
    decoding,
    load_of,
    parsing,
    rank_of,
    snapshot_of,
)

CLEARED = KvCacheEvent(cleared=KvCacheCleared())
STORED = KvCacheEvent(
    stored=KvBlocksStored(blocks=[KvBlock(block_hash=1, token_ids=[5, 6], block_size=2)])
)
REMOVED = KvCacheEvent(removed=KvBlocksRemoved(block_hashes=[1]))


def message(*events: KvCacheEvent, **fields: Any) -> KvEventBatch:
    return KvEventBatch(sequence_number=7, timestamp=1.5, events=events, **fields)


def test_message_survives_a_round_trip() -> None:
    assert finished(parsing(message(CLEARED).SerializeToString())) == message(CLEARED)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\xff", "message is no KvEventBatch"),
        (KvEventBatch(timestamp=math.nan).SerializeToString(), "batch has no timestamp"),
        (
            KvEventBatch(snapshot=KvSnapshotChunk(count=2**32 - 1)).SerializeToString(),
            "snapshot of 4294967295 chunks",
        ),
    ],
)
def test_invalid_message_is_refused(raw: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        finished(parsing(raw))


def test_rank_defaults_to_0() -> None:
    assert rank_of(message()) == 0
    assert rank_of(message(dp_rank=3)) == 3


def test_bad_event_is_named_and_the_rest_kept() -> None:
    batch = finished(decoding(message(REMOVED, KvCacheEvent(), CLEARED, dp_rank=1)))
    assert batch.events == [BlocksRemoved([1]), AllCleared()]
    assert (batch.timestamp, batch.rank, batch.faults) == (1.5, 1, ("unknown_event",))
    assert not batch.removal_lost


def test_partial_blocks_are_left_out_once_the_full_size_is_known() -> None:
    assert isinstance(finished(decoding(message(STORED))).events[0], BlocksStored)
    assert finished(decoding(message(STORED), full_block_size=4)).events == []


def test_snapshot_begins_with_its_first_chunk_and_drops_its_clear() -> None:
    first = message(CLEARED, STORED, snapshot=KvSnapshotChunk(count=3, unknown_before=2))
    second = message(CLEARED, snapshot=KvSnapshotChunk(index=1, count=3))
    assert snapshot_of(first) == SnapshotSpan(7, 9, 2)
    assert snapshot_of(second) is None
    assert snapshot_of(message()) is None
    assert [type(event) for event in finished(decoding(first)).events] == [BlocksStored]
    assert finished(decoding(second)).events == [AllCleared()]


def test_snapshot_of_nothing_is_one_chunk() -> None:
    chunk = message(snapshot=KvSnapshotChunk())
    assert snapshot_of(chunk) == SnapshotSpan(7, 7, 0)
    assert finished(decoding(chunk)) == EventBatch(1.5, [], 0)


def test_empty_batch_of_a_relay_counts_as_a_lost_removal() -> None:
    batch = finished(decoding(KvEventBatch(sequence_number=7)))
    assert (batch.faults, batch.removal_lost) == (("undecodable_batch",), True)
    assert finished(decoding(message())) == EventBatch(1.5, [], 0)


def test_oversized_batch_is_left_out_as_a_whole() -> None:
    lost = EventBatch(1.5, [], 0, ("oversized_batch",), removal_lost=True)
    assert finished(decoding(message(STORED, STORED), max_blocks=1)) == lost
    assert finished(decoding(message(CLEARED, CLEARED), max_events=1)) == lost


def test_load_carries_the_reported_figures_that_are_used() -> None:
    record = LoadRecord(
        running_requests=1,
        waiting_requests=2,
        waiting_uncached_tokens=3,
        prefill_pending_tokens=0,
        token_usage=0.5,
        active_token_usage=0.25,
        gen_throughput=9.0,
        max_running_requests=4,
        age_ms=5,
    )
    assert load_of(message(load=record)) == EngineLoad(1, 2, 3, 0, 0.5, 0.25, 9.0, 4, 5)


def test_load_is_none_where_it_is_not_reported() -> None:
    assert load_of(message()) is None
    assert load_of(message(load=LoadRecord(load_only=True))) == EngineLoad(0, 0, cache_usage=0.0)


@pytest.mark.parametrize(
    ("figure", "share", "rate"),
    [(math.nan, 0.0, 0.0), (math.inf, 0.0, 0.0), (-1.0, 0.0, 0.0), (7.0, 1.0, 7.0)],
)
def test_absurd_load_is_bounded(figure: float, share: float, rate: float) -> None:
    load = load_of(message(load=LoadRecord(token_usage=figure, gen_throughput=figure)))
    assert load
    assert (load.cache_usage, load.tokens_per_second) == (share, rate)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Protobuf of the right shape, cut and patched."""
    batch = message(CLEARED, STORED, REMOVED, snapshot=KvSnapshotChunk(count=2), load=LoadRecord())
    raw = bytearray(batch.SerializeToString())
    for _ in range(draw(st.integers(0, 4))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw[: draw(st.integers(0, len(raw)))])


@given(st.one_of(st.binary(), messages()))
def test_parsing_decodes_or_refuses_any_bytes(raw: bytes) -> None:
    with contextlib.suppress(WireError):
        parsed = finished(parsing(raw))
        assert isinstance(finished(decoding(parsed)), EventBatch)
        snapshot_of(parsed)
        load_of(parsed)


def store(blocks: int, first: int = 1) -> KvCacheEvent:
    """A store of this many blocks of two tokens."""
    return KvCacheEvent(
        stored=KvBlocksStored(
            blocks=[
                KvBlock(block_hash=first + n, token_ids=[n, n + 1], block_size=2, lora_id=n % 2)
                for n in range(blocks)
            ]
        )
    )


def longest_step(steps: Steps[object]) -> float:
    """CPU seconds of the longest step; meanwhile, no garbage of other tests is collected."""
    longest, is_done = 0.0, False
    gc.disable()
    try:
        while not is_done:
            began = time.thread_time()
            is_done = next(steps, steps) is steps
            longest = max(longest, time.thread_time() - began)
    finally:
        gc.enable()
    return longest


def removal(blocks: int) -> KvCacheEvent:
    return KvCacheEvent(removed=KvBlocksRemoved(block_hashes=range(blocks)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "events",
    [
        lambda: [store(200_000)],
        lambda: [removal(2_000_000)],
        lambda: [KvCacheEvent()] * 65_000,
        lambda: [store(1)] * 65_000,
    ],
    ids=["a store of many blocks", "a removal of many", "empty events", "many stores"],
)
def test_message_is_parsed_and_decoded_in_short_steps(
    events: Callable[[], list[KvCacheEvent]],
) -> None:
    raw = message(*events()).SerializeToString()
    assert longest_step(parsing(raw)) < 0.05
    assert longest_step(decoding(finished(parsing(raw)))) < 0.05


def test_message_of_very_many_fields_is_refused() -> None:
    raw = message().SerializeToString() + b"\x1a\0" * (2 * MAX_BLOCKS)
    with pytest.raises(WireError, match="of more than 262144 fields"):
        finished(parsing(raw))


def test_removals_count_for_the_limit_of_a_batch() -> None:
    assert finished(decoding(message(REMOVED, REMOVED), max_blocks=2)).faults == ()
    three = message(REMOVED, REMOVED, REMOVED)
    assert finished(decoding(three, max_blocks=2)).faults == ("oversized_batch",)


NUMBERS = st.lists(st.integers(0, 2**32 - 1), max_size=30)
KEYS = st.builds(KvBlockExtraKey, text=st.text(max_size=40)) | st.builds(
    KvBlockExtraKey, blob=st.binary(max_size=40)
)
BLOCKS = st.builds(
    KvBlock,
    block_hash=st.integers(-(2**63), 2**63 - 1),
    token_ids=NUMBERS,
    extra_keys=st.lists(KEYS, max_size=3),
)
EVENTS = st.one_of(
    st.builds(KvCacheEvent, removed=st.builds(KvBlocksRemoved, block_hashes=NUMBERS)),
    st.builds(
        KvCacheEvent,
        event_id=st.integers(0, 2**64 - 1),
        stored=st.builds(
            KvBlocksStored, blocks=st.lists(BLOCKS, max_size=5), lora_name=st.text(max_size=30)
        ),
    ),
    st.just(CLEARED),
)


@given(
    st.lists(EVENTS, max_size=6), st.binary(max_size=4), st.integers(0, 10_000), st.integers(1, 40)
)
def test_message_parsed_in_pieces_equals_the_whole(
    events: list[KvCacheEvent], noise: bytes, at: int, piece: int
) -> None:
    whole = message(*events, dp_rank=3, snapshot=KvSnapshotChunk(count=5)).SerializeToString()
    place = at % (len(whole) + 1)
    for raw in (whole, whole[:place] + noise + whole[place + len(noise) :], whole[:place]):
        try:
            parsed = finished(parsing(raw, Piece(max_bytes=piece, max_fields=3)))
        except WireError:
            assert raw != whole
            continue
        assert parsed == KvEventBatch.FromString(raw)


def test_number_without_end_is_refused() -> None:
    with pytest.raises(WireError):
        finished(parsing(b"\xff" * 2**20))
