from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.errors import WireError
from kvstate.events import AllCleared, Batch, BlocksRemoved, EventBatch
from kvstate.index.index import Index
from kvstate.overlap import Prompt, Tokens
from kvstate.steps import finished
from kvstate.wire.zmq_wire import END_OF_REPLAY, decode_batch, parse_frames, stamp_of
from tests.oracles.plain_index import PlainIndex


def decode(*events: Any) -> EventBatch:
    return decode_batch(msgspec.msgpack.encode([1.5, list(events), 0]))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91" * 5000, b"\xa2\xff\xfe", b"\1\2"])
def test_payload_without_valid_msgpack_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError, match="payload is not msgpack: "):
        decode_batch(payload)


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x92\x01\x91\xdb\xff\xff\xff\xff",
        b"\x81\x90" * 5000,
        b"\x81\x80\x01",
        b"\xc7\x0c\xff" + b"\xff" * 12,
    ],
)
def test_malformed_or_oversized_payload_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError, match="payload is not msgpack: "):
        decode_batch(payload)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (7, "payload is neither a batch array nor a batch map"),
        ([None, []], "batch has no timestamp"),
        ([True, []], "batch has no timestamp"),
        ([float("nan"), []], "batch has no timestamp"),
        ([float("-inf"), []], "batch has no timestamp"),
        ({"events": []}, "batch has no timestamp"),
        ([1.0], "batch has no list of events"),
    ],
)
def test_payload_without_a_batch_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode_batch(msgspec.msgpack.encode(batch))


def test_batch_may_be_a_map_or_lack_its_rank() -> None:
    as_map = {"ts": 2, "events": [["AllBlocksCleared"]], "data_parallel_rank": 3}
    assert decode_batch(msgspec.msgpack.encode(as_map)) == EventBatch(2.0, [AllCleared()], 3)
    assert decode_batch(msgspec.msgpack.encode([2, []])).rank is None
    assert decode_batch(msgspec.msgpack.encode([2, [], True])).rank is None


def test_bad_event_is_named_and_the_rest_of_its_batch_kept() -> None:
    stored = ["BlockStored", [1], None, [5, 6], 1, None]
    batch = decode(stored, ["BlockRemoved", [1]], ["AllBlocksCleared"], ["BlockPinned"])
    assert batch.events == [BlocksRemoved([1]), AllCleared()]
    assert (batch.faults, batch.removal_lost) == (("misaligned_tokens", "unknown_event"), False)


def test_decode_batch_skips_events_applied_before() -> None:
    payload = msgspec.msgpack.encode([1.5, [["BlockRemoved", "h"], ["AllBlocksCleared"], []]])
    assert decode_batch(payload, 1) == EventBatch(
        1.5, [AllCleared()], None, ("malformed_event",), removal_lost=True
    )
    assert decode_batch(payload, 3) == EventBatch(1.5, [])


def test_repeated_key_of_a_map_means_the_last_one() -> None:
    event = b"\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\x01\xacblock_hashes\x91\x02"
    (removed,) = decode_batch(b"\x92\xcb" + bytes(8) + b"\x91" + event).events
    assert removed == BlocksRemoved([2])


@pytest.mark.parametrize(
    "event", [["BlockRemoved", "h"], ["BlockRemoved", [1], 7], {"type": "AllBlocksCleared "}, [], 7]
)
def test_unreadable_event_that_may_be_a_removal_counts_as_lost(event: Any) -> None:
    batch = decode(event, ["AllBlocksCleared"])
    assert batch.removal_lost == (batch.faults != ("unknown_event",))


@pytest.mark.parametrize(
    ("event", "name"),
    [
        ({"type": "BlockRemoved", "block_hashes": [1], "locality": "REMOTE"}, "other_locality"),
        ({"type": "BlockRemoved", "block_hashes": [1], "ownership": "kvcr"}, "foreign_ownership"),
        ({"type": "AllBlocksCleared", "ownership": "kvcr"}, "foreign_ownership"),
        (["BlockRemoved", [1], "TAPE"], "unknown_medium"),
        (["BlockPinned", [1]], "unknown_event"),
    ],
)
def test_skipped_event_about_blocks_that_are_never_stored_is_harmless(
    event: Any, name: str
) -> None:
    batch = decode(event)
    assert (batch.events, batch.faults, batch.removal_lost) == ([], (name,), False)


