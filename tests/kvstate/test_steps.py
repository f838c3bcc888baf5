"""Long work is done in steps, with the same result as in one go."""

import ast
import re
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.errors import WireError
from kvstate.index.index import Index
from kvstate.index.owner import Owner
from kvstate.overlap import Prompt, Tokens
from kvstate.steps import Steps, finished
from kvstate.wire.zmq_wire import (
    MAX_BLOCKS,
    MAX_EVENT_BYTES,
    MAX_EVENTS,
    MAX_PAYLOAD_BYTES,
    decode_batch,
    stamp_of,
)
from tests.imports import MODULES

# Table lookups that each block counts as, when it is forgotten or moved.
WORK_A_BLOCK = 4

COUNT = 6_000
HASHES = list(range(1, COUNT + 1))
STORED = ["BlockStored", HASHES, None, HASHES, 1, None, "GPU"]
LONG_CHAIN = ["BlockStored", HASHES[:2_000], None, HASHES * 6 + HASHES[:2_000] * 3, 21, None]
EVENTS: list[list[Any]] = [
    [STORED],
    [LONG_CHAIN],
    [STORED, ["BlockRemoved", HASHES[1_000:]]],
    [STORED, ["BlockStored", HASHES, None, [], 0, None, "CPU"], ["BlockRemoved", HASHES]],
    [STORED, ["AllBlocksCleared"], ["BlockStored", [1], None, [1], 1, None]],
    [["BlockStored", [n], n - 1 or None, [n], 1, None] for n in HASHES],
    [["BlockStored", [n], n + 1, [n], 1, None] for n in HASHES[:500]]
    + [["BlockStored", [501], None, [7], 1, None]],
]


def message(events: list[Any]) -> bytes:
    return msgspec.msgpack.encode([1.0, events, 0])


def taken(index: Index, owner: Owner, payload: bytes) -> None:
    """Applies a payload as a subscriber does."""
    stamp_of(payload)
    finished(owner.applying(payload))


def steps_of(steps: Steps[Any]) -> int:
    return sum(1 for _ in steps)


def seen(index: Index, owner: Owner) -> tuple[Any, ...]:
    prompts = Tokens("I", [*range(1, 400)]), Tokens("I", [7, 500, 499, 498, 497, 2])
    overlaps = [index.overlaps(Prompt("m", prompt)) for prompt in prompts]
    index.check()
    return owner.blocks, owner.uncertain_blocks, len(owner.orphans), owner.counts, overlaps


def new_index() -> tuple[Index, Owner]:
    """An index with one trusted rank."""
    index = Index(12345678)
    owner = index.add("w", 0, "m")
    owner.trusted = True
    return index, owner


@pytest.mark.parametrize("events", EVENTS)
def test_message_applied_in_steps_equals_one_applied_at_once(events: list[Any]) -> None:
    index, owner = new_index()
    assert steps_of(owner.applying(message(events))) > 2
    whole, other = new_index()
    one_by_one = decode_batch(message(events)).events
    for event in one_by_one:
        whole.apply(other, [event])
    assert seen(index, owner) == seen(whole, other)


def test_rank_is_cleared_and_demoted_in_steps() -> None:
    index, owner = new_index()
    finished(owner.applying(message([STORED])))
    index.demote(owner)
    again = [
        [*STORED[:1], [n + COUNT for n in HASHES], *STORED[2:]],
        [*STORED[:1], [1], None, [1], 1],
    ]
    finished(owner.applying(message(again)))
    assert (owner.blocks, owner.uncertain_blocks) == (2 * COUNT, COUNT - 1)
    assert steps_of(owner.demoting()) > 3
    index.check()
    assert (owner.blocks, owner.uncertain_blocks) == (2 * COUNT, 2 * COUNT)
    assert steps_of(owner.forgetting()) > 3
    assert seen(index, owner)[0] == 0


@given(st.integers(0, 300), st.integers(0, 400), st.booleans())
def test_step_ends_with_the_block_that_reaches_its_work(
    count: int, work: int, clears: bool
) -> None:
    index, owner = new_index()
    for hashes in ([*range(1, count + 1)], [*range(1_000, 1_000 + count)]):
        index.demote(owner)  # the first of them become uncertain, so that the others have to move
        finished(owner.applying(message([["BlockStored", hashes, None, hashes, 1, None, "GPU"]])))
    some = index.core.clear_some if clears else index.core.demote_some
    left, is_done = owner.blocks if clears else owner.blocks - owner.uncertain_blocks, False
    while not is_done:
        is_done = some(owner.number, work)
        index.check()
        now = owner.blocks if clears else owner.blocks - owner.uncertain_blocks
        assert left - now <= 1 + work // WORK_A_BLOCK
        left = now
    assert left == 0


