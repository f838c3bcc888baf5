"""Queues data to send: whole frames at once, DATA as the peer's windows allow (RFC 9113, 5.2)."""

from extproc.http2.codes import ErrorCode
from tests.oracles.http2.budget import Budget
from tests.oracles.http2.frames import (
    DEFAULT_WINDOW,
    HEADER,
    MAX_FRAME_BYTES,
    MAX_WINDOW,
    Flag,
    FrameType,
    frame,
    rst_stream,
)


class Http2Stream:
    """A stream that is open or half closed.

    window: bytes that the peer may still send. unreturned: used bytes not yet given back by
    WINDOW_UPDATE. credit: WINDOW_UPDATEs minus sent bytes; the peer's initial window plus this may
    still be sent. queue: waiting DATA, None if there is none. trailers: the block that ends the
    answer. is_received: whether the request has ended. refused_bytes: of the budget, until the
    stream of a refused request is closed.
    """

    __slots__ = (
        "credit",
        "expected",
        "id",
        "is_received",
        "is_used",
        "queue",
        "received",
        "refused_bytes",
        "stalled_ticks",
        "trailers",
        "unreturned",
        "window",
    )

    def __init__(self, stream_id: int, window: int, expected: int | None) -> None:
        self.id = stream_id
        self.window = window
        self.unreturned = 0
        self.credit = 0
        self.expected = expected
        self.received = 0
        self.queue: bytearray | None = None
        self.stalled_ticks = 0
        self.trailers: bytes | None = None
        self.refused_bytes = 0
        self.is_used = False
        self.is_received = False

    @property
    def queued(self) -> int:
        """The number of bytes that wait."""
        return 0 if self.queue is None else len(self.queue)


_DATA = int(FrameType.DATA)
# Most bytes of waiting DATA to send at a time; then the transport shows whether it has more room.
_MAX_PUMPED_BYTES = 256 * 1024

_END_OF_ANSWER = int(Flag.END_HEADERS | Flag.END_STREAM)


