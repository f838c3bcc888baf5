"""The compiled decoder of messages against protobuf, to which it may leave any of them."""

import re
from collections.abc import Callable, Iterable
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
from extproc.requests.request import Head
from extproc.serving.naming_headers import NamingHeaders
from extproc.serving.proxy_decoder import ProxyDecoder, by_protobuf, head_of
from extproc.serving.proxy_message import NO_KIND, ProxyMessage, number_of
from tests.extproc.messages import body, head, response_head, trailers

NAMES = (":path", ":status", "x-user", "content-length")
EVERY = ("x-user", "x-other", "x-none")


def plain(
    message: bytes, names: Iterable[str] = NAMES, every: Iterable[str] = EVERY
) -> ProxyMessage:
    """What protobuf makes of a message."""
    return by_protobuf(message, frozenset(names), frozenset(every))


def answer_of(decode: Callable[[bytes], ProxyMessage], message: bytes) -> ProxyMessage | None:
    """What is made of a message; None if it is refused. Contexts are compared parsed."""
    try:
        read = decode(message)
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


@pytest.mark.parametrize("message", MESSAGES, ids=range(len(MESSAGES)))
@given(st.integers(0, 2**32))
def test_decoders_agree_on_whatever_comes(message: ProcessingRequest, seed: int) -> None:
    rng, decode = Random(seed), ProxyDecoder(NAMES, EVERY).decode
    sent = message.SerializeToString()
    assert answer_of(decode, sent) == answer_of(plain, sent) is not None
    for _ in range(20):
        sent = damaged(rng, message.SerializeToString())
        assert answer_of(decode, sent) == answer_of(plain, sent)


HEAD_NAMES = (
    ":method",
    ":path",
    "content-length",
    "content-encoding",
    "traceparent",
    "x-request-id",
    "x-policy",
)
NAMING = NamingHeaders.of(("x-first", "x-second"), ("x-user",))
LETTERS = st.text("/az09?#% \u00e9", max_size=6)
VALUES = st.one_of(
    LETTERS,
    LETTERS.map(lambda text: "/v1/" + text),
    st.sampled_from(("12", "0012", "1" * 19, "1" * 20, "-1", "x" * 128, "x" * 129, "\u00e9" * 129)),
    st.just("/" + "a" * 1100),
)


@given(
    st.lists(
        st.tuples(st.sampled_from((*HEAD_NAMES, *NAMING.all, "other", ":path")), VALUES),
        max_size=12,
    ),
    st.booleans(),
    st.sampled_from((None, "x-policy")),
)
def test_decoder_makes_the_head_that_is_made_of_all_headers(
    pairs: list[tuple[str, str]], is_raw: bool, policy: str | None
) -> None:
    values = [
        HeaderValue(key=key, raw_value=value.encode())
        if is_raw
        else HeaderValue(key=key, value=value)
        for key, value in pairs
    ]
    message = ProcessingRequest(request_headers=HttpHeaders(headers=HeaderMap(headers=values)))
    sent, names = message.SerializeToString(), (*HEAD_NAMES, *NAMING.all)
    made = ProxyDecoder(names, (), NAMING, policy).decode(sent)
    of_all = plain(sent, names, ())
    expected = head_of(of_all, policy, NAMING)
    assert (made.head or head_of(made, policy, NAMING)) == expected
    assert made.headers == ({} if made.head else of_all.headers)


def test_decoder_makes_the_head_of_what_envoy_sends() -> None:
    decoder = ProxyDecoder((*HEAD_NAMES, *NAMING.all), (), NAMING, "x-policy")
    sent = head("/v1/a", headers={"content-length": "12", "x-second": "s", "x-policy": "cost"})
    made = decoder.decode(sent.SerializeToString())
    assert made.head == Head("POST", "/v1/a", 12, "cost", None, "s")
    assert decoder.decode(with_context(sent).SerializeToString()).head is None
    assert decoder.decode(response_head(200).SerializeToString()).head is None
    assert ProxyDecoder([*map(str, range(65))], (), NAMING).decode(b"").head is None


def test_reading_leaves_to_protobuf_what_it_is_not_sure_of() -> None:
    reading = ProxyDecoder(NAMES).reading(b"/path")
    sent = body(b"{}").SerializeToString()
    assert reading.decoder.read(sent) == ProxyDecoder(NAMES).decode(sent)
    assert reading.decoder.read(with_context(head()).SerializeToString()) is None
    assert reading.decoder.read(b"\xff") is None


@given(st.binary(max_size=60))
def test_decoders_agree_on_any_bytes(sent: bytes) -> None:
    assert answer_of(ProxyDecoder(NAMES, EVERY).decode, sent) == answer_of(plain, sent)


def test_decoder_reads_only_the_headers_that_it_is_asked_for() -> None:
    read = ProxyDecoder((":path",)).decode(head("/v1", headers={"x": "y"}).SerializeToString())
    assert read.headers == {":path": "/v1"}
    assert ProxyDecoder(()).decode(b"").kind == NO_KIND
    assert plain(head("/v1").SerializeToString()).headers == {":path": "/v1"}


def test_decoder_reads_every_value_of_the_header_that_is_asked_for_so() -> None:
    headers = HeaderMap(
        headers=[
            HeaderValue(key="x-tenant", raw_value=b"a" * 2000),
            HeaderValue(key="x-tenant", value="b"),
            HeaderValue(key="x-tenant"),
            HeaderValue(key="x-other", value="c"),
        ]
    )
    message = ProcessingRequest(request_headers=HttpHeaders(headers=headers))
    sent = message.SerializeToString()
    for read in (ProxyDecoder((), ["x-tenant"]).decode(sent), plain(sent, (), ["x-tenant"])):
        assert read.values == {"x-tenant": [b"a" * 2000, b"b"]}
    assert ProxyDecoder((), ["x-none"]).decode(message.SerializeToString()).values == {}


@given(st.text(max_size=6) | st.integers(0, 10**9).map(str), st.integers(1, 12))
def test_number_has_no_more_than_its_digits(text: str, digits: int) -> None:
    is_number = re.fullmatch("[0-9]+", text) is not None and len(text) <= digits
    assert number_of(text, digits) == (int(text) if is_number else None)
