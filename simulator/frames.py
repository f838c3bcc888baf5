"""The messages of event publishers and of their replay sockets, as multipart frames.

Layouts follow recorded frames. A batch is a msgpack array of time, events and rank. Sequence
numbers are 8 bytes, big-endian, from 0. Answers of a replay socket name the topic since vLLM 0.26
and SGLang 0.5.22, and in TensorRT-LLM.
"""

from collections.abc import Sequence

import msgspec

from simulator.layouts import WireEvent

_SEQUENCE_BYTES = 8
_MAX_START_BYTES = 8
_END_SEQUENCE = b"\xff" * _SEQUENCE_BYTES

_encoder = msgspec.msgpack.Encoder()


def batch(timestamp: float, events: Sequence[WireEvent], rank: int = 0) -> bytes:
    """The payload for one step's events; `timestamp` is in seconds since the epoch."""
    return _encoder.encode((timestamp, events, rank))


def published(topic: bytes, sequence: int, payload: bytes) -> tuple[bytes, ...]:
    """What subscribers receive."""
    return (topic, sequence.to_bytes(_SEQUENCE_BYTES, "big"), payload)


def replayed(
    topic: bytes, sequence: int, payload: bytes, *, with_topic: bool = True
) -> tuple[bytes, ...]:
    """The same batch in an answer of the replay socket."""
    message = published(topic, sequence, payload)
    return (b"", *(message if with_topic else message[1:]))


def end_of_replay(*, with_topic: bool = True) -> tuple[bytes, ...]:
    """Closes every answer of the replay socket; its topic frame is empty even if a topic is set."""
    end = (b"", b"", _END_SEQUENCE, b"")
    return end if with_topic else end[1:]


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
