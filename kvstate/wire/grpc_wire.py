"""Decodes `SubscribeKvEvents` streams: protobuf messages to batches, snapshots and load.

The messages are those of proto/kvsteer_kv_events.proto, in both generations: smg-grpc-proto 0.4.14,
which has only hashes, tokens, a size, the adapter's number and a cache level, and 0.4.28, which
adds snapshots, load, and more of each event. A store becomes one event, so its blocks must have one
size, medium and adapter.
"""

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError, Message

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
    OtherGroupStored,
)
from kvstate.overlap import Extra, tier_of
from kvstate.pb.kvsteer_kv_events_pb2 import (
    KvBlock,
    KvBlockExtraKey,
    KvBlocksRemoved,
    KvBlocksStored,
    KvCacheEvent,
    KvEventBatch,
)
from kvstate.steps import Steps, finished
from kvstate.wire.extras import Skipped, holds_prefix, reach_of, reject_foreign, with_root
from kvstate.wire.zmq_wire import MAX_BLOCK_SIZE

# KvCacheTier and cache_level, by number.
_MEDIUM_OF_TIER = {1: "GPU", 2: "CPU", 3: "DISK", 4: "EXTERNAL"}
_MEDIUM_OF_LEVEL = {0: "GPU", 1: "CPU", 2: "DISK", 3: "EXTERNAL"}

# KvCacheLocality: unspecified and local.
_OWN_LOCALITIES = (0, 1)


# The most work in one step.
_BLOCKS_AT_ONCE = 64
_HASHES_AT_ONCE = 4_096

_ALL_BITS = 0xFFFF_FFFF_FFFF_FFFF


def decode_event(raw: KvCacheEvent, full_block_size: int) -> list[Event]:
    """Runs `decoding_event` without pauses."""
    return finished(decoding_event(raw, full_block_size))


def decoding_event(raw: KvCacheEvent, full_block_size: int) -> Steps[list[Event]]:
    """Decodes a message's event to typed ones: one, or none if only a partial block was stored.

    One event may have all blocks of a very long prompt, so it is decoded in steps.
    full_block_size: blocks of fewer tokens are partial ones.

    Raises:
        Skipped: it cannot be indexed; the text is the name under which it is counted.
    """
    kind = raw.WhichOneof("data")
    if kind == "stored":
        return (yield from _decoding_stored(raw.stored, full_block_size))
    if kind == "removed":
        return [(yield from _decoding_removed(raw.removed))]
    if kind == "cleared":
        reject_foreign(None, raw.cleared.ownership)
        return [AllCleared()]
    raise Skipped("unknown_event")


class _Columns:
    """The fields of a store's blocks, each in a list."""

    def __init__(self) -> None:
        self.hashes: list[BlockHash] = []
        self.tokens = array("I")
        self.sizes: list[int] = []  # as the blocks state them
        self.counts: list[int] = []  # how many tokens each has
        self.loras: list[int | None] = []
        self.levels: set[int] = set()
        self.keys: dict[int, Sequence[KvBlockExtraKey]] = {}  # by the block's position

    def take(self, block: KvBlock) -> None:
        """Adds a block."""
        ids, keys = block.token_ids, block.extra_keys
        if len(ids) > MAX_BLOCK_SIZE:
            raise Skipped("misaligned_tokens")
        if keys:
            self.keys[len(self.hashes)] = keys
        self.hashes.append(block.block_hash & _ALL_BITS)
        self.tokens.extend(ids)
        self.sizes.append(block.block_size)
        self.counts.append(len(ids))
        self.loras.append(block.lora_id if block.HasField("lora_id") else None)
        self.levels.add(block.cache_level)

    def drop_partial(self, full_block_size: int) -> None:
        """Removes a partial block at the end of the chain."""
        if not 0 < self.sizes[-1] < max(self.sizes[0], full_block_size):
            return
        for column in (self.hashes, self.sizes, self.loras):
            del column[-1]
        del self.tokens[len(self.tokens) - self.counts.pop() :]
        self.keys.pop(len(self.hashes), None)

    def check(self) -> None:
        """Raises Skipped if the blocks are not a chain of blocks of one size."""
        sizes = set(self.sizes)
        if not 0 < min(sizes) <= max(sizes) <= MAX_BLOCK_SIZE:
            raise Skipped("bad_block_size")
        if len(sizes) > 1:
            raise Skipped("mixed_blocks")
        if self.sizes != self.counts:
            raise Skipped("misaligned_tokens")


