import pytest
from hpack.hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import CallError
from extproc.http2.grpc_messages import (
    ANSWER_HEAD,
    MessageReader,
    Piece,
    Status,
    framed,
    percent_encoded,
    refusal_of,
    trailers,
    trailers_only,
)
from extproc.http2.header_blocks import RequestHead, head_of


def fields_of(block: bytes) -> dict[str, str]:
    return dict(Decoder().decode(block))  # type: ignore[arg-type]


def request(**more: bytes) -> RequestHead:
    fields = {"method": b"POST", "type": b"application/grpc", "encoding": b"", **more}
    head = head_of(
        [
            (b":method", fields["method"]),
            (b":scheme", b"http"),
            (b":path", b"/"),
            (b"content-type", fields["type"]),
            (b"grpc-encoding", fields["encoding"]),
        ]
    )
    assert head is not None
    return head


def status_of(data: bytes) -> tuple[int, str]:
    with pytest.raises(CallError) as caught:
        MessageReader(10).read(data)
    return caught.value.status, str(caught.value)


@given(
    st.lists(st.binary(max_size=50), max_size=8),
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
)
def test_messages_come_whole_however_they_are_cut(messages: list[bytes], sizes: list[int]) -> None:
    data = memoryview(b"".join(framed(one) for one in messages))
    reader, got = MessageReader(50), list[Piece]()
    turn = 0
    while data:
        size = sizes[turn % len(sizes)]
        got += reader.read(data[:size])
        assert reader.held <= 55
        data, turn = data[size:], turn + 1
    assert [bytes(one) for one in got] == messages
    assert reader.held == 0


def test_a_message_that_comes_in_one_piece_is_not_copied() -> None:
    piece = memoryview(framed(b"abc"))
    [message] = MessageReader(10).read(piece)
    assert isinstance(message, memoryview)
    assert message.obj is piece.obj


def test_a_message_too_long_is_refused_by_its_prefix() -> None:
    assert status_of(b"\0\0\0\0\x0b") == (
        Status.RESOURCE_EXHAUSTED,
        "message of 11 bytes is too long",
    )
    assert MessageReader(10).read(framed(bytes(10))) == [bytes(10)]


def test_a_compressed_message_is_refused() -> None:
    assert status_of(b"\x01\0\0\0\x01x")[0] == Status.UNIMPLEMENTED


def test_an_answer_ends_with_its_status() -> None:
    assert fields_of(ANSWER_HEAD) == {":status": "200", "content-type": "application/grpc"}
    assert fields_of(trailers(Status.OK, "")) == {"grpc-status": "0"}
    assert fields_of(trailers(Status.INTERNAL, "")) == {"grpc-status": "13"}
    assert fields_of(trailers_only(Status.NOT_FOUND, "no % here")) == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-status": "5",
        "grpc-message": "no %25 here",
    }


def test_a_status_text_is_printable_ascii() -> None:
    assert percent_encoded("é\n~ ") == b"%C3%A9%0A~ "
    assert percent_encoded("\ud800") == b"?"


@pytest.mark.parametrize(
    "content_type",
    [b"application/grpc", b"application/grpc+proto", b"Application/GRPC;charset=utf-8"],
)
def test_grpc_is_understood(content_type: bytes) -> None:
    assert refusal_of(request(type=content_type)) is None
    assert refusal_of(request(encoding=b"identity")) is None


@pytest.mark.parametrize(
    ("head", "field", "value"),
    [
        (request(method=b"GET"), ":status", "405"),
        (request(type=b"application/json"), ":status", "415"),
        (request(type=b"application/grpcx"), ":status", "415"),
        (request(type=b"application/grpc+json"), ":status", "415"),
        (request(encoding=b"gzip"), "grpc-status", "12"),
    ],
)
def test_what_is_not_understood_is_refused(head: RequestHead, field: str, value: str) -> None:
    refusal = refusal_of(head)
    assert refusal is not None
    assert fields_of(refusal)[field] == value
