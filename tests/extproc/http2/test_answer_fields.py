"""The fields of another server's header block, against another decoder."""

import contextlib

import pytest
from hpack import Decoder, Encoder, HPACKError
from hypothesis import given
from hypothesis import strategies as st

from extproc._core import header_fields

FIELDS = st.lists(
    st.one_of(
        st.tuples(st.binary(max_size=20), st.binary(max_size=200)),
        st.sampled_from([(b":status", b"200"), (b"grpc-status", b"12"), (b"grpc-message", b"no")]),
    ),
    max_size=12,
)


@given(FIELDS, st.booleans(), st.booleans())
def test_fields_of_a_block_are_those_that_were_encoded(
    fields: list[tuple[bytes, bytes]], has_table: bool, huffman: bool
) -> None:
    encoder = Encoder()
    if not has_table:
        encoder.header_table_size = 0
    assert header_fields(encoder.encode(fields, huffman=huffman)) == fields


@given(st.binary(max_size=60))
def test_any_block_is_read_as_another_decoder_reads_it_or_refused(block: bytes) -> None:
    expected = None
    with contextlib.suppress(HPACKError, IndexError):
        expected = [
            (bytes(name), bytes(value)) for name, value in Decoder().decode(block, raw=True)
        ]
    found = None
    with contextlib.suppress(ValueError):
        found = header_fields(block)
    assert found is None or found == expected


@pytest.mark.parametrize("block", [b"\xbe", b"\x80", b"\0", b"\x82" * 2000])
def test_field_of_no_table_and_endless_fields_are_refused(block: bytes) -> None:
    with pytest.raises(ValueError, match="undecodable header block"):
        header_fields(block)


@given(st.integers(0, 1_600))
def test_block_of_more_than_32_kib_of_fields_is_refused(count: int) -> None:
    field = len(b":method" + b"GET") + 32  # RFC 9113, section 6.5.2
    if count * field <= 32 * 1024:
        assert header_fields(b"\x82" * count) == [(b":method", b"GET")] * count
        return
    with pytest.raises(ValueError, match="undecodable header block"):
        header_fields(b"\x82" * count)
