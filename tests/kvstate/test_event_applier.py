import msgspec

from kvstate.events import (
    AllCleared,
    BlockHash,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    OtherGroupStored,
)
from kvstate.index.orphans import ORPHAN_OVERHEAD_BYTES
from kvstate.index.owner import BYTES_PER_BLOCK, IndexLimits
from kvstate.overlap import Overlap, Tokens
from tests.kvstate.small_index import an_index, prompt, stored, tiers


def test_orphan_counts_for_nothing_until_its_parent_is_stored() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([2, 3], [2, 3], 1), stored([2], [2], 1)])
    assert (len(owner.orphans), owner.blocks, owner.counts["orphaned"]) == (2, 0, 3)
    assert index.overlaps(prompt(2, 3, 9)) == {}
    index.apply(owner, [stored([1], [1])])
    assert tiers(index, prompt(1, 2, 3, 9)) == (3, 0, 0, 0)
    index.apply(owner, [BlocksRemoved([2])])
    # it was stored twice, and may be gone
    assert index.overlaps(prompt(1, 2, 3, 9)) == {"w": Overlap(1, (1, 0, 0, 0), 2)}
    index.check()


def test_bigram_pages_are_found_by_prompts_of_their_model() -> None:
    index, owner = an_index()
    pages = BlocksStored([1], None, Tokens("I", [2, 3]), 2, extras=[(1,)], bigrams=True)
    index.apply(owner, [pages])
    assert tiers(index, prompt(1, 2, 3, 9)) == (1, 0, 0, 0)


def test_orphans_with_cyclic_parents_are_resolved() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([2], [2], 1), stored([1], [1], 2), stored([1], [1])])
    assert len(owner.orphans) == 0
    assert index.overlaps(prompt(1, 9)) == {}  # its later content is behind block 2
    index.check()


def test_orphan_behind_a_removed_orphan_keeps_waiting() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([3], [3], 2), stored([2], [2], 1), BlocksRemoved([2])])
    index.apply(owner, [stored([1], [1])])
    assert len(owner.orphans) == 1
    index.check()


def test_orphans_are_dropped_by_a_hole_and_by_their_removal() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([2], [2], 1), BlocksRemoved([2])])
    assert len(owner.orphans) == 0
    index.apply(owner, [stored([2], [2], 1)])
    index.demote(owner)
    assert len(owner.orphans) == 0


def test_orphans_are_bounded() -> None:
    index, owner = an_index(IndexLimits(orphans=2))
    index.apply(owner, [stored([2, 3, 4], [2, 3, 4], 1), stored([9], [9], 8)])
    assert (len(owner.orphans), owner.counts["orphans_over_limit"]) == (2, 2)


def test_removal_of_an_unknown_block_is_counted() -> None:
    index, owner = an_index()
    index.apply(owner, [BlocksRemoved([1])])
    assert owner.counts["removed_unknown"] == 1


def test_clearing_drops_everything_of_that_rank_only() -> None:
    index, owner = an_index()
    other = index.add("x", 0, "m")
    for each in (owner, other):
        index.apply(each, [stored([1], [1]), stored([3], [3], 2)])
    index.apply(owner, [AllCleared()])
    assert (owner.blocks, len(owner.orphans)) == (0, 0)
    assert index.overlaps(prompt(1, 9)).keys() == {"x"}
    index.check()


def test_orphans_are_bounded_in_bytes() -> None:
    index, owner = an_index(IndexLimits(orphan_bytes=2 * (ORPHAN_OVERHEAD_BYTES + 4)))
    index.apply(owner, [stored([2, 3, 4], [2, 3, 4], 1)])
    assert (len(owner.orphans), owner.counts["orphans_over_limit"]) == (2, 1)


def test_copy_lies_on_one_more_medium() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1, 2], [1, 2]), BlocksCopied([1, 2, 3], "CPU")])
    index.apply(owner, [BlocksRemoved([1, 2])])
    assert tiers(index, prompt(1, 2, 9)) == (0, 2, 0, 0)
    assert owner.counts == {"copied_unknown": 1}
    index.check()


def test_orphan_is_not_copied() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([2], [2], 1), BlocksCopied([2], "CPU"), stored([1], [1])])
    assert tiers(index, prompt(1, 2, 9)) == (2, 0, 0, 0)
    assert (index.blocks_by_tier("w"), owner.counts["copied_unknown"]) == ((2, 0, 0, 0), 1)


def test_typed_store_of_another_group_is_left_out() -> None:
    index, owner = an_index()
    faults = index.apply(owner, [OtherGroupStored(1), OtherGroupStored()])
    assert faults == ("other_attention_group",) * 2
    assert index.apply(owner, [BlocksCopied([1], "CPU", 1)]) == ("other_attention_group",)
    assert index.apply(owner, [BlocksRemoved([1], group=1)]) == ()
    assert owner.counts == {}


def test_groups_without_kinds_make_all_blocks_uncertain() -> None:
    index, owner = an_index()
    of_group = [msgspec.structs.replace(stored([group], [group]), group=group) for group in (1, 2)]
    assert index.apply(owner, of_group) == ("group_without_kind",)
    assert index.overlaps(prompt(1, 9)) == {"w": Overlap(1, uncertain=1)}
    index.clear(owner)
    assert index.apply(owner, of_group[:1]) == ()


def test_hash_stored_with_other_tokens_replaces_the_block() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1], [1]), stored([1], [2])])
    assert index.overlaps(prompt(1, 9)) == {}
    assert tiers(index, prompt(2, 9)) == (1, 0, 0, 0)
    assert owner.counts["restored_with_other_tokens"] == 1


def test_copies_stop_once_the_rank_is_full() -> None:
    index, owner = an_index(IndexLimits(bytes=100 * BYTES_PER_BLOCK))
    hashes: list[BlockHash] = list(range(100))
    index.apply(owner, [stored(hashes, list(range(100)))])
    index.apply(owner, [BlocksCopied(hashes, "CPU")])
    assert owner.blocks == 100
    assert 0 < owner.counts["over_limit"] < 100  # not one attempt for each of them
    index.check()
