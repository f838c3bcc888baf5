from collections.abc import Sequence

import pytest

from extproc.base.errors import Http2Error
from extproc.http2.frames import ErrorCode, Flag, FrameType
from extproc.http2.header_blocks import RequestHead, head_of
from extproc.http2.limits import Budget, Limits
from extproc.http2.outbox import Outbox
from extproc.http2.streams import Aborted, Floods, Opened, Received, Streams
from tests.extproc.http2.peer import REQUEST, Sent, frames_of, resets

LAST = int(Flag.END_STREAM)
LIMITS = Limits(max_streams=3, stream_window_bytes=100, connection_window_bytes=400)


class Parts:
    """Streams, and what they wrote."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.outbox = Outbox(Budget(10_000))
        self.streams = Streams(limits, self.outbox, Floods(limits))

    def head(
        self, number: int, more: Sequence[tuple[bytes, bytes]] = (), *, is_last: bool = False
    ) -> None:
        self.streams.receive_head(number, request(more), is_last=is_last)

    def opened(self, number: int, *, is_last: bool = False) -> None:
        self.head(number, is_last=is_last)
        assert isinstance(self.streams.events.pop(), Opened)

    def data(self, number: int, payload: bytes = b"", flags: int = 0) -> None:
        self.streams.receive_data(flags, number, payload)

    def events(self) -> list[object]:
        events, self.streams.events = self.streams.events, []
        return list(events)

    def sent(self) -> list[Sent]:
        return frames_of(b"".join(iter(self.outbox.take, b"")))


def request(more: Sequence[tuple[bytes, bytes]] = ()) -> RequestHead:
    head = head_of([*REQUEST, *more])
    assert head is not None
    return head


def test_request_opens_its_stream_and_brings_data() -> None:
    parts = Parts()
    parts.head(1)
    parts.data(1, b"abc")
    parts.data(1, b"", LAST)
    assert parts.events() == [
        Opened(1, request(), is_whole=False),
        Received(1, b"abc", is_last=False),
        Received(1, b"", is_last=True),
    ]
    assert parts.sent() == []


def test_trailers_end_a_request() -> None:
    parts = Parts()
    parts.opened(1)
    parts.streams.receive_head(1, head_of([(b"x", b"y")]), is_last=True)
    assert parts.events() == [Received(1, b"", is_last=True)]


@pytest.mark.parametrize(
    ("head", "is_last"),
    [(request(), True), (head_of([(b"x", b"y")]), False), (None, True)],
    ids=["a request again", "not the last", "malformed"],
)
def test_malformed_trailers_reset_the_stream(head: RequestHead | None, is_last: bool) -> None:
    parts = Parts()
    parts.opened(1)
    parts.streams.receive_head(1, head, is_last=is_last)
    assert parts.events() == [Aborted(1)]
    assert resets(parts.sent()) == [(1, ErrorCode.PROTOCOL_ERROR)]


@pytest.mark.parametrize(
    "head", [None, head_of([(b"x", b"y")])], ids=["malformed", "no pseudo-headers"]
)
def test_malformed_request_is_reset(head: RequestHead | None) -> None:
    parts = Parts()
    parts.streams.receive_head(1, head, is_last=False)
    assert parts.events() == []
    assert resets(parts.sent()) == [(1, ErrorCode.PROTOCOL_ERROR)]


def test_content_length_must_match_the_data() -> None:
    parts = Parts()
    for number, payload in ((1, b"abc"), (3, b"abcd"), (5, b"ab")):
        parts.head(number, [(b"content-length", b"3")])
        parts.data(number, payload, LAST)
    parts.head(7, [(b"content-length", b"3")], is_last=True)
    assert Received(1, b"abc", is_last=True) in parts.events()
    assert [number for number, _ in resets(parts.sent())] == [3, 5, 7]


def test_stream_numbers_must_be_odd_and_rise() -> None:
    with pytest.raises(Http2Error, match="odd"):
        Parts().head(2)
    parts = Parts()
    parts.head(5)
    with pytest.raises(Http2Error) as caught:
        parts.head(3)
    assert caught.value.code == ErrorCode.STREAM_CLOSED


def test_streams_beyond_the_announced_number_are_refused() -> None:
    parts = Parts()
    for number in (1, 3, 5, 7):
        parts.head(number)
    assert resets(parts.sent()) == [(7, ErrorCode.REFUSED_STREAM)]
    parts.streams.receive_reset(1, bytes(4))
    parts.head(9)
    assert parts.sent() == []


def test_draining_connection_refuses_new_streams_only() -> None:
    parts = Parts()
    parts.opened(1)
    parts.streams.is_draining = True
    parts.head(3)
    parts.data(3, b"late")
    parts.data(1, b"go on")
    assert parts.events() == [Received(1, b"go on", is_last=False)]
    assert resets(parts.sent()) == [(3, ErrorCode.REFUSED_STREAM)]


def test_frames_after_the_end_of_a_stream_abort_it() -> None:
    parts = Parts()
    parts.opened(1, is_last=True)
    parts.data(1, b"more")
    assert parts.events() == [Aborted(1)]
    parts.opened(3, is_last=True)
    parts.streams.receive_head(3, head_of([(b"x", b"y")]), is_last=True)
    assert parts.events() == [Aborted(3)]
    assert resets(parts.sent()) == [(1, ErrorCode.STREAM_CLOSED), (3, ErrorCode.STREAM_CLOSED)]


def test_frames_under_way_on_a_reset_stream_are_ignored() -> None:
    parts = Parts()
    parts.opened(1)
    parts.streams.reset(parts.streams.open[1], ErrorCode.CANCEL)
    parts.sent()
    parts.data(1, b"late")
    parts.head(1)
    parts.streams.receive_reset(1, bytes(4))
    parts.streams.receive_window_update(1, b"\0\0\0\x01")
    assert parts.events() == parts.sent() == []


def test_remembered_resets_are_bounded() -> None:
    parts = Parts(Limits(faults_a_tick=5000))
    for number in range(1, 2 * 1100, 2):
        parts.streams.receive_head(number, None, is_last=False)
    parts.sent()
    parts.data(1, b"late")
    assert resets(parts.sent()) == [(1, ErrorCode.STREAM_CLOSED)]


@pytest.mark.parametrize("number", [0, 2, 3])
def test_frames_of_an_unopened_stream_are_refused(number: int) -> None:
    parts = Parts()
    parts.opened(1)
    with pytest.raises(Http2Error, match="DATA on no stream"):
        parts.data(number, b"x")
    with pytest.raises(Http2Error, match="RST_STREAM on no stream"):
        parts.streams.receive_reset(number, bytes(4))
    if number:
        with pytest.raises(Http2Error, match="WINDOW_UPDATE on no stream"):
            parts.streams.receive_window_update(number, b"\0\0\0\x01")


def test_reset_closes_a_stream_without_raising_the_limit() -> None:
    parts = Parts()
    parts.opened(1)
    parts.data(1, b"abc")
    parts.events()
    parts.streams.receive_reset(1, bytes(4))
    assert parts.events() == [Aborted(1)]
    parts.data(1, b"more")
    assert resets(parts.sent()) == [(1, ErrorCode.STREAM_CLOSED)]


def test_rapid_resets_are_counted_only_for_unused_streams() -> None:
    parts = Parts(Limits(rapid_resets_a_tick=2))
    for number in range(1, 20, 2):
        parts.opened(number)
        parts.data(number, b"x")
        parts.streams.receive_reset(number, bytes(4))
    for number in (21, 23):
        parts.head(number)
        parts.streams.receive_reset(number, bytes(4))
    parts.head(25)
    with pytest.raises(Http2Error, match="reset at once"):
        parts.streams.receive_reset(25, bytes(4))


def test_data_beyond_the_windows_is_refused() -> None:
    parts = Parts()
    parts.opened(1)
    parts.data(1, bytes(100))
    parts.data(1, b"x")
    assert resets(parts.sent()) == [(1, ErrorCode.FLOW_CONTROL_ERROR)]
    with pytest.raises(Http2Error, match="more DATA than the connection allows"):
        parts.data(1, bytes(401))


def test_consumed_data_reopens_the_window_by_halves() -> None:
    parts = Parts()
    parts.opened(1)
    stream = parts.streams.open[1]
    parts.data(1, bytes(60))
    parts.streams.consume(stream, 40)
    assert parts.sent() == []
    parts.streams.consume(stream, 20)
    assert parts.sent() == [(FrameType.WINDOW_UPDATE, 0, 1, b"\0\0\0\x3c")]
    parts.data(1, bytes(100))
    parts.opened(3)
    parts.data(3, bytes(50), LAST)
    assert parts.sent() == [(FrameType.WINDOW_UPDATE, 0, 0, b"\0\0\0\xd2")]
    parts.streams.consume(parts.streams.open[3], 50)
    assert parts.sent() == []


def test_padding_counts_against_the_window_and_is_removed() -> None:
    parts = Parts()
    parts.opened(1)
    parts.data(1, b"\x31abc" + bytes(49), Flag.PADDED)
    assert parts.events() == [Received(1, b"abc", is_last=False)]
    assert parts.streams.open[1].unreturned == 0
    assert parts.sent() == [(FrameType.WINDOW_UPDATE, 0, 1, b"\0\0\0\x32")]


def test_empty_data_is_counted_and_passed_over() -> None:
    parts = Parts(Limits(idle_frames_a_tick=2, idle_frames_a_stream=0))
    parts.opened(1)
    parts.data(1)
    parts.data(1)
    assert parts.events() == []
    with pytest.raises(Http2Error, match="without progress"):
        parts.data(1)


def test_data_after_the_answer_is_read_and_dropped() -> None:
    parts = Parts()
    parts.opened(1)
    parts.outbox.pause()
    parts.outbox.send(parts.streams.open[1], b"x")
    parts.outbox.end(parts.streams.open[1], b"")
    parts.data(1, bytes(60))
    assert parts.events() == []
    assert parts.sent() == [(FrameType.WINDOW_UPDATE, 0, 1, b"\0\0\0\x3c")]


def test_answer_ends_a_stream_and_the_rest_of_its_request_is_ignored() -> None:
    parts = Parts()
    for number in (1, 3):
        parts.opened(number, is_last=number == 1)
        parts.streams.finish(parts.streams.open[number])
    parts.data(3, b"late")
    assert parts.sent() == parts.events() == []
    parts.data(1, b"late")
    assert resets(parts.sent()) == [(1, ErrorCode.STREAM_CLOSED)]


def test_window_update_must_be_positive() -> None:
    parts = Parts()
    parts.opened(1)
    parts.streams.receive_window_update(1, b"\0\0\0\x05")
    assert parts.streams.open[1].credit == 5
    parts.streams.receive_window_update(0, b"\x80\0\0\x05")
    parts.streams.receive_window_update(1, bytes(4))
    parts.opened(3)
    parts.streams.receive_window_update(3, b"\x7f\xff\xff\xff")
    assert resets(parts.sent()) == [
        (1, ErrorCode.PROTOCOL_ERROR),
        (3, ErrorCode.FLOW_CONTROL_ERROR),
    ]
    with pytest.raises(Http2Error, match="WINDOW_UPDATE of nothing"):
        parts.streams.receive_window_update(0, bytes(4))
    with pytest.raises(Http2Error, match="window too large"):
        parts.streams.receive_window_update(0, b"\x7f\xff\xff\xff")


def test_frames_have_their_length() -> None:
    parts = Parts()
    parts.opened(1)
    with pytest.raises(Http2Error, match="RST_STREAM of a wrong length"):
        parts.streams.receive_reset(1, bytes(5))
    with pytest.raises(Http2Error, match="WINDOW_UPDATE of a wrong length"):
        parts.streams.receive_window_update(1, bytes(3))
    parts.streams.receive_priority(1, bytes(4))
    assert resets(parts.sent()) == [(1, ErrorCode.FRAME_SIZE_ERROR)]


def test_priorities_are_ignored() -> None:
    parts = Parts()
    parts.streams.receive_priority(77, bytes(5))
    parts.streams.receive_priority(77, bytes(4))
    assert parts.sent() == parts.events() == []
    with pytest.raises(Http2Error, match="PRIORITY on no stream"):
        parts.streams.receive_priority(0, bytes(5))


def test_initial_window_limits_the_data_of_open_streams() -> None:
    parts = Parts()
    parts.opened(1)
    parts.streams.set_initial_window(3)
    assert parts.outbox.send(parts.streams.open[1], b"abcdef")
    assert frames_of(parts.outbox.take()) == [(FrameType.DATA, 0, 1, b"abc")]


def test_initial_window_must_not_overflow_a_window() -> None:
    parts = Parts()
    parts.opened(1)
    parts.streams.receive_window_update(1, b"\x7f\xff\0\0")
    with pytest.raises(Http2Error) as caught:
        parts.streams.set_initial_window(65_536)
    assert caught.value.code == ErrorCode.FLOW_CONTROL_ERROR
