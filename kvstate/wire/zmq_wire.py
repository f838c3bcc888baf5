"""Decodes the ZMQ feeds of vLLM, SGLang and TensorRT-LLM; docs/engines.md has the releases.

All of `kvstate.wire` is pure: bytes in, events (`kvstate.events`) out. It knows layouts and no
state, except for what an engine's stream has said of its attention groups before (`Groups`).
Everything is hostile until it is parsed, so the rule is: whatever an engine can send is bounded in
bytes, events and blocks; a bad event is left out and named among the faults, and `missed_of` says
whether that is a hole; only what is no batch at all raises WireError. Long messages are decoded in
steps.

A message is [topic, sequence number, payload]; the number is 8 bytes big-endian, and
`vllm.distributed.kv_events.ZmqEventPublisher` has the layout. A payload is msgpack, a batch
[timestamp, events, rank] of `vllm.distributed.kv_events`; builds of vLLM between releases send it
as a map.

Events are tagged arrays (vLLM before 0.24, SGLang before 0.5.20) or tagged maps (newer versions,
and TensorRT-LLM). Positions and names are those of `vllm.distributed.kv_events`; SGLang and
TensorRT-LLM use the same, and a few of their own that are named below.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvstate.errors import WireError
from kvstate.events import (
    AllCleared,
    Batch,
    BlockHash,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    EngineLoad,
    Event,
    EventBatch,
    OtherGroupStored,
    blocks_of,
)
from kvstate.overlap import Tokens, tokens_of
from kvstate.steps import Steps, finished
from kvstate.undecodable import UNDECODABLE
from kvstate.wire.extras import (
    HARMLESS,
    INTEGERS,
    MAX_GROUP,
    REMOTE,
    Skipped,
    checked_group,
    checked_medium,
    extras_of,
    holds_prefix,
    reach_of,
    reject_foreign,
    with_root,
)

# Sequence number of the message that ends a replay: -1 in 8 bytes.
END_OF_REPLAY = 0xFFFF_FFFF_FFFF_FFFF


def ends_replay(batch: Batch) -> bool:
    """Whether this is the marker at the end of a replay."""
    return batch.sequence == END_OF_REPLAY and not batch.body


def parse_frames(frames: Sequence[bytes]) -> Batch:
    """Splits a message, live or replayed, into its parts.

    Frames are counted from the end: replays put an empty frame in front, followed since vLLM 0.26
    and SGLang 0.5.22, and in TensorRT-LLM, by the topic.

    Raises:
        WireError: fewer than two frames, or a sequence number that is not 8 bytes.
    """
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise WireError(f"message of {len(frames)} frames has no sequence number")
    return Batch(int.from_bytes(frames[-2], "big"), frames[-1])


# Longer messages are not load reports; SGLang's have some 40 bytes.
MAX_LOAD_BYTES = 4096

_Requests = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class _LoadStat(msgspec.Struct, array_like=True, tag="LoadStat", frozen=True, gc=False):
    """SGLang's load report with --load-publish-endpoint, since 0.5.19.

    Positions as in `sglang.srt.managers.scheduler_components.load_publisher`. used, capacity: of
    its KV cache, in tokens; a capacity of 0 is unknown. Later fields are not used.
    """

    running: _Requests
    waiting: _Requests
    used: _Tokens
    capacity: _Tokens
    rank: int | None = None
    waiting_uncached: _Tokens | None = None


_load_decoder = msgspec.msgpack.Decoder(_LoadStat)


def load_of(frames: Sequence[bytes]) -> EngineLoad:
    """Decodes the load in a message, which has the same frames as a batch of events.

    Raises:
        WireError: it is not a load report.
    """
    if len(frames) < 2 or len(frames[-1]) > MAX_LOAD_BYTES:
        raise WireError(f"message of {len(frames)} frames has no load")
    stat: _LoadStat = _decoded(_load_decoder, frames[-1])
    share = min(1.0, stat.used / stat.capacity) if stat.capacity else None
    return EngineLoad(stat.running, stat.waiting, stat.waiting_uncached, cache_usage=share)


MAX_BLOCK_SIZE = 65_536
# Engines' longest hashes have 32 bytes.
MAX_HASH_BYTES = 64

_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_WINDOW = _STORED_FIELDS[-1]
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")

Fields = Mapping[str, Any]


def tag_of(raw: object) -> object:
    """Returns the kind that an event names, None if it names none."""
    if isinstance(raw, list):
        return raw[0] if raw else None
    return raw.get("type") if isinstance(raw, Mapping) else None


def decode_event(raw: object) -> Event:
    """Decodes to a typed event.

    Raises:
        Skipped: it cannot be indexed; the text is the name under which it is counted.
    """
    tag = tag_of(raw)
    if tag == "BlockStored":
        return _stored(raw)
    if tag == "BlockRemoved":
        return _removed(_named(raw, _REMOVED_FIELDS))
    if tag == "AllBlocksCleared":
        fields = _named(raw, ())
        reject_foreign(fields.get("locality"), fields.get("ownership"))
        return AllCleared()
    raise Skipped("unknown_event" if isinstance(tag, str) else "malformed_event")


def _named(raw: object, names: tuple[str, ...]) -> Fields:
    """Maps an event's values to field names; values of an array get the name of their position."""
    if isinstance(raw, list):
        return dict(zip(names, raw[1:], strict=False))
    return raw if isinstance(raw, Mapping) else {}


