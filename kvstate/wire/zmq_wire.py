"""Decoding of the ZMQ feeds of vLLM (0.9 to 0.32), SGLang (0.4.10 to 0.5.23) and TensorRT-LLM.

A payload is msgpack, a batch [timestamp, events, rank] of `vllm.distributed.kv_events`; builds of
vLLM between releases send it as a map. `kvstate.wire.zmq_frames` has the message around it,
`kvstate.wire.zmq_events` the events in it.
"""

import math
import struct
from collections.abc import Mapping
from typing import Any

import msgspec

from kvstate.errors import WireError
from kvstate.events import Event, EventBatch
from kvstate.wire.admission import HARMLESS, Skipped
from kvstate.wire.zmq_events import decode_event, tag_of
from kvstate.wire.zmq_frames import END_OF_REPLAY, Frames, parse_frames

__all__ = ["END_OF_REPLAY", "Frames", "decode_batch", "parse_frames", "stamp_of"]

# msgpack: arrays of two and three, a float of 64 bits, and where that ends.
_BATCH_TAGS = (0x92, 0x93)
_FLOAT_TAG = 0xCB
_stamp = struct.Struct(">d")
STAMP_END = 2 + _stamp.size

_decoder = msgspec.msgpack.Decoder()


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


def decode_batch(payload: bytes, first: int = 0) -> EventBatch:
    """Decodes one payload; a bad event is skipped and named, the rest of its batch kept.

    first: how many events to leave out at the beginning, because they are known already.

    Raises:
        WireError: the payload is no event batch at all.
    """
    try:
        batch = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"payload is not msgpack: {_without_content(error)}") from None
    timestamp, raw_events, rank = _batch_fields(batch)
    events: list[Event] = []
    faults: list[str] = []
    removal_lost = False
    for raw in raw_events[first:]:
        try:
            events.append(decode_event(raw))
        except Skipped as skipped:
            faults.append(str(skipped))
            removal_lost |= tag_of(raw) != "BlockStored" and str(skipped) not in HARMLESS
    return EventBatch(timestamp, events, rank, tuple(faults), removal_lost)


def _without_content(error: Exception) -> str:
    """What is wrong, without the bytes it is about: they may be somebody's prompt."""
    return error.reason if isinstance(error, UnicodeDecodeError) else str(error)


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
