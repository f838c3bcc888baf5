"""What TensorRT-LLM's `POST /kv_cache_events` answers, a JSON list of events, taken apart.

Every event has a number of its own, `event_id`, counted by each rank from 0 in each life of the
server.
"""

from typing import NamedTuple

import msgspec

from kvstate.errors import WireError

MAX_SEQUENCE = 0xFFFF_FFFF_FFFF_FFFF

# Events of one answer. The queue of the engine (`event_buffer_max_size`) is mostly 1,024 long.
MAX_EVENTS = 65_536

# A list with something in it that is no event is only taken apart up to here: 16 MiB of zeros would
# be 8 million of them, and hold the event loop for seconds.
MAX_SPOILT_BYTES = 64 * 1024

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


class _Numbered(msgspec.Struct):
    event_id: msgspec.Raw


class _Error(msgspec.Struct):
    error: object


_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_numbered_decoder = msgspec.json.Decoder(list[_Numbered])
_envelope_decoder = msgspec.json.Decoder(_Envelope)
_error_decoder = msgspec.json.Decoder(_Error)


def parse_drain(body: bytes) -> list[msgspec.Raw]:
    """The events of an answer, undecoded.

    Raises:
        WireError: it is no JSON list, or one that would take long to take apart.
    """
    if body.count(b'"event_id"') > MAX_EVENTS:
        raise WireError(f"answer of more than {MAX_EVENTS} events")
    try:
        if len(body) > MAX_SPOILT_BYTES:
            _numbered_decoder.decode(body)  # ends at the first that is no event
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
