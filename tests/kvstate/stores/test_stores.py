"""Stores that workers share, from recorded and made-up events."""

import base64
import itertools
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstate.errors import WireError
from kvstate.events import BlocksRemoved, BlocksStored
from kvstate.index.index import Index
from kvstate.index.owner import BYTES_PER_BLOCK, IndexLimits, Owner
from kvstate.overlap import Prompt, Tier
from kvstate.rows.format import SavedStoreRows
from kvstate.steps import Steps, finished
from kvstate.stores.stores import StoreRules, Stores
from kvstate.wire.zmq_wire import MAX_BLOCKS, decoding_shared

HERE = Path(__file__).parent


def frames(name: str) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The frames of a recording, and their payloads."""
    with (HERE / f"vllm_0.32.0_{name}.jsonl").open() as lines:
        for record in map(json.loads, lines):
            if record["kind"] == "frame":
                yield record, base64.b64decode(record["payload_b64"])


class SharedFleet:
    """Two workers and the stores that they mount."""

    def __init__(self, *rules: StoreRules) -> None:
        self.index = Index(12345678)
        self.stores = Stores(self.index, rules or [StoreRules("s")])
        self.ranks = {name: self._follow(name) for name in "ab"}

    def _follow(self, name: str) -> Owner:
        owner = self.index.add(name, 0, "m")
        owner.trusted = True
        self.stores.attach(name, owner)
        return owner

    def apply(self, name: str, payload: bytes) -> tuple[str, ...]:
        return finished(self.ranks[name].applying(payload)).faults

    def stored(self, tokens: list[int]) -> list[tuple[str, int, set[str]]]:
        prompt = Prompt("m", array("I", tokens))
        return [(one.store, one.tokens, set(one.workers)) for one in self.stores.stored(prompt)]


def told(*events: tuple[bool, int]) -> bytes:
    """A message about blocks of a chain in a store: whether each was stored, and its number."""
    return msgspec.msgpack.encode([1.0, [told_event(*each) for each in events], 0])


def told_event(is_stored: bool, number: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"medium": "STORAGE", "locality": "REMOTE", "block_hashes": [number]}
    if not is_stored:
        return {"type": "BlockRemoved", **fields}
    chained = {"parent_block_hash": number - 1 or None, "token_ids": [number], "block_size": 1}
    return {"type": "BlockStored", "lora_id": None, **fields, **chained}


def held(fleet: SharedFleet) -> tuple[object, ...]:
    owner = fleet.stores.owner("s", "m")
    assert owner is not None
    return fleet.stored([1, 2, 3, 4]), owner.blocks, owner.orphans.all()


TOLD = st.builds(
    told,
    st.tuples(st.booleans(), st.integers(1, 3)),
    st.tuples(st.booleans(), st.integers(1, 3)),
)
SENT = st.tuples(st.sampled_from("ab"), TOLD)
REMOVED_BESIDE_STORED = [("a", told((True, 1))), ("b", told((False, 1)))]


@given(st.lists(SENT, max_size=6), st.lists(st.sampled_from("ab")))
@example(REMOVED_BESIDE_STORED, [*"aa", *"bbbbbbbb"])
def test_batches_of_several_workers_change_a_store_in_the_order_in_which_they_end(
    batches: list[tuple[str, bytes]], turns: list[str]
) -> None:
    fleet, other, ended = SharedFleet(), SharedFleet(), list[tuple[str, bytes]]()

    def applying(name: str) -> Iterator[None]:
        for batch in [batch for batch in batches if batch[0] == name]:
            yield from fleet.ranks[name].applying(batch[1])
            ended.append(batch)

    under_way = {name: applying(name) for name in "ab"}
    for name in turns:
        next(under_way[name], None)
    while len(ended) < len(batches):
        for steps in under_way.values():
            next(steps, None)
    for batch in ended:
        other.apply(*batch)
    assert held(fleet) == held(other)


@pytest.mark.parametrize("name", ["full", "hashes_blocks"])
def test_recorded_blocks_belong_to_the_store_and_count_for_all_that_mount_it(name: str) -> None:
    fleet = SharedFleet()
    prompts: dict[str, list[int]] = {}
    whole, last = (256, 192) if name == "full" else (288, 240)  # in chunks of 64 or 16 tokens
    for record, payload in frames(name):
        if record["worker"] == "b" and "b" not in prompts:
            assert fleet.stored(prompts["a"]) == [("s", whole, {"a"})]
        prompts.setdefault(record["worker"], record["prompt_token_ids"])
        assert fleet.apply(record["worker"], payload) == ()
    assert fleet.stored(prompts["a"]) == [("s", whole, {"a", "b"})]
    assert fleet.stored(prompts["b"]) == [("s", last, {"a", "b"})]  # its last chunk was removed
    overlaps = fleet.index.overlaps(Prompt("m", array("I", prompts["a"])))
    tiers = {name: one.tiers for name, one in overlaps.items()}
    assert tiers == {"a": (18, 0, 0, 0), "b": (8, 0, 0, 0)}
    fleet.index.check()


def test_recorded_chunks_named_by_their_last_hash_are_not_credited() -> None:
    fleet = SharedFleet()
    for record, payload in frames("hashes"):
        fleet.apply(record["worker"], payload)
        assert fleet.stored(record["prompt_token_ids"]) == []
    fleet.index.check()


def test_blocks_are_lent_within_their_model_and_the_limit() -> None:
    index = Index(12345678, IndexLimits(bytes=3 * BYTES_PER_BLOCK))
    one, other, third = (
        index.add(*place) for place in (("a", 0, "m"), ("b", 0, "n"), ("c", 0, "m"))
    )
    index.apply(one, [BlocksStored([1, 2, 3], None, array("I", [1, 2, 3]), 1)])
    with pytest.raises(ValueError, match="different models"):
        index.core.lend(other.number, one.number, [1], "STORAGE", None)
    index.core.lend(third.number, one.number, [1, 9, 2, 3], "STORAGE", None)
    assert (third.blocks, third.status["copied_unknown"]) == (3, 1)
    index.core.lend(third.number, one.number, [1], "CPU", None)
    assert (third.blocks, third.status["over_limit"]) == (3, 1)
    index.check()


def test_tokens_on_a_tier_are_not_told_where_overlaps_may_be_cut() -> None:
    index, prompt = Index(12345678), Prompt("m", array("I", [1, 2, 3]))
    assert index.tokens_on(prompt, Tier.DEVICE) == {}
    owner = index.add("a", 0, "m")
    owner.trusted = True
    index.apply(owner, [BlocksStored([1, 2], None, array("I", [1, 2]), 1)])
    assert index.tokens_on(prompt, Tier.DEVICE) == {"a": 2}
    assert index.tokens_on(prompt, Tier.HOST) == {}
    index.core.drop_last(owner.number, 1)
    assert index.tokens_on(prompt, Tier.DEVICE) == {}


def message(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events), 0])


def stored(blocks: range, **fields: Any) -> dict[str, Any]:
    """A store of blocks with one token each, which is their hash."""
    return {
        "type": "BlockStored",
        "block_hashes": list(blocks),
        "parent_block_hash": blocks.start - 1 if blocks.start else None,
        "token_ids": list(blocks),
        "block_size": 1,
        "lora_id": None,
        "medium": "STORAGE",
        "lora_name": None,
        "locality": "REMOTE",
        **fields,
    }


def removed(*blocks: int) -> dict[str, Any]:
    fields = {"block_hashes": list(blocks), "medium": "STORAGE", "locality": "REMOTE"}
    return {"type": "BlockRemoved", **fields}


TOKENS = list(range(10))


def test_removal_by_any_publisher_removes_for_all_however_often_it_was_stored() -> None:
    fleet = SharedFleet()
    for _ in range(2):
        for name in "ab":
            fleet.apply(name, message(stored(range(8))))
    assert fleet.stored(TOKENS) == [("s", 8, {"a", "b"})]
    fleet.apply("b", message(removed(5)))
    assert fleet.stored(TOKENS) == [("s", 5, {"a", "b"})]
    fleet.apply("a", message(stored(range(8))))
    for _ in range(2):  # from now on copies are counted
        fleet.apply("b", message(stored(range(8))))
    fleet.apply("a", message(removed(3)))
    assert fleet.stored(TOKENS) == [("s", 3, {"a", "b"})]


def test_clear_or_end_of_a_worker_leaves_the_store_as_it_is() -> None:
    fleet = SharedFleet()
    fleet.apply("a", message(stored(range(8))))
    fleet.apply("a", message({"type": "AllBlocksCleared"}))
    fleet.apply("a", message({"type": "AllBlocksCleared", "locality": "REMOTE"}))
    assert fleet.stored(TOKENS) == [("s", 8, {"a"})]
    fleet.stores.detach("a")
    fleet.index.remove(fleet.ranks["a"])
    assert fleet.stored(TOKENS) == [("s", 8, set())]


@pytest.mark.parametrize(
    ("rules", "worker", "expected"),
    [
        (StoreRules("s", frozenset("ab")), "a", [("s", 8, {"a", "b"})]),
        (StoreRules("s", frozenset("b")), "a", []),
        (StoreRules("s"), "b", [("s", 8, {"b"})]),
    ],
)
def test_store_counts_for_the_workers_that_mount_it(
    rules: StoreRules, worker: str, expected: list[tuple[str, int, set[str]]]
) -> None:
    fleet = SharedFleet(rules)
    fleet.apply(worker, message(stored(range(8))))
    assert fleet.stored(TOKENS) == expected
    mounts = {name for name in "ab" if fleet.stores.mounted_by(name)}
    assert mounts == (set(rules.workers) if rules.workers else {worker})
    assert list(fleet.stores.blocks()) == [("s", 8 if expected else 0)]


def test_blocks_are_no_tokens_of_workers_on_any_tier() -> None:
    fleet = SharedFleet()
    fleet.apply("a", message(stored(range(8), medium="CPU")))
    prompt = Prompt("m", array("I", TOKENS))
    assert fleet.index.overlaps(prompt) == {}
    assert fleet.index.tokens_on(prompt, Tier.HOST) == {}
    assert fleet.index.stored_tokens(Prompt("other", prompt.tokens)) == {}


def test_blocks_are_forgotten_some_time_after_they_were_stored() -> None:
    other = StoreRules("t", frozenset("b"), 1e9)
    fleet = SharedFleet(StoreRules("s", frozenset("a"), 100.0), other)
    fleet.apply("a", message(stored(range(4))))
    held = []
    for now in (0.0, 50.0, 150.0, 160.0, 260.0):
        for due in fleet.stores.due(now):
            assert fleet.index.expire(due.owner, 1_000_000)
        held.append(sum(tokens for _, tokens, _ in fleet.stored(TOKENS)))
    assert held == [4, 4, 4, 4, 0]
    fleet.apply("b", message(stored(range(4))))
    assert fleet.stored(TOKENS) == [("t", 4, {"b"})]
    fleet.stores.close()
    assert fleet.stored(TOKENS) == []


def test_copying_a_store_keeps_no_rank_from_another_store() -> None:
    fleet = SharedFleet(StoreRules("s", frozenset("a")), StoreRules("t", frozenset("b")))

    def copying() -> Steps[None]:
        while True:
            yield

    under_way = fleet.stores.gate("s").passing(copying())
    next(under_way)
    batch = fleet.ranks["b"].applying(message(stored(range(4))))
    for _ in itertools.islice(batch, 1_000):
        pass
    assert fleet.stored(TOKENS) == [("t", 4, {"b"})]


def test_shared_events_leave_out_what_is_local_or_damaged() -> None:
    local = stored(range(2), locality="LOCAL")
    damaged = [stored(range(2), block_size=-1), {"type": "Unknown", "locality": "REMOTE"}]
    events = finished(decoding_shared(message(local, *damaged, stored(range(3)), removed(1, 2))))
    assert [type(one) for one in events] == [BlocksStored, BlocksRemoved]
    assert isinstance(events[1], BlocksRemoved)
    assert events[1].remaining_copies == [0, 0]
    many = [removed(*range(MAX_BLOCKS // 2 + 1)) for _ in range(2)]
    with pytest.raises(WireError):
        finished(decoding_shared(message(*many)))


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.booleans(), st.integers(0, 7), st.integers(1, 8)),
        max_size=12,
    )
)
def test_store_holds_what_was_stored_since_it_was_last_removed(
    steps: list[tuple[str, bool, int, int]],
) -> None:
    fleet, held = SharedFleet(), set[int]()
    for name, stores, first, last in steps:
        if stores:
            fleet.apply(name, message(stored(range(last))))
            held |= set(range(last))
        else:
            fleet.apply(name, message(removed(first)))
            held.discard(first)
    leading = next(count for count in range(9) if count not in held)
    assert sum(tokens for _, tokens, _ in fleet.stored(TOKENS)) == leading
    assert fleet.index.overlaps(Prompt("m", array("I", TOKENS))) == {}  # no worker's own
    fleet.index.check()


def saved_of(fleet: SharedFleet, now: float = 0.0) -> list[SavedStoreRows]:
    return [finished(steps) for steps in fleet.stores.saving(now)]


def begun_with(saved: list[SavedStoreRows], *rules: StoreRules) -> SharedFleet:
    """The same fleet after a restart; nothing is proven yet."""
    fleet = SharedFleet(*rules)
    for one in saved:
        assert finished(fleet.stores.restoring(one))
    return fleet


def test_saved_store_counts_once_all_that_may_have_changed_it_are_proven() -> None:
    before = SharedFleet(StoreRules("s", frozenset("ab")))
    before.apply("a", message(stored(range(4))))
    after = begun_with(saved_of(before), StoreRules("s", frozenset("ab")))
    after.stores.note_proven("a")
    assert after.stored(TOKENS) == []
    assert after.stores.of_workers("ab") == []  # nor is it passed on
    assert saved_of(after) == []  # nor saved as if it were known
    after.apply("b", message(removed(3)))
    after.stores.note_proven("b")
    assert after.stored(TOKENS) == [("s", 3, {"a", "b"})]
    assert len(saved_of(after)) == 1


def test_saved_store_is_forgotten_if_one_that_may_have_changed_it_is_another_one() -> None:
    before = SharedFleet()
    before.apply("a", message(stored(range(4))))
    for lost in ("b", None):
        after = begun_with(saved_of(before))
        after.stores.note_lost("c")  # it mounts nothing
        after.stores.note_lost(lost)
        after.stores.note_proven("a")
        after.stores.note_proven("b")
        assert after.stored(TOKENS) == []
        finished(after.stores.forgetting())
        after.apply("a", message(stored(range(2))))
        assert after.stored(TOKENS) == [("s", 2, {"a"})]
        after.index.check()


def test_store_that_is_told_of_by_another_process_needs_no_proof() -> None:
    before = SharedFleet()
    before.apply("a", message(stored(range(4))))
    after = begun_with(saved_of(before))
    after.stores.believe("s", "m")
    after.apply("a", message(stored(range(4))))
    assert after.stored(TOKENS) == [("s", 4, {"a"})]


@pytest.mark.parametrize(
    ("rules", "now", "why"),
    [
        (StoreRules("s", frozenset("a"), 100.0), 199.0, ""),
        (StoreRules("s", frozenset("a"), 100.0), 200.0, "it is too old"),
        (StoreRules("s", frozenset("a"), 100.0), -1.0, "it is too old"),
        (StoreRules("t", frozenset("a"), 100.0), 0.0, "it is not configured"),
        (StoreRules("s", frozenset("ab"), 100.0), 0.0, "it is configured differently"),
        (StoreRules("s", None, 100.0), 0.0, "it is configured differently"),
        (StoreRules("s", frozenset("a"), 99.0), 0.0, "it is configured differently"),
        (StoreRules("s", frozenset("a"), 100.0, frozenset({"CPU"})), 0.0, "it is configured diff"),
    ],
)
def test_store_of_another_configuration_is_refused(rules: StoreRules, now: float, why: str) -> None:
    before = SharedFleet(StoreRules("s", frozenset("a"), 100.0))
    before.apply("a", message(stored(range(4))))
    (saved,) = saved_of(before)
    assert saved.store.is_sound
    refused = SharedFleet(rules).stores.why_refused(saved.store, now)
    assert refused.startswith(why)
    assert bool(refused) == bool(why)


def test_store_that_publishes_events_itself_is_not_saved() -> None:
    fleet = SharedFleet()
    fleet.apply("a", message(stored(range(4))))
    assert not fleet.stores.is_pooled("s")
    fleet.stores.pool("s")
    assert fleet.stores.is_pooled("s")
    assert saved_of(fleet) == []


def test_saved_store_without_whole_rows_begins_with_nothing() -> None:
    before = SharedFleet()
    before.apply("a", message(stored(range(4))))
    (saved,) = saved_of(before)
    after = SharedFleet()
    assert not finished(after.stores.restoring(SavedStoreRows(saved.store, [])))
    after.apply("a", message(stored(range(2))))
    assert after.stored(TOKENS) == [("s", 2, {"a"})]


def test_ages_go_on_over_a_restart() -> None:
    rules = StoreRules("s", frozenset("a"), 100.0)
    before = SharedFleet(rules)
    before.apply("a", message(stored(range(4))))
    assert not list(before.stores.due(0.0))
    after = begun_with(saved_of(before, 50.0), rules)
    after.stores.note_proven("a")
    held = []
    for now in (90.0, 190.0, 205.0):  # the first age ended at 100, the second one ends at 200
        for due in after.stores.due(now):
            assert after.index.expire(due.owner, 1_000_000)
        held.append(sum(tokens for _, tokens, _ in after.stored(TOKENS)))
    assert held == [4, 4, 0]


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.booleans(), st.integers(0, 7), st.integers(1, 8)),
        max_size=12,
    ),
    st.integers(0, 12),
)
def test_restarted_router_knows_of_a_store_what_it_would_have_known(
    steps: list[tuple[str, bool, int, int]], restart: int
) -> None:
    whole, fleet = SharedFleet(), SharedFleet()
    for number, (name, stores, first, last) in enumerate(steps):
        if number == restart:
            fleet = begun_with(saved_of(fleet))
        said = message(stored(range(last)) if stores else removed(first))
        for one in (whole, fleet):
            one.apply(name, said)
    for name in "ab":
        fleet.stores.note_proven(name)
    told = [(store, tokens) for store, tokens, _ in fleet.stored(TOKENS)]
    assert told == [(store, tokens) for store, tokens, _ in whole.stored(TOKENS)]
    fleet.index.check()
