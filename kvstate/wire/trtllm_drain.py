"""What TensorRT-LLM's `POST /kv_cache_events` answers, a JSON list of events, taken apart.

Every event has a number of its own, `event_id`, counted by each rank from 0 in each life of the
server.
"""

from typing import NamedTuple

import msgspec

from kvstate.errors import WireError

MAX_SEQUENCE = 0xFFFF_FFFF_FFFF_FFFF

# What msgspec raises on bytes that are not what they should be.
BAD_JSON = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class DrainedEvent(NamedTuple):
    """One event, taken apart as far as it concerns everybody.

    sequence: its event_id. window_tokens: of its pool, None where the server has only one.
    data: the rest, JSON.
    """

    rank: int
    sequence: int
    window_tokens: int | None
    data: msgspec.Raw


class _Envelope(msgspec.Struct):
    event_id: int
    data: msgspec.Raw = msgspec.Raw(b"")
    window_size: int | None = None
    attention_dp_rank: int | None = None


class _Error(msgspec.Struct):
    error: object


_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_envelope_decoder = msgspec.json.Decoder(_Envelope)
_error_decoder = msgspec.json.Decoder(_Error)


def parse_drain(body: bytes) -> list[msgspec.Raw]:
    """The events of an answer, undecoded.

    Raises:
        WireError: it is no JSON list.
    """
    try:
        return _list_decoder.decode(body)
    except BAD_JSON:
        raise WireError("answer is no JSON list of events") from None


def error_of(body: bytes) -> str | None:
    """What the server says instead, if it answers {"error": ...}; None if it does not."""
    try:
        error = _error_decoder.decode(body).error
    except BAD_JSON:
        return None
    return error if isinstance(error, str) else "an error"


def parse_event(raw: msgspec.Raw) -> DrainedEvent:
    """One event of it.

    Raises:
        WireError: it has no number.
    """
    try:
        event = _envelope_decoder.decode(raw)
    except BAD_JSON:
        raise WireError("event has no number") from None
    if not 0 <= event.event_id <= MAX_SEQUENCE:
        raise WireError("event has no number")
    return DrainedEvent(event.attention_dp_rank or 0, event.event_id, event.window_size, event.data)
