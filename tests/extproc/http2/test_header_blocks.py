from typing import Any

import pytest
from hpack.hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import Http2Error
from extproc.http2.frames import ErrorCode
from extproc.http2.header_blocks import BlockCache, HeaderBlocks, encode

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a")]
NO_TABLE = b"\x20"


def blocks(cache: BlockCache | None = None, *, forbidden: bool = True) -> HeaderBlocks:
    one = HeaderBlocks(cache if cache is not None else BlockCache(), 4096)
    if forbidden:
        one.forbid_table()
    return one


def code_of(one: HeaderBlocks, block: bytes) -> int:
    with pytest.raises(Http2Error) as caught:
        one.decode(block)
    return caught.value.code


@given(st.lists(st.tuples(st.binary(max_size=300), st.binary(max_size=20_000)), max_size=4))
def test_encoded_fields_are_readable_by_another_implementation(
    fields: list[tuple[bytes, bytes]],
) -> None:
    decoded = Decoder(10**6).decode(encode(fields), raw=True)
    assert [(bytes(name), bytes(value)) for name, value in decoded] == fields


def test_equal_blocks_are_decoded_once_without_a_table() -> None:
    cache = BlockCache()
    one, block = blocks(cache), encode(REQUEST)
    one.decode(NO_TABLE + block)
    assert len(cache) == 0
    first = one.decode(block)
    assert block in cache
    assert one.decode(block) is first
    other = blocks(cache)
    other.decode(NO_TABLE + block)
    assert other.decode(block) is first


def traced(number: int) -> bytes:
    return encode([*REQUEST, (b"traceparent", f"00-{number:032x}-{1:016x}-01".encode())])


