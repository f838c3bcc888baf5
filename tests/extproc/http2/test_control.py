import pytest

from extproc.base.errors import Http2Error
from extproc.http2.connection import Control
from extproc.http2.frames import ErrorCode, Flag, FrameType, settings
from extproc.http2.header_blocks import BlockCache, HeaderBlocks
from extproc.http2.limits import Budget, Limits
from extproc.http2.outbox import Outbox
from extproc.http2.streams import Floods
from tests.extproc.http2.peer import frames_of

ACK = int(Flag.ACK)
SETTINGS, PING, GOAWAY = FrameType.SETTINGS, FrameType.PING, FrameType.GOAWAY


class Parts:
    def __init__(self) -> None:
        limits = Limits()
        self.outbox = Outbox(Budget(1000))
        self.blocks = HeaderBlocks(BlockCache(), 1000)
        self.windows: list[int] = []
        self.control = Control(self.outbox, Floods(limits), self.blocks, self.windows.append)

    def set(self, name: int, value: int) -> None:
        self.control.receive(SETTINGS, 0, 0, settings({name: value})[9:])


def test_settings_are_acknowledged() -> None:
    parts = Parts()
    parts.set(3, 100)
    assert parts.control.is_greeted
    assert frames_of(parts.outbox.take()) == [(SETTINGS, ACK, 0, b"")]


def test_last_initial_window_of_a_settings_frame_counts() -> None:
    parts = Parts()
    parts.control.receive(SETTINGS, 0, 0, settings({4: 3})[9:] * 2 + settings({4: 7})[9:])
    assert parts.windows == [7]


def test_header_table_is_forbidden_after_the_acknowledgement() -> None:
    parts = Parts()
    assert parts.blocks.decode(b"\x40\x01x\x01y") is not None
    for _ in range(2):
        parts.control.receive(SETTINGS, ACK, 0, b"")
    with pytest.raises(Http2Error):
        parts.blocks.decode(b"\xbe")
    assert not parts.control.is_greeted


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        (2, 2, ErrorCode.PROTOCOL_ERROR),
        (4, 2**31, ErrorCode.FLOW_CONTROL_ERROR),
        (5, 16_383, ErrorCode.PROTOCOL_ERROR),
        (5, 2**24, ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_settings_out_of_bounds_end_the_connection(name: int, value: int, code: int) -> None:
    with pytest.raises(Http2Error) as caught:
        Parts().set(name, value)
    assert caught.value.code == code


@pytest.mark.parametrize(("name", "value"), [(2, 0), (2, 1), (5, 16_384), (5, 2**24 - 1), (99, 7)])
def test_unknown_settings_are_accepted(name: int, value: int) -> None:
    parts = Parts()
    parts.set(name, value)
    assert parts.control.is_greeted


def test_ping_is_answered_and_its_answer_is_not() -> None:
    parts = Parts()
    parts.control.receive(PING, 0, 0, b"12345678")
    parts.control.receive(PING, ACK, 0, b"87654321")
    assert frames_of(parts.outbox.take()) == [(PING, ACK, 0, b"12345678")]


def test_goaway_marks_a_leaving_client() -> None:
    parts = Parts()
    parts.control.receive(GOAWAY, 0, 0, bytes(8))
    assert parts.control.has_said_goodbye


def test_unknown_frames_are_ignored() -> None:
    parts = Parts()
    parts.control.receive(77, 0xFF, 5, b"whatever")
    assert parts.outbox.take() == b""


@pytest.mark.parametrize(
    ("kind", "flags", "stream_id", "payload", "code"),
    [
        (FrameType.PUSH_PROMISE, 0, 1, bytes(4), ErrorCode.PROTOCOL_ERROR),
        (SETTINGS, 0, 1, b"", ErrorCode.PROTOCOL_ERROR),
        (PING, 0, 1, bytes(8), ErrorCode.PROTOCOL_ERROR),
        (GOAWAY, 0, 1, bytes(8), ErrorCode.PROTOCOL_ERROR),
        (SETTINGS, ACK, 0, bytes(6), ErrorCode.FRAME_SIZE_ERROR),
        (SETTINGS, 0, 0, bytes(5), ErrorCode.FRAME_SIZE_ERROR),
        (PING, 0, 0, bytes(7), ErrorCode.FRAME_SIZE_ERROR),
        (GOAWAY, 0, 0, bytes(7), ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_protocol_error_ends_the_connection(
    kind: int, flags: int, stream_id: int, payload: bytes, code: int
) -> None:
    with pytest.raises(Http2Error) as caught:
        Parts().control.receive(kind, flags, stream_id, payload)
    assert caught.value.code == code
