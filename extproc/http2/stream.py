"""The state of one stream (RFC 9113, section 5.1), from its HEADERS until both sides ended it."""

from collections import deque


class Stream:
    """A stream that is open or half closed.

    window: bytes that the peer may still send. unreturned: bytes that were used, of which the peer
    was not told yet. credit: what WINDOW_UPDATEs allowed us less what we sent; with the peer's
    initial window it is what we may send. queue: DATA that waits, of `queued` bytes; only what is
    in a bytearray there may still grow. trailers: the block that ends the answer. is_received,
    is_answered: the sides that have ended.
    """

    __slots__ = (
        "credit",
        "expected",
        "id",
        "is_answered",
        "is_received",
        "is_used",
        "queue",
        "queued",
        "received",
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
        self.queue: deque[bytes | bytearray | memoryview] = deque()
        self.queued = 0
        self.stalled_ticks = 0
        self.trailers: bytes | None = None
        self.is_used = False
        self.is_received = False
        self.is_answered = False
