"""Attention groups that hold a window or a state: what an engine can reuse, and what it cannot."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvstate.events import OtherGroupStored
from kvstate.index.index import Index
from kvstate.index.owner import BYTES_PER_BLOCK, IndexLimits, Owner
from kvstate.overlap import Overlap
from kvstate.reuse import ReuseRules
from kvstate.steps import finished
from tests.kvstate.small_index import an_index, prompt

PROMPT = prompt(*range(8), 99)  # eight blocks of one token, whose hashes are 100 to 107


def store(
    group: int | None, kind: str, first: int, last: int, *, window: int | None = None, **other: Any
) -> dict[str, Any]:
    """The blocks from `first` on, before `last`, of one group."""
    return {
        "type": "BlockStored",
        "block_hashes": [100 + block for block in range(first, last)],
        "parent_block_hash": 99 + first if first else None,
        "token_ids": list(range(first, last)),
        "block_size": 1,
        "group_idx": group,
        "kv_cache_spec_kind": kind,
        "kv_cache_spec_sliding_window": window,
    } | other


def full(first: int = 0, last: int = 8) -> dict[str, Any]:
    return store(0, "full_attention", first, last)


def window(first: int, last: int, group: int = 1, size: int = 3, **other: Any) -> dict[str, Any]:
    """Blocks of a window, of a prompt that begins with others that are not kept."""
    masked: dict[str, Any] = {"parent_block_hash": None, "token_ids": list(range(last))}
    return store(group, "sliding_window", first, last, window=size, **masked) | other


def state(block: int, group: int = 1) -> dict[str, Any]:
    masked: dict[str, Any] = {"parent_block_hash": None, "token_ids": list(range(block + 1))}
    return store(group, "mamba", block, block + 1, **masked)


def removed(group: int, *blocks: int, **other: Any) -> dict[str, Any]:
    hashes = [100 + block for block in blocks]
    return {"type": "BlockRemoved", "block_hashes": hashes, "group_idx": group} | other


def send(index: Index, owner: Owner, *events: object) -> None:
    taken = finished(owner.applying(msgspec.msgpack.encode([1.0, events, 0])))
    assert set(taken.faults) <= {"other_attention_group"}
    index.check()


def held_after(events: Sequence[object], limits: IndexLimits | None = None) -> Overlap | None:
    index, owner = an_index(limits)
    send(index, owner, *events)
    return index.overlaps(PROMPT).get("w")


def overlap(certain: int, unusable: int = 0, uncertain: int = 0) -> Overlap:
    return Overlap(1, (certain, 0, 0, 0), uncertain, unusable=unusable)


@pytest.mark.parametrize(
    ("events", "usable"),
    [
        ([full()], 8),
        ([full(), window(6, 8)], 8),
        ([window(6, 8), full()], 8),  # the order does not matter
        ([full(), window(6, 8, size=4)], 0),  # it needs three blocks
        ([full(), window(0, 2), window(7, 8)], 2),
        ([full(), window(0, 1)], 1),  # all there are
        ([full(), window(6, 8), window(5, 7, group=2)], 0),
        ([full(), window(4, 8), window(5, 7, group=2)], 7),
        ([full(), state(4)], 5),
        ([full(), state(4), state(7)], 8),
        ([full(), state(4), window(2, 8, group=2, size=4)], 5),
        ([full(0, 5), window(6, 8)], 0),
        ([full(), window(6, 8), removed(1, 7)], 0),
        ([full(), window(6, 8), removed(0, 7)], 0),
        ([full(), window(5, 8), removed(0, 7)], 7),
        ([full(), window(6, 8), removed(1, 0)], 8),
        ([full(), window(6, 8), window(6, 8, group=2), removed(1, 7)], 0),
        ([full(), window(6, 8), window(6, 8, group=2), removed(1, 7), window(7, 8)], 8),
    ],
)
def test_prefix_is_reused_where_every_group_has_what_it_needs(
    events: list[dict[str, Any]], usable: int
) -> None:
    removed_blocks = sum(event["group_idx"] == 0 and "Removed" in event["type"] for event in events)
    stored = 5 if full(0, 5) in events else 8
    assert held_after(events) == overlap(usable, stored - removed_blocks - usable)


def test_larger_blocks_of_a_window_align_the_prefix() -> None:
    large = window(3, 4, size=3, block_size=2, token_ids=[*range(4)], block_hashes=[101, 103])
    assert held_after([full(), large]) == overlap(4, 4)
    assert held_after([full(0, 3), large]) == overlap(2, 1)


def test_blocks_that_end_nowhere_with_the_others_leave_everything_uncertain() -> None:
    triple = window(2, 3, size=4, block_size=3, token_ids=[0, 1, 2])
    pairs = {"block_size": 2, "block_hashes": [101, 103], "token_ids": list(range(4))}
    assert held_after([full() | pairs, triple]) == Overlap(2, uncertain=2)


def test_smaller_blocks_of_a_window_leave_the_prefix_uncertain() -> None:
    pairs = {"block_size": 2, "block_hashes": [101, 103], "token_ids": list(range(4))}
    found = held_after([full() | pairs, window(2, 4)])
    assert found == Overlap(2, uncertain=2)


@pytest.mark.parametrize(
    "event",
    [
        store(1, "chunked_local_attention", 0, 8),
        store(1, "sliding_window", 0, 8),  # without its size
        window(6, 8, block_size=0),
    ],
)
def test_groups_that_cannot_be_followed_leave_everything_uncertain(event: dict[str, Any]) -> None:
    assert held_after([full(), event]) == overlap(0, uncertain=8)


def test_group_that_changes_leaves_everything_uncertain_until_a_restart() -> None:
    index, owner = an_index()
    send(index, owner, full(), window(6, 8), window(4, 8, size=4))
    assert index.overlaps(PROMPT) == {"w": overlap(0, uncertain=8)}
    index.clear(owner)
    send(index, owner, full(), window(6, 8))
    assert index.overlaps(PROMPT) == {"w": overlap(8)}


@pytest.mark.parametrize("groups", [13, 5])
def test_more_groups_or_sizes_than_any_model_has_leave_everything_uncertain(groups: int) -> None:
    sizes = range(2, 2 + groups) if groups == 5 else [3] * groups
    windows = [window(0, 8, group, size) for group, size in enumerate(sizes, start=1)]
    assert held_after([full(), *windows]) == overlap(0, uncertain=8)


def test_blocks_before_a_hole_stay_uncertain_and_those_after_it_are_exact() -> None:
    index, owner = an_index()
    send(index, owner, full(), window(6, 8))
    index.demote(owner)
    assert index.overlaps(PROMPT) == {"w": overlap(0, uncertain=8)}
    send(index, owner, full(0, 4), window(2, 4))
    assert index.overlaps(PROMPT) == {"w": overlap(4, uncertain=4)}
    send(index, owner, full())
    assert index.overlaps(PROMPT) == {"w": overlap(4, unusable=4)}


def test_blocks_on_other_tiers_are_uncertain_behind_what_the_device_has() -> None:
    index, owner = an_index()
    offloaded = {"medium": "CPU", "block_size": 0, "token_ids": []}
    send(index, owner, full(), window(2, 4), full(4, 8) | offloaded, removed(0, 4, 5, 6, 7))
    assert index.overlaps(PROMPT) == {"w": overlap(4, uncertain=4)}
    send(index, owner, window(6, 8) | {"medium": "CPU"}, removed(1, 3, medium="CPU"))
    assert index.overlaps(PROMPT) == {"w": overlap(4, uncertain=4)}


@pytest.mark.parametrize(("announced", "usable"), [(False, 0), (True, 8)])
def test_removal_of_one_of_two_copies_of_an_end(usable: int, *, announced: bool) -> None:
    index, owner = an_index()
    if announced:
        owner.note_rules(ReuseRules(announces_copies=True))
    send(index, owner, full(), window(6, 8), window(6, 8))
    send(index, owner, removed(1, 7))
    assert index.overlaps(PROMPT) == {"w": overlap(usable, 8 - usable)}
    send(index, owner, removed(1, 7))  # proves that the removal of each copy is announced
    assert index.overlaps(PROMPT) == {"w": overlap(0, 8)}
    send(index, owner, window(6, 8), window(6, 8))
    send(index, owner, removed(1, 7))
    assert index.overlaps(PROMPT) == {"w": overlap(8)}


def test_removal_may_tell_how_many_copies_of_an_end_are_left() -> None:
    index, owner = an_index()
    send(index, owner, full(), window(6, 8), window(6, 8))
    send(index, owner, removed(1, 7, remaining_copy_counts=[1]))
    assert index.overlaps(PROMPT) == {"w": overlap(8)}
    send(index, owner, removed(1, 7, remaining_copy_counts=[0]))
    assert index.overlaps(PROMPT) == {"w": overlap(0, 8)}


def test_blocks_that_are_only_announced_again_are_not_copies() -> None:
    """vLLM's kv_cache_report_mode, which any client may set, names all blocks of what is reused."""
    index, owner = an_index()
    owner.note_rules(ReuseRules(announces_copies=True))
    whole = {"token_ids": list(range(8))}
    send(index, owner, window(6, 8), full())
    send(index, owner, full(), window(0, 8) | whole)
    assert index.overlaps(PROMPT) == {"w": overlap(8)}
    send(index, owner, removed(1, 7))
    assert index.overlaps(PROMPT) == {"w": overlap(0, 8)}, "it never held the blocks before"
    send(index, owner, removed(0, *range(8)))
    assert index.overlaps(PROMPT) == {"w": overlap(0, uncertain=8)}, "and no second copies"


