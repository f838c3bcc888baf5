"""HTTP/2 frames (RFC 9113, sections 4 and 6): constants, a reader, and builders."""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from struct import Struct
from typing import Final

from extproc.http2.codes import ErrorCode
from tests.oracles.http2.errors import Http2Error

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# Length and type share four bytes: length << 8 | type. Then flags, then the stream.
HEADER: Final = Struct(">IBI")
HEADER_BYTES: Final = 9

# The smallest allowed SETTINGS_MAX_FRAME_SIZE, and this server's, which it never raises.
MAX_FRAME_BYTES: Final = 16_384
LARGEST_MAX_FRAME_BYTES: Final = 2**24 - 1

DEFAULT_WINDOW: Final = 65_535
MAX_WINDOW: Final = 2**31 - 1
STREAM_MASK: Final = 2**31 - 1

_UINT32: Final = Struct(">I")
_SETTING: Final = Struct(">HI")
SETTING_BYTES: Final = 6


class FrameType(IntEnum):
    """RFC 9113, section 6; other types are ignored (4.1)."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flag(IntEnum):
    """Flags of frames; ACK and END_STREAM are the same bit, in different frames."""

    ACK = 0x1
    END_STREAM = 0x1
    END_HEADERS = 0x4
    PADDED = 0x8
    PRIORITY = 0x20


class Setting(IntEnum):
    """RFC 9113, section 6.5.2; others are ignored."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Returns one whole frame."""
    return HEADER.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings(values: Mapping[int, int]) -> bytes:
    """Returns a SETTINGS frame with these values."""
    return frame(
        FrameType.SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in values.items())
    )


def settings_of(payload: bytes) -> Iterable[tuple[int, int]]:
    """Yields the settings of a payload, whose length is a multiple of `SETTING_BYTES`."""
    return _SETTING.iter_unpack(payload)


def settings_ack() -> bytes:
    """Returns the SETTINGS frame that acknowledges the peer's."""
    return frame(FrameType.SETTINGS, Flag.ACK, 0)


def ping(opaque: bytes, *, ack: bool = False) -> bytes:
    """Returns a PING frame. opaque: 8 bytes."""
    return frame(FrameType.PING, Flag.ACK if ack else 0, 0, opaque)


def window_update(stream_id: int, increment: int) -> bytes:
    """Returns a WINDOW_UPDATE frame of a stream, or of the connection (stream 0)."""
    return frame(FrameType.WINDOW_UPDATE, 0, stream_id, _UINT32.pack(increment))


def rst_stream(stream_id: int, code: int) -> bytes:
    """Returns a RST_STREAM frame."""
    return frame(FrameType.RST_STREAM, 0, stream_id, _UINT32.pack(code))


def goaway(last_stream_id: int, code: int, text: str = "") -> bytes:
    """Returns a GOAWAY frame. text: for the peer's log."""
    head = _UINT32.pack(last_stream_id) + _UINT32.pack(code)
    return frame(FrameType.GOAWAY, 0, 0, head + text.encode())


def uint32(payload: bytes, offset: int = 0) -> int:
    """Returns the 32-bit number at an offset of a payload that is long enough."""
    number: int = _UINT32.unpack_from(payload, offset)[0]
    return number


_DATA = int(FrameType.DATA)
_PADDED = int(Flag.PADDED)
_ANY_END = ~int(Flag.END_STREAM)


# Kind, flags, stream and payload of a frame, or of a part of a DATA frame that arrived in parts:
# parts count as frames, with END_STREAM on the last. The payload is a view of the read bytes for
# DATA, else bytes. A plain tuple: three are made for every request.
Frame = tuple[int, int, int, bytes | memoryview]


class FrameReader:
    """Splits a client's bytes into frames, after the preface."""

    def __init__(self) -> None:
        self._remaining_preface = PREFACE
        self._incomplete = b""
        self._remaining_data = 0
        self._data_flags = 0
        self._data_stream = 0

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes kept because their frame is incomplete."""
        return len(self._incomplete)

    def read(self, data: bytes) -> tuple[list[Frame], Http2Error | None]:
        """Returns the frames that these bytes complete, and any error in the bytes after them.

        The reader must not be used after an error.
        """
        if self._remaining_preface:
            expected = self._remaining_preface[: len(data)]
            if not data.startswith(expected):
                return [], Http2Error(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 preface")
            self._remaining_preface = self._remaining_preface[len(expected) :]
            data = data[len(expected) :]
        if self._incomplete:
            data = self._incomplete + data
            self._incomplete = b""
        return self._frames(data)

    def _frames(self, data: bytes) -> tuple[list[Frame], Http2Error | None]:
        frames: list[Frame] = []
        view = memoryview(data)
        at, end = 0, len(data)
        if self._remaining_data:
            at = self._more_of_data(view, frames)
        while end - at >= HEADER_BYTES:
            head, flags, stream_id = HEADER.unpack_from(data, at)
            length, kind = head >> 8, head & 0xFF
            if length > MAX_FRAME_BYTES:
                return frames, Http2Error(ErrorCode.FRAME_SIZE_ERROR, "frame too long")
            stream_id &= STREAM_MASK
            start = at + HEADER_BYTES
            stop = start + length
            if kind == _DATA:
                if stop > end and not flags & _PADDED:
                    self._remaining_data = length
                    self._data_flags, self._data_stream = flags, stream_id
                    at = start + self._more_of_data(view[start:], frames)
                    break
                if stop > end:
                    break
                frames.append((kind, flags, stream_id, view[start:stop]))
            elif stop > end:
                break
            else:
                frames.append((kind, flags, stream_id, data[start:stop]))
            at = stop
        self._incomplete = data[at:]
        return frames, None

    def _more_of_data(self, view: memoryview, frames: list[Frame]) -> int:
        """Adds the next part of a DATA frame; returns how many bytes it took."""
        part = view[: self._remaining_data]
        if not part:
            return 0
        self._remaining_data -= len(part)
        flags = self._data_flags & _ANY_END if self._remaining_data else self._data_flags
        frames.append((_DATA, flags, self._data_stream, part))
        return len(part)
