import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.events import BlockHash
from kvstate.index.core import NEW_COPIES, Core, StoreResult
from kvstate.overlap import Overlap, Tokens
from kvstate.wire.extras import Admission
from tests.kvstate.cores import new_core

NAMES = ["w", "x"]


@pytest.fixture
def core() -> Core:
    return new_core()


def add(core: Core, worker: int = 0) -> int:
    model = core.add_model(b"m")
    owner = core.add_owner(worker, model, 0)
    core.trust(owner, True)
    return owner


def store(
    core: Core,
    owner: int,
    hashes: list[BlockHash],
    ids: list[int],
    parent: BlockHash | None = None,
    *,
    extras: list[bytes | None] | None = None,
    medium: str = "GPU",
) -> int:
    size = len(ids) // len(hashes)
    tokens = Tokens("I", ids)
    return core.store(owner, hashes, parent, tokens, size, None, extras, medium, None, NEW_COPIES)


def overlaps(core: Core, *ids: int, first: bytes | None = None) -> dict[str, Overlap]:
    return core.overlaps(0, Tokens("I", ids), None, first, NAMES)


def test_chain_is_held_until_it_is_removed(core: Core) -> None:
    owner = add(core)
    assert store(core, owner, [1, b"two"], [1, 1, 2, 2]) == StoreResult.STORED
    assert overlaps(core, 1, 1, 2, 2, 9) == {"w": Overlap(2, (2, 0, 0, 0))}
    assert core.remove(owner, b"two", "GPU", None)
    assert not core.remove(owner, b"two", "GPU", None)
    assert not core.remove(owner, 1, "GPU", 7)
    assert overlaps(core, 1, 1, 2, 2, 9) == {"w": Overlap(2, (1, 0, 0, 0))}
    core.check()


def test_unknown_parent_changes_nothing(core: Core) -> None:
    owner = add(core)
    assert store(core, owner, [2], [2], parent=1) == StoreResult.UNKNOWN_PARENT
    assert core.status(owner)["blocks"] == 0


def test_store_beyond_the_bound_is_refused_and_counted(core: Core) -> None:
    owner = add(core)
    assert store(core, owner, list(range(11)), list(range(11))) == StoreResult.OVER_LIMIT
    assert (core.status(owner)["blocks"], core.status(owner)["over_limit"]) == (0, 1)


def test_limit_of_an_owner_may_be_changed(core: Core) -> None:
    core.limit(owner := add(core), 2)
    assert store(core, owner, [1, 2, 3], [1, 2, 3]) == StoreResult.OVER_LIMIT
    assert store(core, owner, [1, 2], [1, 2]) == StoreResult.STORED
    core.limit(owner, 3)
    assert store(core, owner, [3], [3], parent=2) == StoreResult.STORED


def test_extras_and_tiers_are_kept_apart(core: Core) -> None:
    owner = add(core)
    store(core, owner, [1], [1], extras=[b"salt"])
    store(core, owner, [2], [2], medium="DISK")
    assert overlaps(core, 1, 9) == {}
    assert overlaps(core, 1, 9, first=b"salt") == {"w": Overlap(1, (1, 0, 0, 0))}
    assert core.tiers(owner, False) == (1, 0, 1, 0)
    core.demote(owner)
    assert core.tiers(owner, True) == (1, 0, 1, 0)


SALTS = st.none() | st.binary(min_size=1, max_size=8)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), SALTS, SALTS)
def test_prompts_meet_only_chains_of_the_same_salt(
    ids: list[int], salt: bytes | None, other: bytes | None
) -> None:
    core = new_core()
    owner = add(core)
    store(core, owner, list(range(len(ids))), ids, extras=[salt, *[None] * (len(ids) - 1)])
    held = {"w": Overlap(1, (len(ids), 0, 0, 0))}
    assert overlaps(core, *ids, 9, first=salt) == held
    assert overlaps(core, *ids, 9, first=other) == (held if other == salt else {})


def test_hash_that_is_stored_with_other_tokens_is_counted(core: Core) -> None:
    owner = add(core)
    store(core, owner, [1], [1])
    store(core, owner, [1], [2])
    assert core.status(owner) == {
        "blocks": 1,
        "block_size": 1,
        "doubted": 0,
        "removed_unknown": 0,
        "restored_with_other_tokens": 1,
        "over_limit": 0,
        "copied_unknown": 0,
        "removed_certain": 0,
    }