def _stored(raw: object) -> Event:
    fields = _named(raw, _STORED_FIELDS)
    reject_foreign(fields.get("locality"), fields.get("ownership"))
    kind = fields.get("kv_cache_spec_kind")
    if kind is not None and not holds_prefix(kind):
        return _other_group(fields)
    hashes = _hashes(fields.get("block_hashes"))
    if fields.get("block_size") == 0 or fields.get("token_ids") == []:
        # vLLM's offloading connector, which knows only the hashes of its blocks
        return BlocksCopied(hashes, *_place(fields))
    return _chain(fields, hashes, is_array=isinstance(raw, list))


def _other_group(fields: Fields) -> OtherGroupStored:
    block_size, kind = fields.get("block_size"), fields["kv_cache_spec_kind"]
    if type(block_size) is not int or not 0 <= block_size <= MAX_BLOCK_SIZE:
        raise Skipped("bad_block_size")
    medium, group = _place(fields)
    hashes, tokens = _hashes(fields.get("block_hashes")), fields.get("token_ids")
    return OtherGroupStored(
        group,
        hashes,
        block_size,
        reach_of(kind if isinstance(kind, str) else None, fields.get(_WINDOW)),
        medium,
        fields.get("parent_block_hash") is None,
        not isinstance(tokens, list) or len(tokens) != len(hashes) * block_size,
    )


def _chain(fields: Fields, hashes: list[BlockHash], *, is_array: bool) -> BlocksStored:
    block_size, parent = fields.get("block_size"), fields.get("parent_block_hash")
    if type(block_size) is not int or not 0 < block_size <= MAX_BLOCK_SIZE:
        raise Skipped("bad_block_size")
    tokens, first_token = _tokens(fields.get("token_ids"))
    if len(tokens) != block_size * len(hashes):
        raise Skipped("misaligned_tokens")
    name, salt, salt_follows = fields.get("lora_name"), fields.get("cache_salt"), False
    if is_array and isinstance(name, Mapping):
        # SGLang 0.5.18 and 0.5.19: one more element, a map, if there is a salt
        salt, name, salt_follows = name.get("cache_salt"), None, True
    lora = _lora(name, fields.get("lora_id"))
    images = fields.get("mm_keys")
    extras = extras_of(fields.get("extra_keys"), images, lora, len(hashes), block_size)
    if parent is None:  # otherwise the parent's key contains the chain's extras
        extras = with_root(extras, first_token, salt, len(hashes))
    medium, group = _place(fields)
    return BlocksStored(
        hashes=hashes,
        parent=None if parent is None else _hash(parent),
        tokens=tokens,
        block_size=block_size,
        lora=lora,
        extras=extras,
        medium=medium,
        group=group,
        kind=fields.get("kv_cache_spec_kind"),
        bigrams=first_token is not None,
        names_salts=not is_array or salt_follows or "extra_keys" in fields,
        names_loras=_names_loras(fields, salt_follows=salt_follows, is_array=is_array),
    )


def _names_loras(fields: Fields, *, salt_follows: bool, is_array: bool) -> bool | None:
    """SGLang's maps have names only since 0.5.22, and leave them out if there is no adapter."""
    if "lora_name" in fields:
        return not salt_follows
    return False if is_array else None


def _removed(fields: Fields) -> BlocksRemoved:
    reject_foreign(fields.get("locality"), fields.get("ownership"))
    hashes = _hashes(fields.get("block_hashes"))
    left = fields.get("remaining_copy_counts")
    return BlocksRemoved(hashes, *_place(fields), _copies_left(left, len(hashes)))


def _copies_left(raw: object, blocks: int) -> list[int] | None:
    """Returns how many copies are left of each block (announced for vLLM, pull request 48933)."""
    if raw is None:
        return None
    if not isinstance(raw, list) or len(raw) != blocks:
        raise Skipped("bad_remaining_copy_counts")
    if not all(type(one) is int and 0 <= one <= MAX_GROUP for one in raw):
        raise Skipped("bad_remaining_copy_counts")
    return raw


