"""The blocks of TensorRT-LLM's `stored` event, as chains of full blocks.

A block of JSON is {"block_hash", "tokens": [{"token_id", "token_extra_id"}], "cache_level",
"mm_keys"?, "cache_salt"?, "lora_id"?}; the last three came later, the adapter's number with the
release that will first send it. The last block of a prompt may be partial.
"""

from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec

from kvstate.events import BlockHash, BlocksStored, Extra, Tokens
from kvstate.wire.admission import INTEGERS, Skipped
from kvstate.wire.extras import extras_of, with_root
from kvstate.wire.zmq_events import MAX_BLOCK_SIZE

# By cache_level: the pool in the device's memory and the one in the host's.
_MEDIA = ("GPU", "CPU")


class Token(msgspec.Struct):
    """One token; token_extra_id is not 0 where images or drafts make it differ from plain text."""

    token_id: int | str
    token_extra_id: int = 0


class Block(msgspec.Struct):
    """One stored block, full or not."""

    block_hash: int
    tokens: list[Token]
    cache_level: int | None = 0
    mm_keys: list[dict[str, object]] | None = None
    cache_salt: str | msgspec.UnsetType | None = msgspec.UNSET
    lora_id: int | msgspec.UnsetType | None = msgspec.UNSET


class StoredData(msgspec.Struct):
    """The event: each block is the child of the one before, the first one of `parent_hash`."""

    blocks: list[Block]
    parent_hash: int | None = None


def fold(number: int) -> BlockHash:
    """A hash as unsigned 64 bits."""
    return number & 0xFFFF_FFFF_FFFF_FFFF


def medium_of(cache_level: int | None) -> str | None:
    """The medium of a cache level, None where it is unknown."""
    level = cache_level or 0
    return _MEDIA[level] if 0 <= level < len(_MEDIA) else None


def largest(blocks: Sequence[Block]) -> int:
    """Tokens of the largest block, which is full if any is.

    Raises:
        Skipped: bad_block_size.
    """
    size = max((len(block.tokens) for block in blocks), default=0)
    if size > MAX_BLOCK_SIZE:
        raise Skipped("bad_block_size")
    return size


def full(blocks: Sequence[Block], block_size: int) -> Sequence[Block]:
    """The blocks before the first partial one, which nothing can follow."""
    for position, block in enumerate(blocks):
        if len(block.tokens) != block_size:
            return blocks[:position]
    return blocks


def chains(blocks: Sequence[Block], parent: int | None, group: int | None) -> list[BlocksStored]:
    """Full blocks, each the child of the one before, as one event for each run on one medium.

    Raises:
        Skipped: a name for what cannot be indexed.
    """
    loras = {block.lora_id for block in blocks}
    if len(loras) > 1:
        raise Skipped("mixed_blocks")
    if any(isinstance(lora, int) and lora not in INTEGERS for lora in loras):
        raise Skipped("bad_lora")
    events: list[BlocksStored] = []
    for medium, run in groupby(blocks, lambda block: medium_of(block.cache_level)):
        if medium is None:
            raise Skipped("unknown_medium")
        members = list(run)
        events.append(_chain(members, parent, medium, group))
        parent = members[-1].block_hash
    return events


def _chain(
    blocks: Sequence[Block], parent: int | None, medium: str, group: int | None
) -> BlocksStored:
    salt, lora = blocks[0].cache_salt, blocks[0].lora_id
    extras = extras_of(None, [block.mm_keys for block in blocks], None, len(blocks))
    extras = _with_token_extras(extras, blocks)
    if parent is None and isinstance(salt, str):
        extras = with_root(extras, None, salt, len(blocks))
    return BlocksStored(
        hashes=[fold(block.block_hash) for block in blocks],
        parent=None if parent is None else fold(parent),
        tokens=_tokens(blocks),
        block_size=len(blocks[0].tokens),
        lora=lora if isinstance(lora, int) else None,
        extras=extras,
        medium=medium,
        group=group,
        kind="full_attention",  # `trtllm_wire` leaves the other windows out
        names_salts=salt is not msgspec.UNSET,
        names_loras=lora is not msgspec.UNSET,
    )


def _tokens(blocks: Sequence[Block]) -> Tokens:
    token_ids: list[Any] = [token.token_id for block in blocks for token in block.tokens]
    try:
        return array("I", token_ids)
    except (TypeError, OverflowError):
        raise Skipped("bad_tokens") from None


def _with_token_extras(extras: list[Extra] | None, blocks: Sequence[Block]) -> list[Extra] | None:
    """Adds what single tokens carry, with their positions: such a block equals no plain one."""
    carried: list[Extra] = [
        tuple(
            [position, token.token_extra_id]
            for position, token in enumerate(block.tokens)
            if token.token_extra_id
        )
        for block in blocks
    ]
    if not any(carried):
        return extras
    if any(item[1] not in INTEGERS for extra in carried for item in extra):
        raise Skipped("bad_tokens")
    known = extras or [()] * len(blocks)
    return [(*first, *second) for first, second in zip(known, carried, strict=True)]