def _decoding_other_group(
    raw: KvBlocksStored, group: int | None, kind: str
) -> Steps[OtherGroupStored]:
    """A store of a group that holds a window or a state; its blocks' tokens do not matter."""
    reach = reach_of(kind, raw.kv_cache_spec_sliding_window or None)
    if not raw.blocks:
        return OtherGroupStored(group, reach=reach)
    hashes: list[BlockHash] = []
    levels: set[int] = set()
    for number, block in enumerate(raw.blocks, start=1):
        hashes.append(block.block_hash & _ALL_BITS)
        levels.add(block.cache_level)
        if not number % _BLOCKS_AT_ONCE:
            yield
    block_size = raw.blocks[0].block_size
    if not 0 <= block_size <= MAX_BLOCK_SIZE:
        raise Skipped("bad_block_size")
    medium, is_root = _medium(raw, levels, raw.blocks[0]), not raw.HasField("parent_block_hash")
    is_sparse = any(len(block.token_ids) != block_size for block in raw.blocks)
    return OtherGroupStored(group, hashes, block_size, reach, medium, is_root, is_sparse)


def _decoding_stored(raw: KvBlocksStored, full_block_size: int) -> Steps[list[Event]]:
    _reject_foreign(raw)
    group = _group(raw)
    kind = raw.kv_cache_spec_kind or None
    if kind is not None and not holds_prefix(kind):
        return [(yield from _decoding_other_group(raw, group, kind))]
    if not raw.blocks:
        raise Skipped("placeholder")
    columns = _Columns()
    for number, block in enumerate(raw.blocks, start=1):
        columns.take(block)
        if not number % _BLOCKS_AT_ONCE:
            yield
    medium = _medium(raw, columns.levels, raw.blocks[0])
    if not columns.tokens:
        return [BlocksCopied(columns.hashes, medium, group)]
    columns.drop_partial(full_block_size)
    if not columns.hashes:
        return []
    columns.check()
    lora = raw.lora_name or _adapter_number(columns.loras)
    says_namespace = None if raw.HasField("tier") else False  # the first generation lacks these
    stored = BlocksStored(
        hashes=columns.hashes,
        parent=_hash(raw.parent_block_hash) if raw.HasField("parent_block_hash") else None,
        tokens=columns.tokens,
        block_size=columns.sizes[0],
        lora=lora,
        extras=(yield from _decoding_extras(raw, columns, lora)),
        medium=medium,
        group=group,
        kind=kind,
        names_salts=says_namespace,
        names_loras=says_namespace,
    )
    return [stored]


def _decoding_removed(raw: KvBlocksRemoved) -> Steps[BlocksRemoved]:
    _reject_foreign(raw)
    hashes: list[BlockHash] = []
    for at in range(0, len(raw.block_hashes), _HASHES_AT_ONCE):
        hashes += [_hash(each) for each in raw.block_hashes[at : at + _HASHES_AT_ONCE]]
        yield
    return BlocksRemoved(hashes, _medium(raw, {raw.cache_level}, raw), _group(raw))


def _reject_foreign(raw: KvBlocksStored | KvBlocksRemoved) -> None:
    reject_foreign("LOCAL" if raw.locality in _OWN_LOCALITIES else "REMOTE", raw.ownership)


def _group(raw: KvBlocksStored | KvBlocksRemoved) -> int | None:
    return raw.group_idx if raw.HasField("group_idx") else None


