import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstate.errors import WireError
from kvstate.events import AllCleared, BlocksRemoved, BlocksStored, EventBatch, Tokens
from kvstate.index import Index
from kvstate.zmq_wire import END_OF_REPLAY, Frames, decode_batch, parse_frames, stamp_of

STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [5, 6, 7, 8],
    "block_size": 2,
}


def decode(*events: Any) -> EventBatch:
    return decode_batch(msgspec.msgpack.encode([1.5, list(events), 0]))


def stored(**fields: Any) -> BlocksStored:
    (event,) = decode({**STORED, **fields}).events
    assert isinstance(event, BlocksStored)
    return event


def fault(event: Any) -> tuple[str, bool]:
    batch = decode(event, ["AllBlocksCleared"])
    assert batch.events == [AllCleared()]  # the rest of the batch is kept
    (name,) = batch.faults
    return name, batch.removal_lost


def test_live_message_has_topic_number_and_payload() -> None:
    assert parse_frames([b"kv", b"\0" * 7 + b"\7", b"x"]) == Frames(7, b"x")


def test_replayed_message_is_read_from_its_end() -> None:
    number = (7).to_bytes(8, "big")
    assert parse_frames([b"", number, b"x"]) == parse_frames([b"", b"kv", number, b"x"])


def test_end_of_a_replay_has_no_payload() -> None:
    assert parse_frames([b"", b"", b"\xff" * 8, b""]).ends_replay
    assert not parse_frames([b"", b"\xff" * 8, b"x"]).ends_replay
    assert not Frames(0, b"").ends_replay
    assert END_OF_REPLAY == 2**64 - 1


@pytest.mark.parametrize("frames", [[], [b"x"], [b"kv", b"\0" * 7, b"x"], [b"\0" * 8, b"", b"x"]])
def test_message_without_a_number_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError, match=f"message of {len(frames)} frames has no sequence number"):
        parse_frames(frames)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91" * 5000, b"\xa2\xff\xfe", b"\1\2"])
def test_payload_that_is_no_msgpack_is_refused(payload: bytes) -> None:
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
def test_payload_that_is_no_batch_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode_batch(msgspec.msgpack.encode(batch))


def test_batch_may_be_a_map_or_lack_its_rank() -> None:
    as_map = {"ts": 2, "events": [["AllBlocksCleared"]], "data_parallel_rank": 3}
    assert decode_batch(msgspec.msgpack.encode(as_map)) == EventBatch(2.0, [AllCleared()], 3)
    assert decode_batch(msgspec.msgpack.encode([2, []])).rank is None
    assert decode_batch(msgspec.msgpack.encode([2, [], True])).rank is None


def test_store_is_read_from_a_map() -> None:
    assert stored() == BlocksStored([1, 2], None, Tokens("I", [5, 6, 7, 8]), 2)


def test_store_is_read_from_an_array_of_any_length() -> None:
    array = ["BlockStored", [1, 2], None, [5, 6, 7, 8], 2, None, "GPU", "a", [["a"], ["a"]], 1]
    assert decode(array[:6]).events == [stored()]
    assert decode(array).events == [stored(lora_name="a", group_idx=1)]
    assert decode([*array, "full_attention", None, "later"]).events == decode(array).events


def test_hashes_are_unsigned_numbers_or_bytes() -> None:
    event = stored(block_hashes=[-1, b"h" * 32], parent_block_hash=-2)
    assert event.hashes == [2**64 - 1, b"h" * 32]
    assert event.parent == 2**64 - 2


def test_adapter_is_known_by_name_else_by_number() -> None:
    assert stored(lora_name="a", lora_id=3).lora == "a"
    assert stored(lora_id=3).lora == 3
    assert stored(lora_id=True).lora is None


def test_extra_keys_are_kept_without_the_adapter_name() -> None:
    event = stored(lora_name="a", extra_keys=[["a", "salt"], ["a"]])
    assert event.extras == [("salt",), ()]
    assert stored(lora_name="a", extra_keys=[["a"], ["a"]]).extras is None
    assert stored(extra_keys=["salt", [["image", 3]]]).extras == [("salt",), (["image", 3],)]


def test_medium_is_written_in_capitals_and_defaults_to_the_device() -> None:
    assert stored(medium="cpu").medium == "CPU"
    assert stored(medium=None).medium == "GPU"


def test_group_is_a_number_or_absent() -> None:
    assert [stored(group_idx=group).group for group in (2, None, "x")] == [2, None, None]


def test_removal_is_read_from_both_layouts() -> None:
    event = BlocksRemoved([1], "CPU", 2)
    as_map = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "group_idx": 2}
    assert decode(["BlockRemoved", [1], "CPU", 2], as_map).events == [event, event]


