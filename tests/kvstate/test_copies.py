"""Engines that hold a block several times, and what each kind of them announces of its removal."""

import random
from collections import Counter
from collections.abc import Iterator
from enum import Enum

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.events import BlocksRemoved, BlocksStored, Event
from kvstate.index.index import Index
from kvstate.overlap import Overlap, Prompt, Tokens
from kvstate.steps import finished
from kvstate.wire.zmq_wire import decode_batch

BLOCKS = range(1, 4)


class Rule(Enum):
    EACH = "the removal of each copy is announced (vLLM 0.32)"
    LAST = "only that of the last one is (vLLM's pull request 55092)"
    TOLD = "each is, with the copies left (vLLM's pull request 48933)"


class Engine:
    """The cache of an engine, with copies of blocks that follow the same one, or none."""

    def __init__(self, rule: Rule, parent: int | None = None) -> None:
        self.held: Counter[int] = Counter()
        self._rule = rule
        self._parent = parent

    def store(self, block: int) -> Iterator[Event]:
        self.held[block] += 1
        yield BlocksStored([block], self._parent, Tokens("I", [block]), 1)

    def remove(self, block: int) -> Iterator[Event]:
        if not self.held[block]:
            return
        self.held[block] -= 1
        left = self.held[block]
        if self._rule is Rule.TOLD:
            yield BlocksRemoved([block], remaining_copies=[left])
        elif self._rule is Rule.EACH or not left:
            yield BlocksRemoved([block])


def tiers(index: Index, tokens: list[int]) -> int:
    found = index.overlaps(Prompt("m", Tokens("I", [*tokens, 0]))).get("w")
    return sum(found.tiers) if found else 0


def removed_twice(block: int) -> list[Event]:
    """Shows that the removal of each copy is announced."""
    stored = BlocksStored([block], None, Tokens("I", [block]), 1)
    return [stored, stored, BlocksRemoved([block]), BlocksRemoved([block])]


def certain(index: Index) -> set[int]:
    return {block for block in BLOCKS if tiers(index, [block])}


# Its children are stored as new copies: only from the root on may an engine repeat itself.
ROOT = 50
ROOT_STORED = BlocksStored([ROOT], None, Tokens("I", [ROOT]), 1)


def certain_children(index: Index) -> set[int]:
    return {block for block in BLOCKS if tiers(index, [ROOT, block]) > 1}


@given(
    rule=st.sampled_from(Rule),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["store"] * 6 + ["remove"] * 6 + ["hole"]), st.sampled_from(BLOCKS)
        ),
        min_size=30,
    ),
    losses=st.randoms(use_true_random=False),
)
def test_credit_is_certain_only_for_blocks_that_the_engine_holds(
    *, rule: Rule, steps: list[tuple[str, int]], losses: random.Random
) -> None:
    index = Index(12345678)
    owner = index.add("w", 0, "m")
    owner.trusted = True
    engine = Engine(rule)
    for what, block in steps:
        if what == "hole":
            for _ in range(3):  # lost
                [*(engine.store if losses.random() < 0.5 else engine.remove)(losses.choice(BLOCKS))]
            index.demote(owner)
        else:
            act = engine.store if what == "store" else engine.remove
            index.apply(owner, [*act(block)])
        if losses.random() < 0.2:
            index.expire(owner, 100_000)
        assert certain(index) <= set(+engine.held)
        index.check()


@pytest.mark.parametrize("rule", [Rule.EACH, Rule.TOLD])
@given(steps=st.lists(st.tuples(st.booleans(), st.sampled_from(BLOCKS)), min_size=20))
def test_copies_are_credited_exactly_once_the_rule_is_known(
    *, rule: Rule, steps: list[tuple[bool, int]]
) -> None:
    index = Index(12345678)
    owner = index.add("w", 0, "m")
    owner.trusted = True
    engine = Engine(rule, ROOT)
    index.apply(owner, [ROOT_STORED])
    if rule is Rule.EACH:
        index.apply(owner, removed_twice(99))
    for is_store, block in steps:
        index.apply(owner, [*(engine.store if is_store else engine.remove)(block)])
        assert certain_children(index) == set(+engine.held)


@given(blocks=st.sets(st.integers(1, 60), min_size=1), slots=st.integers(1, 99))
def test_blocks_that_lost_a_copy_are_certain_again_once_the_rule_is_known(
    *, blocks: set[int], slots: int
) -> None:
    index = Index(12345678)
    owner = index.add("w", 0, "m")
    owner.trusted = True
    engine = Engine(Rule.EACH, ROOT)
    index.apply(owner, [ROOT_STORED])
    for block in blocks - {ROOT}:
        index.apply(owner, [*engine.store(block), *engine.store(block), *engine.remove(block)])
    assert owner.uncertain_blocks == len(blocks - {ROOT})
    index.expire(owner, slots)  # a sweep that rests somewhere
    index.apply(owner, removed_twice(99))
    for _ in range(2):
        while not index.expire(owner, slots):
            index.check()
    assert (owner.blocks, owner.uncertain_blocks) == (len(blocks | {ROOT}), 0)


def test_blocks_announced_again_while_held_are_not_certain_after_their_removal() -> None:
    index = Index(12345678)
    owner = index.add("w", 0, "m")
    owner.trusted = True
    chain = BlocksStored([1, 2, 3], None, Tokens("I", [1, 2, 3]), 1)
    # three requests with "kv_cache_report_mode": "full", then an eviction
    index.apply(owner, [chain, chain, chain, chain, BlocksRemoved([3, 2, 1])])
    found = index.overlaps(Prompt("m", Tokens("I", [1, 2, 3, 0])))
    assert found == {"w": Overlap(1, uncertain=3)}


def test_children_of_a_block_that_lost_a_copy_are_certain_with_it() -> None:
    index = Index(12345678)
    owner = index.add("w", 0, "m")
    owner.trusted = True
    root = BlocksStored([1], None, Tokens("I", [1]), 1)
    child = BlocksStored([2], 1, Tokens("I", [2]), 1)
    prompt = Prompt("m", Tokens("I", [1, 2, 0]))
    index.apply(owner, [root, root, BlocksRemoved([1]), child])
    assert index.overlaps(prompt) == {"w": Overlap(1, uncertain=2)}
    index.apply(owner, [root])
    assert index.overlaps(prompt) == {"w": Overlap(1, (2, 0, 0, 0))}


@pytest.mark.parametrize(
    ("counts", "uncertain", "counted"),
    [
        ([0], None, {}),
        ([1], 0, {}),
        (None, 1, {}),
        ([-1], 1, "bad"),
        ([], 1, "bad"),
        ("x", 1, "bad"),
    ],
)
def test_counts_of_a_removal_are_read_from_the_wire(
    *, counts: object, uncertain: int | None, counted: object
) -> None:
    index = Index(12345678)
    owner = index.add("w", 0, "m")
    owner.trusted = True
    index.apply(owner, [BlocksStored([1], None, Tokens("I", [1]), 1)] * 2)
    event = {"type": "BlockRemoved", "block_hashes": [1], "remaining_copy_counts": counts}
    body = msgspec.msgpack.encode([1.0, [event]])
    taken = finished(owner.applying(body))
    assert bool(taken.faults) == (counted == "bad")
    if counted != "bad":
        assert decode_batch(body).events == [BlocksRemoved([1], remaining_copies=counts)]  # type: ignore[arg-type]
    found = index.overlaps(Prompt("m", Tokens("I", [1, 0]))).get("w")
    assert (found and found.uncertain) == uncertain