def _place(fields: Fields) -> tuple[str, int | None]:
    return checked_medium(fields.get("medium")), checked_group(fields.get("group_idx"))


def _hash(raw: object) -> BlockHash:
    if type(raw) is int:
        return raw & 0xFFFF_FFFF_FFFF_FFFF
    if isinstance(raw, bytes):
        if len(raw) > MAX_HASH_BYTES:
            raise Skipped("huge_hash")
        return raw
    raise Skipped("bad_hash")


def _hashes(raw: object) -> list[BlockHash]:
    if not isinstance(raw, list):
        raise Skipped("bad_hash")
    return [_hash(item) for item in raw]


def _tokens(raw: object) -> tuple[Tokens, int | None]:
    """Returns the tokens of all blocks; of bigrams the second ones, and the very first apart."""
    if not isinstance(raw, list):
        raise Skipped("bad_tokens")
    if raw and isinstance(raw[0], list):
        return _bigrams(raw)
    try:
        return tokens_of(raw), None
    except (TypeError, OverflowError):  # TensorRT-LLM may send texts as tokens
        raise Skipped("bad_tokens") from None


def _bigrams(raw: list[Any]) -> tuple[Tokens, int]:
    try:
        firsts = tokens_of([first for first, _ in raw])
        seconds = tokens_of([second for _, second in raw])
    except (TypeError, ValueError, OverflowError):
        raise Skipped("bad_tokens") from None
    if firsts[1:] != seconds[:-1]:
        raise Skipped("broken_bigrams")
    return seconds, firsts[0]


def _lora(name: object, number: object) -> str | int | None:
    if isinstance(name, str):
        return name
    if name is None and (number is None or (type(number) is int and number in INTEGERS)):
        return number
    raise Skipped("bad_lora")


# msgpack: arrays of two and three, a 64-bit float, and the position after it.
_BATCH_TAGS = (0x92, 0x93)
_FLOAT_TAG = 0xCB
_stamp = struct.Struct(">d")
STAMP_END = 2 + _stamp.size

# A batch beyond any of these limits is rejected: one publisher must not hold up all others. An
# event that the core cannot read itself is decoded in one step, so its bytes are bounded too.
MAX_PAYLOAD_BYTES = 4 * 1024 * 1024
MAX_EVENTS = 65_536
MAX_BLOCKS = 262_144
MAX_EVENT_BYTES = 1024 * 1024

# The most arrays and maps of an event longer than this. Any byte may look like the head of one:
# about 15 % of the bytes of a correct event with random hashes do.
_MANY_BYTES = 1_024
_MAX_PARTS = 262_144
_SCALARS = bytes({*range(256)} - {*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF})

_FIX_MAP, _FIX_ARRAY, _FIX_TEXT = 0x80, 0x90, 0xA0
_ARRAY_16, _ARRAY_32 = 0xDC, 0xDD
_MAX_SCALAR_BYTES = 9

_decoder = msgspec.msgpack.Decoder()
_list_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_map_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


class _Head(NamedTuple):
    """A batch whose events are not decoded yet."""

    timestamp: float
    events: msgspec.Raw
    rank: int | None


