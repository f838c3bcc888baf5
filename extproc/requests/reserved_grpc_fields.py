"""Removes from a message of gRPC the fields by which only the router may say where KV blocks are.

They are found by their numbers, and cut out; nothing is decoded. Sources: the services of
smg-grpc-proto 0.4.28; protobuf's encoding of messages; gRPC over HTTP/2, "Length-Prefixed-Message".
"""

import struct
from typing import Final

# The numbers of the fields in each path's message.
FIELDS: Final = {
    # kv_transfer_params, kv_transfer_params_json
    "/vllm.grpc.engine.VllmEngine/Generate": frozenset((6, 8)),
    # disaggregated_params
    "/sglang.grpc.scheduler.SglangScheduler/Generate": frozenset((10,)),
    "/trtllm.TrtllmService/Generate": frozenset((17,)),
    # encode_bootstrap_info, kv_bootstrap_info
    "/tokenspeed.grpc.scheduler.TokenSpeedScheduler/Generate": frozenset((10, 11)),
}

# A message with more fields is refused: encoders write numbers of a list into one field.
MAX_FIELDS = 512

_PREFIX = struct.Struct(">BI")

# How protobuf writes a field: the wire types.
_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED_64: 8, _FIXED_32: 4}

# Most bytes of a number that a decoder reads, and of a field's tag, which has 32 bits.
_MAX_VARINT_BYTES = 10
_MAX_TAG_BYTES = 5

# In each byte of a number that another one follows.
_FOLLOWED = 0x80


def without_reserved(path: str, body: bytes) -> bytes | None:
    """Returns a request without the router's fields: the same object if it has none.

    Returns None, which refuses it, if that is not certain: it is compressed, not one message, or
    has more than MAX_FIELDS fields. All other bytes but the message's length stay as they are.
    """
    fields = FIELDS.get(path)
    if fields is None:
        return body
    if len(body) < _PREFIX.size:
        return None
    compressed, length = _PREFIX.unpack_from(body)
    if compressed or _PREFIX.size + length != len(body):
        return None
    try:
        kept = _remaining_parts(body, fields)
    except _UnclearError:
        return None
    if kept == [(_PREFIX.size, len(body))]:
        return body
    message = b"".join([body[start:end] for start, end in kept])
    return _PREFIX.pack(0, len(message)) + message


class _UnclearError(Exception):
    """A message is not read with certainty."""


def _remaining_parts(body: bytes, fields: frozenset[int]) -> list[tuple[int, int]]:
    """Returns the parts of a message between the fields that are cut out."""
    kept, begun, at = [], _PREFIX.size, _PREFIX.size
    for _ in range(MAX_FIELDS):
        if at == len(body):
            break
        field, end = _field(body, at)
        if field in fields:
            kept.append((begun, at))
            begun = end
        at = end
    if at != len(body):
        raise _UnclearError
    return [*kept, (begun, at)]


def _field(body: bytes, at: int) -> tuple[int, int]:
    """Returns the number of the field that begins at a place, and where it ends."""
    tag, behind = _number(body, at, _MAX_TAG_BYTES)
    field, kind = tag >> 3, tag & 7
    if not field or tag >> 32:
        raise _UnclearError
    if kind == _VARINT:
        end = _number(body, behind, _MAX_VARINT_BYTES)[1]
    elif kind == _LENGTH:
        length, behind = _number(body, behind, _MAX_TAG_BYTES)
        end = behind + length
    elif kind in _FIXED_BYTES:
        end = behind + _FIXED_BYTES[kind]
    else:  # a group, which none of these messages has
        raise _UnclearError
    if end > len(body):
        raise _UnclearError
    return field, end


def _number(body: bytes, at: int, most_bytes: int) -> tuple[int, int]:
    """Returns the number at a place, which may be written in more bytes than it needs."""
    number = 0
    for place, byte in enumerate(body[at : at + most_bytes]):
        number |= (byte & 0x7F) << 7 * place
        if not byte & _FOLLOWED:
            return number, at + place + 1
    raise _UnclearError
