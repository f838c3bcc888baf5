import pytest

from extproc.base.errors import Http2Error
from extproc.http2.frames import ErrorCode, Flag, FrameType
from extproc.http2.limits import Limits
from extproc.http2.streams import HeadJoiner, unpadded

END = int(Flag.END_HEADERS)
CONTINUATION = int(FrameType.CONTINUATION)
LIMITS = Limits(max_header_block_bytes=10, max_continuations=3)


def code_of(caught: pytest.ExceptionInfo[Http2Error]) -> int:
    return caught.value.code


def test_block_in_one_frame_is_whole() -> None:
    joiner = HeadJoiner(LIMITS)
    assert joiner.begin(END, 1, b"block") == (1, b"block", False)
    assert joiner.begin(END | Flag.END_STREAM, 3, b"x") == (3, b"x", True)


def test_padding_and_priority_are_removed() -> None:
    flags = END | Flag.PADDED | Flag.PRIORITY
    assert HeadJoiner(LIMITS).begin(flags, 1, b"\x02" + b"12345" + b"block" + b"\0\0") == (
        1,
        b"block",
        False,
    )


def test_continuations_are_joined_and_keep_the_end_of_the_stream() -> None:
    joiner = HeadJoiner(LIMITS)
    assert joiner.begin(Flag.END_STREAM, 1, b"ab") is None
    assert joiner.go_on(CONTINUATION, 0, 1, b"cd") is None
    assert joiner.is_open
    assert joiner.go_on(CONTINUATION, END, 1, b"ef") == (1, b"abcdef", True)
    assert not joiner.is_open


@pytest.mark.parametrize(
    ("kind", "stream_id"), [(FrameType.DATA, 1), (FrameType.PING, 0), (CONTINUATION, 3)]
)
def test_frame_between_continuations_is_refused(kind: int, stream_id: int) -> None:
    joiner = HeadJoiner(LIMITS)
    joiner.begin(0, 1, b"ab")
    with pytest.raises(Http2Error) as caught:
        joiner.go_on(kind, END, stream_id, b"")
    assert code_of(caught) == ErrorCode.PROTOCOL_ERROR


def test_continuation_without_a_head_is_refused() -> None:
    with pytest.raises(Http2Error):
        HeadJoiner(LIMITS).go_on(CONTINUATION, END, 1, b"")


def test_empty_continuations_are_counted() -> None:
    joiner = HeadJoiner(LIMITS)
    joiner.begin(0, 1, b"")
    for _ in range(3):
        joiner.go_on(CONTINUATION, 0, 1, b"")
    with pytest.raises(Http2Error, match="too many CONTINUATION") as caught:
        joiner.go_on(CONTINUATION, END, 1, b"")
    assert code_of(caught) == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("flags", [0, END])
def test_block_is_bounded(flags: int) -> None:
    with pytest.raises(Http2Error, match="header block too large"):
        HeadJoiner(LIMITS).begin(flags, 1, bytes(11))
    joiner = HeadJoiner(LIMITS)
    joiner.begin(0, 1, bytes(10))
    with pytest.raises(Http2Error, match="header block too large"):
        joiner.go_on(CONTINUATION, flags, 1, b"x")


def test_headers_on_stream_0_are_refused() -> None:
    with pytest.raises(Http2Error, match="HEADERS on no stream"):
        HeadJoiner(LIMITS).begin(END, 0, b"")


def test_priority_has_five_bytes() -> None:
    with pytest.raises(Http2Error) as caught:
        HeadJoiner(LIMITS).begin(END | Flag.PRIORITY, 1, b"1234")
    assert code_of(caught) == ErrorCode.FRAME_SIZE_ERROR


def test_unpadded_removes_padding() -> None:
    assert unpadded(b"\x00abc") == b"abc"
    assert unpadded(b"\x02abc\0\0") == b"abc"
    assert unpadded(b"\x03\0\0\0") == b""


@pytest.mark.parametrize(
    ("payload", "code"),
    [(b"", ErrorCode.FRAME_SIZE_ERROR), (b"\x04abc", ErrorCode.PROTOCOL_ERROR)],
)
def test_unpadded_refuses_more_padding_than_payload(payload: bytes, code: int) -> None:
    with pytest.raises(Http2Error) as caught:
        unpadded(payload)
    assert code_of(caught) == code
