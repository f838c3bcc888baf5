"""HEADERS and its CONTINUATION frames -> one header block (RFC 9113, sections 6.2 and 6.10)."""

from extproc.errors import Http2Error
from extproc.http2.frames import ErrorCode, Flag, FrameType
from extproc.http2.limits import Limits

_PRIORITY_BYTES = 5


class HeadJoiner:
    """Of one connection: nothing may come between the frames of a block."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.is_open = False
        self._stream_id = 0
        self._is_last = False
        self._block = b""
        self._continuations = 0

    def begin(self, flags: int, stream_id: int, payload: bytes) -> tuple[int, bytes, bool] | None:
        """HEADERS: the stream, its block and whether nothing follows it, if that is whole.

        Raises:
            Http2Error: it cannot be read.
        """
        if stream_id == 0:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "HEADERS on no stream")
        if flags & Flag.PADDED:
            payload = unpadded(payload)
        if flags & Flag.PRIORITY:
            if len(payload) < _PRIORITY_BYTES:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short")
            payload = payload[_PRIORITY_BYTES:]
        is_last = bool(flags & Flag.END_STREAM)
        if flags & Flag.END_HEADERS and len(payload) <= self._limits.max_header_block_bytes:
            return stream_id, payload, is_last
        self.is_open = True
        self._stream_id, self._is_last = stream_id, is_last
        self._block = b""
        self._continuations = 0
        return self._append(flags, payload)

    def go_on(
        self, kind: int, flags: int, stream_id: int, payload: bytes
    ) -> tuple[int, bytes, bool] | None:
        """What came after HEADERS that did not end its block: as `begin`.

        Raises:
            Http2Error: it is not its CONTINUATION, or one too many.
        """
        if kind != FrameType.CONTINUATION or not self.is_open or stream_id != self._stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION and nothing else follows")
        self._continuations += 1
        if self._continuations > self._limits.max_continuations:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many CONTINUATION")
        return self._append(flags, payload)

    def _append(self, flags: int, payload: bytes) -> tuple[int, bytes, bool] | None:
        self._block += payload
        if len(self._block) > self._limits.max_header_block_bytes:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "header block too large")
        if not flags & Flag.END_HEADERS:
            return None
        block, self._block = self._block, b""
        self.is_open = False
        return self._stream_id, block, self._is_last


def unpadded(payload: bytes) -> bytes:
    """The content of a padded payload (RFC 9113, section 6.1).

    Raises:
        Http2Error: there is more padding than payload.
    """
    if not payload:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "padded frame without a length of padding")
    padding = payload[0]
    if padding >= len(payload):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - padding]
