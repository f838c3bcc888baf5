"""Encodes typed events as messages of SMG's feed, for both of its generations at once.

Messages are composed of pieces: serialized protobuf messages of one type, concatenated, are read as
one message. So a block is encoded once, for the stream and for all new subscribers; an event is
encoded as a batch that holds nothing else (an entry), and a batch is a head followed by entries.

Field numbers and meanings: proto/kvsteer_kv_events.proto. Consumers of smg-grpc-proto 0.4.14 read
`cache_level` where those of 0.4.28 read `tier` and `medium`; both are written.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvstate.events import BlockHash, BlocksRemoved, BlocksStored
from kvstate.overlap import Tier, tier_of
from kvstate.pb.kvsteer_kv_events_pb2 import (
    KV_CACHE_LOCALITY_LOCAL,
    KV_CACHE_TIER_DEVICE,
    KV_CACHE_TIER_DISK,
    KV_CACHE_TIER_EXTERNAL,
    KV_CACHE_TIER_HOST,
    KV_CACHE_TIER_UNSPECIFIED,
    KvBlock,
    KvBlockExtraKey,
    KvBlocksRemoved,
    KvBlocksStored,
    KvCacheCleared,
    KvCacheEvent,
    KvCacheTier,
    KvEventBatch,
    KvMultimodalKey,
    KvSnapshotChunk,
)

_TIERS = {
    Tier.DEVICE: KV_CACHE_TIER_DEVICE,
    Tier.HOST: KV_CACHE_TIER_HOST,
    Tier.DISK: KV_CACHE_TIER_DISK,
    Tier.REMOTE: KV_CACHE_TIER_EXTERNAL,
}

_SIGN_BIT = 1 << 63
INT64 = range(-_SIGN_BIT, _SIGN_BIT)
_HASH_BYTES = 8


def signed_hash(block_hash: BlockHash) -> int:
    """Converts a hash to the proto's int64: the same bits, or a digest's last eight bytes."""
    if isinstance(block_hash, bytes):
        block_hash = int.from_bytes(block_hash[-_HASH_BYTES:], "big")
    return ((block_hash + _SIGN_BIT) & (2 * _SIGN_BIT - 1)) - _SIGN_BIT


def is_text(item: str) -> bool:
    """Whether a text can be a protobuf string; JSON also allows halves of surrogate pairs."""
    try:
        item.encode()
    except UnicodeEncodeError:
        return False
    return True


def varint(number: int) -> bytes:
    """Encodes a number as protobuf does: seven bits per byte, lowest first."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def extra_key(item: object) -> KvBlockExtraKey:
    """Encodes an extra key; one without a proto form is spelled out, so that it equals no other."""
    match item:
        case str() if is_text(item):
            return KvBlockExtraKey(text=item)
        case bytes():
            return KvBlockExtraKey(blob=item)
        case int() if item in INT64 and not isinstance(item, bool):
            return KvBlockExtraKey(number=item)
        case [str() as name, int() as offset] if is_text(name) and offset in INT64:
            key = KvMultimodalKey(identifier=name, offset=offset)
            return KvBlockExtraKey(multimodal=key)
        case _:
            return KvBlockExtraKey(blob=ascii(item).encode())


def proto_tier(medium: str) -> KvCacheTier:
    """Returns the proto's tier of a medium; unspecified if it has none."""
    tier = tier_of(medium)
    return KV_CACHE_TIER_UNSPECIFIED if tier is None else _TIERS[tier]


def cache_level_of(medium: str) -> int | None:
    """Returns the cache level of the first generation; None for the device or an unknown medium."""
    tier = tier_of(medium)
    return None if tier is None or tier is Tier.DEVICE else int(tier)


def uint32_or_none(number: int | None) -> int | None:
    """Returns the number if a uint32 field can hold it, else None."""
    return number if number is not None and 0 <= number < 1 << 32 else None


# Consumers reject messages above 4 MiB by default, so larger events are split well below that: a
# store of many blocks becomes several of fewer blocks, each the child of the one before.
MAX_EVENT_TOKENS = 65_536
MAX_EVENT_BLOCKS = 4_096
MAX_EVENT_HASHES = 16_384
# After a split no correct event is longer; one that is, because of its extra keys, is not sent.
MAX_ENTRY_BYTES = 1024 * 1024

# Tags (field number and wire type): KvEventBatch.events, KvCacheEvent.event_id and .stored,
# KvBlocksStored.parent_block_hash.
_EVENT_TAG = b"\x1a"
_EVENT_ID_TAG = b"\x08"
_STORED_TAG = b"\x12"
_PARENT_TAG = b"\x10"
_UINT64_MAX = (1 << 64) - 1


class Namespace(NamedTuple):
    """The namespace under which a store and its children were computed."""

    lora: str | int | None = None
    salt: str | None = None


class BatchHead(NamedTuple):
    """The fields of a batch besides its events."""

    sequence: int
    timestamp: float
    rank: int