def test_clearing_is_seen_from_outside() -> None:
    assert decode({"type": "AllBlocksCleared"}).clears
    assert not decode(["BlockRemoved", [1]]).clears


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"kv_cache_spec_kind": "mamba"}, "other_attention_group"),
        ({"kv_cache_spec_kind": ["full_attention"]}, "other_attention_group"),
        ({"locality": "REMOTE"}, "other_locality"),
        ({"cache_salt": "tenant"}, "salt_outside_extra_keys"),
        ({"block_size": 0}, "placeholder"),
        ({"token_ids": []}, "placeholder"),
        ({"block_size": 2.0}, "bad_block_size"),
        ({"block_size": 65_537}, "bad_block_size"),
        ({"block_size": -2}, "bad_block_size"),
        ({"token_ids": [5, 6, 7]}, "misaligned_tokens"),
        ({"token_ids": [[5, 6], [6, 7], [7, 8], [8, 9]]}, "bad_tokens"),
        ({"token_ids": [5, 6, 7, 2**32]}, "bad_tokens"),
        ({"token_ids": "text"}, "bad_tokens"),
        ({"block_hashes": None}, "bad_hash"),
        ({"block_hashes": ["h", 2]}, "bad_hash"),
        ({"parent_block_hash": 1.5}, "bad_hash"),
        ({"extra_keys": {"cache_salt": "tenant"}}, "bad_extra_keys"),
        ({"extra_keys": [None]}, "bad_extra_keys"),
        ({"extra_keys": [[[["nested"]]], None]}, "bad_extra_keys"),
        ({"extra_keys": [[{"a": 1}], None]}, "bad_extra_keys"),
        ({"medium": "TAPE"}, "unknown_medium"),
        ({"medium": 7}, "bad_medium"),
    ],
)
def test_store_that_cannot_be_credited_is_skipped_by_name(
    fields: dict[str, Any], name: str
) -> None:
    assert fault({**STORED, **fields}) == (name, False)


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention", None])
def test_groups_that_hold_the_whole_prefix_are_stored(kind: str | None) -> None:
    assert stored(kv_cache_spec_kind=kind).hashes == [1, 2]


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (["BlockRemoved", "h"], "bad_hash"),
        (["BlockRemoved", [1], 7], "bad_medium"),
        ([], "malformed_event"),
        ([7], "malformed_event"),
        (7, "malformed_event"),
        ({"type": None}, "malformed_event"),
    ],
)
def test_event_that_may_have_been_a_removal_is_a_lost_one(event: Any, name: str) -> None:
    assert fault(event) == (name, True)


@pytest.mark.parametrize(
    ("event", "name"),
    [
        ({"type": "BlockRemoved", "block_hashes": [1], "locality": "REMOTE"}, "other_locality"),
        (["BlockRemoved", [1], "TAPE"], "unknown_medium"),
        (["BlockPinned", [1]], "unknown_event"),
    ],
)
def test_skipped_event_about_blocks_that_are_never_stored_is_harmless(
    event: Any, name: str
) -> None:
    assert fault(event) == (name, False)


@pytest.mark.parametrize("batch", [[1.5, []], [1.5, [], 0], [3, [], 0], {"ts": 2.5, "events": []}])
def test_stamp_is_read_from_every_layout(batch: Any) -> None:
    payload = msgspec.msgpack.encode(batch)
    assert stamp_of(payload) == decode_batch(payload).timestamp


@pytest.mark.parametrize("payload", [b"", b"x", msgspec.msgpack.encode([float("nan"), []])])
def test_stamp_of_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        stamp_of(payload)


def is_batch_or_refused(payload: bytes) -> bool:
    try:
        batch = decode_batch(payload)
    except WireError:
        return True
    index = Index(12345678)
    index.apply(index.add("w", 0, "m"), batch.events)  # whatever is decoded can be applied
    index.check()
    return isinstance(batch, EventBatch)


@given(st.lists(st.binary(max_size=12), max_size=5))
def test_any_frames_are_a_message_or_refused(frames: list[bytes]) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(parse_frames(frames), Frames)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_refused(payload: bytes) -> None:
    assert is_batch_or_refused(payload)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(0, 4)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "CPU", "REMOTE"])
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=4))
)
fields = st.sampled_from(
    (
        *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
        *("medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "locality"),
    )
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(fields, inner, max_size=4),
    max_leaves=12,
)
plausible = st.fixed_dictionaries(
    {"type": st.just("BlockStored")},
    optional={
        "block_hashes": st.lists(st.integers(0, 3) | scalars, max_size=2),
        "parent_block_hash": st.integers(0, 3) | st.none() | values,
        "token_ids": st.lists(st.integers(0, 3), max_size=4) | values,
        "block_size": st.sampled_from([1, 2]) | values,
        "extra_keys": st.lists(values, max_size=2) | values,
        "medium": st.sampled_from(["GPU", "CPU"]) | values,
        "lora_name": values,
        "kv_cache_spec_kind": values,
        "group_idx": values,
    },
)
tagged = st.sampled_from(["BlockStored", "BlockRemoved"]).flatmap(
    lambda tag: st.lists(values, max_size=10).map(lambda rest: [tag, *rest])
)


@settings(max_examples=300)
@given(st.floats() | values, st.lists(plausible | tagged | values, max_size=4), values)
def test_any_values_in_the_shape_of_a_batch_are_one_or_refused(
    timestamp: Any, events: list[Any], rank: Any
) -> None:
    assert is_batch_or_refused(msgspec.msgpack.encode([timestamp, events, rank]))
