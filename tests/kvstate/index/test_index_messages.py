"""Messages as engines send them, applied by the fast path and by the typed decoder."""

from collections.abc import Callable

import msgspec
import pytest

from kvstate.events import BatchResult
from kvstate.index.index import Index
from kvstate.index.owner import Owner
from kvstate.overlap import Overlap
from kvstate.steps import finished
from tests.kvstate.small_index import an_index, prompt, tiers

NOT_TOLD_APART = "its attention groups cannot be distinguished"


def placeholder(*hashes: int, group: int | None = None) -> dict[str, object]:
    """A block as vLLM's offloading connector announces it."""
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": None,
        "token_ids": [], "block_size": 0, "lora_id": None, "medium": "CPU", "lora_name": None,
        "group_idx": group,
    }  # fmt: skip


def of_group(group: int | None, block: int, kind: str | None = None) -> dict[str, object]:
    """A block of an attention group, of one token that is its hash."""
    return {
        "type": "BlockStored", "block_hashes": [block], "parent_block_hash": None,
        "token_ids": [block], "block_size": 1, "lora_id": None, "medium": "GPU",
        "lora_name": None, "group_idx": group, "kv_cache_spec_kind": kind,
    }  # fmt: skip


def removed(block: int, group: int | None) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": group}


# With this at its end, a message takes the typed path: the fast one does not handle salts.
TYPED = of_group(None, 99) | {"extra_keys": [["salt"]]}


@pytest.fixture(params=["fast", "typed"])
def apply(request: pytest.FixtureRequest) -> Callable[..., BatchResult]:
    """Applies events as one message, by the fast path and by the typed one."""

    def apply(index: Index, owner: Owner, *events: object) -> BatchResult:
        all_events = [*events, TYPED] if request.param == "typed" else [*events]
        return finished(owner.applying(msgspec.msgpack.encode([1.0, all_events, 0])))

    return apply


def test_placeholder_is_a_copy(apply: Callable[..., BatchResult]) -> None:
    index, owner = an_index()
    assert apply(index, owner, of_group(0, 1), placeholder(1, 7), removed(1, 0)).faults == ()
    assert tiers(index, prompt(1, 9)) == (0, 1, 0, 0)
    assert owner.counts == {"copied_unknown": 1}


def test_groups_that_hold_no_prefix_are_left_out(apply: Callable[..., BatchResult]) -> None:
    index, owner = an_index()
    applied = apply(
        index,
        owner,
        of_group(0, 1, "full_attention"),
        of_group(1, 2, "sliding_window") | {"token_ids": [0, 0, 2]},  # of three blocks one is kept
        of_group(1, 3),
        placeholder(1, group=1),
        removed(2, 1),
    )
    assert applied == BatchResult(faults=("other_attention_group",) * 3)
    assert index.overlaps(prompt(1, 9)) == {"w": Overlap(1, uncertain=1)}, "the window is not known"
    assert [index.overlaps(prompt(block, 9)) for block in (2, 3)] == [{}, {}]
    assert owner.counts == {}


def test_groups_without_kinds_make_all_blocks_uncertain(apply: Callable[..., BatchResult]) -> None:
    index, owner = an_index()
    assert apply(index, owner, of_group(0, 1), of_group(0, 2)).faults == ()
    applied = apply(index, owner, of_group(1, 3), removed(1, 0), removed(1, 1))
    assert applied == BatchResult(faults=("group_without_kind",), missed=NOT_TOLD_APART)
    assert index.overlaps(prompt(1, 9)) == index.overlaps(prompt(3, 9)) == {}
    assert index.overlaps(prompt(2, 9)) == {"w": Overlap(1, uncertain=1)}
    applied = apply(index, owner, of_group(0, 4), placeholder(2, group=0))
    assert (applied.faults, applied.missed) == (("group_without_kind",) * 2, NOT_TOLD_APART)
    assert index.overlaps(prompt(4, 9)) == {}
    assert owner.counts == {}


def test_doubt_about_groups_outlasts_a_clear_and_ends_with_a_restart(
    apply: Callable[..., BatchResult],
) -> None:
    index, owner = an_index()
    apply(index, owner, of_group(0, 1), of_group(1, 1), {"type": "AllBlocksCleared"})
    assert apply(index, owner, of_group(0, 1)).faults == ("group_without_kind",)
    index.clear(owner)
    assert apply(index, owner, of_group(0, 1)).faults == ()
    assert tiers(index, prompt(1, 9)) == (1, 0, 0, 0)


def test_blocks_of_others_are_left_out(apply: Callable[..., BatchResult]) -> None:
    index, owner = an_index()
    applied = apply(
        index,
        owner,
        of_group(None, 1),
        of_group(None, 2) | {"locality": "REMOTE"},
        removed(1, None) | {"ownership": "KVCR"},
        {"type": "AllBlocksCleared", "ownership": "kvcr"},
        removed(7, None) | {"locality": "REMOTE"},
    )
    kept_out = ("other_locality", *("foreign_ownership",) * 2, "other_locality")
    assert applied == BatchResult(faults=kept_out)
    assert tiers(index, prompt(1, 9)) == (1, 0, 0, 0)
    assert index.overlaps(prompt(2, 9)) == {}
    assert owner.counts == {}


def test_removal_of_a_group_that_was_never_stored_is_unknown(
    apply: Callable[..., BatchResult],
) -> None:
    index, owner = an_index()
    apply(index, owner, of_group(0, 1), removed(1, 5))
    assert owner.counts == {"removed_unknown": 1}
