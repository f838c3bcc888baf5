from itertools import permutations

import pytest

from kvstate.core import Pool
from kvstate.overlap import Tier
from kvstate.plain_core import Segment, Table

GPU, GPU_1, CPU = Pool.of("GPU", None, 16), Pool.of("GPU", 1, 16), Pool.of("CPU", None, 32)


def consistent(table: Table, *segments: Segment) -> bool:
    expected: Table = {}
    for segment in segments:
        for key, bits in segment.bits_by_key().items():
            expected[key] = expected.get(key, 0) | bits
    return expected == table


def test_pool_of_an_unknown_medium_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="events of unknown media never reach the index"):
        Pool.of("TAPE", None, 16)


def test_held_block_has_a_bit_of_its_tier() -> None:
    table: Table = {}
    segment = Segment(table, 4)
    segment.store(GPU, 1, 77)
    segment.store(CPU, 1, 77)
    assert table == {77: 0b11_0000}
    assert segment.find(1) == (GPU, 77)
    assert segment.find(2) is None
    assert (len(segment), segment.block_sizes) == (2, {16, 32})
    assert segment.count_by_tier() == {Tier.DEVICE: 1, Tier.HOST: 1}


@pytest.mark.parametrize("copies", [1, 2, 3, 4])
def test_block_is_held_until_every_copy_is_removed(copies: int) -> None:
    table: Table = {}
    segment = Segment(table, 0)
    for _ in range(copies):
        assert segment.store(GPU, 1, 77)
    for _ in range(copies):
        assert table == {77: 1}
        assert segment.remove("GPU", None, 1)
    assert table == {}
    assert not segment.remove("GPU", None, 1)


@pytest.mark.parametrize("hashes", [1, 2, 3, 4])
def test_key_is_held_until_every_hash_of_it_is_removed(hashes: int) -> None:
    table: Table = {}
    segment = Segment(table, 0)
    for block in range(hashes):
        segment.store(GPU if block % 2 else GPU_1, block, 77)
    for block in range(hashes):
        assert table == {77: 1}
        assert segment.remove("GPU", None if block % 2 else 1, block)
    assert table == {}


def test_block_is_found_on_the_nearest_medium_whatever_came_first() -> None:
    larger = Pool.of("GPU", None, 32)
    for pools in permutations((GPU, larger, GPU_1, CPU)):
        segment = Segment({}, 0)
        for key, pool in enumerate(pools):
            segment.store(pool, 1, key)
        order = []
        while found := segment.find(1):
            order.append(found[0])
            segment.forget(found[0], 1)
        assert order == [GPU, larger, GPU_1, CPU]


def test_removal_names_medium_and_group() -> None:
    segment = Segment({}, 0)
    segment.store(GPU, 1, 77)
    assert not segment.remove("GPU", 1, 1)
    assert not segment.remove("CPU", None, 1)
    assert segment.remove("GPU", None, 1)


def test_hash_with_other_tokens_replaces_all_its_copies() -> None:
    table: Table = {}
    segment = Segment(table, 0)
    segment.store(GPU, 1, 77)
    segment.store(GPU, 1, 77)
    assert not segment.store(GPU, 1, 88)
    assert table == {88: 1}
    assert segment.remove("GPU", None, 1)
    assert table == {}


def test_forgotten_block_loses_all_copies() -> None:
    table: Table = {}
    segment = Segment(table, 0)
    segment.store(GPU, 1, 77)
    segment.store(GPU, 1, 77)
    segment.forget(GPU, 2)
    segment.forget(CPU, 1)
    assert len(segment) == 1
    segment.forget(GPU, 1)
    assert (len(segment), table) == (0, {})


def test_empty_pools_are_not_kept() -> None:
    segment = Segment({}, 0)
    for group in range(5):
        segment.store(Pool.of("GPU", group, 16), 1, 77)
        segment.remove("GPU", group, 1)
    assert segment._pools == {}


def test_cleared_segment_leaves_the_bits_of_others() -> None:
    table: Table = {}
    one, two = Segment(table, 0), Segment(table, 4)
    for segment in (one, two):
        segment.store(GPU, 1, 77)
        segment.store(GPU_1, 1, 77)
        segment.store(CPU, 1, 77)
    one.clear(9)
    assert table == {77: 0b11_0000}
    assert (len(one), len(two)) == (0, 3)
    assert consistent(table, one, two)


def test_moved_blocks_replace_what_the_other_segment_had_of_them() -> None:
    table: Table = {}
    one, two = Segment(table, 0), Segment(table, 4)
    one.store(GPU, 1, 77)
    one.store(GPU, 1, 77)
    two.store(GPU, 1, 77)
    two.store(GPU, 2, 88)
    assert one.move_to(two, 9)
    assert (len(one), table) == (0, {77: 1 << 4, 88: 1 << 4})
    assert [two.remove("GPU", None, 1) for _ in range(3)] == [True, True, False]
    assert consistent(table, one, two)


def test_copies_of_what_ages_are_not_counted() -> None:
    table: Table = {}
    one, two = Segment(table, 0), Segment(table, 4)
    for age in (1, 2):
        assert one.store(CPU, 1, 77, age)
    assert not one.store(CPU, 1, 78, 2)
    one.move_to(two, 9)
    two.expire({"CPU"}, 2)
    assert len(two) == 1
    assert [two.remove("CPU", None, 1) for _ in range(2)] == [True, False]
    assert consistent(table, one, two)


def test_what_was_stored_before_an_age_expires_on_these_media() -> None:
    table: Table = {}
    one = Segment(table, 0)
    one.store(GPU, 1, 77)
    one.store(CPU, 1, 77, 1)
    one.store(CPU, 2, 88, 2)
    one.expire({"DISK"}, 2)
    assert len(one) == 3
    one.expire({"CPU"}, 2)
    assert one.find(1) == (GPU, 77)
    assert one.find(2) == (CPU, 88)
    assert consistent(table, one)
