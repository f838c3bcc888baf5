from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.events import BlocksRemoved, BlocksStored
from kvstate.overlap import Tokens
from kvstate.pb.kvsteer_kv_events_pb2 import (
    KvBlocksStored,
    KvCacheEvent,
    KvEventBatch,
    KvSnapshotChunk,
)
from kvstate.wire.grpc_encoding import (
    MAX_EVENT_HASHES,
    BatchHead,
    Namespace,
    copied_block,
    copied_origin,
    encode_cleared,
    encode_head,
    encode_removed,
    encode_store,
    encode_stored,
    stored_entry,
)

BASE = Namespace()


def store(hashes: int = 2, size: int = 4, **fields: Any) -> BlocksStored:
    tokens = Tokens("I", range(hashes * size))
    return BlocksStored(
        list(range(1, hashes + 1)), fields.pop("parent", None), tokens, size, **fields
    )


def event_of(entry: bytes) -> KvCacheEvent:
    (event,) = KvEventBatch.FromString(entry).events
    return event


def told(stored: BlocksStored, namespace: Namespace = BASE) -> KvBlocksStored:
    (entry,) = entries_of(stored, namespace)
    return event_of(entry).stored


def entries_of(stored: BlocksStored, namespace: Namespace = BASE) -> list[bytes]:
    return list(encode_stored(stored, encode_store(stored, namespace), 7))


def test_batch_is_a_head_with_entries_behind_it() -> None:
    head = encode_head(BatchHead(5, 1.5, 3), KvSnapshotChunk(index=1, count=2))
    batch = KvEventBatch.FromString(head + encode_cleared(1) + encode_cleared(2))
    assert (batch.sequence_number, batch.timestamp, batch.dp_rank) == (5, 1.5, 3)
    assert (batch.snapshot.index, batch.snapshot.count) == (1, 2)
    assert [(event.event_id, event.HasField("cleared")) for event in batch.events] == [
        (1, True),
        (2, True),
    ]


def test_store_carries_all_known_fields() -> None:
    stored = store(parent=2**64 - 5, medium="CPU_PINNED", group=3, kind="mla_attention", lora="a")
    told_store = told(stored, Namespace("a", "salt"))
    assert told_store.parent_block_hash == -5
    assert (told_store.medium, told_store.tier, told_store.locality) == ("CPU_PINNED", 2, 1)
    assert (told_store.group_idx, told_store.kv_cache_spec_kind) == (3, "mla_attention")
    assert (told_store.lora_name, told_store.cache_salt) == ("a", "salt")
    assert [(block.block_hash, list(block.token_ids)) for block in told_store.blocks] == [
        (1, [0, 1, 2, 3]),
        (2, [4, 5, 6, 7]),
    ]
    assert {block.block_size for block in told_store.blocks} == {4}
    assert {block.cache_level for block in told_store.blocks} == {1}


def test_store_omits_unknown_fields() -> None:
    told_store = told(store(group=-1), Namespace(2**70, None))
    fields = {field.name for field, _ in told_store.ListFields()}
    assert fields == {"blocks", "medium", "tier", "locality"}
    fields = {field.name for field, _ in told_store.blocks[0].ListFields()}
    assert fields == {"block_hash", "token_ids", "block_size"}


def test_adapter_without_a_name_keeps_its_number() -> None:
    told_store = told(store(lora=9), Namespace(9, None))
    assert [block.lora_id for block in told_store.blocks] == [9, 9]
    assert not told_store.HasField("lora_name")


def test_extra_keys_are_those_of_their_block() -> None:
    blocks = told(store(2, extras=[(), ("text", -3)])).blocks
    keys = [[(key.text, key.number) for key in block.extra_keys] for block in blocks]
    assert keys == [[], [("text", 0), ("", -3)]]


def test_store_of_many_blocks_is_cut_into_children_of_one_another() -> None:
    entries = entries_of(store(10_000, 1, parent=99))
    events = [event_of(entry) for entry in entries]
    assert [len(event.stored.blocks) for event in events] == [4096, 4096, 1808]
    assert [event.stored.parent_block_hash for event in events] == [99, 4096, 8192]
    assert {event.event_id for event in events} == {7}


def test_store_of_large_blocks_is_cut_by_tokens() -> None:
    entries = entries_of(store(3, 40_000))
    assert [len(event_of(entry).stored.blocks) for entry in entries] == [1, 1, 1]


@given(st.integers(0, 2**63), st.none() | st.integers(-(2**63), 2**63 - 1), st.integers(0, 40))
def test_stored_entry_equals_the_encoding_of_protobuf(
    event_id: int, parent: int | None, blocks: int
) -> None:
    encoded = encode_store(store(40, 4, medium="CPU"), Namespace("a", "salt"))
    entry = stored_entry(encoded.origin, parent, encoded.blocks[:blocks], event_id)
    event = event_of(entry)
    assert event.event_id == event_id
    assert len(event.stored.blocks) == blocks
    told_parent = event.stored.parent_block_hash
    assert (told_parent if event.stored.HasField("parent_block_hash") else None) == parent
    assert (event.stored.medium, event.stored.cache_salt) == ("CPU", "salt")


def test_removal_carries_its_place_and_is_cut() -> None:
    hashes: list[int | bytes] = [2**64 - 1] * (MAX_EVENT_HASHES + 1)
    events = [event_of(e) for e in encode_removed(BlocksRemoved(hashes, "DISK", 2), 7)]
    assert [len(event.removed.block_hashes) for event in events] == [MAX_EVENT_HASHES, 1]
    removed = events[1].removed
    assert (list(removed.block_hashes), removed.medium, removed.tier) == ([-1], "DISK", 3)
    assert (removed.cache_level, removed.group_idx, removed.locality) == (2, 2, 1)


def test_medium_without_a_tier_is_written_without_one() -> None:
    (entry,) = encode_removed(BlocksRemoved([1], "TAPE"), 7)
    removed = event_of(entry).removed
    assert (removed.tier, removed.HasField("cache_level")) == (0, False)


@pytest.mark.parametrize(("medium", "tier", "level"), [("CPU", 2, 1), ("GPU", 1, None)])
@pytest.mark.parametrize(
    "namespace", [BASE, Namespace("a", "salt")], ids=["base", "adapter and salt"]
)
def test_copy_differs_from_its_store_only_in_its_place(
    medium: str, tier: int, level: int | None, namespace: Namespace
) -> None:
    encoded = encode_store(store(1, medium="DISK", group=4, kind="full_attention"), namespace)
    stored = KvBlocksStored.FromString(copied_origin(encoded.origin, medium, 5))
    assert (stored.medium, stored.tier, stored.group_idx) == (medium, tier, 5)
    assert (stored.lora_name or None, stored.cache_salt or None) == namespace
    assert not stored.HasField("kv_cache_spec_kind")
    (block,) = KvBlocksStored.FromString(copied_block(encoded.blocks[0], medium)).blocks
    assert (block.cache_level if block.HasField("cache_level") else None) == level
    assert (block.block_hash, list(block.token_ids)) == (1, [0, 1, 2, 3])
