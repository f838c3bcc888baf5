import pytest

from kvstate.events import BlocksRemoved
from kvstate.index.index import Index
from kvstate.index.owner import Owner
from tests.kvstate.small_index import an_index, prompt, stored


def remembering(count: int = 4) -> tuple[Index, Owner]:
    index, owner = an_index()
    index.remember_removals(count)
    index.apply(owner, [stored([1, 2, 3], [1, 1, 2, 2, 3, 3])])
    return index, owner


def test_removal_of_a_block_of_a_prompt_is_remembered_with_its_time() -> None:
    index, owner = remembering()
    index.note_time(50.0)
    index.apply(owner, [BlocksRemoved([2])])
    index.note_time(60.0)
    assert owner.removed_at(prompt(1, 1, 2, 2, 9), 1, ()) == 50.0
    assert owner.removed_at(prompt(1, 1, 2, 2, 9), 0, ()) is None
    assert owner.removed_at(prompt(1, 1, 7, 7, 9), 1, ()) is None
    assert owner.removed_at(prompt(1, 1, 2), 1, ()) is None


def test_only_the_last_removals_are_remembered() -> None:
    index, owner = remembering(2)
    index.apply(owner, [BlocksRemoved([3, 2, 1])])
    asked = prompt(1, 1, 2, 2, 3, 3, 9)
    assert owner.removed_at(asked, 2, ()) is None
    assert owner.removed_at(asked, 1, ()) is not None
    assert owner.removed_at(asked, 0, ()) is not None


def test_nothing_is_remembered_unless_it_is_asked_for() -> None:
    index, owner = an_index()
    assert owner.removed_at(prompt(1, 1, 9), 0, ()) is None
    index.apply(owner, [stored([1], [1, 1]), BlocksRemoved([1])])
    assert owner.removed_at(prompt(1, 1, 9), 0, ()) is None
    assert index.core.memory() > 0


def test_how_much_is_remembered_is_set_once_and_bounded() -> None:
    index, _ = an_index()
    with pytest.raises(ValueError, match="to be set once"):
        index.remember_removals(0)
    index.remember_removals(8)
    with pytest.raises(ValueError, match="to be set once"):
        index.remember_removals(16)


def test_an_owner_that_comes_in_the_place_of_another_remembers_none_of_its_removals() -> None:
    index, owner = remembering()
    index.apply(owner, [BlocksRemoved([2])])
    index.remove(owner)
    fresh = index.add("w", 0, "m")
    index.apply(fresh, [stored([1], [1, 1])])
    assert fresh.removed_at(prompt(1, 1, 2, 2, 9), 1, ()) is None
