import pytest
from hpack.hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from extproc.http2.header_blocks import cut_at_fields

Fields = list[tuple[bytes, bytes]]

names = st.sampled_from([b":method", b":path", b"te", b"x-request-id", b"a" * 130])
texts = st.binary(max_size=200) | st.sampled_from([b"POST", b"trailers", b"x" * 20_000])


def read(block: bytes) -> Fields:
    decoder = Decoder(10**7)
    decoder.max_allowed_table_size = 0
    decoder.decode(b"\x20")
    return [(bytes(name), bytes(value)) for name, value in decoder.decode(block, raw=True)]


@given(st.lists(st.tuples(names, texts), max_size=6), st.booleans())
def test_cut_at_fields_gives_the_fields_of_the_block(fields: Fields, huffman: bool) -> None:
    encoder = Encoder()
    encoder.header_table_size = 0
    encoder.encode([])  # emits the table's size
    block = encoder.encode(fields, huffman=huffman)
    parts = cut_at_fields(block)
    assert parts is not None
    assert b"".join(parts) == block
    assert [field for part in parts for field in read(part)] == read(block) == fields


@given(st.binary(max_size=60))
def test_cut_at_fields_joins_to_any_block_or_is_none(block: bytes) -> None:
    parts = cut_at_fields(block)
    assert parts is None or (b"".join(parts) == block and all(parts))


@pytest.mark.parametrize(
    "block",
    [
        b"\x82",
        b"\xff\x80\x01",
        b"\x41\x01a",
        b"\x40\x01a\x01b",
        b"\x7f\x00\x01b",
        b"\x0f\x81\x00\x01b",
        b"\x10\x01a\x01b",
        b"\x00\x01a\x7f\x01" + bytes(128),
    ],
    ids=[
        "index",
        "long index",
        "added, with a known name",
        "added",
        "added, with a long index",
        "literal with a long index",
        "never to be added",
        "long value",
    ],
)
def test_cut_at_fields_cuts_each_kind_of_field(block: bytes) -> None:
    assert cut_at_fields(block) == [block]
    assert cut_at_fields(b"\x82" + block) == [b"\x82", block]


@pytest.mark.parametrize(
    "block",
    [
        b"\x20",
        b"\x82\x20",
        b"\xff",
        b"\xff\x80",
        b"\x00\x05ab",
        b"\x00",
        b"\x00\x01a\x7f" + b"\xff" * 9,
    ],
    ids=["size", "size later", "cut", "cut index", "cut name", "cut at once", "endless length"],
)
def test_cut_at_fields_refuses_fields_that_need_a_table(block: bytes) -> None:
    assert cut_at_fields(block) is None
