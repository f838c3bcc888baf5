"""Any order of messages, and any way to cut a request into them."""

import contextlib
from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from extproc._core import Budget
from extproc.base.errors import ProtocolError
from extproc.pb.kvsteer_ext_proc_pb2 import (
    HttpBody,
    HttpTrailers,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
)
from extproc.requests.refusals import Refusal
from extproc.requests.request import RoutingRequest
from extproc.serving.stream import Stream, StreamSettings
from extproc.serving.stream_answers import PickAnswer
from tests.extproc.messages import answers_of, body, head, read, response_head, trailers
from tests.extproc.serving.routers import in_flight, released, service
from tests.extproc.settled import at_once

LIMIT = 3000
MODES = st.sampled_from([None, *range(6)])
PATHS = st.sampled_from(["/v1/completions", "/metrics"])
PIECES = st.lists(st.binary(max_size=20) | st.just(b"z" * 1900), max_size=5)

MESSAGES = st.one_of(
    st.builds(
        head, PATHS, mode=MODES, response_mode=st.integers(0, 5), end_of_stream=st.booleans()
    ),
    st.builds(body, st.binary(max_size=9) | st.just(b"x" * 2000), end_of_stream=st.booleans()),
    st.builds(trailers),
    st.builds(response_head, st.just(200), end_of_stream=st.booleans()),
    st.builds(lambda piece, last: response_body(piece, last=last), st.binary(), st.booleans()),
    st.just(ProcessingRequest(response_trailers=HttpTrailers())),
    st.just(ProcessingRequest()),
)


def response_body(piece: bytes, *, last: bool) -> ProcessingRequest:
    return ProcessingRequest(response_body=HttpBody(body=piece, end_of_stream=last))


def stream() -> Stream:
    bodies = Budget(10**9)
    return Stream(StreamSettings(max_body_bytes=LIMIT, bodies=bodies, reads_usage=True))


def talk(
    one: Stream, messages: Sequence[ProcessingRequest], *, refuses: bool = False
) -> Iterator[ProcessingResponse]:
    """Yields the answers to each message, including picks."""
    for message in messages:
        step = one.receive(read(message))
        if not isinstance(step, RoutingRequest):
            yield from answers_of(step)
        elif refuses:
            yield from answers_of(one.refuse(Refusal(503, (), b"")))
        else:
            yield from answers_of(one.place(PickAnswer("10.0.0.1:1")))


def request(mode: int, path: str, pieces: list[bytes], *, ends_with_trailers: bool) -> list[
    ProcessingRequest
]:  # fmt: skip
    """A whole request as Envoy cuts it into messages."""
    messages = [head(path, mode=mode)]
    messages += [body(piece, end_of_stream=False) for piece in pieces]
    return [*messages, trailers() if ends_with_trailers else body(b"", end_of_stream=True)]


@given(st.lists(MESSAGES, max_size=12), st.booleans())
def test_stream_answers_or_refuses_any_order_of_messages(
    messages: list[ProcessingRequest],
    refuses: bool,
) -> None:
    said: list[ProcessingResponse] = []
    with contextlib.suppress(ProtocolError):
        said.extend(talk(stream(), messages, refuses=refuses))
    assert all(answer.WhichOneof("response") for answer in said)


@given(PATHS, PIECES, st.booleans())
def test_duplex_request_is_echoed_exactly(
    path: str,
    pieces: list[bytes],
    ends_with_trailers: bool,
) -> None:
    mode = ProcessingMode.FULL_DUPLEX_STREAMED
    messages = request(mode, path, pieces, ends_with_trailers=ends_with_trailers)
    answers = list(talk(stream(), messages))
    kinds = [str(answer.WhichOneof("response")) for answer in answers]
    parts = [
        answer.request_body.response.body_mutation.streamed_response
        for answer in answers
        if answer.HasField("request_body")
    ]
    assert kinds[0] == "request_headers"
    assert kinds.count("request_headers") == 1
    assert kinds.count("request_trailers") == int(ends_with_trailers)
    assert b"".join(part.body for part in parts) == b"".join(pieces)
    assert [part.end_of_stream for part in parts].count(True) == int(not ends_with_trailers)
    last = answers[-1]
    assert last.HasField("request_trailers") or parts[-1].end_of_stream


@given(PIECES)
def test_streamed_request_gets_one_answer_for_each_message(pieces: list[bytes]) -> None:
    mode = ProcessingMode.STREAMED
    messages = request(mode, "/v1/completions", pieces, ends_with_trailers=False)
    answers = list(talk(stream(), messages))
    asked = [message.WhichOneof("request") for message in messages]
    assert [answer.WhichOneof("response") for answer in answers] == asked
    assert answers[0].dynamic_metadata.fields


@given(st.lists(MESSAGES, max_size=8), st.integers(1, 3))
def test_exchange_releases_its_load_once_for_any_order_of_messages(
    messages: list[ProcessingRequest], closes: int
) -> None:
    exchange = SERVICE.open()
    before = released(SERVICE)
    with contextlib.suppress(ProtocolError):
        for message in messages:
            at_once(exchange.receive(read(message)))
    booked = in_flight(SERVICE)
    for _ in range(closes):
        exchange.close()
    assert in_flight(SERVICE) == 0
    assert released(SERVICE) - before == booked


SERVICE = service()
