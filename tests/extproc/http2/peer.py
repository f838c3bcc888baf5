"""A client that writes and reads frames itself, so that it can break every rule."""

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from tests.oracles.http2.frames import Flag, FrameType, frame
from tests.oracles.http2.header_blocks import encode

END_HEADERS = int(Flag.END_HEADERS)
END_STREAM = int(Flag.END_STREAM)

REQUEST = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/service/method"),
    (b"content-type", b"application/grpc"),
]

# What a call takes of a server's budget, besides its content: until its first message is whole.
OPEN_BYTES = 1024

# Sets the table size to 0: a peer must do so before its first field once it knows our limit.
NO_TABLE = b"\x20"


class Sent(NamedTuple):
    """A frame that the connection wrote."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes


def frames_of(data: bytes) -> list[Sent]:
    """Returns the frames that a connection wrote, without an incomplete last one."""
    found: list[Sent] = []
    while True:
        length = int.from_bytes(data[:3], "big")
        if len(data) < 9 + length:
            return found
        stream_id = int.from_bytes(data[5:9], "big")
        found.append(Sent(data[3], data[4], stream_id, data[9 : 9 + length]))
        data = data[9 + length :]


def block_of(fields: Sequence[tuple[bytes, bytes]] = REQUEST) -> bytes:
    """A header block that needs no table."""
    return encode(fields)


def headers(
    stream_id: int,
    fields: Sequence[tuple[bytes, bytes]] = REQUEST,
    *,
    flags: int = END_HEADERS,
) -> bytes:
    """HEADERS."""
    return frame(FrameType.HEADERS, flags, stream_id, block_of(fields))


def data(stream_id: int, payload: bytes = b"", *, flags: int = 0) -> bytes:
    """DATA."""
    return frame(FrameType.DATA, flags, stream_id, payload)


def rst(stream_id: int) -> bytes:
    """RST_STREAM with CANCEL."""
    return frame(FrameType.RST_STREAM, 0, stream_id, b"\0\0\0\x08")


def resets(frames: Sequence[Sent]) -> list[tuple[int, int]]:
    """Stream and code of every RST_STREAM."""
    return [
        (one.stream_id, Struct(">I").unpack(one.payload)[0])
        for one in frames
        if one.kind == FrameType.RST_STREAM
    ]