class CountingDecoder(Decoder):
    """Keeps how long each block was that it decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def decode(self, data: bytes, raw: bool = False) -> Any:
        self.sizes.append(len(data))
        return super().decode(data, raw)


def test_block_that_differs_in_one_field_has_only_that_decoded() -> None:
    one, decoder = blocks(BlockCache()), CountingDecoder()
    one.decoder = decoder
    one.decode(NO_TABLE)
    one.decode(traced(1))
    decoder.sizes.clear()
    head = one.decode(traced(2))
    assert head is not None
    assert head.fields[:3] == REQUEST
    assert head.fields[3] == (
        b"traceparent",
        b"00-" + b"2".zfill(32) + b"-" + b"1".zfill(16) + b"-01",
    )
    assert decoder.sizes == [len(traced(2)) - len(encode(REQUEST))]


def test_oversized_list_of_known_fields_is_refused() -> None:
    one = blocks()
    one.decode(NO_TABLE)
    fields = [(b"x", b"y" * 900)]
    assert one.decode(encode(fields * 4)) is not None
    assert code_of(one, encode(fields * 5)) == ErrorCode.ENHANCE_YOUR_CALM


def test_known_fields_are_bounded() -> None:
    cache = BlockCache()
    one = blocks(cache)
    one.decode(NO_TABLE)
    one.decode(encode([(b"x", b"y" * 1100)]))
    assert len(cache.fields) == 0
    for number in range(1000):
        one.decode(traced(number))
        assert len(cache.fields) <= 256


def test_field_that_breaks_compression_ends_a_running_connection() -> None:
    one = blocks()
    one.decode(NO_TABLE)
    assert code_of(one, b"\xbe") == ErrorCode.COMPRESSION_ERROR


def test_block_that_repeats_the_table_size_is_found_whole() -> None:
    cache = BlockCache()
    one, block = blocks(cache), NO_TABLE + encode(REQUEST)
    one.decode(block)
    first = one.decode(block)
    assert block in cache
    assert one.decode(block) is first


def test_malformed_head_is_cached_as_such() -> None:
    cache = BlockCache()
    one, block = blocks(cache), encode([(b"UPPER", b"x")])
    one.decode(NO_TABLE)
    assert one.decode(block) is None
    assert block in cache
    assert one.decode(block) is None


def test_table_may_be_used_until_it_is_forbidden() -> None:
    cache, encoder = BlockCache(), Encoder()
    one = blocks(cache, forbidden=False)
    for _ in range(2):
        head = one.decode(encoder.encode([*REQUEST, (b"x", b"y")], huffman=True))
        assert head is not None
        assert head.fields[-1] == (b"x", b"y")
    assert len(cache) == 0
    one.forbid_table()
    encoder.header_table_size = 0
    head = one.decode(encoder.encode([*REQUEST, (b"x", b"y")]))
    assert head is not None


ADDED = b"\x40\x01x\x01y"
SIZE_31, SIZE_4096 = b"\x3f\x00", b"\x3f\xe1\x1f"


@pytest.mark.parametrize("block", [b"\xbe", encode(REQUEST), b"", SIZE_31 + ADDED])
def test_table_with_fields_has_to_be_emptied_behind_the_acknowledgement(block: bytes) -> None:
    one = blocks(forbidden=False)
    one.decode(ADDED)
    one.forbid_table()
    assert code_of(one, block) == ErrorCode.COMPRESSION_ERROR


def test_table_that_was_emptied_before_the_acknowledgement_needs_no_size() -> None:
    one = blocks(forbidden=False)
    one.decode(ADDED)
    one.decode(NO_TABLE)
    one.forbid_table()
    assert one.decode(encode(REQUEST)) is not None


def test_empty_table_of_the_default_size_may_be_used_behind_the_acknowledgement() -> None:
    one, encoder = blocks(), Encoder()
    for _ in range(2):
        head = one.decode(encoder.encode([*REQUEST, (b"x", b"y")]))
        assert head is not None
        assert head.fields[-1] == (b"x", b"y")
    assert one.decode(NO_TABLE + encode(REQUEST)) is not None
    assert code_of(one, SIZE_4096) == ErrorCode.COMPRESSION_ERROR


def test_table_may_grow_again_until_it_is_forbidden() -> None:
    cache = BlockCache()
    one = blocks(cache, forbidden=False)
    one.decode(NO_TABLE)
    again = b"\x3f\xe1\x1f" + encode(REQUEST)
    assert one.decode(again) is not None
    assert again not in cache


@pytest.mark.parametrize(
    "block",
    [
        NO_TABLE + b"\xbe",
        b"\x3f\xe1\x1f",
        NO_TABLE + b"\x3f\x00",
        NO_TABLE + b"\x00\x05ab",
        NO_TABLE + b"\x00",
    ],
    ids=["dynamic entry", "size above 0", "last size above 0", "cut", "cut at once"],
)
def test_block_that_breaks_compression_ends_the_connection(block: bytes) -> None:
    assert code_of(blocks(), block) == ErrorCode.COMPRESSION_ERROR


def test_oversized_list_ends_the_connection() -> None:
    bomb = NO_TABLE + encode([(b"x", bytes(1000))] * 5)
    assert code_of(blocks(), bomb) == ErrorCode.ENHANCE_YOUR_CALM


def test_cache_is_bounded() -> None:
    cache = BlockCache()
    one = blocks(cache)
    one.decode(NO_TABLE)
    one.decode(encode([(b"x", b"y" * 1100)]))
    assert len(cache) == 0
    for number in range(1000):
        one.decode(encode([(b"x", str(number).encode())]))
        assert len(cache) <= 256


@pytest.mark.parametrize(
    ("sizes", "is_taken"),
    [(b"\x20\x20", True), (b"\x3f\xe1\x1f\x20", True), (b"\x20" * 3, False), (b"\x3f\x81", False)],
)
def test_block_begins_with_at_most_two_table_sizes(sizes: bytes, *, is_taken: bool) -> None:
    blocks = HeaderBlocks(BlockCache(), 1000)
    if is_taken:
        assert blocks.decode(sizes + encode([(b"a", b"b")])) is not None
        return
    with pytest.raises(Http2Error):
        blocks.decode(sizes)
