"""The body of a long message is joined beside the loop, and nothing of the message is lost."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from extproc.http2.messages import LONG_BYTES, MessageParts
from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest
from extproc.serving.long_message import joined, without_body
from extproc.serving.proxy_decoder import ProxyDecoder, by_protobuf
from extproc.serving.proxy_message import ProxyMessage
from tests.extproc.messages import body, head

ANOTHER = body(b"another").SerializeToString()
PATH = head("/v1/completions").SerializeToString()
DECODER = ProxyDecoder((":path",))
CUTS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def told(message: bytes) -> ProxyMessage:
    """What protobuf reads of a message."""
    return by_protobuf(message, frozenset((":path",)), frozenset())


def in_parts(message: bytes, cuts: list[int]) -> list[bytes]:
    """A message whose first part is as long as those of a reader: it has all lengths."""
    edges = [0, 24]
    for cut in cuts:
        edges.append(edges[-1] + cut)
    edges = [edge for edge in edges if edge < len(message)] + [len(message)]
    return [message[start:end] for start, end in pairwise(edges)]


@given(
    st.binary(max_size=300),
    st.booleans(),
    st.sampled_from([None, head("/v1/completions"), body(b"another"), body(b"")]),
    CUTS,
)
async def test_joined_returns_what_the_decoder_reads(
    content: bytes,
    is_last: bool,
    merged: ProcessingRequest | None,
    cuts: list[int],
) -> None:
    message = body(content, end_of_stream=is_last).SerializeToString()
    message += b"" if merged is None else merged.SerializeToString()
    with ThreadPoolExecutor(1) as thread:
        assert await joined(MessageParts(in_parts(message, cuts)), DECODER, thread) == told(message)


@given(st.binary(min_size=1, max_size=60), CUTS)
async def test_joined_refuses_what_the_decoder_refuses(message: bytes, cuts: list[int]) -> None:
    with ThreadPoolExecutor(1) as thread:
        try:
            expected = told(message)
        except DecodeError:
            with pytest.raises(DecodeError):
                await joined(MessageParts(in_parts(message, cuts)), DECODER, thread)
            return
        assert await joined(MessageParts(in_parts(message, cuts)), DECODER, thread) == expected


@given(
    st.integers(LONG_BYTES - 2, LONG_BYTES + 2),
    st.sampled_from([b"", ANOTHER, PATH, b"\x9a\x05\0", b"\xff", bytes(70_000)]),
)
async def test_joined_returns_what_the_decoder_reads_of_a_long_message(
    length: int, more: bytes
) -> None:
    message = body(bytes(length)).SerializeToString() + more
    parts = [message[at : at + 65_536] for at in range(0, len(message), 65_536)]
    with ThreadPoolExecutor(1) as thread:
        try:
            expected = told(message)
        except DecodeError:
            with pytest.raises(DecodeError):
                await joined(MessageParts(parts), DECODER, thread)
            return
        assert await joined(MessageParts(parts), DECODER, thread) == expected


def test_without_body_leaves_little_to_decode() -> None:
    message = body(b"x" * 3_000_000).SerializeToString()
    parts = [message[at : at + 65_536] for at in range(0, len(message), 65_536)]
    parted = without_body(parts)
    assert parted is not None
    assert len(parted[0]) < 100
    assert b"".join(parted[1]) == b"x" * 3_000_000
