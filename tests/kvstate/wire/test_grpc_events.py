from typing import Any

import pytest

from kvstate.events import (
    AllCleared,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    Event,
    OtherGroupStored,
)
from kvstate.overlap import Prompt, Tokens
from kvstate.pb.kvsteer_kv_events_pb2 import (
    KV_CACHE_LOCALITY_REMOTE,
    KvBlock,
    KvBlockExtraKey,
    KvBlocksRemoved,
    KvBlocksStored,
    KvCacheCleared,
    KvCacheEvent,
    KvMultimodalKey,
)
from kvstate.wire.extras import Skipped
from kvstate.wire.grpc_wire import decode_event
from kvstate.wire.zmq_wire import MAX_BLOCK_SIZE
from tests.kvstate.cores import new_index


def block(number: int, *tokens: int, **fields: Any) -> KvBlock:
    return KvBlock(block_hash=number, token_ids=tokens, block_size=len(tokens), **fields)


def decode(full_block_size: int = 0, **data: Any) -> list[Event]:
    return decode_event(KvCacheEvent(event_id=1, **data), full_block_size)


def stored(*blocks: KvBlock, full_block_size: int = 0, **fields: Any) -> BlocksStored:
    (event,) = decode(full_block_size, stored=KvBlocksStored(blocks=blocks, **fields))
    assert isinstance(event, BlocksStored)
    return event


def fault(**data: Any) -> str:
    with pytest.raises(Skipped) as skipped:
        decode(**data)
    return str(skipped.value)


def store_fault(*blocks: KvBlock, **fields: Any) -> str:
    return fault(stored=KvBlocksStored(blocks=blocks, **fields))


def text(*keys: str) -> list[KvBlockExtraKey]:
    return [KvBlockExtraKey(text=key) for key in keys]


def test_store_of_the_first_generation_is_a_chain() -> None:
    assert stored(block(1, 5, 6), block(-1, 7, 8), parent_block_hash=-2) == BlocksStored(
        hashes=[1, 2**64 - 1],
        parent=2**64 - 2,
        tokens=Tokens("I", [5, 6, 7, 8]),
        block_size=2,
        names_salts=False,
        names_loras=False,
    )


def test_second_generation_may_name_namespaces() -> None:
    event = stored(block(1, 5), tier=1, kv_cache_spec_kind="full_attention", group_idx=0)
    assert (event.names_salts, event.names_loras) == (None, None)
    assert (event.kind, event.group) == ("full_attention", 0)


@pytest.mark.parametrize(
    ("fields", "level", "medium"),
    [
        ({}, None, "GPU"),
        ({}, 0, "GPU"),
        ({}, 1, "CPU"),
        ({}, 2, "DISK"),
        ({}, 3, "EXTERNAL"),
        ({"tier": 0}, 2, "DISK"),
        ({"tier": 2}, 3, "CPU"),
        ({"tier": 2, "medium": "cpu_pinned"}, 1, "CPU_PINNED"),
        ({"tier": 4, "medium": "TAPE"}, None, "EXTERNAL"),
        ({"medium": "TAPE"}, 2, "DISK"),
    ],
)
def test_medium_name_wins_over_its_tier_and_level(
    fields: dict[str, Any], level: int | None, medium: str
) -> None:
    assert stored(block(1, 5, cache_level=level), **fields).medium == medium
    raw = KvBlocksRemoved(block_hashes=[-1], cache_level=level, **fields)
    assert decode(removed=raw) == [BlocksRemoved([2**64 - 1], medium)]


@pytest.mark.parametrize(
    ("fields", "level"), [({"tier": 9}, None), ({"medium": "TAPE"}, None), ({}, 4), ({}, -1)]
)
def test_unknown_medium_is_not_credited(fields: dict[str, Any], level: int | None) -> None:
    assert store_fault(block(1, 5, cache_level=level), **fields) == "unknown_medium"


def test_removal_names_its_group() -> None:
    raw = KvBlocksRemoved(block_hashes=[1, 2], group_idx=3)
    assert decode(removed=raw) == [BlocksRemoved([1, 2], group=3)]


def test_blocks_of_a_window_are_decoded_as_another_group() -> None:
    names: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    raw = KvBlocksStored(blocks=[block(1, 5)], kv_cache_spec_sliding_window=4, **names)
    assert decode(stored=raw) == [OtherGroupStored(1, [1], 1, 3, is_root=True)]
    assert decode(stored=KvBlocksStored(**names)) == [OtherGroupStored(1)]
    huge = [KvBlock(block_hash=1, block_size=MAX_BLOCK_SIZE + 1)] * 64
    with pytest.raises(Skipped, match="bad_block_size"):
        decode(stored=KvBlocksStored(blocks=huge, **names))


