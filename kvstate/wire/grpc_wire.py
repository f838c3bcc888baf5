"""Decoding of `SubscribeKvEvents` streams: protobuf messages to batches, snapshots and load.

The messages are those of proto/kvsteer_kv_events.proto, in both generations: smg-grpc-proto 0.4.14,
which has only hashes, tokens, a size, the adapter's number and a cache level, and 0.4.28, which
adds snapshots, load, and more of each event. A store becomes one event, so its blocks must have one
size, medium and adapter.
"""

import math
from array import array
from collections.abc import Generator, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from kvstate.errors import WireError
from kvstate.events import (
    AllCleared,
    BlockHash,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    EngineLoad,
    Event,
    EventBatch,
    Extra,
    OtherGroupStored,
)
from kvstate.pb.kvsteer_kv_events_pb2 import (
    KvBlock,
    KvBlockExtraKey,
    KvBlocksRemoved,
    KvBlocksStored,
    KvCacheEvent,
    KvEventBatch,
)
from kvstate.tiers import tier_of
from kvstate.wire.extras import Skipped, holds_prefix, reject_foreign, with_root
from kvstate.wire.zmq_wire import MAX_BLOCK_SIZE

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


# Servers pack at most 1,024 events; one store of a long prompt has thousands of blocks.
MAX_EVENTS = 65_536
MAX_BLOCKS = 262_144
MAX_SNAPSHOT_CHUNKS = 1_048_576


class SnapshotSpan(NamedTuple):
    """Numbers of a snapshot's first and last chunk, and the batches that its server never saw."""

    first: int
    last: int
    unknown_before: int


def parse_message(raw: bytes) -> KvEventBatch:
    """One message of the stream.

    Raises:
        WireError: it is no KvEventBatch, or one without a time stamp or with an absurd snapshot.
    """
    try:
        message = KvEventBatch.FromString(raw)
    except DecodeError:
        raise WireError("message is no KvEventBatch") from None
    if not math.isfinite(message.timestamp):
        raise WireError("batch has no timestamp")
    if message.snapshot.count > MAX_SNAPSHOT_CHUNKS:
        raise WireError(f"snapshot of {message.snapshot.count} chunks")
    return message


def rank_of(message: KvEventBatch) -> int:
    """The rank that a message is of; servers of one rank leave it out."""
    return message.dp_rank if message.HasField("dp_rank") else 0


def snapshot_of(message: KvEventBatch) -> SnapshotSpan | None:
    """The snapshot that this message begins, None if it begins none."""
    if not _begins_snapshot(message):
        return None
    first = message.sequence_number
    chunk = message.snapshot
    return SnapshotSpan(first, first + max(1, chunk.count) - 1, chunk.unknown_before)


def load_of(message: KvEventBatch) -> EngineLoad | None:
    """What the message says of the engine's load, None if nothing."""
    if not message.HasField("load"):
        return None
    load = message.load

    def said(name: str) -> int | None:
        return getattr(load, name) if load.HasField(name) else None

    return EngineLoad(
        running=load.running_requests,
        waiting=load.waiting_requests,
        waiting_uncached_tokens=said("waiting_uncached_tokens"),
        prefill_pending_tokens=said("prefill_pending_tokens"),
        cache_usage=_share(load.token_usage),
        active_cache_usage=(
            _share(load.active_token_usage) if load.HasField("active_token_usage") else None
        ),
        tokens_per_second=_positive(load.gen_throughput),
        max_running=load.max_running_requests or None,
        age_ms=load.age_ms,
        silence_ms=said("engine_silence_ms"),
    )


def batch_of(message: KvEventBatch, full_block_size: int = 0) -> EventBatch:
    """The events of a message, decoded in one go; see `decoding`."""
    steps = decoding(message, full_block_size)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            batch: EventBatch = end.value
            return batch


def decoding(message: KvEventBatch, full_block_size: int = 0) -> Generator[None, None, EventBatch]:
    """Decodes a message event by event; a bad one is skipped and named, the rest kept.

    The cleared event that begins a snapshot is left out: the snapshot itself replaces everything.
    full_block_size: blocks of fewer tokens are partial ones, which TensorRT-LLM publishes too.
    """
    rank = rank_of(message)
    lost = _lost_as_a_whole(message)
    if lost:
        return EventBatch(message.timestamp, [], rank, (lost,), removal_lost=True)
    events: list[Event] = []
    faults: list[str] = []
    for raw in _events(message):
        try:
            events += decode_event(raw, full_block_size)
        except Skipped as skipped:
            faults.append(str(skipped))
        yield
    return EventBatch(message.timestamp, events, rank, tuple(faults))


def _lost_as_a_whole(message: KvEventBatch) -> str:
    """Why nothing that the message said can be known, "" if it can.

    SMG's relays pass on a payload that they cannot decode as an empty batch without a time stamp.
    """
    if len(message.events) > MAX_EVENTS:
        return "oversized_batch"
    if sum(len(event.stored.blocks) for event in message.events) > MAX_BLOCKS:
        return "oversized_batch"
    says_nothing = not message.events and not message.HasField("snapshot")
    return "undecodable_batch" if says_nothing and not message.timestamp else ""


def _begins_snapshot(message: KvEventBatch) -> bool:
    return message.HasField("snapshot") and message.snapshot.index == 0


def _events(message: KvEventBatch) -> Sequence[KvCacheEvent]:
    events = message.events
    if _begins_snapshot(message) and events and events[0].HasField("cleared"):
        return events[1:]
    return events


def _share(figure: float) -> float:
    return min(max(figure, 0.0), 1.0) if math.isfinite(figure) else 0.0


def _positive(figure: float) -> float:
    return max(figure, 0.0) if math.isfinite(figure) else 0.0
