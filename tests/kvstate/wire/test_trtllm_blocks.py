from typing import Any

import msgspec
import pytest

from kvstate.events import BlocksStored
from kvstate.media import ItemStart, beginnings
from kvstate.overlap import Tokens
from kvstate.wire.extras import Skipped
from kvstate.wire.trtllm_wire import Block, chains, full, largest, medium_of, unsigned
from kvstate.wire.zmq_wire import MAX_BLOCK_SIZE


def block(number: int, *token_ids: Any, **fields: Any) -> Block:
    tokens = [each if isinstance(each, dict) else {"token_id": each} for each in token_ids]
    return msgspec.convert({"block_hash": number, "tokens": tokens, **fields}, Block)


def one(*blocks: Block, parent: int | None = None) -> BlocksStored:
    (chain,) = chains(blocks, parent, None)
    return chain


def fault(*blocks: Block) -> str:
    with pytest.raises(Skipped) as skipped:
        chains(blocks, None, None)
    return str(skipped.value)


def test_blocks_on_one_medium_are_one_chain() -> None:
    assert chains([block(1, 5, 6), block(-1, 7, 8)], -2, 64) == [
        BlocksStored(
            hashes=[1, 2**64 - 1],
            parent=2**64 - 2,
            tokens=Tokens("I", [5, 6, 7, 8]),
            block_size=2,
            group=64,
            kind="full_attention",
            names_salts=False,
            names_loras=False,
        )
    ]


def test_blocks_on_two_media_are_chained_across_them() -> None:
    made = chains([block(1, 5), block(2, 6, cache_level=1), block(3, 7)], None, None)
    assert [(each.hashes, each.parent, each.medium) for each in made] == [
        ([1], None, "GPU"),
        ([2], 1, "CPU"),
        ([3], 2, "GPU"),
    ]


def test_partial_block_ends_the_full_ones() -> None:
    blocks = [block(1, 5, 6), block(2, 7), block(3, 8, 9)]
    assert largest(blocks) == 2
    assert full(blocks, 2) == blocks[:1]
    assert full(blocks[:1], 2) == blocks[:1]
    assert largest([]) == 0


def test_oversized_block_is_refused() -> None:
    with pytest.raises(Skipped, match="bad_block_size"):
        largest([block(1, *[0] * (MAX_BLOCK_SIZE + 1))])


@pytest.mark.parametrize(
    ("level", "medium"), [(None, "GPU"), (0, "GPU"), (1, "CPU"), (2, None), (-1, None)]
)
def test_level_names_a_medium(level: int | None, medium: str | None) -> None:
    assert medium_of(level) == medium


def test_hashes_are_unsigned() -> None:
    assert [unsigned(-1), unsigned(7)] == [2**64 - 1, 7]


@pytest.mark.parametrize(
    ("blocks", "name"),
    [
        ([block(1, "image")], "bad_tokens"),
        ([block(1, -1)], "bad_tokens"),
        ([block(1, 2**32)], "bad_tokens"),
        ([block(1, 5, cache_level=2)], "unknown_medium"),
        ([block(1, 5, lora_id=1), block(2, 6)], "mixed_blocks"),
        ([block(1, 5, mm_keys=[{}])], "bad_mm_keys"),
    ],
)
def test_invalid_blocks_are_skipped_by_name(blocks: list[Block], name: str) -> None:
    assert fault(*blocks) == name


def test_images_and_token_extras_become_extras_of_their_blocks() -> None:
    image = {"type": "mm_key", "hash": "h", "start_offset": 3}
    chain = one(block(1, 5, mm_keys=[image]), block(2, 6), block(3, 7, mm_keys=None))
    assert chain.extras == [(["h", -3],), (), ()]
    draft = {"token_id": 6, "token_extra_id": 9}
    assert one(block(1, 5, draft), block(2, 7, 8)).extras == [(["token_extra_id", 1, 9],), ()]
    both = one(block(1, draft, mm_keys=[image]), block(2, 7))
    assert both.extras == [(["h", -3], ["token_extra_id", 0, 9]), ()]
    assert [begun.at for begun in beginnings(both)] == [-3]


def test_item_that_begins_within_a_block_is_found_by_the_next_one() -> None:
    image = [{"type": "mm_key", "hash": "h", "start_offset": before} for before in (0, 1)]
    chain = one(block(1, 5, 9, mm_keys=image[:1]), block(2, 9, 6, mm_keys=image[1:]))
    assert beginnings(chain) == [ItemStart(1, "h", 4)]
    assert beginnings(one(block(1, 5, 9, mm_keys=image[:1]))) == []


def test_salt_belongs_to_the_root_block() -> None:
    chain = one(block(1, 5, cache_salt="s"), block(2, 6, cache_salt="s"))
    assert (chain.extras, chain.names_salts) == ([("s",), ()], True)
    assert one(block(1, 5, cache_salt="s"), parent=7).extras is None
    assert one(block(1, 5, cache_salt=None)).extras is None


def test_adapter_is_known_by_its_number() -> None:
    chain = one(block(1, 5, lora_id=3))
    assert (chain.lora, chain.names_loras) == (3, True)
    assert one(block(1, 5, lora_id=None)).lora is None
