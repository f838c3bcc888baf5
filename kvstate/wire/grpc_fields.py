"""Single values of typed events as fields of SMG's messages; proto/kvsteer_kv_events.proto."""

from kvstate.events import BlockHash
from kvstate.pb.kvsteer_kv_events_pb2 import (
    KV_CACHE_TIER_DEVICE,
    KV_CACHE_TIER_DISK,
    KV_CACHE_TIER_EXTERNAL,
    KV_CACHE_TIER_HOST,
    KV_CACHE_TIER_UNSPECIFIED,
    KvBlockExtraKey,
    KvCacheTier,
    KvMultimodalKey,
)
from kvstate.tiers import Tier, tier_of

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
    """A block hash as the proto's int64: the same bits, or the last eight bytes of a digest."""
    if isinstance(block_hash, bytes):
        block_hash = int.from_bytes(block_hash[-_HASH_BYTES:], "big")
    return ((block_hash + _SIGN_BIT) & (2 * _SIGN_BIT - 1)) - _SIGN_BIT


def is_text(item: str) -> bool:
    """Whether it can be a protobuf string: JSON lets halves of surrogate pairs pass."""
    try:
        item.encode()
    except UnicodeEncodeError:
        return False
    return True


def varint(number: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first."""
    written = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - what seven bits hold
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def extra_key(item: object) -> KvBlockExtraKey:
    """What the proto has no form for is spelled out, so that it stays apart from all others."""
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
    """The tier of a medium; unspecified where it has none."""
    tier = tier_of(medium)
    return KV_CACHE_TIER_UNSPECIFIED if tier is None else _TIERS[tier]


def cache_level_of(medium: str) -> int | None:
    """As the first generation has it: nothing for the device."""
    tier = tier_of(medium)
    return None if tier is None or tier is Tier.DEVICE else int(tier)


def uint32_or_none(number: int | None) -> int | None:
    """A number where a uint32 field can hold it."""
    return number if number is not None and 0 <= number < 1 << 32 else None
