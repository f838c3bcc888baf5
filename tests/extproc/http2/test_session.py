"""What a session does, and its oracle alike: windows, floods, ends and messages."""

from collections.abc import Callable, Sequence
from itertools import count, islice

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, TrailersReceived
from hypothesis import given
from hypothesis import strategies as st

from extproc.http2.call_events import ABORTED, ENDED, FAILED, MESSAGE, OPENED
from extproc.http2.codes import ErrorCode, Status
from extproc.http2.limits import Limits
from tests.extproc.http2.pair import Pair
from tests.extproc.http2.peer import (
    END_HEADERS,
    END_STREAM,
    NO_TABLE,
    block_of,
    data,
    frames_of,
    headers,
    resets,
    rst,
)
from tests.oracles.http2.frames import (
    PREFACE,
    FrameType,
    frame,
    ping,
    settings,
    settings_ack,
    window_update,
)
from tests.oracles.http2.grpc_messages import framed
from tests.oracles.http2.header_blocks import encode

WHOLE = END_HEADERS | END_STREAM
MAX_MESSAGE = 1000
REQUEST_FIELDS: Sequence[tuple[bytes, bytes]] = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a"),
    (b"content-type", b"application/grpc"),
)


def greeted(
    limits: Limits | None = None, max_bytes: int = 2**30, values: dict[int, int] | None = None
) -> Pair:
    """Sessions after both greetings."""
    pair = Pair(limits or Limits(), MAX_MESSAGE, max_bytes)
    pair.receive(PREFACE + settings(values or {}))
    return pair


def kinds(pair: Pair) -> list[int]:
    """What happened."""
    return [kind for _, kind, _ in pair.events]


def code_of(pair: Pair) -> int | None:
    """The error code that ends the connection."""
    fault = pair.both[0].fault
    return None if fault is None else fault[0]


def test_session_announces_a_table_of_size_0_at_once() -> None:
    first, second = frames_of(Pair(Limits(), 1, 1).greeting)
    assert (first.kind, second.kind) == (FrameType.SETTINGS, FrameType.WINDOW_UPDATE)
    assert first.payload[:6] == b"\0\x01\0\0\0\0"


def test_session_answers_another_implementation() -> None:
    client = H2Connection(H2Configuration(client_side=True))
    pair = Pair(Limits(), MAX_MESSAGE, 2**30)
    client.initiate_connection()
    client.receive_data(pair.greeting)
    names = (":method", ":scheme", ":path", ":authority", "content-type")
    head = list(zip(names, ("POST", "http", "/a", "a", "application/grpc"), strict=True))
    for number in (1, 3, 5):
        client.send_headers(number, head)
        client.send_data(number, framed(b"asked"), end_stream=True)
        client.receive_data(pair.receive(client.data_to_send()))
        pair.do("answer", number, b"answered")
        pair.do("finish", number, Status.OK, "")
        got = client.receive_data(pair.compare())
        assert {ResponseReceived, DataReceived, TrailersReceived} <= set(map(type, got))
    assert kinds(pair) == [OPENED, MESSAGE, ENDED] * 3
    assert (pair.both[0].stream_count, pair.both[0].fault) == (0, None)


def test_head_may_come_in_many_frames() -> None:
    pair, block = greeted(), block_of()
    pair.receive(
        frame(FrameType.HEADERS, 0, 1, block[:5])
        + frame(FrameType.CONTINUATION, 0, 1, block[5:9])
        + frame(FrameType.CONTINUATION, END_HEADERS, 1, block[9:])
    )
    assert kinds(pair) == [OPENED]


def test_padding_and_priority_of_a_head_are_removed() -> None:
    pair = greeted()
    pair.receive(frame(FrameType.HEADERS, 0x2C, 1, b"\x03" + bytes(5) + block_of() + bytes(3)))
    assert kinds(pair) == [OPENED]


def test_events_before_a_fault_are_told_and_none_behind_it() -> None:
    pair = greeted()
    sent = pair.receive(headers(1) + data(1, framed(b"x")) + window_update(0, 0))
    assert kinds(pair) == [OPENED, MESSAGE]
    assert frames_of(sent)[-1].payload[:8] == b"\0\0\0\x01\0\0\0\x01"  # the last stream, the code
    pair.receive(headers(3))
    assert len(pair.events) == 2


