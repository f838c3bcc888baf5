from collections.abc import Iterable

import pytest
from hpack.hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from extproc.http2.grpc_messages import (
    ANSWER_HEAD,
    LONG_BYTES,
    NOT_GRPC,
    MessageParts,
    MessageReader,
    Received,
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


def fault_of(data: bytes) -> tuple[int, str]:
    reader = MessageReader(10)
    assert reader.read(data) == []
    assert reader.fault is not None
    return reader.fault.status, str(reader.fault)


def joined(received: Iterable[Received]) -> list[list[bytes]]:
    """The messages, each in its parts."""
    messages: list[list[bytes]] = [[]]
    for content, is_whole in received:
        messages[-1].append(content)
        if is_whole:
            messages.append([])
    assert messages.pop() == []
    return messages


@given(
    st.lists(st.binary(max_size=50), max_size=8),
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
)
def test_messages_are_read_whole_from_any_split(messages: list[bytes], sizes: list[int]) -> None:
    data = memoryview(b"".join(framed(one) for one in messages))
    reader, got = MessageReader(50), list[Received]()
    turn = 0
    while data:
        size = sizes[turn % len(sizes)]
        got += reader.read(data[:size])
        assert reader.buffered_bytes <= 55
        data, turn = data[size:], turn + 1
    assert got == [(one, True) for one in messages]
    assert reader.buffered_bytes == 0


@given(
    st.lists(st.integers(-3, 3) | st.integers(-LONG_BYTES, 200_000), min_size=1, max_size=3),
    st.integers(20_000, 200_000),
)
def test_long_messages_come_in_parts_that_are_short(mores: list[int], size: int) -> None:
    messages = [bytes([number]) * (LONG_BYTES + more) for number, more in enumerate(mores)]
    data = memoryview(b"".join(framed(one) for one in messages))
    reader, got = MessageReader(2 * LONG_BYTES), list[Received]()
    for at in range(0, len(data), size):
        got += reader.read(data[at : at + size])
    found = joined(got)
    assert [b"".join(parts) for parts in found] == messages
    for message, parts in zip(messages, found, strict=True):
        longest = 65_536 + size if len(message) >= LONG_BYTES else LONG_BYTES
        assert len(parts) == 1 or len(message) >= LONG_BYTES
        assert len(MessageParts(parts)) == len(message)
        assert all(len(part) <= longest for part in parts)
    assert reader.buffered_bytes == 0


def test_incomplete_message_can_be_dropped() -> None:
    reader = MessageReader(10)
    assert reader.read(framed(b"abc")[:6]) == []
    reader.forget()
    assert reader.buffered_bytes == 0


def test_oversized_message_is_refused_by_its_prefix() -> None:
    assert fault_of(b"\0\0\0\0\x0b") == (
        Status.RESOURCE_EXHAUSTED,
        "message of 11 bytes is too long",
    )
    assert MessageReader(10).read(framed(bytes(10))) == [(bytes(10), True)]


def test_compressed_message_is_refused() -> None:
    assert fault_of(b"\x01\0\0\0\x01x")[0] == Status.UNIMPLEMENTED


def test_answer_ends_with_its_status() -> None:
    assert fields_of(ANSWER_HEAD) == {":status": "200", "content-type": "application/grpc"}
    assert fields_of(trailers(Status.OK, "")) == {"grpc-status": "0"}
    assert fields_of(trailers(Status.INTERNAL, "")) == {"grpc-status": "13"}
    assert fields_of(trailers_only(Status.NOT_FOUND, "no % here")) == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-status": "5",
        "grpc-message": "no %25 here",
    }


def test_status_text_is_printable_ascii() -> None:
    assert percent_encoded("é\n~ ") == b"%C3%A9%0A~ "
    assert percent_encoded("\ud800") == b"?"


@pytest.mark.parametrize(
    "content_type",
    [b"application/grpc", b"application/grpc+proto", b"Application/GRPC;charset=utf-8"],
)
def test_refusal_of_a_grpc_request_is_none(content_type: bytes) -> None:
    assert refusal_of(request(type=content_type)) is None
    assert refusal_of(request(encoding=b"identity")) is None


@pytest.mark.parametrize(
    ("head", "field", "value", "content"),
    [
        (request(method=b"GET"), ":status", "405", NOT_GRPC),
        (request(method=b"HEAD"), ":status", "405", b""),
        (request(type=b"application/json"), ":status", "415", NOT_GRPC),
        (request(type=b"application/grpcx"), ":status", "415", NOT_GRPC),
        (request(type=b"application/grpc+json"), ":status", "415", NOT_GRPC),
        (request(encoding=b"gzip"), "grpc-status", "12", b""),
    ],
)
def test_refusal_of_another_request_names_its_cause(
    head: RequestHead, field: str, value: str, content: bytes
) -> None:
    refusal = refusal_of(head)
    assert refusal is not None
    assert fields_of(refusal.block)[field] == value
    assert refusal.content == content