def test_second_hole_adds_to_the_first(core: Core) -> None:
    owner = add(core)
    store(core, owner, [1, 2], [1, 2])
    core.demote(owner)
    store(core, owner, [1], [1])
    core.demote(owner)
    assert overlaps(core, 1, 2, 9) == {"w": Overlap(1, uncertain=2)}
    assert core.status(owner)["blocks"] == 2
    core.check()


def test_removed_holder_leaves_the_others(core: Core) -> None:
    first, better = add(core), core.add_owner(1, 0, 1)
    worse, other = core.add_owner(1, 0, 0), core.add_owner(0, core.add_model(b"n"), 0)
    for owner in (better, worse, first):
        store(core, owner, [1], [1])
    store(core, better, [2], [2], parent=1)
    store(core, other, [3], [3])
    assert overlaps(core, 1, 2, 9) == {
        "w": Overlap(1, (1, 0, 0, 0)),
        "x": Overlap(1, uncertain=2, rank=1),
    }
    core.clear(first)
    core.remove_owner(first)
    core.check()
    assert overlaps(core, 1, 2, 9) == {"x": Overlap(1, uncertain=2, rank=1)}


def test_block_stored_again_behind_an_uncertain_parent_is_uncertain(core: Core) -> None:
    owner = add(core)
    store(core, owner, [1], [1])
    core.demote(owner)
    store(core, owner, [2], [2], parent=1)
    assert overlaps(core, 1, 2, 9) == {"w": Overlap(1, uncertain=2)}


def test_memory_grows_with_the_blocks(core: Core) -> None:
    owner = add(core)
    before = core.memory()
    store(core, owner, list(range(8)), list(range(8)))
    assert core.memory() > before


def test_copy_lies_on_one_more_medium_until_it_is_removed(core: Core) -> None:
    owner = add(core)
    store(core, owner, [1, b"two"], [1, 1, 2, 2])
    core.copy(owner, [1, b"two", 3], "CPU", 7)
    assert core.status(owner)["copied_unknown"] == 1
    for block in (1, b"two"):
        assert core.remove(owner, block, "GPU", None)
    assert overlaps(core, 1, 1, 2, 2, 9) == {"w": Overlap(2, (0, 2, 0, 0))}
    assert not core.remove(owner, 1, "CPU", None)
    assert core.remove(owner, 1, "CPU", 7)
    assert overlaps(core, 1, 1, 2, 2, 9) == {}
    core.check()


def test_copies_are_counted_and_as_certain_as_their_source(core: Core) -> None:
    owner = add(core)
    store(core, owner, [1], [1])
    core.copy(owner, [1, 1], "GPU", None)
    core.demote(owner)
    core.copy(owner, [1], "CPU", None)
    assert core.tiers(owner, True) == (1, 1, 0, 0)
    assert [core.remove(owner, 1, "GPU", None) for _ in range(4)] == [True] * 3 + [False]
    store(core, owner, [1], [1])
    core.copy(owner, [1], "CPU", None)  # a copy of the certain one, which replaces the other
    assert core.tiers(owner, False) == (1, 1, 0, 0)
    assert core.tiers(owner, True) == (0, 0, 0, 0)
    core.check()


def test_copies_beyond_the_bound_are_refused_and_counted(core: Core) -> None:
    owner = add(core)
    store(core, owner, list(range(9)), list(range(9)))
    core.copy(owner, [0, 1, 2], "CPU", None)
    assert (core.status(owner)["blocks"], core.status(owner)["over_limit"]) == (10, 1)


def test_hash_of_two_contents_is_copied_from_the_nearest_medium(core: Core) -> None:
    owner = add(core)
    store(core, owner, [1], [8], medium="DISK")
    store(core, owner, [1], [7])
    core.copy(owner, [1], "CPU", None)
    assert overlaps(core, 7, 9) == {"w": Overlap(1, (1, 0, 0, 0))}
    core.remove(owner, 1, "GPU", None)
    assert overlaps(core, 7, 9) == {"w": Overlap(1, (0, 1, 0, 0))}


