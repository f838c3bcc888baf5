"""Bytes as they come -> frames. Bounded: never keeps more than one frame that is not whole."""

from typing import NamedTuple

from extproc.errors import Http2Error
from extproc.http2.frames import (
    HEADER,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    PREFACE,
    STREAM_MASK,
    ErrorCode,
    Flag,
    FrameType,
)

_DATA = int(FrameType.DATA)
_PADDED = int(Flag.PADDED)
_ANY_END = ~int(Flag.END_STREAM)


class Frame(NamedTuple):
    """A frame, or a part of a DATA frame that came in parts: these are as good as frames of their
    own, END_STREAM on the last. Payload: a view of what was read if DATA, else bytes."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes | memoryview


class FrameReader:
    """Takes what a client sends, its preface first."""

    def __init__(self) -> None:
        self._preface_left = PREFACE
        self._rest = b""
        self._data_left = 0
        self._data_flags = 0
        self._data_stream = 0

    @property
    def held(self) -> int:
        """Bytes that are kept because their frame is not whole."""
        return len(self._rest)

    def read(self, data: bytes) -> tuple[list[Frame], Http2Error | None]:
        """The frames that these bytes make whole, and what is wrong with the bytes after them.

        After an error the reader is not to be used again.
        """
        if self._preface_left:
            expected = self._preface_left[: len(data)]
            if not data.startswith(expected):
                return [], Http2Error(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 preface")
            self._preface_left = self._preface_left[len(expected) :]
            data = data[len(expected) :]
        if self._rest:
            data = self._rest + data
            self._rest = b""
        return self._frames(data)

    def _frames(self, data: bytes) -> tuple[list[Frame], Http2Error | None]:
        frames: list[Frame] = []
        view = memoryview(data)
        at, end = 0, len(data)
        if self._data_left:
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
                    self._data_left = length
                    self._data_flags, self._data_stream = flags, stream_id
                    at = start + self._more_of_data(view[start:], frames)
                    break
                if stop > end:
                    break
                frames.append(Frame(kind, flags, stream_id, view[start:stop]))
            elif stop > end:
                break
            else:
                frames.append(Frame(kind, flags, stream_id, data[start:stop]))
            at = stop
        self._rest = data[at:]
        return frames, None

    def _more_of_data(self, view: memoryview, frames: list[Frame]) -> int:
        """The next part of a DATA frame that has begun; how many bytes it took."""
        part = view[: self._data_left]
        if not part:
            return 0
        self._data_left -= len(part)
        flags = self._data_flags & _ANY_END if self._data_left else self._data_flags
        frames.append(Frame(_DATA, flags, self._data_stream, part))
        return len(part)
