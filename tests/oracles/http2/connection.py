"""The server's side of one HTTP/2 connection (RFC 9113): bytes in, events and bytes out.

Frames are passed to `Streams`, `Control` and `HeadJoiner`; answers are sent through `Outbox`. A
connection error is answered by GOAWAY; then `fault` is set, and nothing more is read.
"""

from collections.abc import Callable

from extproc.http2.codes import ErrorCode
from extproc.http2.limits import Limits
from tests.oracles.http2 import frames
from tests.oracles.http2.budget import Budget
from tests.oracles.http2.errors import Http2Error
from tests.oracles.http2.frames import (
    DEFAULT_WINDOW,
    Flag,
    FrameReader,
    FrameType,
    Setting,
    frame,
    goaway,
    settings,
    window_update,
)
from tests.oracles.http2.header_blocks import HeaderBlocks
from tests.oracles.http2.outbox import Outbox
from tests.oracles.http2.streams import Aborted, Event, Floods, HeadJoiner, Streams

_PING_BYTES = 8
_GOAWAY_LEAST_BYTES = 8


class Control:
    """Handles the frames that concern the whole connection: SETTINGS, PING and GOAWAY.

    is_greeted: the client's first SETTINGS arrived. has_said_goodbye: its GOAWAY arrived.

    set_initial_window: takes the initial window of streams; raises Http2Error.
    """

    def __init__(
        self,
        outbox: Outbox,
        floods: Floods,
        blocks: HeaderBlocks,
        set_initial_window: Callable[[int], None],
    ) -> None:
        self.is_greeted = False
        self.has_said_goodbye = False
        self._outbox = outbox
        self._floods = floods
        self._blocks = blocks
        self._set_initial_window = set_initial_window
        self._is_acknowledged = False

    def receive(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Takes one frame that does not belong to a stream.

        Raises:
            Http2Error: it violates the protocol.
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
            self.has_said_goodbye = True

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
        if window is not None:  # once per frame, which may set it thousands of times
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
    """Checks a setting (RFC 9113, 6.5.2). The server uses no dynamic table, and does not push."""
    if name == Setting.ENABLE_PUSH and value > 1:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is 0 or 1")
    if name == Setting.INITIAL_WINDOW_SIZE and value > frames.MAX_WINDOW:
        raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE too large")
    if name == Setting.MAX_FRAME_SIZE and not (
        frames.MAX_FRAME_BYTES <= value <= frames.LARGEST_MAX_FRAME_BYTES
    ):
        # no frame sent from here is above the smallest maximum, so the value itself is not needed
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE out of bounds")


_DATA = int(FrameType.DATA)
_HEADERS = int(FrameType.HEADERS)
_END_HEADERS = int(Flag.END_HEADERS)
_END_STREAM = int(Flag.END_STREAM)
_WHOLE_HEADS = (_END_HEADERS, _END_HEADERS | _END_STREAM)


class Connection:
    """The connection of one peer.

    After `receive`, and after sending, the caller must write `data_to_send` while anything is
    `unsent` or any stream is `ready` for more; at once if it `is_due`.
    """

    def __init__(self, limits: Limits, budget: Budget) -> None:
        self.fault: Http2Error | None = None
        self._limits = limits
        self._reader = FrameReader()
        self._joiner = HeadJoiner(limits)
        self._floods = Floods(limits)
        self._budget = budget
        self._outbox = Outbox(budget)
        self.unsent, self.ready = self._outbox.chunks, self._outbox.ready
        self._blocks = HeaderBlocks(limits.max_header_list_bytes)
        self._streams = Streams(limits, self._outbox, self._floods)
        self._control = Control(
            self._outbox, self._floods, self._blocks, self._streams.set_initial_window
        )
        self._ticks = 0
        # the last stream named in a GOAWAY may not grow (RFC 9113, section 6.8)
        self._last_taken: int | None = None
        self._greet()

    @property
    def is_due(self) -> bool:
        """Whether the peer waits for any of the data to send."""
        return self._outbox.is_due or bool(self.ready)

    @property
    def stream_count(self) -> int:
        """The number of streams that are not closed."""
        return len(self._streams.open)

    @property
    def is_over(self) -> bool:
        """Whether no stream is open, and no new one can come."""
        return not self._streams.open and (
            self._streams.is_draining or self._control.has_said_goodbye
        )

    def receive(self, data: bytes) -> list[Event]:
        """Takes bytes and returns the events in them; sets `fault` if the connection must end."""
        if self.fault is not None:
            return []
        frames, fault = self._reader.read(data)
        streams, joiner, control = self._streams, self._joiner, self._control
        longest = self._limits.max_header_block_bytes
        try:
            for kind, flags, stream_id, payload in frames:
                if joiner.is_open or not control.is_greeted:
                    self._receive_other(kind, flags, stream_id, bytes(payload))
                elif kind == _DATA:
                    streams.receive_data(flags, stream_id, payload)
                elif kind == _HEADERS and flags in _WHOLE_HEADS and len(payload) <= longest:
                    head = self._blocks.decode(bytes(payload))
                    streams.receive_head(stream_id, head, is_last=flags != _END_HEADERS)
                else:
                    self._receive_other(kind, flags, stream_id, bytes(payload))
        except Http2Error as error:
            fault = error
        if fault is not None:
            self._fail(fault)
        events, streams.events = streams.events, []
        return events

    def data_to_send(self) -> bytes:
        """Returns the bytes to write now, empty if there are none."""
        outbox = self._outbox
        data = outbox.take()
        if outbox.finished_streams:
            for stream in outbox.finished():
                self._streams.finish(stream)
        return data

    def pause_sending(self) -> None:
        """Holds DATA back because the transport is full."""
        self._outbox.pause()

    def resume_sending(self) -> None:
        """Sends DATA again because the transport has room."""
        self._outbox.resume()

    def send_data(self, stream_id: int, data: bytes, head: bytes = b"") -> int | None:
        """Sends a part of an answer; returns how many bytes of it wait for the peer.

        Returns None if the stream is gone, or was reset because there is no room for the data.
        head: the header block that begins the answer.
        """
        stream = self._streams.open.get(stream_id)
        if stream is None:
            return None
        if head:
            self._outbox.write(frame(_HEADERS, _END_HEADERS, stream_id, head))
        if self._outbox.send(stream, data):
            return stream.queued
        self._streams.reset(stream, ErrorCode.ENHANCE_YOUR_CALM)
        return None

    def charge_refusal(self, stream_id: int, size: int) -> bool:
        """Books what a refused request takes until its stream is closed; False without room."""
        stream = self._streams.open.get(stream_id)
        if stream is None:  # it was reset in the same read
            return True
        if not self._budget.take(size):
            return False
        stream.refused_bytes = size
        return True

    def end(self, stream_id: int, block: bytes, *, is_due: bool = True) -> None:
        """Sends the last headers of an answer; does nothing if the stream is gone.

        is_due: whether the peer waits for them.
        """
        stream = self._streams.open.get(stream_id)
        if stream is not None and self._outbox.end(stream, block, is_due=is_due):
            self._streams.finish(stream)

    def reset(self, stream_id: int, code: int) -> None:
        """Ends a stream at once with RST_STREAM; does nothing if it is gone."""
        stream = self._streams.open.get(stream_id)
        if stream is not None:
            self._streams.reset(stream, code)

    def queued(self, stream_id: int) -> int:
        """Returns how many bytes of an answer wait for the peer."""
        stream = self._streams.open.get(stream_id)
        return 0 if stream is None else stream.queued

    def consume(self, stream_id: int, size: int) -> None:
        """Notes that bytes of a request were used, so that the peer may send that many more."""
        stream = self._streams.open.get(stream_id)
        if stream is not None:
            self._streams.consume(stream, size)

    def drain(self) -> None:
        """Accepts no new streams and sends GOAWAY; open streams continue."""
        if not self._streams.is_draining and self.fault is None:
            self._streams.is_draining = True
            self._say_goodbye(ErrorCode.NO_ERROR, "")

    def tick(self) -> list[Event]:
        """Called every 5 s: resets the flood counts; returns the streams that stalled too long."""
        self._floods.tick()
        self._ticks += 1
        if not self._control.is_greeted and self._ticks > self._limits.preface_ticks:
            if self.fault is None:
                self._fail(Http2Error(ErrorCode.SETTINGS_TIMEOUT, "no preface in time"))
            return []
        stalled = self._outbox.stalled(self._limits.stall_ticks)
        for stream in stalled:
            self._streams.reset(stream, ErrorCode.CANCEL)
        return [Aborted(stream.id) for stream in stalled]

    def close(self) -> None:
        """Releases the memory of a lost connection."""
        for stream in self._streams.open.values():
            self._outbox.forget(stream)
        self._streams.open.clear()

    def _greet(self) -> None:
        limits = self._limits
        ours: dict[int, int] = {
            Setting.HEADER_TABLE_SIZE: 0,
            Setting.MAX_CONCURRENT_STREAMS: limits.max_streams,
            Setting.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
            Setting.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
        }
        more = limits.connection_window_bytes - DEFAULT_WINDOW
        self._outbox.write(settings(ours) + window_update(0, more))

    def _fail(self, fault: Http2Error) -> None:
        self.fault = fault
        self._say_goodbye(fault.code, str(fault))

    def _say_goodbye(self, code: int, text: str) -> None:
        if self._last_taken is None:
            self._last_taken = self._streams.last_id
        self._outbox.write(goaway(self._last_taken, code, text))

    def _receive_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Takes a frame that `receive` does not handle by itself."""
        block = None
        if self._joiner.is_open or kind == FrameType.CONTINUATION:
            block = self._joiner.go_on(kind, flags, stream_id, payload)
        elif not self._control.is_greeted and (kind != FrameType.SETTINGS or flags & Flag.ACK):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        elif kind == _HEADERS:
            block = self._joiner.begin(flags, stream_id, payload)
        elif kind == FrameType.RST_STREAM:
            self._streams.receive_reset(stream_id, payload)
        elif kind == FrameType.WINDOW_UPDATE:
            self._streams.receive_window_update(stream_id, payload)
        elif kind == FrameType.PRIORITY:
            self._streams.receive_priority(stream_id, payload)
        else:
            self._control.receive(kind, flags, stream_id, payload)
        if block is not None:
            number, encoded, is_last = block
            head = self._blocks.decode(encoded)
            self._streams.receive_head(number, head, is_last=is_last)
