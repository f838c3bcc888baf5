"""The streams of one connection, and what the peer's frames do to them (RFC 9113, section 5.1).

    none       HEADERS                 Opened: open, or half closed with END_STREAM
    open       DATA                    Received
    open       DATA with END_STREAM    Received: half closed
    open       HEADERS = trailers      Received: half closed
    half closed          DATA, HEADERS stream error STREAM_CLOSED: Aborted, closed
    open, half closed    RST_STREAM    Aborted: closed
    closed     DATA                    stream error STREAM_CLOSED; nothing if it was reset
    closed     HEADERS                 connection error STREAM_CLOSED; nothing if it was reset

"Half closed" means the remote side; a stream is closed once the server's answer has ended, too.
"""

import msgspec

from extproc.http2.codes import ErrorCode
from extproc.http2.limits import Limits
from tests.oracles.http2.errors import Http2Error
from tests.oracles.http2.frames import (
    MAX_WINDOW,
    Flag,
    FrameType,
    rst_stream,
    uint32,
    window_update,
)
from tests.oracles.http2.header_blocks import RequestHead
from tests.oracles.http2.outbox import Http2Stream, Outbox


class Floods:
    """Counts actions that a peer may do only a limited number of times on one connection.

    Each method that counts one raises Http2Error (ENHANCE_YOUR_CALM) beyond the limit.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.tick()

    def tick(self) -> None:
        """Resets the counts."""
        limits = self._limits
        self._pings = limits.pings_a_tick
        self._settings = limits.settings_a_tick
        self._idle_frames = limits.idle_frames_a_tick
        self._rapid_resets = limits.rapid_resets_a_tick
        self._faults = limits.faults_a_tick

    def stream_opened(self) -> None:
        """Allows a few more idle frames for a new stream."""
        self._idle_frames += self._limits.idle_frames_a_stream

    def ping(self) -> None:
        """Counts a PING, or its acknowledgement."""
        self._pings -= 1
        _check(self._pings, "PING")

    def settings(self) -> None:
        """Counts a SETTINGS frame, or its acknowledgement."""
        self._settings -= 1
        _check(self._settings, "SETTINGS")

    def idle_frame(self) -> None:
        """Counts a frame without progress."""
        self._idle_frames -= 1
        _check(self._idle_frames, "frames without progress")

    def rapid_reset(self) -> None:
        """Counts a RST_STREAM on a stream without any DATA."""
        self._rapid_resets -= 1
        _check(self._rapid_resets, "streams reset at once")

    def fault(self) -> None:
        """Counts an error of one stream."""
        self._faults -= 1
        _check(self._faults, "stream errors")


def _check(left: int, what: str) -> None:
    if left < 0:
        raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"too many {what}")


_PRIORITY_BYTES = 5


class HeadJoiner:
    """Joins HEADERS and CONTINUATION of one block; no other frame may come between them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.is_open = False
        self._stream_id = 0
        self._is_last = False
        self._block = b""
        self._continuations = 0

    def begin(self, flags: int, stream_id: int, payload: bytes) -> tuple[int, bytes, bool] | None:
        """Takes HEADERS; returns the stream, the block and whether the request ends with it.

        Returns None if CONTINUATION must follow.

        Raises:
            Http2Error: it is malformed or too large.
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
        """Takes the next frame of an incomplete block; returns the same as `begin`.

        Raises:
            Http2Error: it is not the block's CONTINUATION, or there are too many or too large ones.
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
    """Returns the content of a padded payload (RFC 9113, section 6.1).

    Raises:
        Http2Error: it is empty, or there is more padding than payload.
    """
    if not payload:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "padded frame without a length of padding")
    padding = payload[0]
    if padding >= len(payload):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - padding]


class Opened(msgspec.Struct, frozen=True, gc=False):
    """A request has begun. is_whole: it has no body."""

    stream_id: int
    head: RequestHead
    is_whole: bool


class Received(msgspec.Struct, frozen=True, gc=False):
    """A part of a request's DATA, which may be empty at the end; is_last: the request is complete.

    Call `Connection.consume` for the bytes that are used.
    """

    stream_id: int
    data: bytes | memoryview
    is_last: bool


class Aborted(msgspec.Struct, frozen=True, gc=False):
    """A stream ended early: the peer reset it, or violated the protocol."""

    stream_id: int


