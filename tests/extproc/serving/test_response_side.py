import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc._core import Budget
from extproc.pb.kvsteer_ext_proc_pb2 import (
    HttpBody,
    HttpTrailers,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
)
from extproc.serving.stream import Stream, StreamSettings
from extproc.serving.stream_answers import MAX_ECHO_BYTES
from tests.extproc.messages import answers_of, head, read, response_head

JSON = {"content-type": "application/json"}


def side(*, is_duplex: bool = False, reads_usage: bool = False) -> Stream:
    """A stream that has its request headers, but nothing of its response."""
    bodies = Budget(1000)
    one = Stream(StreamSettings(max_body_bytes=1000, bodies=bodies, reads_usage=reads_usage))
    one.receive(read(head(response_mode=ProcessingMode.FULL_DUPLEX_STREAMED if is_duplex else 0)))
    return one


def answered(one: Stream, message: ProcessingRequest) -> list[ProcessingResponse]:
    return answers_of(one.receive(read(message)))


def body(piece: bytes, *, last: bool) -> ProcessingRequest:
    return ProcessingRequest(response_body=HttpBody(body=piece, end_of_stream=last))


def headers_answer(one: Stream, message: ProcessingRequest) -> ProcessingResponse:
    (answer,) = answered(one, message)
    return answer


def test_response_headers_continue_and_are_read() -> None:
    one = side()
    answer = headers_answer(one, response_head(503))
    assert answer.WhichOneof("response") == "response_headers"
    assert not answer.response_headers.HasField("response")
    assert not answer.HasField("mode_override")
    assert one.response_head is not None
    assert one.response_head.status == 503


def test_readable_response_body_is_requested_streamed() -> None:
    mode = headers_answer(side(reads_usage=True), response_head(200, JSON)).mode_override
    assert mode.response_body_mode == ProcessingMode.STREAMED
    assert mode.response_trailer_mode == ProcessingMode.SEND


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (side(), response_head(200, JSON)),
        (side(reads_usage=True), response_head(200, {"content-type": "text/html"})),
        (side(reads_usage=True), response_head(200, JSON, end_of_stream=True)),
        (side(reads_usage=True, is_duplex=True), response_head(200, JSON)),
    ],
    ids=["not configured", "no usage in it", "no body", "comes anyway"],
)
def test_unreadable_response_body_is_not_requested(one: Stream, message: ProcessingRequest) -> None:
    assert not headers_answer(one, message).HasField("mode_override")


def test_streamed_response_piece_continues() -> None:
    (answer,) = answered(side(), body(b"x", last=False))
    assert answer.WhichOneof("response") == "response_body"
    assert not answer.response_body.HasField("response")


@given(st.lists(st.binary(max_size=8) | st.just(b"y" * (2 * MAX_ECHO_BYTES + 1)), max_size=4))
def test_duplex_response_body_is_echoed_bytewise_as_it_comes(pieces: list[bytes]) -> None:
    one = side(is_duplex=True)
    back: list[tuple[bytes, bool]] = []
    for piece, last in [*((piece, False) for piece in pieces), (b"", True)]:
        answers = answered(one, body(piece, last=last))
        parts = [each.response_body.response.body_mutation.streamed_response for each in answers]
        assert b"".join(part.body for part in parts) == piece
        back += [(part.body, part.end_of_stream) for part in parts]
    assert [last for _, last in back] == [False] * (len(back) - 1) + [True]


def test_response_trailers_continue() -> None:
    message = ProcessingRequest(response_trailers=HttpTrailers())
    (answer,) = answered(side(), message)
    assert answer.WhichOneof("response") == "response_trailers"


messages = st.one_of(
    st.builds(
        response_head,
        st.integers(200, 599),
        st.sampled_from([JSON, {"content-type": "text/html"}]),
        end_of_stream=st.booleans(),
    ),
    st.builds(body, st.binary(max_size=8), last=st.booleans()),
    st.just(ProcessingRequest(response_trailers=HttpTrailers())),
)


@given(st.lists(messages, max_size=6), st.booleans())
def test_buffered_responses_pass_unchanged(
    timeline: list[ProcessingRequest],
    reads_usage: bool,
) -> None:
    one = side(reads_usage=reads_usage)
    for message in timeline:
        (answer,) = answered(one, message)
        kind = answer.WhichOneof("response")
        assert kind == message.WhichOneof("request")
        assert kind is not None
        assert not getattr(answer, kind).ListFields()
        assert not answer.HasField("dynamic_metadata")