def test_blocks_without_tokens_are_decoded_as_copies() -> None:
    raw = KvBlocksStored(blocks=[block(1), block(-1)], medium="CPU")
    assert decode(stored=raw) == [BlocksCopied([1, 2**64 - 1], "CPU")]


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({}, "unknown_event"),
        ({"stored": KvBlocksStored()}, "placeholder"),
        ({"cleared": KvCacheCleared(ownership="KVCR")}, "foreign_ownership"),
        ({"removed": KvBlocksRemoved(ownership="kvcr")}, "foreign_ownership"),
        ({"removed": KvBlocksRemoved(locality=KV_CACHE_LOCALITY_REMOTE)}, "other_locality"),
        ({"stored": KvBlocksStored(locality=KV_CACHE_LOCALITY_REMOTE)}, "other_locality"),
    ],
)
def test_foreign_or_invalid_event_is_skipped(data: dict[str, Any], name: str) -> None:
    assert fault(**data) == name


def test_clear_owned_by_the_engine_is_decoded() -> None:
    assert decode(cleared=KvCacheCleared(ownership="engine")) == [AllCleared()]


@pytest.mark.parametrize(
    ("blocks", "name"),
    [
        ([KvBlock(token_ids=[5])], "bad_block_size"),
        ([KvBlock(token_ids=[5], block_size=-1)], "bad_block_size"),
        ([KvBlock(token_ids=[5], block_size=MAX_BLOCK_SIZE + 1)], "bad_block_size"),
        ([KvBlock(token_ids=[5], block_size=2)], "misaligned_tokens"),
        ([block(1, 5), KvBlock(block_size=1)], "misaligned_tokens"),
        ([block(1, 5), block(2, 6, 7)], "mixed_blocks"),
        ([block(1, 5, 6), block(2, 7), block(3, 8, 9)], "mixed_blocks"),
        ([block(1, 5, lora_id=1), block(2, 6)], "mixed_blocks"),
        ([block(1, 5), block(2, 6, cache_level=1)], "mixed_blocks"),
        ([block(1, 5, extra_keys=[KvBlockExtraKey()])], "bad_extra_keys"),
    ],
)
def test_store_with_unequal_blocks_is_skipped(blocks: list[KvBlock], name: str) -> None:
    assert store_fault(*blocks) == name


def test_partial_block_at_the_end_is_left_out() -> None:
    assert stored(block(1, 5, 6), block(2, 7)).hashes == [1]
    assert decode(2, stored=KvBlocksStored(blocks=[block(2, 7)])) == []
    assert stored(block(1, 5, 6), full_block_size=2).hashes == [1]


def test_adapter_is_known_by_its_name_or_else_by_its_number() -> None:
    assert stored(block(1, 5, lora_id=3), lora_name="ad").lora == "ad"
    assert stored(block(1, 5, lora_id=0)).lora == 0
    assert stored(block(1, 5)).lora is None


def test_extra_keys_are_those_of_each_block_less_the_adapter() -> None:
    image = KvBlockExtraKey(multimodal=KvMultimodalKey(identifier="i", offset=4))
    event = stored(
        block(1, 5, extra_keys=[*text("ad"), KvBlockExtraKey(blob=b"x"), image]),
        block(2, 6, extra_keys=text("ad")),
        block(3, 7, extra_keys=[KvBlockExtraKey(number=9)]),
        lora_name="ad",
    )
    assert event.extras == [(b"x", ["i", 4]), (), (9,)]


def test_salt_belongs_to_the_root_block_once() -> None:
    assert stored(block(1, 5), block(2, 6), cache_salt="s").extras == [("s",), ()]
    assert stored(block(1, 5, extra_keys=text("s")), cache_salt="s").extras == [("s",)]
    assert stored(block(1, 5), cache_salt="s", parent_block_hash=7).extras is None
    assert stored(block(1, 5), cache_salt="").extras is None


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, {}),
        ({"cache_salt": "s"}, {"salt": "s"}),
        ({"lora_name": "ad"}, {"lora": "ad"}),
        ({"lora_name": "ad", "cache_salt": "s"}, {"lora": "ad", "salt": "s"}),
    ],
)
def test_request_of_the_same_namespace_meets_the_chain(
    fields: dict[str, Any], prompt: dict[str, Any]
) -> None:
    index = new_index()
    owner = index.add("w", 0, "m")
    owner.trusted = True
    index.apply(owner, [stored(block(1, 5, 6), **fields)])
    index.apply(owner, [stored(block(2, 7, 8), parent_block_hash=1, **fields)])
    tokens = Tokens("I", [5, 6, 7, 8, 9])
    assert index.overlaps(Prompt("m", tokens, **prompt))["w"].tiers == (2, 0, 0, 0)
    assert not index.overlaps(Prompt("m", tokens, lora="another"))


def test_block_with_too_many_tokens_is_skipped() -> None:
    long = KvBlock(block_hash=1, token_ids=[7] * (MAX_BLOCK_SIZE + 1), block_size=16)
    assert store_fault(long) == "misaligned_tokens"


def test_blocks_keep_their_own_keys() -> None:
    blocks = [block(n, n, extra_keys=text(f"key {n}")) for n in range(1, 200)]
    assert stored(*blocks).extras == [(f"key {n}",) for n in range(1, 200)]
