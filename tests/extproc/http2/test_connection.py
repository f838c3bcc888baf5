import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, TrailersReceived
from hypothesis import given
from hypothesis import strategies as st

from extproc.http2.connection import Connection
from extproc.http2.frames import (
    PREFACE,
    ErrorCode,
    FrameType,
    frame,
    ping,
    settings,
    settings_ack,
    window_update,
)
from extproc.http2.header_blocks import BlockCache, encode
from extproc.http2.limits import Budget, Limits
from extproc.http2.streams import Aborted, Opened, Received
from tests.extproc.http2.peer import (
    END_HEADERS,
    END_STREAM,
    NO_TABLE,
    block_of,
    connected,
    data,
    frames_of,
    headers,
    resets,
    rst,
    written,
)

HEAD, END = encode([(b":status", b"200")]), encode([(b"grpc-status", b"0")])
WHOLE = END_HEADERS | END_STREAM


def goodbye(connection: Connection) -> tuple[int, int]:
    """The last stream and the code of the GOAWAY that ends a connection."""
    last = written(connection)[-1]
    assert last.kind == FrameType.GOAWAY
    return int.from_bytes(last.payload[:4], "big"), int.from_bytes(last.payload[4:8], "big")


def test_connection_sends_its_settings_at_once() -> None:
    connection = Connection(Limits(), BlockCache(), Budget(0))
    assert connection.is_due
    first, second = frames_of(connection.data_to_send())
    assert (first.kind, second.kind) == (FrameType.SETTINGS, FrameType.WINDOW_UPDATE)
    assert first.payload[:6] == b"\0\x01\0\0\0\0"


def test_connection_answers_another_implementation() -> None:
    client = H2Connection(H2Configuration(client_side=True))
    server = Connection(Limits(), BlockCache(), Budget(0))
    client.initiate_connection()
    for number in (1, 3, 5):
        client.send_headers(number, block_of_text())
        client.send_data(number, b"asked", end_stream=True)
        events = server.receive(client.data_to_send())
        assert [type(one) for one in events] == [Opened, Received]
        server.send_data(number, b"answered", HEAD)
        server.end(number, END)
        got = client.receive_data(b"".join(iter(server.data_to_send, b"")))
        kinds = [type(one) for one in got]
        assert {ResponseReceived, DataReceived, TrailersReceived} <= set(kinds)
    assert server.stream_count == 0
    assert server.fault is None


def block_of_text() -> list[tuple[str, str]]:
    return [(":method", "POST"), (":scheme", "http"), (":path", "/a"), (":authority", "a")]


