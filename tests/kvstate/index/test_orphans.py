import pytest

from kvstate.events import BlockHash, BlocksStored
from kvstate.index.core import BlockPool
from kvstate.index.orphans import ORPHAN_OVERHEAD_BYTES, Name, Orphan, Orphanage, orphans_of
from kvstate.overlap import Tokens

GPU = BlockPool.of("GPU", None, 1)


def orphan(
    parent: BlockHash, block: BlockHash, tokens: bytes = b"", extra: bytes | None = None
) -> Orphan:
    return Orphan(parent, GPU, block, tokens, extra)


def test_orphans_of_a_chain_are_each_the_parent_of_the_next() -> None:
    tokens = Tokens("I", [1, 2])
    found = list(orphans_of(BlocksStored([2, 3], 1, tokens, 1, extras=[("salt",), ()])))
    assert [(each.parent, each.block) for each in found] == [(1, 2), (2, 3)]
    assert [each.tokens for each in found] == [tokens[:1].tobytes(), tokens[1:].tobytes()]
    assert [each.extra for each in found] == [b"\x91\xa4salt", None]
    assert [each.extra for each in orphans_of(BlocksStored([2], 1, tokens[:1], 1))] == [None]


def test_first_block_of_a_prompt_is_no_orphan() -> None:
    assert list(orphans_of(BlocksStored([2], None, Tokens("I", [1]), 1))) == []


def test_take_returns_the_children_of_a_parent_once() -> None:
    orphanage = Orphanage()
    orphanage.park(orphan(1, 2))
    orphanage.park(orphan(1, 3))
    orphanage.park(orphan(3, 4))
    assert [each.block for each in orphanage.take(1)] == [2, 3]
    assert orphanage.take(1) == []
    assert len(orphanage) == 1


def test_orphan_is_named_as_its_removal_names_it() -> None:
    assert orphan(1, b"h").name == Name("GPU", None, b"h")


def test_orphan_stored_twice_is_dropped_by_the_first_removal() -> None:
    orphanage = Orphanage()
    orphanage.park(orphan(1, 2))
    orphanage.park(orphan(1, 2))
    assert [orphanage.remove("GPU", None, 2) for _ in range(2)] == [True, False]
    assert len(orphanage) == 0
    assert orphanage.take(1) == []


def test_removal_leaves_the_other_children() -> None:
    orphanage = Orphanage()
    orphanage.park(orphan(1, 2))
    orphanage.park(orphan(1, 3))
    orphanage.remove("GPU", None, 2)
    assert [each.block for each in orphanage.take(1)] == [3]


def test_removal_from_another_medium_or_group_drops_nothing() -> None:
    orphanage = Orphanage()
    orphanage.park(orphan(1, 2))
    assert not orphanage.remove("CPU", None, 2)
    assert not orphanage.remove("GPU", 1, 2)


def test_newer_content_replaces_the_older() -> None:
    orphanage = Orphanage()
    for newer in (orphan(1, 2, b"old"), orphan(1, 2, b"new"), orphan(1, 2, b"new", b"salt")):
        orphanage.park(newer)
        assert len(orphanage) == 1
    assert orphanage.take(1) == [orphan(1, 2, b"new", b"salt")]


def test_orphan_that_changed_its_parent_waits_for_the_new_one() -> None:
    orphanage = Orphanage()
    orphanage.park(orphan(1, 2))
    orphanage.park(orphan(7, 2))
    assert orphanage.take(1) == []
    assert len(orphanage.take(7)) == 1


def test_cleared_orphanage_is_empty() -> None:
    orphanage = Orphanage()
    orphanage.park(orphan(1, 2))
    orphanage.clear()
    assert (len(orphanage), orphanage.take(1)) == (0, [])


def test_bytes_count_everything_that_is_parked() -> None:
    orphanage = Orphanage()
    orphanage.park(orphan(b"parent", b"hash", b"12345678", b"salt"))
    orphanage.park(orphan(2, 3, b"1234"))
    assert orphanage.bytes == 2 * ORPHAN_OVERHEAD_BYTES + 6 + 4 + 8 + 4 + 4
    orphanage.take(b"parent")
    assert orphanage.bytes == ORPHAN_OVERHEAD_BYTES + 4
    orphanage.remove("GPU", None, 3)
    assert orphanage.bytes == 0


def test_pool_of_an_unknown_medium_is_refused() -> None:
    with pytest.raises(ValueError, match="events of unknown media never reach the index"):
        BlockPool.of("TAPE", None, 1)