def encode_head(head: BatchHead, chunk: KvSnapshotChunk | None = None) -> bytes:
    """Encodes the first piece of a batch; entries follow."""
    batch = KvEventBatch(
        sequence_number=head.sequence, timestamp=head.timestamp, dp_rank=head.rank, snapshot=chunk
    )
    return batch.SerializeToString()


def encode_cleared(event_id: int) -> bytes:
    """Encodes the entry that empties the rank."""
    return _entry(KvCacheEvent(event_id=event_id, cleared=KvCacheCleared()))


def encode_removed(removed: BlocksRemoved, event_id: int) -> Iterator[bytes]:
    """Yields the encoded entries of a removal."""
    level = cache_level_of(removed.medium)
    for start in range(0, len(removed.hashes), MAX_EVENT_HASHES):
        hashes = removed.hashes[start : start + MAX_EVENT_HASHES]
        data = KvBlocksRemoved(
            block_hashes=[signed_hash(block_hash) for block_hash in hashes],
            cache_level=level,
            tier=proto_tier(removed.medium),
            medium=removed.medium,
            group_idx=uint32_or_none(removed.group),
            locality=KV_CACHE_LOCALITY_LOCAL,
        )
        yield _entry(KvCacheEvent(event_id=event_id, removed=data))


class EncodedStore(NamedTuple):
    """An encoded store, in pieces from which its entries are made.

    origin: everything except the parent and the blocks; blocks: one piece each.
    """

    namespace: Namespace
    origin: bytes
    blocks: list[bytes]


def encode_store(stored: BlocksStored, namespace: Namespace) -> EncodedStore:
    """Encodes the pieces of a store."""
    lora = namespace.lora
    origin = _origin(stored.medium, stored.group)
    if stored.kind is not None:
        origin.kv_cache_spec_kind = stored.kind
    if isinstance(lora, str):
        origin.lora_name = lora
    if namespace.salt is not None:
        origin.cache_salt = namespace.salt
    level = cache_level_of(stored.medium)
    lora_id = lora if isinstance(lora, int) and lora in INT64 else None
    size = stored.block_size
    tokens = stored.tokens
    blocks = []
    for position, block_hash in enumerate(stored.hashes):
        block = KvBlock(
            block_hash=signed_hash(block_hash),
            token_ids=tokens[position * size : (position + 1) * size],
            block_size=size,
            lora_id=lora_id,
            cache_level=level,
        )
        if stored.extras is not None:
            block.extra_keys.extend(map(extra_key, stored.extras[position]))
        blocks.append(KvBlocksStored(blocks=[block]).SerializeToString())
    return EncodedStore(namespace, origin.SerializeToString(), blocks)


def encode_stored(stored: BlocksStored, encoded: EncodedStore, event_id: int) -> Iterator[bytes]:
    """Yields the encoded entries of a store."""
    step = max(1, min(MAX_EVENT_BLOCKS, MAX_EVENT_TOKENS // stored.block_size))
    cuts = [*range(0, len(stored.hashes), step), len(stored.hashes)]
    for start, end in pairwise(cuts):
        parent = stored.hashes[start - 1] if start else stored.parent
        signed = None if parent is None else signed_hash(parent)
        yield stored_entry(encoded.origin, signed, encoded.blocks[start:end], event_id)


def stored_entry(
    origin: bytes, parent: int | None, blocks: Sequence[bytes], event_id: int = 0
) -> bytes:
    """Encodes the entry of consecutive blocks, the first of which is the child of `parent`."""
    parts = [origin, *blocks]
    if parent is not None:
        parts.append(_PARENT_TAG + varint(parent & _UINT64_MAX))
    stored = b"".join(parts)
    number = _EVENT_ID_TAG + varint(event_id) if event_id else b""
    event = b"".join((number, _STORED_TAG, varint(len(stored)), stored))
    return b"".join((_EVENT_TAG, varint(len(event)), event))


def copied_origin(origin: bytes, medium: str, group: int | None) -> bytes:
    """Encodes the origin of a store for copies of its blocks on another medium."""
    known = KvBlocksStored.FromString(origin)
    copied = _origin(medium, group)
    if known.HasField("lora_name"):
        copied.lora_name = known.lora_name
    if known.HasField("cache_salt"):
        copied.cache_salt = known.cache_salt
    return copied.SerializeToString()


def copied_block(block: bytes, medium: str) -> bytes:
    """Encodes a block as a copy on this medium."""
    stored = KvBlocksStored.FromString(block)
    level = cache_level_of(medium)
    stored.blocks[0].ClearField("cache_level")
    if level is not None:
        stored.blocks[0].cache_level = level
    return stored.SerializeToString()


def _entry(event: KvCacheEvent) -> bytes:
    return KvEventBatch(events=[event]).SerializeToString()


def _origin(medium: str, group: int | None) -> KvBlocksStored:
    return KvBlocksStored(
        tier=proto_tier(medium),
        medium=medium,
        group_idx=uint32_or_none(group),
        locality=KV_CACHE_LOCALITY_LOCAL,
    )
