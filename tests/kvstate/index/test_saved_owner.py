"""What an owner saves, put back whole or damaged.

`test_index_by_oracle` saves and restores after any history.
"""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvstate.events import BlocksCopied, BlocksRemoved, Event, OtherGroupStored
from kvstate.index.index import Index
from kvstate.index.owner import MAX_NUMBERED_ADAPTERS, IndexLimits, Owner
from kvstate.rows.format import SavedOwner
from kvstate.steps import finished
from tests.kvstate.cores import new_index
from tests.kvstate.small_index import prompt, stored

SECRET = 12345678
LONG = 9_000  # blocks: several steps
LIMITS = IndexLimits(bytes=64 * 2 * LONG)


def filled(index: Index) -> Owner:
    """A rank with all that is saved: media of every kind, copies, marks, groups and adapters."""
    owner = index.add("w", 0, "m")
    index.apply(
        owner,
        [
            stored([1, b"two"], [1, 1, 2, 2]),
            stored([1], [1, 1]),
            stored([3], [1, 1], medium="CPU_TIER1"),
            stored([4], [9, 9], lora=7),
            BlocksCopied([1], "CPU"),
            BlocksRemoved([1]),
        ],
    )
    return owner


def saved(owner: Owner) -> tuple[SavedOwner, list[bytes]]:
    rows: list[bytes] = []
    return finished(owner.saving(rows)), rows


def test_restored_owner_knows_layout_and_adapters_again() -> None:
    owner = filled(new_index(SECRET))
    known, rows = saved(owner)
    index = new_index(SECRET)
    again = index.add("w", 0, "m")
    assert finished(again.restoring(known, rows))
    assert saved(again) == (known, rows)
    assert (again.block_size, known.numbered) == (2, (7,))
    assert index.overlaps_by_number(prompt(9, 9, 9, lora="any")).keys() == {"w"}
    assert not again.trusted


@pytest.mark.parametrize("is_inexact", [False, True])
def test_restored_owner_knows_the_ends_of_other_groups_again(is_inexact: bool) -> None:
    index = new_index(SECRET)
    owner = with_ends(index, is_inexact=is_inexact)
    known, rows = saved(owner)
    other = new_index(SECRET)
    again = other.add("w", 0, "m")
    assert finished(again.restoring(known, rows))
    other.check()
    assert again.other_groups() == owner.other_groups()
    again.trusted = owner.trusted = True
    asked = prompt(1, 1, 2, 2, 3, 3, 9)
    found = index.overlaps(asked)
    assert other.overlaps(asked) == found
    assert found["w"].unusable == (0 if is_inexact else 1)
    later: list[Event] = [
        OtherGroupStored(1, hashes=[12], block_size=2, reach=2),
        BlocksRemoved([11], group=1),
    ]
    for its, rank in ((index, owner), (other, again)):
        its.apply(rank, later)
    assert other.overlaps(asked) == index.overlaps(asked)


def with_ends(index: Index, *, is_inexact: bool = False) -> Owner:
    """A rank with three blocks, of which a window ends at the first two."""
    owner = index.add("w", 0, "m")
    window = OtherGroupStored(1, hashes=[10, 11], block_size=2, reach=2)
    index.apply(owner, [replace(stored([10, 11, 12], [1, 1, 2, 2, 3, 3]), group=0), window])
    if is_inexact:
        index.apply(owner, [OtherGroupStored(2, hashes=[10], block_size=2, reach=0)])
    return owner


def test_restored_owner_knows_the_groups_of_its_blocks_again() -> None:
    index = new_index(SECRET)
    owner = filled(index)
    index.apply(owner, [replace(stored([5], [7, 7]), group=1)])
    known, rows = saved(owner)
    again = new_index(SECRET).add("w", 0, "m")
    assert finished(again.restoring(known, rows))
    assert saved(again) == (known, rows)


def test_restored_owner_knows_bigrams_again() -> None:
    known, rows = saved(filled(new_index(SECRET)))
    again = new_index(SECRET).add("w", 0, "m")
    assert finished(again.restoring(replaced(known, has_bigrams=True), rows))
    assert saved(again)[0].has_bigrams


def replaced(known: SavedOwner, **fields: object) -> SavedOwner:
    return replace(known, **fields)


def test_many_blocks_are_saved_in_pieces() -> None:
    index = new_index(SECRET, LIMITS)
    owner = index.add("w", 0, "m")
    index.apply(owner, [stored(list(range(1, LONG + 1)), list(range(LONG)))])
    known, rows = saved(owner)
    assert len(rows) > 1
    other = new_index(SECRET, LIMITS)
    again = other.add("w", 0, "m")
    assert finished(again.restoring(known, rows))
    other.check()
    again.trusted = owner.trusted = True
    asked = prompt(*range(LONG), 0)
    assert other.overlaps(asked) == index.overlaps(asked)


def test_restore_keeps_to_the_limit_of_rows() -> None:
    known, rows = saved(filled(new_index(SECRET)))
    index = new_index(SECRET, IndexLimits(bytes=64 * 2))
    again = index.add("w", 0, "m")
    assert not finished(again.restoring(known, rows))
    index.check()
    assert again.blocks == 0


@pytest.mark.parametrize("blocks", [-1, 0, 1_000])
def test_rows_of_another_number_are_not_restored(blocks: int) -> None:
    known, rows = saved(filled(new_index(SECRET)))
    again = new_index(SECRET).add("w", 0, "m")
    assert not finished(again.restoring(replaced(known, blocks=blocks), rows))
    assert again.blocks == 0


def test_excess_adapters_are_cut() -> None:
    known, rows = saved(filled(new_index(SECRET)))
    again = new_index(SECRET).add("w", 0, "m")
    many = tuple(range(2 * MAX_NUMBERED_ADAPTERS))
    assert finished(again.restoring(replaced(known, numbered=many), rows))
    assert len(saved(again)[0].numbered) == MAX_NUMBERED_ADAPTERS


@given(data=st.data())
@pytest.mark.parametrize("fill", [filled, with_ends])
def test_damaged_bytes_leave_a_sound_index(
    fill: Callable[[Index], Owner], data: st.DataObject
) -> None:
    known, rows = saved(fill(Index(SECRET)))
    pieces = [known.learned, *rows]
    at = data.draw(st.integers(0, len(pieces) - 1))
    piece = bytearray(pieces[at])
    place = data.draw(st.integers(0, len(piece) - 1))
    piece[place : place + data.draw(st.integers(1, 9))] = data.draw(st.binary(max_size=9))
    pieces[at] = bytes(piece)
    index = Index(SECRET)
    again = index.add("w", 0, "m")
    damaged = replaced(known, learned=pieces[0])
    if not finished(again.restoring(damaged, pieces[1:])):
        assert again.blocks == 0
    again.trusted = True
    index.overlaps(prompt(1, 1, 2, 2, 3))
    index.check()
    index.apply(again, [BlocksRemoved([1, b"two", 3, 4]), stored([5], [5, 5])])
    index.remove(again)
    index.check()