class Outbox:
    """The data that one connection has to send. Streams with waiting DATA are served oldest first.

    finished_streams: streams whose trailers were sent after waiting, until `finished` returns them.
    is_due: whether the peer waits for any data: it does for all but the ends of successful streams.
    chunks, ready: the data to send, and the streams whose DATA may be sent.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.is_due = False
        self.chunks: list[bytes | memoryview] = []
        self._window = DEFAULT_WINDOW
        self._initial_window = DEFAULT_WINDOW
        self._waiting: dict[int, Http2Stream] = {}
        # the streams that wait only for the connection's window
        self.ready: dict[int, Http2Stream] = {}
        self.finished_streams: list[Http2Stream] = []
        self._pumped = 0
        self._is_paused = False

    def take(self) -> bytes:
        """Returns the bytes to send now; call it until it returns none."""
        if self.ready:
            self._pump()
        if not self.chunks:
            return b""
        self._pumped = 0
        self.is_due = False
        data = b"".join(self.chunks)
        self.chunks.clear()
        return data

    def write(self, data: bytes) -> None:
        """Queues whole frames that no window holds back."""
        self.is_due = True
        self.chunks.append(data)

    def pause(self) -> None:
        """Holds DATA back, since the transport is full."""
        self._is_paused = True

    def resume(self) -> None:
        """Sends DATA again, since the transport takes more."""
        self._is_paused = False

    def send(self, stream: Http2Stream, data: bytes) -> bool:
        """Sends DATA now or as windows allow; returns False if there is no room to keep it."""
        size = len(data)
        if (
            size <= self._window
            and size <= self._initial_window + stream.credit
            and size <= MAX_FRAME_BYTES
            and stream.queue is None
            and not self._is_paused
        ):
            self._window -= size
            stream.credit -= size
            self.is_due = True
            self.chunks.append(HEADER.pack(size << 8 | _DATA, 0, stream.id))
            self.chunks.append(data)
            return True
        if not self._budget.take(size):
            return False
        if stream.queue is None:
            stream.queue = bytearray()
        stream.queue += data
        self._waiting[stream.id] = stream
        if self._initial_window + stream.credit > 0:
            self.ready[stream.id] = stream
        return True

    def end(self, stream: Http2Stream, block: bytes, *, is_due: bool = True) -> bool:
        """Sends trailers after any waiting DATA; returns whether they could be sent now.

        block: empty for an answer without trailers.
        """
        stream.trailers = block
        if is_due or not stream.is_received:
            self.is_due = True
        return self._ended(stream)

    def forget(self, stream: Http2Stream) -> None:
        """Drops the waiting data of an ended stream."""
        self._budget.give_back(stream.refused_bytes)
        stream.refused_bytes = 0
        if stream.queue is not None:
            self._budget.give_back(len(stream.queue))
            stream.queue = None
            del self._waiting[stream.id]
            self.ready.pop(stream.id, None)

    def grant(self, increment: int) -> bool:
        """Takes the connection's WINDOW_UPDATE; returns False if the window becomes too large."""
        self._window += increment
        return self._window <= MAX_WINDOW

    def grant_stream(self, stream: Http2Stream, increment: int) -> bool:
        """Takes a stream's WINDOW_UPDATE; returns False if the window gets too large."""
        stream.credit += increment
        if self._initial_window + stream.credit > MAX_WINDOW:
            return False
        if stream.queue is not None and self._initial_window + stream.credit > 0:
            self.ready[stream.id] = stream
        return True

    def set_initial_window(self, size: int) -> None:
        """Takes the peer's initial window, which applies to every stream (RFC 9113, 6.9.2)."""
        self._initial_window = size
        for stream in self._waiting.values():
            if size + stream.credit > 0:
                self.ready[stream.id] = stream

    def finished(self) -> list[Http2Stream]:
        """Returns the streams whose trailers, after a wait, were sent since the last call."""
        done = self.finished_streams
        if done:
            self.finished_streams = []
        return done

    def stalled(self, ticks: int) -> list[Http2Stream]:
        """Returns the streams whose DATA made no progress in more than this many calls."""
        for stream in self._waiting.values():
            stream.stalled_ticks += 1
        return [one for one in self._waiting.values() if one.stalled_ticks > ticks]

    def _pump(self) -> None:
        while (
            self.ready
            and self._window > 0
            and self._pumped < _MAX_PUMPED_BYTES
            and not self._is_paused
        ):
            stream = next(iter(self.ready.values()))
            room = self._initial_window + stream.credit
            if stream.queue is not None and room > 0:
                self._send_queued(stream, stream.queue, room)
            if stream.queue is None:
                del self.ready[stream.id], self._waiting[stream.id]
                if self._ended(stream):
                    self.finished_streams.append(stream)
            elif self._initial_window + stream.credit <= 0:
                del self.ready[stream.id]

    def _send_queued(self, stream: Http2Stream, queue: bytearray, room: int) -> None:
        """Sends one frame of waiting DATA. room: in the stream's window."""
        part = bytes(queue[: min(self._window, room, MAX_FRAME_BYTES)])
        del queue[: len(part)]
        size = len(part)
        self.chunks.append(HEADER.pack(size << 8 | _DATA, 0, stream.id))
        self.chunks.append(part)
        self._pumped += size
        self._window -= size
        stream.credit -= size
        stream.stalled_ticks = 0
        self._budget.give_back(size)
        if not queue:
            stream.queue = None

    def _ended(self, stream: Http2Stream) -> bool:
        if stream.queue is not None or stream.trailers is None:
            return False
        if stream.trailers:
            end = frame(FrameType.HEADERS, _END_OF_ANSWER, stream.id, stream.trailers)
        else:
            end = frame(FrameType.DATA, Flag.END_STREAM, stream.id)
        self.chunks.append(end)
        if not stream.is_received:
            # RFC 9113, section 8.1: the rest of the request is not needed
            self.chunks.append(rst_stream(stream.id, ErrorCode.NO_ERROR))
        return True
