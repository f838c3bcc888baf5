"""Decoding of the ZMQ feeds of vLLM (0.9 to 0.32) and engines that publish the same layouts.

A message is [topic, sequence number (8 bytes big-endian), payload]; the payload is msgpack, a batch
[timestamp, events, rank] whose events are tagged arrays (vLLM before 0.24) or tagged maps (since).
Positions and names are those of `vllm.distributed.kv_events`.
"""

import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvstate.errors import WireError
from kvstate.events import (
    AllCleared,
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
    Extra,
    Tokens,
)
from kvstate.tiers import DEFAULT_MEDIUM, tier_of

# Sequence number of the message that ends a replay: -1 in 8 bytes.
END_OF_REPLAY = 0xFFFF_FFFF_FFFF_FFFF

MAX_BLOCK_SIZE = 65_536

# msgpack: arrays of two and three, a float of 64 bits, and where that ends.
_BATCH_TAGS = (0x92, 0x93)
_FLOAT_TAG = 0xCB
_stamp = struct.Struct(">d")
STAMP_END = 2 + _stamp.size

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
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")

# What an extra key may consist of.
_SCALARS = str | bytes | int | float | None

# Groups whose blocks hold the whole prefix; the others keep a window or a state of it.
_PREFIX_KINDS = {"full_attention", "mla_attention", "sink_full_attention"}


# Skipped events that cannot have removed anything that we hold: their blocks are never stored.
_HARMLESS = {"unknown_event", "unknown_medium", "other_locality"}


class _Skipped(Exception):  # noqa: N818 - control flow inside this module, not an error
    """An event that is left out, under the name it is counted by."""


class Frames(NamedTuple):
    """One ZMQ message, taken apart."""

    sequence: int
    payload: bytes

    @property
    def ends_replay(self) -> bool:
        """Whether this is the marker after the last batch of a replay."""
        return self.sequence == END_OF_REPLAY and not self.payload


def parse_frames(frames: Sequence[bytes]) -> Frames:
    """Takes a message apart, live or replayed.

    Counted from the end: replays put an empty frame in front, and since vLLM 0.26 the topic too.

    Raises:
        WireError: fewer than two frames, or a sequence number that is not 8 bytes.
    """
    if len(frames) < 2 or len(frames[-2]) != 8:  # noqa: PLR2004 - the layout above
        raise WireError(f"message of {len(frames)} frames has no sequence number")
    return Frames(int.from_bytes(frames[-2], "big"), frames[-1])


def stamp_of(payload: bytes) -> float:
    """The time stamp of a batch, read without decoding it where it lies where engines put it.

    Raises:
        WireError: the payload is no event batch at all.
    """
    if len(payload) > STAMP_END and payload[0] in _BATCH_TAGS and payload[1] == _FLOAT_TAG:
        stamp: float = _stamp.unpack_from(payload, 2)[0]
        if math.isfinite(stamp):
            return stamp
    return decode_batch(payload).timestamp


_decoder = msgspec.msgpack.Decoder()


def decode_batch(payload: bytes) -> EventBatch:
    """Decodes one payload; a bad event is skipped and named, the rest of its batch kept.

    Raises:
        WireError: the payload is no event batch at all.
    """
    try:
        batch = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"payload is not msgpack: {error}") from None
    timestamp, raw_events, rank = _batch_fields(batch)
    events: list[Event] = []
    faults: list[str] = []
    removal_lost = False
    for raw in raw_events:
        try:
            events.append(_event(raw))
        except _Skipped as skipped:
            faults.append(str(skipped))
            removal_lost |= _tag(raw) != "BlockStored" and str(skipped) not in _HARMLESS
    return EventBatch(timestamp, events, rank, tuple(faults), removal_lost)


def _batch_fields(batch: object) -> tuple[float, list[Any], int | None]:
    if isinstance(batch, Mapping):
        fields: list[Any] = [batch.get(name) for name in ("ts", "events", "data_parallel_rank")]
    elif isinstance(batch, list):
        fields = (batch + [None] * 3)[:3]
    else:
        raise WireError("payload is neither a batch array nor a batch map")
    timestamp, events, rank = fields
    if type(timestamp) not in (int, float) or not math.isfinite(float(timestamp)):
        raise WireError("batch has no timestamp")
    if not isinstance(events, list):
        raise WireError("batch has no list of events")
    return float(timestamp), events, rank if type(rank) is int else None


def _tag(raw: object) -> object:
    if isinstance(raw, list):
        return raw[0] if raw else None
    return raw.get("type") if isinstance(raw, Mapping) else None


