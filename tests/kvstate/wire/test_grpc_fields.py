import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.pb.kvsteer_kv_events_pb2 import KvBlock, KvCacheEvent
from kvstate.wire.grpc_encoding import (
    cache_level_of,
    extra_key,
    is_text,
    proto_tier,
    signed_hash,
    uint32_or_none,
    varint,
)


@pytest.mark.parametrize(
    ("block_hash", "signed"),
    [
        (5, 5),
        (2**63 - 1, 2**63 - 1),
        (2**63, -(2**63)),
        (2**64 - 1, -1),
        (-1, -1),
        (b"\x00" * 24 + b"\xff" * 8, -1),
        (b"\x01\x02", 258),
    ],
)
def test_hashes_keep_their_bits_and_digests_their_last_eight_bytes(
    block_hash: int | bytes, signed: int
) -> None:
    assert signed_hash(block_hash) == signed


@given(st.integers(0, 2**64 - 1))
def test_signed_hash_keeps_every_hash(block_hash: int) -> None:
    assert KvBlock(block_hash=signed_hash(block_hash)).block_hash & (2**64 - 1) == block_hash


@pytest.mark.parametrize(
    ("extra", "key", "value"),
    [
        ("text", "text", "text"),
        (b"digest", "blob", b"digest"),
        (-3, "number", -3),
        (2**63, "blob", b"9223372036854775808"),
        (True, "blob", b"True"),
        (1.5, "blob", b"1.5"),
        (None, "blob", b"None"),
        ("\ud800", "blob", b"'\\ud800'"),
        (["\ud800", 1], "blob", b"['\\ud800', 1]"),
        (["image", 2**63], "blob", b"['image', 9223372036854775808]"),
        (["image", 1, 2], "blob", b"['image', 1, 2]"),
    ],
)
def test_extra_keys_keep_their_form_or_are_spelled_out(
    extra: object, key: str, value: object
) -> None:
    told = extra_key(extra)
    assert told.WhichOneof("key") == key
    assert getattr(told, key) == value


def test_image_with_its_offset_is_a_multimodal_key() -> None:
    key = extra_key(["image", 7]).multimodal
    assert (key.identifier, key.offset) == ("image", 7)


@given(st.integers(1, 2**64 - 1))
def test_varint_equals_the_encoding_of_protobuf(number: int) -> None:
    assert b"\x08" + varint(number) == KvCacheEvent(event_id=number).SerializeToString()


@pytest.mark.parametrize(
    ("medium", "tier", "level"),
    [("GPU", 1, None), ("CPU_PINNED", 2, 1), ("DISK", 3, 2), ("EXTERNAL", 4, 3), ("TAPE", 0, None)],
)
def test_media_have_a_tier_and_a_cache_level(medium: str, tier: int, level: int | None) -> None:
    assert (proto_tier(medium), cache_level_of(medium)) == (tier, level)


@pytest.mark.parametrize(
    ("number", "told"), [(0, 0), (2**32 - 1, 2**32 - 1), (2**32, None), (-1, None), (None, None)]
)
def test_uint32_or_none_omits_numbers_out_of_range(number: int | None, told: int | None) -> None:
    assert uint32_or_none(number) == told


def test_is_text_refuses_halves_of_surrogate_pairs() -> None:
    assert is_text("ä")
    assert not is_text("\udc00")