def test_short_prefix_that_may_be_announced_again_is_in_doubt_after_a_removal() -> None:
    index, owner = an_index()
    owner.note_rules(ReuseRules(announces_copies=True))
    whole = {"token_ids": [0, 1]}
    send(index, owner, window(0, 2), full())
    send(index, owner, window(0, 2) | whole)
    send(index, owner, removed(1, 1))
    assert index.overlaps(PROMPT) == {"w": overlap(1, 7)}


def test_prompt_that_could_not_be_reused_is_stored_as_new_copies() -> None:
    index, owner = an_index()
    owner.note_rules(ReuseRules(announces_copies=True))
    send(index, owner, full(), window(6, 8), removed(1, 6, 7))
    send(index, owner, window(6, 8), full())
    send(index, owner, removed(0, *range(8)))
    assert index.overlaps(PROMPT) == {"w": overlap(8)}


def test_ends_count_towards_the_limit_of_blocks() -> None:
    limits = IndexLimits(bytes=64 * 9)
    assert held_after([full(), window(5, 8)], limits=limits) == overlap(0, 8)
    assert held_after([full(0, 7), window(5, 7)], limits=limits) == overlap(7)
    assert held_after([window(0, 8), full(0, 7)], limits=limits) is None


def test_drop_of_a_draft_takes_the_last_block() -> None:
    index, owner = an_index()
    owner.note_rules(ReuseRules(draft_drop=1))
    send(index, owner, full())
    assert index.overlaps(PROMPT) == {"w": overlap(7, 1)}
    send(index, owner, window(5, 7))
    assert index.overlaps(PROMPT) == {"w": overlap(7, 1)}
    send(index, owner, removed(1, 6))
    assert index.overlaps(PROMPT) == {"w": overlap(0, 8)}
    assert index.overlaps(prompt(0, 1)) == {"w": overlap(0, 1)}