def test_groups_are_kept_by_owner(core: Core) -> None:
    one, other = add(core), add(core)
    assert core.admit(one, 1, False) == core.admission(one, 1) == Admission.OTHER_GROUP
    assert core.admit(other, 1, None) == Admission.INDEXED
    core.forget_layout(one)
    assert core.admission(one, 1) == Admission.INDEXED
    assert core.layout(one) == (None, None)


def thue_morse(length: int) -> list[int]:
    """The sequence that makes polynomial hashes collide whatever their multiplier is."""
    return [number.bit_count() & 1 for number in range(length)]


@pytest.mark.parametrize("low", [0, 7])
def test_patterns_that_collide_in_weaker_hashes_stay_apart(low: int) -> None:
    core = new_core(limit_blocks=10_000)
    owner = add(core)
    pattern = [low + bit * 1000 for bit in thue_morse(2048)]
    inverse = [low + (1 - bit) * 1000 for bit in thue_morse(2048)]
    ids = [token for block in pattern for token in [block] * 4]
    store(core, owner, list(range(1, 2049)), ids)
    assert overlaps(core, *ids, 9)["w"].tiers[0] == 2048
    assert overlaps(core, *(token for block in inverse for token in [block] * 4), 9) == {}


def test_block_that_is_its_own_parent_is_never_held(core: Core) -> None:
    owner = add(core)
    assert store(core, owner, [1], [1], parent=1) == StoreResult.UNKNOWN_PARENT
    store(core, owner, [1], [1])
    assert store(core, owner, [1], [2], parent=1) == StoreResult.STORED
    assert overlaps(core, 1, 2, 9) == {}
    core.check()


def test_medium_is_doubted_until_a_removal_or_a_copy_by_hash(core: Core) -> None:
    owner = add(core)
    store(core, owner, [1], [1])
    store(core, owner, [1, 2], [1, 2], medium="CPU")
    store(core, owner, [1, 2], [1, 2], medium="DISK")
    assert overlaps(core, 1, 2, 9) == {"w": Overlap(1, (1, 0, 0, 0), uncertain=1)}
    assert core.status(owner)["doubted"] == 0b0110
    core.remove(owner, 7, "DISK", None)
    assert overlaps(core, 1, 2, 9) == {"w": Overlap(1, (1, 0, 1, 0))}
    core.copy(owner, [2], "CPU", None)
    assert overlaps(core, 1, 2, 9) == {"w": Overlap(1, (1, 1, 0, 0))}
    assert core.status(owner)["doubted"] == 0
    core.clear(owner)
    core.forget_layout(owner)
    store(core, owner, [1], [1], medium="DISK")
    assert overlaps(core, 1, 9) == {"w": Overlap(1, uncertain=1)}
    core.check()


def test_blocks_not_stored_again_on_a_doubted_medium_expire(core: Core) -> None:
    owner = add(core)
    store(core, owner, [1], [1])
    core.remove(owner, 7, "CPU_TIER2", None)
    store(core, owner, [1, 2], [1, 2], medium="CPU_TIER2")
    store(core, owner, [1, 2], [1, 2], medium="CPU")
    core.demote(owner)
    store(core, owner, [3, 4], [3, 4], medium="CPU")
    assert core.expire(owner, 1_000)
    store(core, owner, [3], [3], medium="CPU")
    while not core.expire(owner, 1):
        core.check()
    assert core.tiers(owner, True) == (1, 0, 2, 0)
    assert core.tiers(owner, False) == (0, 1, 0, 0)
    core.check()


def test_proceed_is_refused_before_a_message_is_started(core: Core) -> None:
    owner = add(core)
    assert core.start(owner, b"no message", 1) is False
    with pytest.raises(ValueError, match="no message is applied in part"):
        core.proceed(owner, 1)
    core.abandon(owner)
    assert core.status(owner)["blocks"] == 0


def test_removal_that_tells_what_is_left_ends_no_block_that_ages(core: Core) -> None:
    owner = add(core)
    store(core, owner, [1], [1, 1], medium="EXTERNAL")
    assert core.remove(owner, 1, "EXTERNAL", None, 1)
    assert overlaps(core, 1, 1, 9) == {"w": Overlap(2, (0, 0, 0, 1))}
    assert core.remove(owner, 1, "EXTERNAL", None, 0)
    assert overlaps(core, 1, 1, 9) == {}
    core.check()


def test_owner_without_other_groups_has_none(core: Core) -> None:
    assert core.other_groups(add(core)) == (0, True, ())
