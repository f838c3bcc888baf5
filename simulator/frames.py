"""The messages of vLLM 0.32's event publisher and of its replay socket, as multipart frames.

Layouts follow recorded frames. A batch is a msgpack array of time, events and rank; its events
are maps. Sequence numbers are 8 bytes, big-endian, from 0.
"""

from collections.abc import Sequence

import msgspec

from simulator.events import Event

_SEQUENCE_BYTES = 8
_MAX_START_BYTES = 8

END_OF_REPLAY: tuple[bytes, ...] = (b"", b"", b"\xff" * _SEQUENCE_BYTES, b"")
"""Closes every answer of the replay socket; its topic frame is empty even if a topic is set."""

_encoder = msgspec.msgpack.Encoder()


def batch(timestamp: float, events: Sequence[Event], rank: int = 0) -> bytes:
    """The payload for one step's events; `timestamp` is in seconds since the epoch."""
    return _encoder.encode((timestamp, events, rank))


def published(topic: bytes, sequence: int, payload: bytes) -> tuple[bytes, ...]:
    """What subscribers receive."""
    return (topic, sequence.to_bytes(_SEQUENCE_BYTES, "big"), payload)


def replayed(topic: bytes, sequence: int, payload: bytes) -> tuple[bytes, ...]:
    """The same batch in an answer of the replay socket (vLLM 0.26 and later, with the topic)."""
    return (b"", *published(topic, sequence, payload))


def replay_start(request: Sequence[bytes]) -> int | None:
    """The first sequence number that a replay request asks for; None if it is to be ignored.

    `request` is without the sender's routing frame: an empty delimiter and the number. vLLM
    reads shorter numbers too, and answers nothing to a request without the delimiter.
    """
    match request:
        case [b"", start] if 0 < len(start) <= _MAX_START_BYTES:
            return int.from_bytes(start, "big")
        case _:
            return None