Event = Opened | Received | Aborted


_PADDED = int(Flag.PADDED)
_END_STREAM = int(Flag.END_STREAM)
_UINT32_BYTES = 4

# How many streams that the server reset are remembered: frames on them may still arrive.
_MAX_RESET_KEPT = 1_000


class Streams:
    """The streams of one connection.

    open: open streams by number. events: those since the list was last taken.

    The methods that take frames raise Http2Error if the connection must end.
    """

    def __init__(self, limits: Limits, outbox: Outbox, floods: Floods) -> None:
        self.open: dict[int, Http2Stream] = {}
        self.events: list[Event] = []
        self.last_id = 0
        self.is_draining = False
        self._limits = limits
        self._outbox = outbox
        self._floods = floods
        self._reset: dict[int, None] = {}
        self._window = limits.connection_window_bytes
        self._half_window = limits.connection_window_bytes // 2
        self._unreturned = 0

    def receive_data(self, flags: int, stream_id: int, payload: bytes | memoryview) -> None:
        """Takes DATA; padding also counts for the windows (RFC 9113, section 6.9.1)."""
        size = len(payload)
        self._window -= size
        self._unreturned += size
        if self._window < 0 or self._unreturned >= self._half_window:
            self._return_window()
        if flags & _PADDED:
            payload = unpadded(bytes(payload))
        stream = self.open.get(stream_id)
        if stream is None or stream.is_received:
            self._receive_data_late(stream_id)
            return
        stream.window -= size
        if stream.window < 0:
            self._refuse(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
            return
        if flags & _PADDED:
            self.consume(stream, size - len(payload))
        if payload:
            stream.is_used = True
            stream.received += len(payload)
        elif not flags & _END_STREAM:
            self._floods.idle_frame()
            return
        self._deliver(stream, payload, is_last=bool(flags & _END_STREAM))

    def receive_head(self, stream_id: int, head: RequestHead | None, *, is_last: bool) -> None:
        """Takes the head of a new stream, or trailers. head: None if malformed."""
        stream = self.open.get(stream_id)
        if stream is not None:
            self._receive_trailers(stream, head, is_last=is_last)
        elif stream_id % 2 == 0:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a client's streams have odd numbers")
        elif stream_id > self.last_id:
            self.last_id = stream_id
            self._receive_request(stream_id, head, is_last=is_last)
        elif stream_id in self._reset:
            self._floods.idle_frame()
        else:
            raise Http2Error(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")

    def receive_reset(self, stream_id: int, payload: bytes) -> None:
        """Takes RST_STREAM."""
        if len(payload) != _UINT32_BYTES:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of a wrong length")
        self._require_known(stream_id, "RST_STREAM")
        stream = self.open.pop(stream_id, None)
        if stream is None:
            self._floods.idle_frame()
            return
        self._outbox.forget(stream)
        self.events.append(Aborted(stream_id))
        if not stream.is_used:
            self._floods.rapid_reset()

    def receive_window_update(self, stream_id: int, payload: bytes) -> None:
        """Takes a stream's or the connection's WINDOW_UPDATE."""
        if len(payload) != _UINT32_BYTES:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of a wrong length")
        self._floods.idle_frame()
        increment = uint32(payload) & MAX_WINDOW
        if stream_id == 0:
            if not increment:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing")
            if not self._outbox.grant(increment):
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "window too large")
            return
        self._require_known(stream_id, "WINDOW_UPDATE")
        stream = self.open.get(stream_id)
        if not increment:
            self._refuse(stream_id, ErrorCode.PROTOCOL_ERROR)
        elif stream is not None and not self._outbox.grant_stream(stream, increment):
            self._refuse(stream_id, ErrorCode.FLOW_CONTROL_ERROR)

    def receive_priority(self, stream_id: int, payload: bytes) -> None:
        """Ignores PRIORITY, on idle and closed streams too (RFC 9113, section 5.3.2)."""
        if stream_id == 0:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PRIORITY on no stream")
        self._floods.idle_frame()
        if len(payload) != _PRIORITY_BYTES and stream_id <= self.last_id:
            self._refuse(stream_id, ErrorCode.FRAME_SIZE_ERROR)

    def set_initial_window(self, size: int) -> None:
        """Takes the peer's SETTINGS_INITIAL_WINDOW_SIZE; no window may become too large."""
        most = max((stream.credit for stream in self.open.values()), default=0)
        if size + most > MAX_WINDOW:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE too large")
        self._outbox.set_initial_window(size)

    def consume(self, stream: Http2Stream, size: int) -> None:
        """Notes that bytes of a request were used, so that the peer may send that many more."""
        if stream.is_received:
            return
        stream.unreturned += size
        if stream.unreturned * 2 >= self._limits.stream_window_bytes:
            stream.window += stream.unreturned
            self._outbox.write(window_update(stream.id, stream.unreturned))
            stream.unreturned = 0

    def reset(self, stream: Http2Stream, code: int) -> None:
        """Ends an open stream at once with RST_STREAM."""
        del self.open[stream.id]
        self._outbox.forget(stream)
        self._say_reset(stream.id, code)

    def finish(self, stream: Http2Stream) -> None:
        """Closes a stream whose answer has ended."""
        self._outbox.forget(stream)
        del self.open[stream.id]
        if not stream.is_received:
            self._remember(stream.id)

    def _return_window(self) -> None:
        """Gives the used part of the connection's window back to the peer; kept bytes are limited
        elsewhere."""
        if self._window < 0:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection allows")
        self._window += self._unreturned
        self._outbox.write(window_update(0, self._unreturned))
        self._unreturned = 0

    def _deliver(self, stream: Http2Stream, data: bytes | memoryview, *, is_last: bool) -> None:
        if is_last:
            if stream.expected is not None and stream.expected != stream.received:
                self._refuse(stream.id, ErrorCode.PROTOCOL_ERROR)
                return
            stream.is_received = True
        if stream.trailers is None:
            self.events.append(Received(stream.id, data, is_last))
        else:
            self.consume(stream, len(data))

    def _receive_data_late(self, stream_id: int) -> None:
        self._require_known(stream_id, "DATA")
        self._floods.idle_frame()
        if stream_id not in self._reset:
            self._refuse(stream_id, ErrorCode.STREAM_CLOSED)

    def _receive_trailers(
        self, stream: Http2Stream, head: RequestHead | None, *, is_last: bool
    ) -> None:
        if stream.is_received:
            self._refuse(stream.id, ErrorCode.STREAM_CLOSED)
        elif head is None or not is_last or not head.is_trailers:
            self._refuse(stream.id, ErrorCode.PROTOCOL_ERROR)
        else:
            self._deliver(stream, b"", is_last=True)

    def _receive_request(self, stream_id: int, head: RequestHead | None, *, is_last: bool) -> None:
        if self.is_draining or len(self.open) >= self._limits.max_streams:
            # The peer is not at fault: GOAWAY with the last accepted stream, or SETTINGS with the
            # number of allowed streams, may not have reached it yet.
            self._floods.idle_frame()
            self._say_reset(stream_id, ErrorCode.REFUSED_STREAM)
        elif head is None or not head.is_request or (is_last and head.content_length):
            self._refuse(stream_id, ErrorCode.PROTOCOL_ERROR)
        else:
            self._floods.stream_opened()
            stream = Http2Stream(stream_id, self._limits.stream_window_bytes, head.content_length)
            stream.is_received = is_last
            self.open[stream_id] = stream
            self.events.append(Opened(stream_id, head, is_last))

    def _require_known(self, stream_id: int, what: str) -> None:
        """Checks that a stream is not idle: an idle one may get only HEADERS and PRIORITY."""
        if stream_id == 0 or stream_id > self.last_id or stream_id % 2 == 0:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"{what} on no stream")

    def _refuse(self, stream_id: int, code: int) -> None:
        """Answers a stream error with RST_STREAM (RFC 9113, section 5.4.2)."""
        self._floods.fault()
        stream = self.open.get(stream_id)
        if stream is None:
            self._say_reset(stream_id, code)
        else:
            self.reset(stream, code)
            self.events.append(Aborted(stream_id))

    def _say_reset(self, stream_id: int, code: int) -> None:
        self._outbox.write(rst_stream(stream_id, code))
        self._remember(stream_id)

    def _remember(self, stream_id: int) -> None:
        self._reset[stream_id] = None
        if len(self._reset) > _MAX_RESET_KEPT:
            del self._reset[next(iter(self._reset))]
