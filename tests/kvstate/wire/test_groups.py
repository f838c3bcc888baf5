import pytest

from kvstate.index.core import Core
from kvstate.wire.extras import MAX_GROUPS, Admission, Groups
from tests.kvstate.cores import new_core

INDEXED, OTHER_GROUP, DOUBTFUL = Admission


class GroupsOfCore:
    """A core's groups of an owner, used like `Groups`, so that both are tested alike."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._owner = core.add_owner(0, core.add_model(b"m"), 0)

    def stored(self, group: int | None, *, holds_prefix: bool | None) -> int:
        return self._core.admit(self._owner, group, holds_prefix)

    def admission(self, group: int | None) -> int:
        return self._core.admission(self._owner, group)

    def forget(self) -> None:
        self._core.forget_layout(self._owner)


@pytest.fixture(params=["alone", "core"])
def groups(request: pytest.FixtureRequest) -> Groups | GroupsOfCore:
    if request.param == "alone":
        return Groups()
    return GroupsOfCore(new_core())


def test_named_kind_decides_and_is_remembered(groups: Groups) -> None:
    assert groups.stored(0, holds_prefix=True) == INDEXED
    assert groups.stored(1, holds_prefix=False) == OTHER_GROUP
    assert [groups.stored(group, holds_prefix=None) for group in (0, 1)] == [INDEXED, OTHER_GROUP]
    assert [groups.admission(group) for group in (0, 1, 2)] == [INDEXED, OTHER_GROUP, INDEXED]


def test_block_without_a_group_belongs_to_the_only_one(groups: Groups) -> None:
    assert groups.stored(None, holds_prefix=None) == INDEXED
    assert groups.stored(None, holds_prefix=False) == OTHER_GROUP
    assert groups.admission(None) == INDEXED
    assert groups.stored(0, holds_prefix=None) == INDEXED  # that was no second group


def test_only_group_needs_no_kind(groups: Groups) -> None:
    for _ in range(2):
        assert groups.stored(0, holds_prefix=None) == INDEXED
    assert groups.admission(0) == INDEXED


def test_groups_of_which_two_lack_kinds_are_doubtful(groups: Groups) -> None:
    groups.stored(0, holds_prefix=None)
    assert groups.stored(1, holds_prefix=None) == DOUBTFUL
    assert groups.stored(0, holds_prefix=None) == DOUBTFUL
    assert [groups.admission(group) for group in (0, 1, 2)] == [DOUBTFUL, DOUBTFUL, INDEXED]


def test_kind_named_later_ends_the_doubt(groups: Groups) -> None:
    for group in (0, 1):
        groups.stored(group, holds_prefix=None)
    assert groups.stored(0, holds_prefix=True) == INDEXED
    assert groups.admission(1) == INDEXED  # the only one without a kind


@pytest.mark.parametrize("before", [None, True])
def test_indexed_group_that_proves_to_hold_no_prefix_is_doubtful(
    groups: Groups,
    before: bool | None,
) -> None:
    groups.stored(0, holds_prefix=before)
    for again in (False, None, False):
        assert groups.stored(0, holds_prefix=again) == DOUBTFUL
    assert groups.admission(0) == DOUBTFUL
    assert groups.stored(0, holds_prefix=True) == INDEXED


def test_group_may_become_indexed(groups: Groups) -> None:
    groups.stored(0, holds_prefix=False)
    assert groups.stored(0, holds_prefix=True) == INDEXED


def test_groups_over_the_limit_are_not_indexed(groups: Groups) -> None:
    for group in range(MAX_GROUPS):
        groups.stored(group, holds_prefix=True)
    assert groups.stored(MAX_GROUPS, holds_prefix=True) == OTHER_GROUP
    assert groups.stored(0, holds_prefix=True) == INDEXED


def test_forgotten_groups_are_learned_anew(groups: Groups) -> None:
    for group in (0, 1):
        groups.stored(group, holds_prefix=None)
    groups.forget()
    assert groups.stored(1, holds_prefix=None) == INDEXED


@pytest.mark.parametrize("saved", [{}, {0: 1, 3: 2}])
def test_saved_groups_are_those_that_are_put(saved: dict[int, int]) -> None:
    groups = Groups()
    assert groups.put(saved)
    assert groups.saved() == saved


def test_groups_in_an_unknown_state_are_refused() -> None:
    groups = Groups()
    assert groups.put({2: 1})
    assert not groups.put({0: 99})
    assert groups.saved() == {2: 1}