def _medium(
    raw: KvBlocksStored | KvBlocksRemoved, levels: set[int], first: KvBlock | KvBlocksRemoved
) -> str:
    """Returns the medium's own name if it is known, else a name for its tier.

    levels: the cache levels of the blocks, which must all be the same. first: the first block of a
    store, or the removal; its cache level counts if the tier is not named.
    """
    if tier_of(raw.medium) is not None:
        return raw.medium.upper()
    medium = _MEDIUM_OF_TIER.get(raw.tier)
    if medium is None and raw.tier == 0 and (not raw.medium or first.HasField("cache_level")):
        if len(levels) > 1:
            raise Skipped("mixed_blocks")
        medium = _MEDIUM_OF_LEVEL.get(first.cache_level)
    if medium is None:
        raise Skipped("unknown_medium")
    return medium


def _hash(signed: int) -> BlockHash:
    return signed & _ALL_BITS


def _adapter_number(loras: list[int | None]) -> int | None:
    numbers = set(loras)
    if len(numbers) > 1:
        raise Skipped("mixed_blocks")
    return numbers.pop()


def _decoding_extras(
    raw: KvBlocksStored, columns: _Columns, lora: str | int | None
) -> Steps[list[Extra] | None]:
    """Returns the extra keys of each block, without the adapter's name.

    Relays repeat the salt on a child's store; it belongs only to the root block, where vLLM's extra
    keys have it too.
    """
    extras: list[Extra] | None = None
    if columns.keys:
        extras = [()] * len(columns.hashes)
        for number, (place, keys) in enumerate(columns.keys.items(), start=1):
            extras[place] = _extra(keys, lora)
            if not number % _BLOCKS_AT_ONCE:
                yield
    if raw.cache_salt and not raw.HasField("parent_block_hash"):
        extras = with_root(extras, None, raw.cache_salt, len(columns.hashes))
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


# Servers pack at most 1,024 events, but one store of a long prompt has thousands of blocks.
MAX_EVENTS = 65_536
MAX_BLOCKS = 262_144
MAX_SNAPSHOT_CHUNKS = 1_048_576


class Piece(NamedTuple):
    """The most of a message that is parsed at once.

    An empty event has two bytes and takes thirty times as long as a token, so fields are limited
    beside bytes.
    """

    max_bytes: int = 32 * 1024
    max_fields: int = 4_096


_USUAL_PIECE = Piece()

# How protobuf encodes fields: their kinds, and numbers in groups of seven bits, the lowest first.
_VARINT, _LENGTH = 0, 2
_FIXED = {1: 8, 5: 4}
_MORE, _VARINT_BITS = 0x80, 70
_SHORT = 0x80 | 7  # of a one-byte tag: the continuation bit, and the wire type


class SnapshotSpan(NamedTuple):
    """Numbers of a snapshot's first and last chunk, and the batches that its server missed."""

    first: int
    last: int
    unknown_before: int


def parsing(raw: bytes, piece: Piece = _USUAL_PIECE) -> Steps[KvEventBatch]:
    """Parses one message of the stream, a piece at a time.

    Raises:
        WireError: it is not a KvEventBatch, has no finite time stamp, or has more snapshot chunks
            or fields than allowed.
    """
    message = KvEventBatch()
    try:
        yield from _merging(message, raw, 0, len(raw), piece)
    except DecodeError:
        raise WireError("message is no KvEventBatch") from None
    if not math.isfinite(message.timestamp):
        raise WireError("batch has no timestamp")
    if message.snapshot.count > MAX_SNAPSHOT_CHUNKS:
        raise WireError(f"snapshot of {message.snapshot.count} chunks")
    return message


def _merging(message: Message, raw: bytes, start: int, end: int, piece: Piece) -> Steps[None]:
    """Parses these bytes into a message: long fields one by one, the others together."""
    max_bytes, max_fields = piece
    begun = at = start
    fields = 0
    while end - begun > max_bytes and at < end:
        number, content, behind = _field(raw, at, end)
        fields += 1
        if fields > MAX_BLOCKS:
            raise WireError(f"message of more than {MAX_BLOCKS} fields")
        if behind - at > max_bytes:
            message.MergeFromString(raw[begun:at])
            yield
            yield from _merging_one(message, number, raw, (at, content, behind), piece)
            begun = behind
        elif behind - begun >= max_bytes or not fields % max_fields:
            message.MergeFromString(raw[begun:behind])
            begun = behind
            yield
        at = behind
    message.MergeFromString(raw[begun:end])


