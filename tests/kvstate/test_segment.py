from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.core import BlockPool
from kvstate.events import BlockHash
from kvstate.overlap import Tier
from kvstate.plain_core import Segment, Table

GPU, GPU_1, CPU = (
    BlockPool.of("GPU", None, 16),
    BlockPool.of("GPU", 1, 16),
    BlockPool.of("CPU", None, 32),
)


def removed(segment: Segment, medium: str, group: int | None, block: BlockHash) -> bool:
    """Drops one copy; whether there was one."""
    pool = segment.place(medium, group, block)
    if pool is None:
        return False
    left = segment.copies(pool, block) - 1
    segment.count(pool, block, left) if left else segment.forget(pool, block)
    return True


def consistent(table: Table, *segments: Segment) -> bool:
    expected: Table = {}
    for segment in segments:
        for key, bits in segment.bits_by_key().items():
            expected[key] = expected.get(key, 0) | bits
    return expected == table


def test_pool_of_an_unknown_medium_is_refused() -> None:
    with pytest.raises(ValueError, match="events of unknown media never reach the index"):
        BlockPool.of("TAPE", None, 16)


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
        assert removed(segment, "GPU", None, 1)
    assert table == {}
    assert not removed(segment, "GPU", None, 1)


@pytest.mark.parametrize("hashes", [1, 2, 3, 4])
def test_key_is_held_until_every_hash_of_it_is_removed(hashes: int) -> None:
    table: Table = {}
    segment = Segment(table, 0)
    for block in range(hashes):
        segment.store(GPU if block % 2 else GPU_1, block, 77)
    for block in range(hashes):
        assert table == {77: 1}
        assert removed(segment, "GPU", None if block % 2 else 1, block)
    assert table == {}


def test_find_returns_the_nearest_medium_in_any_order_of_stores() -> None:
    larger = BlockPool.of("GPU", None, 32)
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
    assert not removed(segment, "GPU", 1, 1)
    assert not removed(segment, "CPU", None, 1)
    assert removed(segment, "GPU", None, 1)


def test_hash_with_other_tokens_replaces_all_its_copies() -> None:
    table: Table = {}
    segment = Segment(table, 0)
    segment.store(GPU, 1, 77)
    segment.store(GPU, 1, 77)
    assert not segment.store(GPU, 1, 88)
    assert table == {88: 1}
    assert removed(segment, "GPU", None, 1)
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
        segment.store(BlockPool.of("GPU", group, 16), 1, 77)
        removed(segment, "GPU", group, 1)
    assert segment.pools == {}


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


def test_moved_blocks_replace_those_of_the_other_segment() -> None:
    table: Table = {}
    one, two = Segment(table, 0), Segment(table, 4)
    one.store(GPU, 1, 77)
    one.store(GPU, 1, 77)
    two.store(GPU, 1, 77)
    two.store(GPU, 2, 88)
    assert one.move_to(two, 9)
    assert (len(one), table) == (0, {77: 1 << 4, 88: 1 << 4})
    assert [removed(two, "GPU", None, 1) for _ in range(3)] == [True, True, False]
    assert consistent(table, one, two)


def test_copies_on_an_aging_medium_are_not_counted() -> None:
    table: Table = {}
    one, two = Segment(table, 0), Segment(table, 4)
    for age in (1, 2):
        assert one.store(CPU, 1, 77, age)
    assert not one.store(CPU, 1, 78, 2)
    one.move_to(two, 9)
    two.expire({"CPU"}, 2)
    assert len(two) == 1
    assert [removed(two, "CPU", None, 1) for _ in range(2)] == [True, False]
    assert consistent(table, one, two)


def test_expire_drops_older_blocks_of_the_named_media_only() -> None:
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


@given(st.integers(0, 20), st.integers(0, 25), st.booleans())
def test_clear_and_move_to_handle_at_most_the_given_number_of_blocks(
    blocks: int,
    most: int,
    moves: bool,
) -> None:
    table: Table = {}
    one, other = Segment(table, 0), Segment(table, 4)
    for block in range(blocks):
        one.store((GPU, CPU)[block % 2], block, 100 + block)
    is_done = one.move_to(other, most) if moves else one.clear(most)
    assert len(one) == max(0, blocks - most)
    assert is_done == (not len(one))
    assert len(other) == (min(blocks, most) if moves else 0)
    assert consistent(table, one, other)


def test_restore_moves_only_the_blocks_with_the_mark() -> None:
    table: Table = {}
    uncertain, certain = Segment(table, 4), Segment(table, 0)
    for block, mark in ((1, 1), (2, 2)):
        uncertain.store(GPU, block, block)
        uncertain.count(GPU, block, 1, mark)
    uncertain.restore_to(certain, 1)
    assert (len(uncertain), len(certain)) == (1, 1)
    assert removed(certain, "GPU", None, 1)
