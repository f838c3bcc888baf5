"""Decoding of the ZMQ feeds of vLLM (0.9 to 0.32), SGLang (0.4.10 to 0.5.23) and TensorRT-LLM.

A payload is msgpack, a batch [timestamp, events, rank] of `vllm.distributed.kv_events`; builds of
vLLM between releases send it as a map. `kvstate.wire.zmq_frames` has the message around it,
`kvstate.wire.zmq_events` the events in it.
"""

import math
import struct
from collections.abc import Generator
from typing import Any, NamedTuple

import msgspec

from kvstate.core import finished
from kvstate.errors import WireError
from kvstate.events import Event, EventBatch, blocks_of
from kvstate.wire.admission import HARMLESS, Skipped
from kvstate.wire.zmq_events import decode_event, tag_of
from kvstate.wire.zmq_frames import END_OF_REPLAY, Frames, parse_frames

__all__ = ["END_OF_REPLAY", "Frames", "decode_batch", "decoding", "parse_frames", "stamp_of"]

# msgpack: arrays of two and three, a float of 64 bits, and where that ends.
_BATCH_TAGS = (0x92, 0x93)
_FLOAT_TAG = 0xCB
_stamp = struct.Struct(">d")
STAMP_END = 2 + _stamp.size

# A batch beyond any of these is not taken at all: one publisher must not hold up everybody. An
# event that the core does not read by itself is decoded in one go, so its bytes are bounded too.
MAX_PAYLOAD_BYTES = 4 * 1024 * 1024
MAX_EVENTS = 65_536
MAX_BLOCKS = 262_144
MAX_EVENT_BYTES = 1024 * 1024

# Arrays and maps of one event that is longer than these bytes; any of the bytes may be the head of
# one, so of an honest event some 15 % are, where its hashes are random.
_MANY_BYTES = 1_024
_MAX_PARTS = 262_144
_SCALARS = bytes({*range(256)} - {*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF})

_FIX_MAP, _FIX_ARRAY, _FIX_TEXT = 0x80, 0x90, 0xA0
_ARRAY_16, _ARRAY_32 = 0xDC, 0xDD
_MAX_SCALAR_BYTES = 9

_decoder = msgspec.msgpack.Decoder()
_list_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_map_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_NOT_MSGPACK = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class _Head(NamedTuple):
    """A batch whose events are not decoded yet."""

    timestamp: float
    events: msgspec.Raw
    rank: int | None


def stamp_of(payload: bytes) -> float:
    """The time stamp of a batch, read without decoding it where it lies where engines put it.

    Raises:
        WireError: the payload is no event batch at all, or one of too many bytes.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise WireError(f"payload of more than {MAX_PAYLOAD_BYTES} bytes")
    if len(payload) > STAMP_END and payload[0] in _BATCH_TAGS and payload[1] == _FLOAT_TAG:
        stamp: float = _stamp.unpack_from(payload, 2)[0]
        if math.isfinite(stamp):
            return stamp
    return _head(payload).timestamp


def decode_batch(payload: bytes, first: int = 0) -> EventBatch:
    """As `decoding`, in one go."""
    return finished(decoding(payload, first))


def decoding(payload: bytes, first: int = 0) -> Generator[None, None, EventBatch]:
    """Decodes one payload, event by event; a bad one is skipped and named, the rest kept.

    first: how many events to leave out at the beginning, because they are known already.

    Raises:
        WireError: the payload is no event batch at all, or beyond the limits.
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


def _head(payload: bytes) -> _Head:
    """Takes a batch apart; its own fields are so few that their number fits in the first byte."""
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


def _scalar(raw: msgspec.Raw | None) -> Any:  # noqa: ANN401 - whatever it is
    """A field that is no text and no list; None for others."""
    if raw is None or len(memoryview(raw)) > _MAX_SCALAR_BYTES:
        return None
    return _decoded(_decoder, raw)


def _count_of(raw: msgspec.Raw) -> int | None:
    """How many items an array has, None if it is none."""
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
    """The values of one event, unless they are too many."""
    size_bytes = len(memoryview(raw))
    if size_bytes > MAX_EVENT_BYTES:
        raise WireError(f"event of more than {MAX_EVENT_BYTES} bytes")
    if size_bytes > _MANY_BYTES:
        parts = len(bytes(raw).translate(None, _SCALARS))
        if parts > min(_MAX_PARTS, size_bytes // 2):
            raise WireError("event of too many arrays")
    return _decoded(_decoder, raw)


def _decoded(decoder: msgspec.msgpack.Decoder[Any], raw: bytes | msgspec.Raw) -> Any:  # noqa: ANN401
    try:
        return decoder.decode(raw)
    except _NOT_MSGPACK as error:
        raise WireError(f"payload is not msgpack: {_without_content(error)}") from None


def _without_content(error: Exception) -> str:
    """What is wrong, without the bytes it is about: they may be somebody's prompt."""
    return error.reason if isinstance(error, UnicodeDecodeError) else str(error)
