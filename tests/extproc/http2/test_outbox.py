from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.http2.frames import MAX_FRAME_BYTES, MAX_WINDOW, ErrorCode, FrameType
from extproc.http2.limits import Budget
from extproc.http2.outbox import Http2Stream, Outbox
from tests.extproc.http2.peer import Sent, frames_of, resets

WINDOW = 65_535
LAST_HEADERS = (FrameType.HEADERS, 5, 1, b"end")


def stream(number: int = 1, *, is_received: bool = True) -> Http2Stream:
    one = Http2Stream(number, 0, None)
    one.is_received = is_received
    return one


def taken(outbox: Outbox) -> list[Sent]:
    return frames_of(b"".join(iter(outbox.take, b"")))


def data_of(frames: list[Sent], number: int = 1) -> bytes:
    return b"".join(one.payload for one in frames if (one.kind, one.stream_id) == (0, number))


def test_data_within_the_windows_is_sent_at_once() -> None:
    outbox, one = Outbox(Budget(0)), stream()
    outbox.write(b"")
    assert outbox.send(one, b"abc")
    assert outbox.end(one, b"end")
    assert taken(outbox) == [(0, 0, 1, b"abc"), LAST_HEADERS]
    assert outbox.finished() == []


@pytest.mark.parametrize("is_received", [True, False])
def test_end_of_a_received_stream_is_not_due(*, is_received: bool) -> None:
    outbox = Outbox(Budget(0))
    outbox.end(stream(is_received=is_received), b"end", is_due=False)
    assert outbox.is_due == (not is_received)


@pytest.mark.parametrize(
    "send",
    [
        lambda outbox: outbox.write(b"frame"),
        lambda outbox: outbox.send(stream(), b"data"),
        lambda outbox: outbox.end(stream(), b"end"),
    ],
)
def test_other_frames_are_due_at_once(send: Callable[[Outbox], object]) -> None:
    outbox = Outbox(Budget(0))
    assert not outbox.is_due
    send(outbox)
    is_due = outbox.is_due
    outbox.take()
    assert (is_due, outbox.is_due) == (True, False)


def test_end_before_the_request_ended_resets_the_rest() -> None:
    outbox, one = Outbox(Budget(0)), stream(is_received=False)
    outbox.end(one, b"end")
    assert resets(taken(outbox)) == [(1, ErrorCode.NO_ERROR)]


def test_long_data_is_cut_into_frames_within_the_windows() -> None:
    budget = Budget(10**6)
    outbox, one = Outbox(budget), stream()
    outbox.grant(10**6)
    assert outbox.send(one, bytes(100_000))
    frames = taken(outbox)
    assert max(len(frame.payload) for frame in frames) == 16_384
    assert len(data_of(frames)) == WINDOW
    assert budget.used_bytes == one.queued == 100_000 - WINDOW
    assert outbox.grant_stream(one, 1000)
    assert len(data_of(taken(outbox))) == 1000
    assert outbox.grant_stream(one, MAX_WINDOW)
    assert len(data_of(taken(outbox))) == 100_000 - WINDOW - 1000
    assert budget.used_bytes == one.queued == 0


def test_connection_window_limits_all_streams_oldest_first() -> None:
    outbox, first, second = Outbox(Budget(10**6)), stream(1), stream(3)
    outbox.send(first, bytes(WINDOW))
    assert len(data_of(taken(outbox))) == WINDOW
    outbox.send(second, b"second")
    assert data_of(taken(outbox), 3) == b""
    outbox.grant(4)
    assert data_of(taken(outbox), 3) == b"seco"
    outbox.grant(4)
    assert data_of(taken(outbox), 3) == b"nd"


def test_trailers_wait_for_the_data_before_them() -> None:
    outbox, one = Outbox(Budget(10**6)), stream()
    outbox.set_initial_window(2)
    outbox.send(one, b"abc")
    outbox.send(one, b"de")
    assert not outbox.end(one, b"end")
    assert taken(outbox) == [(0, 0, 1, b"ab")]
    assert outbox.finished() == []
    outbox.set_initial_window(10)
    assert taken(outbox) == [(0, 0, 1, b"cde"), LAST_HEADERS]
    assert outbox.finished() == [one]
    assert outbox.finished() == []


def test_window_may_be_negative() -> None:
    outbox, one = Outbox(Budget(100)), stream()
    outbox.send(one, b"abc")
    outbox.set_initial_window(1)
    outbox.send(one, b"x")
    assert data_of(taken(outbox)) == b"abc"
    outbox.set_initial_window(2)
    assert outbox.grant_stream(one, 1)
    assert taken(outbox) == []
    assert outbox.grant_stream(one, 1)
    assert data_of(taken(outbox)) == b"x"


