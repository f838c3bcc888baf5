"""Whether prompts were stored since they were watched, whatever was evicted meanwhile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.events import BlocksRemoved
from kvstate.index.core import WATCHES, Core
from kvstate.index.owner import WATCHED_PROMPTS
from kvstate.overlap import Tokens
from tests.kvstate.cores import new_core
from tests.kvstate.index.test_index import bigrams
from tests.kvstate.small_index import an_index, prompt, stored


def test_prompt_was_stored_even_if_it_is_gone_again() -> None:
    index, owner = an_index()
    owner.watch(0, prompt(1, 1, 2, 2, 9), 2)
    index.apply(owner, [stored([1], [1, 1])])
    assert not owner.was_stored(0)
    index.apply(owner, [stored([2], [2, 2], 1), BlocksRemoved([2]), BlocksRemoved([1])])
    assert owner.was_stored(0)
    assert index.overlaps(prompt(1, 1, 2, 2, 9)) == {}


def test_other_tokens_and_other_namespaces_are_not_the_prompt() -> None:
    index, owner = an_index()
    for slot, salt in enumerate([None, "s"]):
        owner.watch(slot, prompt(1, 1, 2, 2, 9, salt=salt), 2)
    index.apply(owner, [stored([1, 2], [7, 1, 2, 2]), stored([3, 4], [1, 1, 2, 2], lora="a")])
    assert [owner.was_stored(slot) for slot in (0, 1)] == [False, False]
    index.apply(owner, [stored([5, 6], [1, 1, 2, 2], extras=[("s",), ()])])
    assert [owner.was_stored(slot) for slot in (0, 1)] == [False, True]


def test_what_was_stored_before_is_not_noted() -> None:
    index, owner = an_index()
    index.apply(owner, [stored([1], [1])])
    owner.watch(0, prompt(1, 9), 1)
    assert not owner.was_stored(0)


def test_slot_forgets_what_it_watched_before() -> None:
    index, owner = an_index()
    last = WATCHED_PROMPTS - 1
    owner.watch(last, prompt(1, 9), 1)
    index.apply(owner, [stored([1], [1])])
    owner.watch(last, prompt(2, 9), 1)
    assert not owner.was_stored(last)
    owner.watch(last, prompt(1), 1)  # its only token is computed each time
    index.apply(owner, [stored([2], [2])])
    assert not owner.was_stored(last)


def test_adapter_may_be_named_by_its_number_and_pages_may_be_of_bigrams() -> None:
    index, owner = an_index()
    owner.watch(0, prompt(1, 9, lora="a"), 1, [7])
    index.apply(owner, [stored([1], [1], lora=7)])
    assert owner.was_stored(0)
    owner.watch(1, prompt(2, 9, lora="b"), 1)  # any number that it used may be b's
    index.apply(owner, [stored([2], [2], lora=7)])
    assert owner.was_stored(1)
    assert not owner.watch(2, prompt(3, 9, lora="c"), 1, range(WATCHES))


def test_pages_of_bigrams_may_hold_the_prompt() -> None:
    index, owner = an_index()
    index.apply(owner, [bigrams([1], [5, 6])])
    owner.watch(0, prompt(1, 2, 3, 4), 2)
    assert not owner.was_stored(0)
    index.apply(owner, [bigrams([2], [1, 2, 3])])
    assert owner.was_stored(0)
    owner.watch(1, prompt(), 2)


def test_first_removal_is_noted() -> None:
    for removed in (1, 7):  # one that it holds, and one that nobody knows
        index, owner = an_index()
        index.apply(owner, [stored([1], [1])])
        assert not owner.has_removed
        index.apply(owner, [BlocksRemoved([removed])])
        assert owner.has_removed


def test_watches_end_with_their_rank() -> None:
    index, owner = an_index()
    owner.watch(0, prompt(1, 9), 1)
    index.remove(owner)
    again = index.add("w", 0, "m")
    index.apply(again, [stored([1], [1])])
    assert (again.number, again.was_stored(0)) == (owner.number, False)


def test_core_refuses_slots_and_block_sizes_out_of_bounds() -> None:
    core = new_core()
    owner, none = core.add_owner(0, core.add_model(b"m"), 0), Tokens("I")
    with pytest.raises(ValueError, match="slot"):
        core.watch(owner, WATCHES, none, None, None, 16)
    with pytest.raises(ValueError, match="slot"):
        core.was_stored(owner, WATCHES)
    with pytest.raises(ValueError, match="block size"):
        core.watch(owner, 0, none, None, None, 0)


CHAIN = st.lists(st.integers(0, 2), min_size=1, max_size=4)
STEPS = st.lists(st.tuples(st.booleans(), CHAIN, st.integers(0, 3)), max_size=30)


def played(core: Core, steps: list[tuple[bool, list[int], int]]) -> list[bool]:
    """Watches chains and stores others; each block's hash is its whole path."""
    owner = core.add_owner(0, core.add_model(b"m"), 0)
    for is_watch, ids, slot in steps:
        if is_watch:
            core.watch(owner, slot, Tokens("I", [*ids, 9]), None, None, 1)
            continue
        hashes: list[int | bytes] = [bytes(ids[: n + 1]) for n in range(len(ids))]
        core.store(owner, hashes, None, Tokens("I", ids), 1, None, None, "GPU", None, False)
        for block in reversed(hashes):
            core.remove(owner, block, "GPU", None)
    return [core.was_stored(owner, slot) for slot in range(4)]


@given(STEPS)
def test_watched_prompt_was_stored_if_a_later_chain_begins_with_it(
    steps: list[tuple[bool, list[int], int]],
) -> None:
    expected = [False] * 4
    watched: dict[int, list[int]] = {}
    for is_watch, ids, slot in steps:
        if is_watch:
            watched[slot], expected[slot] = ids, False
            continue
        for each, its in watched.items():
            expected[each] |= ids[: len(its)] == its
    assert played(new_core(limit_blocks=9), steps) == expected