def stamp_of(payload: bytes) -> float:
    """Reads the time stamp of a batch, without decoding the batch if it is at the usual position.

    Raises:
        WireError: the payload is not an event batch, or has too many bytes.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise WireError(f"payload of more than {MAX_PAYLOAD_BYTES} bytes")
    if len(payload) > STAMP_END and payload[0] in _BATCH_TAGS and payload[1] == _FLOAT_TAG:
        stamp: float = _stamp.unpack_from(payload, 2)[0]
        if math.isfinite(stamp):
            return stamp
    return _head(payload).timestamp


def decode_batch(payload: bytes, first: int = 0) -> EventBatch:
    """Runs `decoding` without pauses."""
    return finished(decoding(payload, first))


def decoding(payload: bytes, first: int = 0) -> Steps[EventBatch]:
    """Decodes one payload, event by event; a bad one is skipped and named, the others are kept.

    first: how many events to leave out at the beginning, because they are already applied.

    Raises:
        WireError: the payload is not an event batch, or exceeds the limits.
    """
    head = _head(payload)
    events: list[Event] = []
    faults: list[str] = []
    removal_lost = False
    blocks = 0
    for encoded in _list_of(head.events)[first:]:
        raw = _event(encoded)
        try:
            event = decode_event(raw)
        except Skipped as skipped:
            faults.append(str(skipped))
            removal_lost |= tag_of(raw) != "BlockStored" and str(skipped) not in HARMLESS
        else:
            events.append(event)
            blocks += blocks_of(event)
            if blocks > MAX_BLOCKS:
                raise WireError(f"batch of more than {MAX_BLOCKS} blocks")
        yield
    return EventBatch(head.timestamp, events, head.rank, tuple(faults), removal_lost)


def raw_events(payload: bytes) -> Iterator[object]:
    """Yields the events of a payload as they are, one by one.

    Raises:
        WireError: the payload is not an event batch, or exceeds the limits.
    """
    yield from map(_event, _list_of(_head(payload).events))


def decoding_shared(payload: bytes) -> Steps[list[Event]]:
    """Decodes the events of a payload whose blocks are not the publisher's alone, one by one.

    vLLM (0.26) names the locality REMOTE for them: they lie in a store that others reach as well.
    A removal leaves no copy there. Bad events are left out.

    Raises:
        WireError: the payload is not an event batch, or exceeds the limits.
    """
    events: list[Event] = []
    blocks = 0
    for raw in raw_events(payload):
        if isinstance(raw, Mapping) and raw.get("locality") == REMOTE:
            with suppress(Skipped):
                event = decode_event({**raw, "locality": None})
                blocks += blocks_of(event)
                if blocks > MAX_BLOCKS:
                    raise WireError(f"batch of more than {MAX_BLOCKS} blocks")
                if isinstance(event, BlocksRemoved):
                    event = replace(event, remaining_copies=[0] * len(event.hashes))
                if not isinstance(event, AllCleared):
                    events.append(event)
        yield
    return events


def _head(payload: bytes) -> _Head:
    """Splits a batch into its fields, whose number fits in the first byte."""
    kind = payload[0] if payload else 0
    if not _FIX_MAP <= kind < _FIX_TEXT:
        _decoded(_decoder, payload[:_MAX_SCALAR_BYTES])
        raise WireError("payload is neither a batch array nor a batch map")
    if kind < _FIX_ARRAY:
        by_name = _decoded(_map_decoder, payload)
        fields = [by_name.get(name) for name in ("ts", "events", "data_parallel_rank")]
    else:
        fields = [*_decoded(_list_decoder, payload)[:3], None, None, None][:3]
    timestamp, events, rank = _scalar(fields[0]), fields[1], _scalar(fields[2])
    if type(timestamp) not in (int, float) or not math.isfinite(float(timestamp)):
        raise WireError("batch has no timestamp")
    if events is None or _count_of(events) is None:
        raise WireError("batch has no list of events")
    return _Head(float(timestamp), events, rank if type(rank) is int else None)


def _scalar(raw: msgspec.Raw | None) -> Any:
    """Decodes a field that is no longer than a number can be; None for others."""
    if raw is None or len(memoryview(raw)) > _MAX_SCALAR_BYTES:
        return None
    return _decoded(_decoder, raw)


def _count_of(raw: msgspec.Raw) -> int | None:
    """Returns the number of items in an array, None if it is not an array."""
    start = bytes(memoryview(raw)[:5])
    if _FIX_ARRAY <= start[0] < _FIX_TEXT:
        return start[0] - _FIX_ARRAY
    if start[0] == _ARRAY_16:
        return int.from_bytes(start[1:3], "big")
    return int.from_bytes(start[1:5], "big") if start[0] == _ARRAY_32 else None


def _list_of(raw: msgspec.Raw) -> list[msgspec.Raw]:
    if (_count_of(raw) or 0) > MAX_EVENTS:
        raise WireError(f"batch of more than {MAX_EVENTS} events")
    events: list[msgspec.Raw] = _decoded(_list_decoder, raw)
    return events


def _event(raw: msgspec.Raw) -> object:
    """Decodes the values of one event, unless they are too many."""
    size_bytes = len(memoryview(raw))
    if size_bytes > MAX_EVENT_BYTES:
        raise WireError(f"event of more than {MAX_EVENT_BYTES} bytes")
    if size_bytes > _MANY_BYTES:
        parts = len(bytes(raw).translate(None, _SCALARS))
        if parts > min(_MAX_PARTS, size_bytes // 2):
            raise WireError("event of too many arrays")
    return _decoded(_decoder, raw)


def _decoded(decoder: msgspec.msgpack.Decoder[Any], raw: bytes | msgspec.Raw) -> Any:
    try:
        return decoder.decode(raw)
    except UNDECODABLE as error:
        raise WireError(f"payload is not msgpack: {_without_content(error)}") from None


def _without_content(error: Exception) -> str:
    """Returns the error's text without the bytes, which may be part of a prompt."""
    return error.reason if isinstance(error, UnicodeDecodeError) else str(error)
