"""Frames that belong to no stream: SETTINGS, PING, GOAWAY, and what a client must not send."""

from collections.abc import Callable

from extproc.errors import Http2Error
from extproc.http2 import frames
from extproc.http2.floods import Floods
from extproc.http2.frames import ErrorCode, Flag, FrameType, Setting
from extproc.http2.header_blocks import HeaderBlocks
from extproc.http2.outbox import Outbox

_PING_BYTES = 8
_GOAWAY_LEAST_BYTES = 8


class Control:
    """Of one connection. is_greeted: the client's first SETTINGS came; has_left: its GOAWAY.

    set_initial_window: takes what streams may be sent at first; raises Http2Error.
    """

    def __init__(
        self,
        outbox: Outbox,
        floods: Floods,
        blocks: HeaderBlocks,
        set_initial_window: Callable[[int], None],
    ) -> None:
        self.is_greeted = False
        self.has_left = False
        self._outbox = outbox
        self._floods = floods
        self._blocks = blocks
        self._set_initial_window = set_initial_window
        self._is_acknowledged = False

    def receive(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Takes one frame of any type that streams do not take.

        Raises:
            Http2Error: it breaks the protocol.
        """
        if kind == FrameType.PUSH_PROMISE:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a client cannot promise")
        if kind not in (FrameType.SETTINGS, FrameType.PING, FrameType.GOAWAY):
            self._floods.idle_frame()
            return
        if stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "control frame on a stream")
        if kind == FrameType.SETTINGS:
            self._receive_settings(flags, payload)
        elif kind == FrameType.PING:
            self._receive_ping(flags, payload)
        elif len(payload) < _GOAWAY_LEAST_BYTES:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY too short")
        else:
            self._floods.idle_frame()
            self.has_left = True

    def _receive_settings(self, flags: int, payload: bytes) -> None:
        self._floods.settings()
        if flags & Flag.ACK:
            if payload:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS ACK with a payload")
            if not self._is_acknowledged:
                self._is_acknowledged = True
                self._blocks.forbid_table()
            return
        if len(payload) % frames.SETTING_BYTES:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a wrong length")
        window: int | None = None
        for name, value in frames.settings_of(payload):
            _check(name, value)
            if name == Setting.INITIAL_WINDOW_SIZE:
                window = value
        if window is not None:  # once a frame, which may name it thousands of times
            self._set_initial_window(window)
        self.is_greeted = True
        self._outbox.write(frames.settings_ack())

    def _receive_ping(self, flags: int, payload: bytes) -> None:
        if len(payload) != _PING_BYTES:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "PING of a wrong length")
        self._floods.ping()
        if not flags & Flag.ACK:
            self._outbox.write(frames.ping(payload, ack=True))


def _check(name: int, value: int) -> None:
    """RFC 9113, section 6.5.2. We use no dynamic table, do not push, and send short heads."""
    if name == Setting.ENABLE_PUSH and value > 1:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is 0 or 1")
    if name == Setting.INITIAL_WINDOW_SIZE and value > frames.MAX_WINDOW:
        raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE too large")
    if name == Setting.MAX_FRAME_SIZE and not (
        frames.MAX_FRAME_BYTES <= value <= frames.LARGEST_MAX_FRAME_BYTES
    ):
        # larger frames than the least are never sent, so that there is nothing to set
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE out of bounds")