def test_prompt_that_a_draft_makes_compute_anew_is_stored_as_new_copies() -> None:
    index, owner = an_index()
    owner.note_rules(ReuseRules(announces_copies=True, draft_drop=1))
    send(index, owner, full(0, 1))
    send(index, owner, full())
    send(index, owner, removed(0, 0))
    assert index.overlaps(PROMPT) == {"w": overlap(7, 1)}
    send(index, owner, full(0, 2))  # of two held blocks, one could have been reused
    send(index, owner, removed(0, 0))
    assert index.overlaps(PROMPT) == {"w": overlap(0, 1, uncertain=7)}


def test_distrusted_rank_has_what_it_can_reuse_as_uncertain() -> None:
    index, owner = an_index()
    send(index, owner, full(), window(4, 6))
    owner.trusted = False
    assert index.overlaps(PROMPT) == {"w": overlap(0, unusable=2, uncertain=6)}


def test_typed_blocks_of_a_window_are_noted_on_the_device_alone() -> None:
    index, owner = an_index()
    some = OtherGroupStored(1, hashes=[100, 101], block_size=1, reach=2)
    index.apply(owner, [replace(some, medium="CPU")])
    assert index.core.other_groups(owner.number) == (0, True, ())
    index.apply(owner, [some])
    assert index.core.other_groups(owner.number) == (2, True, ((1, 2),))


def test_typed_blocks_of_a_window_keep_to_the_limit() -> None:
    index, owner = an_index(IndexLimits(bytes=10 * BYTES_PER_BLOCK))
    some = OtherGroupStored(1, hashes=list(range(100, 200)), block_size=1, reach=2)
    index.apply(owner, [some])
    assert (index.core.other_groups(owner.number)[0], owner.status["over_limit"]) == (10, 1)
    index.check()