def test_abandoned_message_leaves_a_consistent_index() -> None:
    index, owner = new_index()
    for _ in range(3):
        steps = owner.applying(message([STORED, ["BlockRemoved", HASHES]]))
        for _ in range(4):
            next(steps)
        steps.close()
        index.check()
    finished(owner.applying(message([["AllBlocksCleared"], ["BlockStored", [1], None, [1], 1]])))
    assert owner.blocks == 1


@pytest.mark.parametrize(
    ("payload", "fault"),
    [
        (message([[]] * (MAX_EVENTS + 1)), "more than 65536 events"),
        (message([["BlockRemoved", [1] * 9_000]] * 30), f"more than {MAX_BLOCKS} blocks"),
        (message([["BlockRemoved", [[]] * 9_000]]), "too many arrays"),
        (message([["Unknown", "x" * MAX_EVENT_BYTES]]), "event of more than"),
        (message([["BlockRemoved", [1] * MAX_PAYLOAD_BYTES]]), "payload of more than"),
    ],
)
def test_oversized_batch_is_refused_as_a_whole(payload: bytes, fault: str) -> None:
    index, owner = new_index()
    finished(owner.applying(message([["BlockStored", [1], None, [1], 1]])))
    with pytest.raises(WireError, match=fault):
        taken(index, owner, payload)
    assert owner.blocks == 1


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (["BlockStored", [b"x" * 65], None, [1], 1], "huge_hash"),
        (["BlockStored", [1], b"x" * 65, [1], 1], "huge_hash"),
        (["BlockRemoved", [b"x" * 65]], "huge_hash"),
        (
            ["BlockStored", [1], None, [1], 1, None, "GPU", None, [["x" * 5_000]]],
            "huge_extra_keys",
        ),
        (
            ["BlockStored", [1], None, [1], 1, None, "GPU", None, [[["x", 1]] * 300]],
            "huge_extra_keys",
        ),
        ({"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None,
          "token_ids": [1], "block_size": 1, "cache_salt": "x" * 5_000}, "bad_cache_salt"),
    ],
)  # fmt: skip
def test_event_with_oversized_keys_or_hashes_is_left_out(event: Any, fault: str) -> None:
    _, owner = new_index()
    assert finished(owner.applying(message([event]))).faults == (fault,)
    assert owner.blocks == 0


def test_hole_costs_time_in_proportion_to_the_blocks() -> None:
    # filling a table in the order of another one with the same secret takes quadratic time
    index, owner = new_index()
    count = 60_000
    began = time.thread_time()
    for first in (0, 1):
        for start in range(0, count, 6_000):
            chain = [2 * (start + n) + first + 1 for n in range(6_000)]
            finished(owner.applying(message([["BlockStored", chain, None, HASHES, 1]])))
        if not first:
            index.demote(owner)
    filled = time.thread_time()
    finished(owner.demoting())
    assert time.thread_time() - filled < 4 * (filled - began)


def calls_left_alone(tree: ast.AST, names: set[str]) -> Iterator[str]:
    """Yields the calls of such functions of which nothing is done with the steps."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            if called.rpartition(".")[2] in names:
                yield f"line {node.lineno}: {called}"


def step_functions(tree: ast.AST) -> set[str]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {
        one.name for one in functions if one.returns and "Steps[" in ast.unparse(one.returns)[:6]
    }


def test_functions_of_steps_are_named_so_and_no_call_leaves_them_undone() -> None:
    trees = {path: ast.parse(path.read_bytes()) for path in MODULES.values()}
    names = set[str]().union(*map(step_functions, trees.values()))
    assert names
    assert not [name for name in names if not re.search("ing(_|$)|^steps$", name)]
    assert not {
        str(path): left
        for path, tree in trees.items()
        if (left := [*calls_left_alone(tree, names)])
    }


def test_call_that_leaves_its_steps_undone_is_found() -> None:
    forgotten = ast.parse("def f(owner):\n    owner.forgetting()\n    yield from owner.demoting()")
    names = {"forgetting", "demoting"}
    assert [*calls_left_alone(forgotten, names)] == ["line 2: owner.forgetting"]
