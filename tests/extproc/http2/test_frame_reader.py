import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.http2.frames import PREFACE, Flag, Frame, FrameReader, FrameType, frame

DATA, HEADERS, PADDED, LAST = FrameType.DATA, FrameType.HEADERS, Flag.PADDED, Flag.END_STREAM


def reader() -> FrameReader:
    one = FrameReader()
    assert one.read(PREFACE) == ([], None)
    return one


def plain(frames: list[Frame]) -> list[tuple[int, int, int, bytes]]:
    return [(kind, flags, number, bytes(payload)) for kind, flags, number, payload in frames]


def test_frames_are_read_in_order() -> None:
    data = frame(HEADERS, 4, 1, b"head") + frame(DATA, 1, 1, b"body") + frame(9, 0, 3)
    frames, fault = reader().read(data)
    assert fault is None
    assert plain(frames) == [(1, 4, 1, b"head"), (0, 1, 1, b"body"), (9, 0, 3, b"")]


def test_reserved_bit_of_a_stream_is_ignored() -> None:
    frames, _ = reader().read(frame(HEADERS, 0, 2**31 + 5, b""))
    assert plain(frames) == [(1, 0, 5, b"")]


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"X", PREFACE[:-1] + b"!"])
def test_preface_is_refused_at_its_first_wrong_byte(data: bytes) -> None:
    frames, fault = FrameReader().read(data)
    assert frames == []
    assert str(fault) == "no HTTP/2 preface"


def test_oversized_frame_is_refused_by_its_head() -> None:
    good = frame(HEADERS, 4, 1, b"head")
    frames, fault = reader().read(good + b"\x00\x40\x01" + bytes(6))
    assert plain(frames) == [(1, 4, 1, b"head")]
    assert str(fault) == "frame too long"


def test_data_is_passed_on_as_it_comes_and_ends_once() -> None:
    one = reader()
    whole = frame(DATA, LAST, 1, b"abcdef")
    assert plain(one.read(whole[:9])[0]) == []
    assert plain(one.read(whole[9:12])[0]) == [(0, 0, 1, b"abc")]
    assert one.buffered_bytes == 0
    assert plain(one.read(whole[12:] + frame(HEADERS, 0, 3))[0]) == [
        (0, 1, 1, b"def"),
        (1, 0, 3, b""),
    ]


def test_padded_data_waits_until_it_is_whole() -> None:
    one = reader()
    whole = frame(DATA, PADDED, 1, b"\x01ab\0")
    assert one.read(whole[:12]) == ([], None)
    assert one.buffered_bytes == 12
    assert plain(one.read(whole[12:])[0]) == [(0, 8, 1, b"\x01ab\0")]


FRAMES = st.lists(
    st.tuples(
        st.sampled_from((0, 1, 4, 9, 77)),
        st.sampled_from((0, 1, 4, 8, 9)),
        st.integers(0, 2**31 - 1),
        st.binary(max_size=60),
    ),
    max_size=8,
)


def joined(frames: list[Frame]) -> list[tuple[int, int, int, bytes]]:
    """Joins adjacent DATA frames of a stream, of which only the last may have END_STREAM."""
    whole: list[tuple[int, int, int, bytes]] = []
    for kind, flags, number, payload in plain(frames):
        before = whole[-1] if whole else (-1, 0, 0, b"")
        is_more = kind == DATA == before[0] and number == before[2]
        if is_more and not before[1] & LAST and not flags & PADDED:
            whole[-1] = (kind, flags, number, before[3] + payload)
            continue
        whole.append((kind, flags, number, payload))
    return whole


@given(FRAMES, st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_read_returns_the_same_for_any_split(
    sent: list[tuple[int, int, int, bytes]], sizes: list[int]
) -> None:
    data = PREFACE + b"".join(frame(*one) for one in sent)
    at_once, _ = FrameReader().read(data)
    one, parts = FrameReader(), list[Frame]()
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        frames, fault = one.read(data[at : at + size])
        assert fault is None
        parts += frames
        at, turn = at + size, turn + 1
    assert joined(parts) == joined(at_once)
