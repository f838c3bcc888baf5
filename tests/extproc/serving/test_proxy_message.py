"""The compiled decoder of messages against protobuf, to which it may leave any of them."""

from random import Random

import pytest
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from extproc.pb.kvsteer_ext_proc_pb2 import (
    HeaderMap,
    HeaderValue,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
)
from extproc.serving import proxy_message
from extproc.serving.proxy_message import NO_KIND, ProxyDecoder, ProxyMessage
from tests.extproc.messages import body, head, response_head, trailers
from tests.without_core import without_core

compiled = pytest.mark.skipif(not proxy_message.IS_COMPILED, reason="no C compiler at installation")

NAMES = (":path", ":status", "x-user", "content-length")
EVERY = ("x-user", "x-other", "x-none")
PLAIN = ProxyDecoder(NAMES, EVERY, compiled=False)


def answer_of(decoder: ProxyDecoder, message: bytes) -> ProxyMessage | None:
    """What a decoder makes of a message; None if it refuses it. Contexts are compared parsed."""
    try:
        read = decoder.decode(message)
    except DecodeError:
        return None
    if read.context is not None:
        whole, read.context = read.context, ProcessingRequest()
        read.context.metadata_context.CopyFrom(whole.metadata_context)
        for name, value in whole.attributes.items():
            read.context.attributes[name].CopyFrom(value)
    return read


def with_context(message: ProcessingRequest) -> ProcessingRequest:
    message.attributes["filter"].CopyFrom(Struct())
    message.attributes["filter"].fields["upstream"].string_value = "10.0.0.1:1"
    message.metadata_context.filter_metadata["n"].fields["k"].number_value = 1
    return message


MESSAGES = [
    head(headers={"x-user": "u", "content-length": "17", "x-other": "y"}),
    head("/" + "a" * 2000, mode=None, end_of_stream=True),
    with_context(head(headers={"x-user": "\u00e9"})),
    body(b"{}"),
    body(b"x" * 500, end_of_stream=False),
    with_context(response_head(200, {"content-type": "text/plain"})),
    trailers(),
    ProcessingRequest(
        response_trailers=HttpTrailers(
            trailers=HeaderMap(headers=[HeaderValue(key="x-user", value="v" * 1100)])
        )
    ),
    ProcessingRequest(
        request_headers=HttpHeaders(
            headers=HeaderMap(
                headers=[
                    HeaderValue(key="x-user", raw_value=b"\xff\xfea"),
                    HeaderValue(key="x-user", value="last"),
                    HeaderValue(key="x-user"),
                    HeaderValue(key="x-other", raw_value=b"v" * 2000, value="both"),
                    HeaderValue(key=""),
                ]
            )
        )
    ),
    ProcessingRequest(observability_mode=True),
]


def damaged(rng: Random, message: bytes) -> bytes:
    """A message with bytes changed, lost or added, or with another one behind it."""
    changed = bytearray(message)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(changed) + 1)
        changed[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    if rng.random() < 0.2:
        changed += rng.choice(MESSAGES).SerializeToString()
    return bytes(changed)


@compiled
@pytest.mark.parametrize("message", MESSAGES, ids=range(len(MESSAGES)))
@given(st.integers(0, 2**32))
def test_decoders_agree_on_whatever_comes(message: ProcessingRequest, seed: int) -> None:
    rng, decoder = Random(seed), ProxyDecoder(NAMES, EVERY)
    sent = message.SerializeToString()
    assert answer_of(decoder, sent) == answer_of(PLAIN, sent) is not None
    for _ in range(20):
        sent = damaged(rng, message.SerializeToString())
        assert answer_of(decoder, sent) == answer_of(PLAIN, sent)


@compiled
@given(st.binary(max_size=60))
def test_decoders_agree_on_any_bytes(sent: bytes) -> None:
    assert answer_of(ProxyDecoder(NAMES, EVERY), sent) == answer_of(PLAIN, sent)


def test_decoder_reads_only_the_headers_that_it_is_asked_for() -> None:
    read = ProxyDecoder((":path",)).decode(head("/v1", headers={"x": "y"}).SerializeToString())
    assert read.headers == {":path": "/v1"}
    assert ProxyDecoder(()).decode(b"").kind == NO_KIND
    plain = ProxyDecoder((":path",), compiled=False).decode(head("/v1").SerializeToString())
    assert plain.headers == {":path": "/v1"}


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=compiled)])
def test_decoder_reads_every_value_of_the_header_that_is_asked_for_so(*, is_compiled: bool) -> None:
    headers = HeaderMap(
        headers=[
            HeaderValue(key="x-tenant", raw_value=b"a" * 2000),
            HeaderValue(key="x-tenant", value="b"),
            HeaderValue(key="x-tenant"),
            HeaderValue(key="x-other", value="c"),
        ]
    )
    message = ProcessingRequest(request_headers=HttpHeaders(headers=headers))
    asked = ProxyDecoder((), ["x-tenant"], compiled=is_compiled)
    read = asked.decode(message.SerializeToString())
    assert read.values == {"x-tenant": [b"a" * 2000, b"b"]}
    assert ProxyDecoder((), ["x-none"]).decode(message.SerializeToString()).values == {}


def test_decoder_is_plain_where_none_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = without_core(proxy_message, "extproc._core", monkeypatch)
    assert not plain.IS_COMPILED
    assert plain.ProxyDecoder(()).decode(b"").kind == NO_KIND