def test_head_may_come_in_many_frames() -> None:
    connection, block = connected(), block_of()
    events = connection.receive(
        frame(FrameType.HEADERS, 0, 1, block[:5])
        + frame(FrameType.CONTINUATION, 0, 1, block[5:9])
        + frame(FrameType.CONTINUATION, END_HEADERS, 1, block[9:])
    )
    assert [type(one) for one in events] == [Opened]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (headers(2), ErrorCode.PROTOCOL_ERROR),
        (data(1, b"x"), ErrorCode.PROTOCOL_ERROR),
        (rst(1), ErrorCode.PROTOCOL_ERROR),
        (frame(FrameType.CONTINUATION, 4, 1), ErrorCode.PROTOCOL_ERROR),
        (frame(FrameType.PUSH_PROMISE, 4, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(FrameType.HEADERS, 0, 1) + data(1), ErrorCode.PROTOCOL_ERROR),
        (frame(FrameType.HEADERS, 0, 1) + ping(bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(FrameType.HEADERS, 4, 1, b"\xff"), ErrorCode.COMPRESSION_ERROR),
        (frame(FrameType.PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
        (window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
        (ping(bytes(8)) * 1001, ErrorCode.ENHANCE_YOUR_CALM),
        (settings({}) * 101, ErrorCode.ENHANCE_YOUR_CALM),
        (frame(99, 0, 0) * 10_001, ErrorCode.ENHANCE_YOUR_CALM),
        (b"\xff" * 9, ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_protocol_error_ends_the_connection(sent: bytes, code: int) -> None:
    connection = connected()
    assert connection.receive(sent) == []
    assert connection.fault is not None
    assert goodbye(connection)[1] == connection.fault.code == code
    assert connection.receive(headers(1)) == []
    assert repr(connection) == "<Connection failed, 0 streams>"


@pytest.mark.parametrize("first", [headers(1), ping(bytes(8)), settings_ack(), data(1)])
def test_first_frame_must_be_settings(first: bytes) -> None:
    connection = Connection(Limits(), BlockCache(), Budget(0))
    connection.receive(PREFACE + first)
    assert goodbye(connection) == (0, ErrorCode.PROTOCOL_ERROR)


def test_receive_returns_the_events_before_a_fault() -> None:
    connection = connected()
    events = connection.receive(headers(1) + data(1, b"x") + window_update(0, 0))
    assert [type(one) for one in events] == [Opened, Received]
    assert goodbye(connection) == (1, ErrorCode.PROTOCOL_ERROR)


def test_peer_without_a_preface_is_disconnected() -> None:
    connection = Connection(Limits(preface_ticks=2), BlockCache(), Budget(0))
    connection.receive(PREFACE[:5])
    assert connection.tick() == connection.tick() == []
    assert repr(connection) == "<Connection open, 0 streams>"
    connection.tick()
    assert goodbye(connection)[1] == ErrorCode.SETTINGS_TIMEOUT
    connection.tick()
    assert written(connection) == []


def test_tick_resets_the_counts() -> None:
    connection = connected()
    for _ in range(3):
        connection.receive(ping(bytes(8)) * 900)
        connection.tick()
    assert connection.fault is None


def test_closed_stream_is_sent_no_frame() -> None:
    connection = connected()
    connection.receive(headers(1) + rst(1))
    assert connection.send_data(1, b"x", HEAD) is None
    connection.end(1, END)
    connection.reset(1, ErrorCode.CANCEL)
    connection.consume(1, 5)
    assert connection.queued(1) == 0
    assert written(connection) == []


def test_reset_ends_a_stream() -> None:
    connection = connected()
    connection.receive(headers(1))
    connection.reset(1, ErrorCode.CANCEL)
    assert resets(written(connection)) == [(1, ErrorCode.CANCEL)]
    assert connection.stream_count == 0


def test_answer_beyond_the_budget_resets_its_stream() -> None:
    connection = connected(budget=Budget(100_000), values={4: 10})
    connection.receive(headers(1, flags=WHOLE) + headers(3, flags=WHOLE))
    assert connection.send_data(1, bytes(90_000)) == 90_000
    assert connection.send_data(3, bytes(20_000)) is None
    assert resets(written(connection)) == [(3, ErrorCode.ENHANCE_YOUR_CALM)]
    connection.receive(window_update(1, 2**20) + window_update(0, 2**20))
    connection.end(1, END)
    assert sum(len(one.payload) for one in written(connection) if one.kind == 0) == 89_990
    assert connection.queued(1) == connection.stream_count == 0


def test_peer_that_accepts_no_data_is_disconnected() -> None:
    budget = Budget(1000)
    connection = connected(Limits(stall_ticks=2), budget, {4: 0})
    connection.receive(headers(1, flags=WHOLE) + headers(3, flags=WHOLE))
    connection.send_data(1, b"waits")
    assert connection.tick() == connection.tick() == []
    assert connection.tick() == [Aborted(1)]
    assert resets(written(connection)) == [(1, ErrorCode.CANCEL)]
    assert (connection.stream_count, budget.used_bytes) == (1, 0)


def test_close_releases_the_budget_of_waiting_data() -> None:
    budget = Budget(1000)
    connection = connected(None, budget, {4: 0})
    connection.receive(headers(1))
    connection.send_data(1, b"waits")
    connection.close()
    assert (connection.stream_count, budget.used_bytes) == (0, 0)


def test_sending_pauses_while_the_transport_is_full() -> None:
    connection = connected()
    connection.receive(headers(1))
    connection.pause_sending()
    connection.send_data(1, b"abc")
    assert written(connection) == []
    connection.resume_sending()
    assert [one.payload for one in written(connection)] == [b"abc"]


def test_consumed_data_reopens_the_window() -> None:
    connection = connected(Limits(stream_window_bytes=100))
    connection.receive(headers(1) + data(1, bytes(60)))
    connection.consume(1, 60)
    assert [one.kind for one in written(connection)] == [FrameType.WINDOW_UPDATE]


def test_drain_names_the_last_stream_and_lets_it_end() -> None:
    connection = connected()
    connection.receive(headers(1))
    connection.drain()
    connection.drain()
    assert goodbye(connection) == (1, ErrorCode.NO_ERROR)
    assert connection.receive(headers(3)) == []
    assert repr(connection) == "<Connection draining, 1 streams>"
    connection.receive(rst(1))
    assert connection.is_over
    connection.receive(window_update(0, 0))
    assert goodbye(connection) == (1, ErrorCode.PROTOCOL_ERROR)
    connection.drain()
    assert written(connection) == []


def test_connection_is_not_over_while_it_answers() -> None:
    connection = connected()
    connection.receive(headers(1))
    connection.drain()
    assert not connection.is_over


def test_goaway_of_a_client_lets_its_streams_end() -> None:
    connection = connected()
    assert repr(connection) == "<Connection open, 0 streams>"
    connection.receive(headers(1, flags=WHOLE) + frame(FrameType.GOAWAY, 0, 0, bytes(8)))
    assert connection.stream_count == 1
    connection.end(1, END)
    assert connection.is_over


def test_priorities_and_unknown_frames_are_ignored() -> None:
    connection = connected()
    connection.receive(frame(FrameType.PRIORITY, 0, 9, bytes(5)) + frame(99, 0, 0, b"x"))
    assert connection.fault is None
    assert written(connection) == []


PAYLOADS = st.one_of(st.binary(max_size=40), st.just(NO_TABLE + block_of()), st.just(bytes(4)))
ANY_FRAME = st.builds(
    frame,
    st.integers(0, 11),
    st.integers(0, 255),
    st.sampled_from((0, 1, 2, 3, 5, 7, 2**31 - 1)),
    PAYLOADS,
)
CHUNKS = st.lists(st.integers(1, 200), min_size=1, max_size=20)


def fed(connection: Connection, sent: bytes, sizes: list[int]) -> None:
    """Feeds a connection bytes in pieces of these sizes, and answers the data that it receives."""
    at = turn = 0
    while at < len(sent) and connection.fault is None:
        size = sizes[turn % len(sizes)]
        for event in connection.receive(sent[at : at + size]):
            if isinstance(event, Received):
                connection.consume(event.stream_id, len(event.data))
                connection.send_data(event.stream_id, bytes(100))
                if event.is_last:
                    connection.end(event.stream_id, END)
        at, turn = at + size, turn + 1
        while connection.data_to_send():
            pass
    connection.tick()


@given(st.lists(ANY_FRAME, max_size=30), CHUNKS)
def test_connection_survives_any_frames(frames: list[bytes], sizes: list[int]) -> None:
    budget = Budget(10_000)
    connection = connected(budget=budget)
    fed(connection, b"".join(frames), sizes)
    assert budget.used_bytes <= 10_000
    assert connection.stream_count <= 4
    connection.close()
    assert budget.used_bytes == 0


@given(st.binary(max_size=400), CHUNKS, st.booleans())
def test_connection_survives_any_bytes(sent: bytes, sizes: list[int], greets: bool) -> None:
    connection = Connection(Limits(), BlockCache(), Budget(0))
    fed(connection, (PREFACE + settings({}) if greets else b"") + sent, sizes)
    assert connection.fault is not None or connection.stream_count == 0