def _event(raw: object) -> Event:
    tag = _tag(raw)
    if tag == "BlockStored":
        return _stored(_named(raw, _STORED_FIELDS))
    if tag == "BlockRemoved":
        return _removed(_named(raw, _REMOVED_FIELDS))
    if tag == "AllBlocksCleared":
        return AllCleared()
    raise _Skipped("unknown_event" if isinstance(tag, str) else "malformed_event")


def _named(raw: object, fields: tuple[str, ...]) -> Mapping[str, Any]:
    """An event by field names; a value of an array has the name of its position."""
    if isinstance(raw, list):
        return dict(zip(fields, raw[1:], strict=False))
    return raw if isinstance(raw, Mapping) else {}


def _stored(raw: Mapping[str, Any]) -> BlocksStored:
    _reject_foreign(raw)
    kind = raw.get("kv_cache_spec_kind")
    if kind is not None and (not isinstance(kind, str) or kind not in _PREFIX_KINDS):
        raise _Skipped("other_attention_group")
    if raw.get("cache_salt") is not None:
        raise _Skipped("salt_outside_extra_keys")  # SGLang's layout: not for unsalted prompts
    hashes = _hashes(raw.get("block_hashes"))
    block_size = raw.get("block_size")
    token_ids = raw.get("token_ids")
    if block_size == 0 or token_ids == []:
        raise _Skipped("placeholder")
    if type(block_size) is not int or not 0 < block_size <= MAX_BLOCK_SIZE:
        raise _Skipped("bad_block_size")
    tokens = _tokens(token_ids)
    if len(tokens) != block_size * len(hashes):
        raise _Skipped("misaligned_tokens")
    parent = raw.get("parent_block_hash")
    lora = _lora(raw)
    return BlocksStored(
        hashes=hashes,
        parent=None if parent is None else _hash(parent),
        tokens=tokens,
        block_size=block_size,
        lora=lora,
        extras=_extras(raw.get("extra_keys"), lora, len(hashes)),
        medium=_medium(raw),
        group=_group(raw),
    )


def _removed(raw: Mapping[str, Any]) -> BlocksRemoved:
    _reject_foreign(raw)
    return BlocksRemoved(_hashes(raw.get("block_hashes")), _medium(raw), _group(raw))


def _reject_foreign(raw: Mapping[str, Any]) -> None:
    """Blocks that lie on another server are not this worker's to credit (vLLM 0.26, locality)."""
    if raw.get("locality") == "REMOTE":
        raise _Skipped("other_locality")


def _hash(raw: object) -> BlockHash:
    if type(raw) is int:
        return raw & 0xFFFF_FFFF_FFFF_FFFF
    if isinstance(raw, bytes):
        return raw
    raise _Skipped("bad_hash")


def _hashes(raw: object) -> list[BlockHash]:
    if not isinstance(raw, list):
        raise _Skipped("bad_hash")
    return [_hash(item) for item in raw]


def _tokens(raw: object) -> Tokens:
    if not isinstance(raw, list):
        raise _Skipped("bad_tokens")
    try:
        return array("I", raw)
    except (TypeError, OverflowError):
        raise _Skipped("bad_tokens") from None


def _lora(raw: Mapping[str, Any]) -> str | int | None:
    name, number = raw.get("lora_name"), raw.get("lora_id")
    if isinstance(name, str):
        return name
    return number if type(number) is int else None


def _extras(raw: object, lora: str | int | None, blocks: int) -> list[Extra] | None:
    """The extra keys of each block, less the adapter's name, which the root key holds already."""
    if raw is None:
        return None
    if not isinstance(raw, list) or len(raw) != blocks:
        raise _Skipped("bad_extra_keys")
    extras = [_extra(item, lora) for item in raw]
    return extras if any(extras) else None


def _extra(raw: object, lora: str | int | None) -> Extra:
    items = raw if isinstance(raw, list) else [] if raw is None else [raw]
    if items and lora is not None and items[0] == lora:
        items = items[1:]
    if not all(_is_plain(item) for item in items):
        raise _Skipped("bad_extra_keys")
    return tuple(items)


def _is_plain(item: object) -> bool:
    """A scalar, or scalars such as vLLM's [image hash, offset]: no engine nests deeper."""
    scalars = item if isinstance(item, list) else [item]
    return all(isinstance(scalar, _SCALARS) for scalar in scalars)


def _medium(raw: Mapping[str, Any]) -> str:
    medium = raw.get("medium")
    if medium is None:
        return DEFAULT_MEDIUM
    if not isinstance(medium, str):
        raise _Skipped("bad_medium")
    if tier_of(medium) is None:
        raise _Skipped("unknown_medium")
    return medium.upper()


def _group(raw: Mapping[str, Any]) -> int | None:
    group = raw.get("group_idx")
    return group if type(group) is int else None