def test_windows_do_not_exceed_their_bound() -> None:
    outbox, one = Outbox(Budget(0)), stream()
    assert outbox.grant(MAX_WINDOW - WINDOW)
    assert not outbox.grant(1)
    assert outbox.grant_stream(one, MAX_WINDOW - WINDOW)
    assert not outbox.grant_stream(one, 1)


def test_data_waits_while_the_transport_is_full() -> None:
    outbox, one = Outbox(Budget(100)), stream()
    outbox.pause()
    outbox.send(one, b"abc")
    assert taken(outbox) == []
    outbox.resume()
    assert data_of(taken(outbox)) == b"abc"


def test_take_returns_a_bounded_part_until_resumed() -> None:
    outbox, one = Outbox(Budget(10**7)), stream()
    outbox.grant(10**7)
    outbox.set_initial_window(10**7)
    outbox.send(one, bytes(10**6))
    assert len(outbox.take()) < 300_000
    outbox.pause()
    assert outbox.take() == b""
    outbox.resume()
    assert len(data_of(taken(outbox))) > 700_000


def test_send_refuses_data_beyond_the_budget() -> None:
    budget = Budget(5)
    outbox, one = Outbox(budget), stream()
    outbox.pause()
    assert outbox.send(one, b"12345")
    assert not outbox.send(one, b"6")
    outbox.forget(one)
    assert budget.used_bytes == 0
    outbox.resume()
    assert taken(outbox) == []
    outbox.forget(one)


def test_waiting_pieces_are_joined() -> None:
    outbox, one = Outbox(Budget(10**6)), stream()
    outbox.set_initial_window(0)
    for piece in (b"ab", b"cd", b"ef"):
        outbox.send(one, piece)
    outbox.grant_stream(one, 5)
    assert taken(outbox) == [(0, 0, 1, b"abcde")]
    outbox.send(one, b"g")
    outbox.grant_stream(one, 10**6)
    assert taken(outbox) == [(0, 0, 1, b"fg")]


def test_shrunken_window_holds_back_what_waits_for_the_connection() -> None:
    outbox, one = Outbox(Budget(10**6)), stream()
    outbox.set_initial_window(10**6)
    outbox.send(one, bytes(WINDOW + 100))
    assert len(data_of(taken(outbox))) == WINDOW
    outbox.set_initial_window(10)
    outbox.grant(1000)
    assert taken(outbox) == []
    outbox.grant_stream(one, WINDOW)
    assert len(data_of(taken(outbox))) == 10


def test_stream_is_stalled_while_no_data_moves() -> None:
    outbox, one = Outbox(Budget(100)), stream()
    outbox.set_initial_window(0)
    outbox.send(one, b"abc")
    assert outbox.stalled(2) == outbox.stalled(2) == []
    outbox.grant_stream(one, 1)
    taken(outbox)
    assert outbox.stalled(2) == outbox.stalled(2) == []
    assert outbox.stalled(2) == [one]


@given(st.lists(st.integers(1, 40_000), max_size=6), st.lists(st.integers(1, 50_000), max_size=20))
def test_data_arrives_whole_and_in_order_for_any_windows(
    sizes: list[int], grants: list[int]
) -> None:
    outbox, one = Outbox(Budget(10**7)), stream()
    sent = b"".join(bytes([number]) * size for number, size in enumerate(sizes))
    for number, size in enumerate(sizes):
        assert outbox.send(one, bytes([number]) * size)
    got = data_of(taken(outbox))
    for size in [*grants, 10**6]:
        outbox.grant(size)
        outbox.grant_stream(one, size)
        got += data_of(taken(outbox))
    assert got == sent


sends = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3 * MAX_FRAME_BYTES)), max_size=6)


@given(sends, st.integers(0, 2 * WINDOW), st.lists(st.integers(1, 2 * WINDOW), max_size=6))
def test_data_frames_stay_within_the_smallest_maximum(
    pieces: list[tuple[int, int]], initial: int, grants: list[int]
) -> None:
    outbox, streams = Outbox(Budget(10**7)), [stream(number) for number in (1, 3, 5)]
    outbox.set_initial_window(initial)
    for place, size in pieces:
        outbox.send(streams[place - 1], bytes(size))
    frames = taken(outbox)
    for size in grants:
        outbox.grant(size)
        for one in streams:
            outbox.grant_stream(one, size)
        frames += taken(outbox)
    assert all(len(one.payload) <= MAX_FRAME_BYTES for one in frames)
