"""One event of a `SubscribeKvEvents` stream: from protobuf to a typed one.

A store becomes one event, so its blocks must have one size, medium and adapter. The first
generation of the messages has only hashes, tokens, a size, the adapter's number and a cache level.
"""

from array import array
from collections.abc import Sequence

from kvstate.events import (
    AllCleared,
    BlockHash,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    Event,
    Extra,
    OtherGroupStored,
)
from kvstate.pb.kvsteer_kv_events_pb2 import (
    KvBlock,
    KvBlockExtraKey,
    KvBlocksRemoved,
    KvBlocksStored,
    KvCacheEvent,
)
from kvstate.tiers import tier_of
from kvstate.wire.admission import Skipped, holds_prefix, reject_foreign
from kvstate.wire.extras import with_root
from kvstate.wire.zmq_events import MAX_BLOCK_SIZE

# KvCacheTier and cache_level, by number.
_MEDIUM_OF_TIER = {1: "GPU", 2: "CPU", 3: "DISK", 4: "EXTERNAL"}
_MEDIUM_OF_LEVEL = {0: "GPU", 1: "CPU", 2: "DISK", 3: "EXTERNAL"}

# KvCacheLocality: unspecified and local.
_OWN_LOCALITIES = (0, 1)


def decode_event(raw: KvCacheEvent, full_block_size: int) -> list[Event]:
    """The typed events that it is: one, or none if only a partial block was stored.

    full_block_size: blocks of fewer tokens are partial ones.

    Raises:
        Skipped: it cannot be indexed, under the name it is counted by.
    """
    kind = raw.WhichOneof("data")
    if kind == "stored":
        return _stored(raw.stored, full_block_size)
    if kind == "removed":
        return [_removed(raw.removed)]
    if kind == "cleared":
        reject_foreign(None, raw.cleared.ownership)
        return [AllCleared()]
    raise Skipped("unknown_event")


def _stored(raw: KvBlocksStored, full_block_size: int) -> list[Event]:
    _reject_foreign(raw)
    group = _group(raw)
    kind = raw.kv_cache_spec_kind or None
    if kind is not None and not holds_prefix(kind):
        return [OtherGroupStored(group)]
    if not raw.blocks:
        raise Skipped("placeholder")
    medium = _medium(raw, raw.blocks)
    if not any(block.token_ids for block in raw.blocks):
        return [BlocksCopied([_hash(block.block_hash) for block in raw.blocks], medium, group)]
    blocks = _full(raw.blocks, full_block_size)
    if not blocks:
        return []
    lora = raw.lora_name or _adapter_number(blocks)
    says_namespace = None if raw.HasField("tier") else False  # what the first generation cannot say
    tokens = array("I")
    for block in blocks:
        tokens.extend(block.token_ids)
    stored = BlocksStored(
        hashes=[_hash(block.block_hash) for block in blocks],
        parent=_hash(raw.parent_block_hash) if raw.HasField("parent_block_hash") else None,
        tokens=tokens,
        block_size=blocks[0].block_size,
        lora=lora,
        extras=_extras(raw, blocks, lora),
        medium=medium,
        group=group,
        kind=kind,
        names_salts=says_namespace,
        names_loras=says_namespace,
    )
    return [stored]


def _removed(raw: KvBlocksRemoved) -> BlocksRemoved:
    _reject_foreign(raw)
    hashes = [_hash(each) for each in raw.block_hashes]
    return BlocksRemoved(hashes, _medium(raw, [raw]), _group(raw))


def _reject_foreign(raw: KvBlocksStored | KvBlocksRemoved) -> None:
    reject_foreign("LOCAL" if raw.locality in _OWN_LOCALITIES else "REMOTE", raw.ownership)


def _group(raw: KvBlocksStored | KvBlocksRemoved) -> int | None:
    return raw.group_idx if raw.HasField("group_idx") else None


def _medium(
    raw: KvBlocksStored | KvBlocksRemoved, levels: Sequence[KvBlock] | Sequence[KvBlocksRemoved]
) -> str:
    """The medium's own name if we know it, or else a name for its tier.

    levels: what carries the cache level, which must be one and the same.
    """
    if tier_of(raw.medium) is not None:
        return raw.medium.upper()
    medium = _MEDIUM_OF_TIER.get(raw.tier)
    if medium is None and raw.tier == 0 and (not raw.medium or levels[0].HasField("cache_level")):
        if len({each.cache_level for each in levels}) > 1:
            raise Skipped("mixed_blocks")
        medium = _MEDIUM_OF_LEVEL.get(levels[0].cache_level)
    if medium is None:
        raise Skipped("unknown_medium")
    return medium


def _full(blocks: Sequence[KvBlock], full_block_size: int) -> Sequence[KvBlock]:
    """The blocks of a chain without the partial one at its end."""
    last = blocks[-1]
    if 0 < last.block_size < max(blocks[0].block_size, full_block_size):
        blocks = blocks[:-1]
    for block in blocks:
        if not 0 < block.block_size <= MAX_BLOCK_SIZE:
            raise Skipped("bad_block_size")
        if block.block_size != blocks[0].block_size:
            raise Skipped("mixed_blocks")
        if len(block.token_ids) != block.block_size:
            raise Skipped("misaligned_tokens")
    return blocks


def _hash(signed: int) -> BlockHash:
    return signed & 0xFFFF_FFFF_FFFF_FFFF


def _adapter_number(blocks: Sequence[KvBlock]) -> int | None:
    numbers = {block.lora_id if block.HasField("lora_id") else None for block in blocks}
    if len(numbers) > 1:
        raise Skipped("mixed_blocks")
    return numbers.pop()


def _extras(
    raw: KvBlocksStored, blocks: Sequence[KvBlock], lora: str | int | None
) -> list[Extra] | None:
    """What each block carries besides its tokens, less the adapter's name.

    Relays repeat the salt on a child's store; it belongs to the root's first block alone, where the
    extra keys of vLLM have it too.
    """
    extras: list[Extra] | None = None
    if any(block.extra_keys for block in blocks):
        extras = [_extra(block.extra_keys, lora) for block in blocks]
    if raw.cache_salt and not raw.HasField("parent_block_hash"):
        extras = with_root(extras, None, raw.cache_salt, len(blocks))
    return extras if any(extras or ()) else None


def _extra(keys: Sequence[KvBlockExtraKey], lora: str | int | None) -> Extra:
    items = [_item(key) for key in keys]
    return tuple(items[1:] if items and lora is not None and items[0] == lora else items)


def _item(key: KvBlockExtraKey) -> str | bytes | int | list[str | int]:
    match key.WhichOneof("key"):
        case "text":
            return key.text
        case "blob":
            return key.blob
        case "number":
            return key.number
        case "multimodal":
            return [key.multimodal.identifier, key.multimodal.offset]
    raise Skipped("bad_extra_keys")