FLOODS: dict[str, Callable[[int], bytes]] = {
    "ping": lambda _: ping(bytes(8)),
    "settings": lambda _: settings({}),
    "unknown": lambda _: frame(99, 0, 0),
    "rapid reset": lambda number: headers(number) + rst(number),
    "malformed": lambda number: headers(number, [(b"X", b"")]),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_more_than_a_tick_allows_ends_the_connection(flood: Callable[[int], bytes]) -> None:
    limits = Limits(
        pings_a_tick=3,
        settings_a_tick=3,
        idle_frames_a_tick=3,
        idle_frames_a_stream=0,
        rapid_resets_a_tick=3,
        faults_a_tick=3,
    )
    pair = greeted(limits)
    numbers = count(1, 2)
    for _ in range(3):
        pair.do("tick")
        for number in islice(numbers, 3):
            pair.receive(flood(number))
    assert pair.both[0].fault is None
    pair.receive(flood(next(numbers)))
    assert code_of(pair) == ErrorCode.ENHANCE_YOUR_CALM


def test_resets_of_used_streams_are_not_counted() -> None:
    pair = greeted(Limits(rapid_resets_a_tick=2))
    for number in range(1, 41, 2):
        pair.receive(headers(number) + data(number, b"\0") + rst(number))
    assert pair.both[0].fault is None
    assert kinds(pair) == [OPENED, ABORTED] * 20


def test_streams_beyond_the_announced_number_are_refused() -> None:
    pair = greeted(Limits(max_streams=3))
    sent = pair.receive(b"".join(map(headers, (1, 3, 5, 7))))
    assert resets(frames_of(sent)) == [(7, ErrorCode.REFUSED_STREAM)]
    assert resets(frames_of(pair.receive(rst(1) + headers(9)))) == []
    assert pair.both[0].stream_count == 3


def test_content_length_must_match_the_data() -> None:
    pair, size = greeted(), (b"content-length", b"8")
    fields = [*REQUEST_FIELDS, size]
    sent = b""
    for number, message in ((1, b"abc"), (3, b"abcd"), (5, b"ab")):
        sent += pair.receive(headers(number, fields) + data(number, framed(message), flags=1))
    sent += pair.receive(headers(7, fields, flags=WHOLE))
    assert [number for number, _ in resets(frames_of(sent))] == [3, 5, 7]


def test_drain_refuses_new_streams_and_lets_open_ones_end() -> None:
    pair = greeted()
    pair.receive(headers(1))
    pair.do("drain")
    goaway = frames_of(pair.compare())[-1]
    assert (goaway.kind, goaway.payload[:8]) == (FrameType.GOAWAY, b"\0\0\0\x01" + bytes(4))
    sent = pair.receive(headers(3) + data(3, framed(b"late")) + data(1, framed(b"go on")))
    assert resets(frames_of(sent)) == [(3, ErrorCode.REFUSED_STREAM)]
    assert kinds(pair) == [OPENED, MESSAGE]
    assert not pair.both[0].is_over
    pair.do("finish", 1, Status.OK, "")
    pair.receive(rst(1))
    assert pair.both[0].is_over


def test_goaway_of_a_client_lets_its_streams_end() -> None:
    pair = greeted()
    pair.receive(headers(1, flags=WHOLE) + frame(FrameType.GOAWAY, 0, 0, bytes(8)))
    assert (pair.both[0].stream_count, pair.both[0].is_over) == (1, False)
    pair.do("finish", 1, Status.OK, "")
    pair.compare()
    assert pair.both[0].is_over


def test_peer_without_a_preface_is_disconnected() -> None:
    pair = Pair(Limits(preface_ticks=2), 1, 1)
    pair.receive(PREFACE[:5])
    for _ in range(2):
        assert pair.do("tick") == []
        assert pair.both[0].fault is None
    pair.do("tick")
    assert code_of(pair) == ErrorCode.SETTINGS_TIMEOUT


def test_answer_that_the_peer_does_not_let_through_ends_its_stream() -> None:
    pair = greeted(Limits(stall_ticks=2, first_ticks=9), values={4: 0})
    pair.receive(headers(1, flags=WHOLE) + headers(3, flags=WHOLE))
    pair.do("answer", 1, b"waits")
    assert pair.do("tick") == pair.do("tick") == []
    assert pair.do("tick") == [(1, ABORTED, None)]
    assert resets(frames_of(pair.compare())) == [(1, ErrorCode.CANCEL)]
    assert pair.both[0].stream_count == 1


def test_answer_beyond_the_budget_resets_its_stream() -> None:
    pair = greeted(max_bytes=100_000, values={4: 10})
    pair.receive(headers(1, flags=WHOLE) + headers(3, flags=WHOLE))
    assert pair.do("answer", 1, bytes(90_000)) == 90_005
    assert pair.do("answer", 3, bytes(20_000)) == -1
    assert resets(frames_of(pair.compare())) == [(3, ErrorCode.ENHANCE_YOUR_CALM)]


def test_answers_wait_while_the_transport_is_full() -> None:
    pair = greeted()
    pair.receive(headers(1))
    pair.compare()
    pair.do("pause_sending")
    pair.do("answer", 1, b"abc")
    assert FrameType.DATA not in {one.kind for one in frames_of(pair.compare())}
    pair.do("resume_sending")
    assert [one.payload for one in frames_of(pair.compare())] == [framed(b"abc")]


def test_read_data_reopens_the_window_and_held_data_does_not() -> None:
    pair = greeted(Limits(stream_window_bytes=100))
    pair.receive(headers(1))
    updates = frames_of(pair.receive(data(1, framed(bytes(55)))))
    assert [(one.kind, one.stream_id) for one in updates] == [(FrameType.WINDOW_UPDATE, 1)]
    pair.do("hold", 1)
    assert frames_of(pair.receive(data(1, framed(bytes(55))))) == []
    pair.do("unhold", 1)
    assert [one.kind for one in frames_of(pair.compare())] == [FrameType.WINDOW_UPDATE]


def test_data_beyond_the_window_resets_its_stream() -> None:
    pair = greeted(Limits(stream_window_bytes=100))
    pair.receive(headers(1))
    pair.do("hold", 1)
    sent = pair.receive(data(1, bytes(100)) + data(1, b"x"))
    assert resets(frames_of(sent)) == [(1, ErrorCode.FLOW_CONTROL_ERROR)]


def test_frames_under_way_to_a_finished_call_are_ignored() -> None:
    pair = greeted()
    pair.receive(headers(1))
    pair.do("finish", 1, Status.OK, "")
    pair.compare()
    assert frames_of(pair.receive(data(1, b"late") + window_update(1, 1) + rst(1))) == []
    assert kinds(pair) == [OPENED]


def test_table_is_forbidden_once_a_size_of_0_was_acknowledged() -> None:
    pair, block = greeted(), encode(REQUEST_FIELDS)
    indexed = b"\x40\x01x\x01y"  # added to the table, where its number is 62
    pair.receive(frame(FrameType.HEADERS, END_HEADERS, 1, block + indexed))
    pair.receive(frame(FrameType.HEADERS, END_HEADERS, 3, block + b"\xbe"))
    pair.receive(settings_ack() + frame(FrameType.HEADERS, END_HEADERS, 5, NO_TABLE + block))
    assert kinds(pair) == [OPENED] * 3
    pair.receive(frame(FrameType.HEADERS, END_HEADERS, 7, block + b"\xbe"))
    assert code_of(pair) == ErrorCode.COMPRESSION_ERROR


@given(
    st.lists(st.binary(max_size=40), max_size=8),
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
)
def test_messages_are_told_whole_from_any_split(messages: list[bytes], sizes: list[int]) -> None:
    pair = greeted()
    pair.receive(headers(1))
    whole = b"".join(map(framed, messages))
    at = turn = 0
    while at < len(whole):
        size = sizes[turn % len(sizes)]
        pair.receive(data(1, whole[at : at + size]))
        at, turn = at + size, turn + 1
    told = [found for _, kind, found in pair.events if kind == MESSAGE]
    assert len(told) == len(messages)
    assert all(
        one == other for one, other in zip(told, messages, strict=True) if type(one) is bytes
    )


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (framed(bytes(MAX_MESSAGE + 1))[:5], Status.RESOURCE_EXHAUSTED),
        (b"\x01" + framed(b"a")[1:], Status.UNIMPLEMENTED),
    ],
    ids=["too long", "compressed"],
)
def test_message_is_refused_by_its_prefix(sent: bytes, status: Status) -> None:
    pair = greeted()
    pair.receive(headers(1) + data(1, sent))
    _, kind, why = pair.events[-1]
    assert kind == FAILED
    assert isinstance(why, tuple)
    assert why[0] == status


def test_incomplete_last_message_fails_its_call() -> None:
    pair = greeted()
    pair.receive(headers(1) + data(1, framed(b"abc")[:6], flags=END_STREAM))
    assert pair.events[-1] == (1, FAILED, (Status.INTERNAL, "the last message is incomplete"))


def test_text_of_a_status_is_printable_ascii() -> None:
    pair = greeted()
    pair.receive(headers(1))
    pair.do("finish", 1, Status.INTERNAL, "50 % ä\n")
    sent = frames_of(pair.compare())[0]
    assert sent.payload.endswith(b"50 %25 %C3%A4%0A")