def _merging_one(
    message: Message, number: int, raw: bytes, place: tuple[int, int, int], piece: Piece
) -> Steps[None]:
    """Parses one long field: a message by fields, packed numbers in pieces, a text at once."""
    at, content, behind = place
    field = message.DESCRIPTOR.fields_by_number.get(number)
    if field is not None and field.message_type is not None:
        own = getattr(message, field.name)
        part = own.add() if field.is_repeated else own
        part.SetInParent()
        yield from _merging(part, raw, content, behind, piece)
    elif field is None or not field.is_packed:
        message.MergeFromString(raw[at:behind])
    else:
        tag = raw[at : at + 1]
        while content < behind:
            piece_end = min(content + piece.max_bytes, behind)
            while piece_end < behind and raw[piece_end - 1] & 0x80:  # not within a number
                piece_end += 1
            numbers = raw[content:piece_end]
            message.MergeFromString(tag + _varint(len(numbers)) + numbers)
            content = piece_end
            yield


def _field(raw: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Returns a field's number, where its content begins, and where it ends."""
    if at + 2 <= end and raw[at] & _SHORT == _LENGTH and raw[at + 1] < _MORE:  # the usual case
        behind = at + 2 + raw[at + 1]
        if behind <= end:
            return raw[at] >> 3, at + 2, behind
    tag, at = _varint_at(raw, at, end)
    kind = tag & 7
    behind = content = at
    if kind == _LENGTH:
        size, content = _varint_at(raw, at, end)
        behind = content + size
    elif kind == _VARINT:
        _, behind = _varint_at(raw, at, end)
    elif kind in _FIXED:
        behind = at + _FIXED[kind]
    else:
        raise DecodeError("a group, or an unknown wire type")
    if behind > end:
        raise DecodeError("cut off")
    return tag >> 3, content, behind


def _varint_at(raw: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < _VARINT_BITS:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < _MORE:
            return value, at
        shift += 7
    raise DecodeError("no number")


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value >= _MORE:
        digits.append(value & 0x7F | _MORE)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def rank_of(message: KvEventBatch) -> int:
    """Returns the rank of a message; 0 if none is named, as by servers with one rank."""
    return message.dp_rank if message.HasField("dp_rank") else 0


def snapshot_of(message: KvEventBatch) -> SnapshotSpan | None:
    """Returns the snapshot that this message begins, or None."""
    if not _begins_snapshot(message):
        return None
    first = message.sequence_number
    chunk = message.snapshot
    return SnapshotSpan(first, first + max(1, chunk.count) - 1, chunk.unknown_before)


def load_of(message: KvEventBatch) -> EngineLoad | None:
    """Returns the engine's load in the message, or None."""
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
    )


def decoding(
    message: KvEventBatch,
    full_block_size: int = 0,
    *,
    max_events: int = MAX_EVENTS,
    max_blocks: int = MAX_BLOCKS,
) -> Steps[EventBatch]:
    """Decodes a message in short steps; a bad event is skipped and named, the others are kept.

    The cleared event that begins a snapshot is left out: the snapshot itself replaces everything.
    full_block_size: blocks with fewer tokens are partial; TensorRT-LLM publishes those too.
    """
    rank = rank_of(message)
    lost = _lost_as_a_whole(message, max_events)
    events: list[Event] = []
    faults: list[str] = []
    hashes = 0
    for raw in () if lost else _events(message):
        hashes += len(raw.stored.blocks) + len(raw.removed.block_hashes)
        if hashes > max_blocks:
            lost = "oversized_batch"
            break
        try:
            events += yield from decoding_event(raw, full_block_size)
        except Skipped as skipped:
            faults.append(str(skipped))
        yield
    if lost:
        return EventBatch(message.timestamp, [], rank, (lost,), removal_lost=True)
    return EventBatch(message.timestamp, events, rank, tuple(faults))


def _lost_as_a_whole(message: KvEventBatch, max_events: int) -> str:
    """Returns why the contents of the message are lost, "" if they are not.

    SMG's relays forward a payload that they cannot decode as an empty batch without a time stamp.
    """
    if len(message.events) > max_events:
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