@pytest.mark.parametrize("batch", [[1.5, []], [1.5, [], 0], [3, [], 0], {"ts": 2.5, "events": []}])
def test_stamp_is_read_from_every_layout(batch: Any) -> None:
    payload = msgspec.msgpack.encode(batch)
    assert stamp_of(payload) == decode_batch(payload).timestamp


@pytest.mark.parametrize("payload", [b"", b"x", msgspec.msgpack.encode([float("nan"), []])])
def test_stamp_of_an_invalid_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        stamp_of(payload)


def test_parse_frames_is_available_from_zmq_wire() -> None:
    assert parse_frames([b"\xff" * 8, b""]) == Batch(END_OF_REPLAY, b"")


def outcome(index: Index, payload: bytes) -> object:
    """What a message does to an index that knows a few blocks already; None if it is refused."""
    owner = index.add("w", 0, "m")
    known = ["BlockStored", [1, 2], None, [0, 1], 1, None]
    finished(owner.applying(msgspec.msgpack.encode([1.0, [known]])))
    try:
        applied = finished(owner.applying(payload))
    except WireError:
        return None
    index.check()
    found = index.overlaps(Prompt("m", Tokens("I", [0, 1, 2])))
    status = {**owner.status, "removed_unknown": 0}  # the counts have it, whoever counted it
    return applied, status, owner.counts, len(owner.orphans), found


def is_batch_or_refused(payload: bytes) -> bool:
    """Whether decoding and both cores agree on what a payload is."""
    try:
        stamp_of(payload)
        decode_batch(payload)
        sound = True
    except WireError:
        sound = False
    plain, native = (outcome(make(12345678), payload) for make in (PlainIndex, Index))
    return plain == native and (plain is not None) == sound


@given(st.binary(max_size=200))
def test_decode_batch_decodes_or_refuses_any_bytes(payload: bytes) -> None:
    assert is_batch_or_refused(payload)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(0, 4)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.sampled_from(
        ["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "CPU", "REMOTE", "kvcr"]
    )
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=4))
)
fields = st.sampled_from(
    (
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "locality",
        "ownership",
        "cache_salt",
        "mm_keys",
        "hash",
        "start_offset",
    )
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(fields, inner, max_size=4),
    max_leaves=12,
)
plausible = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockStored", "BlockRemoved"])},
    optional={
        "block_hashes": st.lists(st.integers(0, 3) | scalars, max_size=2),
        "parent_block_hash": st.integers(0, 3) | st.none() | values,
        "token_ids": st.lists(st.integers(0, 3), max_size=4) | values,
        "block_size": st.sampled_from([1, 2]) | values,
        "extra_keys": st.lists(values, max_size=2) | values,
        "medium": st.sampled_from(["GPU", "CPU"]) | values,
        "lora_name": values,
        "kv_cache_spec_kind": st.sampled_from(["full_attention", "mamba", None]) | values,
        "group_idx": st.integers(0, 2) | values,
        "locality": values,
        "ownership": values,
        "cache_salt": values,
        "mm_keys": st.lists(values, max_size=2) | values,
    },
)
tagged = st.sampled_from(["BlockStored", "BlockRemoved"]).flatmap(
    lambda tag: st.lists(values, max_size=10).map(lambda rest: [tag, *rest])
)


@given(st.floats() | values, st.lists(plausible | tagged | values, max_size=4), values)
def test_decode_batch_decodes_or_refuses_any_batch_of_values(
    timestamp: Any, events: list[Any], rank: Any
) -> None:
    assert is_batch_or_refused(msgspec.msgpack.encode([timestamp, events, rank]))
