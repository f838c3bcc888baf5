from array import array
from collections.abc import Iterator, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.claims.claim_table import ClaimTable, Holdings
from extproc.routing.claims.homes import Homes
from extproc.routing.cost.room import CONVERSATIONS
from extproc.routing.decide import decide
from extproc.routing.decision import Decision
from extproc.routing.explain import reason_sentence
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from extproc.routing.savings.belonging import NOWHERE
from kvstate.overlap import Overlap, Prompt
from tests.oracles.routing.load_columns import evicted_from

WORKERS = [Candidate(name, f"{name}:1") for name in "abc"]
CAPACITY = 40_000
SYSTEM = range(4_000)


class Fleet:
    """Three equal workers whose caches hold what was sent there, and never evict."""

    def __init__(self, capacity: int | None = CAPACITY) -> None:
        self.homes, self.claims, self.now, self.seed = Homes(1), ClaimTable(1), 0.0, 0
        self.holdings = {one.name: Holdings(one.name) for one in WORKERS}
        for each in self.holdings.values():
            each.capacity_tokens = capacity
        self.sent: dict[str, list[Sequence[int]]] = {one.name: [] for one in WORKERS}

    def live(self, name: str) -> tuple[float, float]:
        """How many conversations live on a worker, and the tokens of their contexts."""
        one = self.holdings[name].contexts
        one.expire(self.now)
        return one.once + one.returned, one.own_once + one.own_returned + one.shared

    def decide(self, tokens: Sequence[int], **known: object) -> Decision:
        held = {
            name: Overlap(1, (most, 0, 0, 0))
            for name, sent in self.sent.items()
            if (most := max([_common(tokens, one) for one in sent], default=0))
        }
        here = Snapshot(
            WORKERS, [held], lambda _, __: Load(), "cost", 0,
            claims=self.claims, homes=self.homes, records=list(self.holdings.values()),
        )  # fmt: skip
        query = Query("m", [Prompt("m", array("I", tokens))])
        return decide(PLAIN_REQUEST, query, replace(here, **known), self.now, Random(self.seed))

    def send(self, tokens: Sequence[int], worker: str = "", **known: object) -> str:
        """Sends a request where it is decided, or to a worker; returns where."""
        made = self.decide(tokens, **known)
        worker = worker or made.worker
        self.homes.turn(made.basis.belonging.turn, self.holdings[worker], self.now)
        claim = self.claims.record(self.holdings[worker], made.marks[0], self.now)
        self.claims.end(claim, self.now)
        self.sent[worker].append(tokens)
        self.now += 2.0
        return worker


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        count += 1
    return count


def conversation(number: int, own: int, turns: int = 1) -> Iterator[Sequence[int]]:
    """The prompts of a conversation that begins with the common system, each with more tokens."""
    for turn in range(turns):
        yield [*SYSTEM, *range(100_000 * number, 100_000 * number + own * (turn + 1))]


@given(st.integers(0, 99_999), st.integers(0, 99_999), st.integers(1, 50_000))
def test_evicted_tokens_grow_with_what_is_there_and_are_at_most_those_added(
    occupied: int, more: int, capacity: int
) -> None:
    found = evicted_from(occupied, more, capacity)
    assert 0.0 <= found <= more * (1 + 1e-9) + 1e-6
    assert evicted_from(occupied + 10, more, capacity) >= found - 1e-6
    if occupied >= capacity:
        assert found == pytest.approx(more)


def test_conversations_with_one_system_are_spread_over_idle_workers() -> None:
    fleet = Fleet()
    placed = [fleet.send(next(conversation(n, 300))) for n in range(1, 9)]
    assert min(map(placed.count, "abc")) >= 2


def test_conversations_are_spread_where_the_size_of_caches_is_not_known() -> None:
    fleet = Fleet(None)
    placed = [fleet.send(next(conversation(n, 300))) for n in range(1, 9)]
    assert min(map(placed.count, "abc")) >= 2


def test_conversation_begins_where_live_contexts_leave_room() -> None:
    fleet = Fleet()
    for number, (worker, own) in enumerate((("a", 20_000), ("b", 15_000), ("c", 1_000)), 1):
        fleet.send(next(conversation(number, own)), worker)
        fleet.send(list(conversation(number, own, 2))[1], worker)
    assert fleet.send(next(conversation(9, 3_000))) == "c"


@pytest.mark.parametrize("slowness", [0.06, 0.3, 3.0])
def test_worker_that_seems_fast_or_slow_does_not_turn_all_conversations(slowness: float) -> None:
    fleet = Fleet()
    loads = {"a:1": Load(slowness=slowness)}
    placed = [
        fleet.send(next(conversation(n, 300)), load=lambda name, _: loads.get(name, Load()))
        for n in range(1, 19)
    ]
    counts = [placed.count(name) for name in "abc"]
    assert min(counts) >= 3
    assert max(counts) <= 9


def test_conversation_that_another_worker_holds_as_well_stays_at_home() -> None:
    for home, other in ("ab", "ba", "ca"):
        fleet = Fleet()
        first, second = conversation(1, 3_000, 2)
        fleet.send(first, other)
        fleet.send(first, home)
        for fleet.seed in range(8):
            assert fleet.decide(second).worker == home


def test_conversation_that_lost_its_cache_is_placed_as_one_that_begins() -> None:
    fleet = Fleet()
    first, second = conversation(1, 3_000, 2)
    fleet.send(first, "a")
    for number in range(2, 5):
        fleet.send(next(conversation(number, 9_000)), "a")
    fleet.sent["a"].clear()
    made = fleet.decide(second)
    assert made.basis.belonging.begins
    assert (made.basis.belonging.home, made.worker != "a") == ("a", True)
    assert "its conversation was last at a:1, which no longer holds most" in reason_sentence(made)


def test_conversation_that_is_held_stays_where_it_is_after_a_restart() -> None:
    fleet = Fleet()
    first, second = conversation(1, 3_000, 2)
    fleet.send(first, "a")
    after = Fleet()
    after.sent = fleet.sent
    for number in range(2, 5):
        after.send(next(conversation(number, 300)), "a")
    made = after.decide(second)
    assert (made.worker, made.basis.belonging.begins) == ("a", False)


def test_held_conversation_is_moved_only_for_more_than_a_move_costs() -> None:
    fleet = Fleet()
    first, second = conversation(1, 3_000, 2)
    fleet.send(first, "a")

    def busy(tokens: float) -> Decision:
        return fleet.decide(second, load=lambda name, _: Load(0, tokens if name == "a:1" else 0.0))

    held = busy(0.0)
    assert (held.worker, held.basis.charges) == ("a", {})
    costs = [cost for cost in held.basis.costs if cost is not None]
    dearer = min(costs[1:]) - costs[0]
    assert busy(dearer + 900.0).worker == "a"
    assert CONVERSATIONS in busy(dearer + 900.0).basis.charges
    assert busy(2 * dearer + 20_000.0).worker != "a"


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from("abc")), max_size=20))
def test_occupancy_is_the_own_tokens_of_each_conversation_where_it_was_last(
    turns: list[tuple[int, str]],
) -> None:
    fleet, last = Fleet(), dict[int, tuple[str, int]]()
    prompts = {number: conversation(number, 500, 20) for number in range(1, 5)}
    for number, worker in turns:
        fleet.send(next(prompts[number]), worker)
        last[number] = worker, last.get(number, ("", 0))[1] + 500
    for name in "abc":
        own = sum(tokens for worker, tokens in last.values() if worker == name)
        count, tokens = fleet.live(name)
        assert count == sum(worker == name for worker, _ in last.values())
        assert own <= tokens <= own + 2 * len(SYSTEM)


@given(st.integers(1, 6))
def test_sub_agents_that_go_on_from_one_prompt_count_it_once_beside_the_first(count: int) -> None:
    fleet = Fleet()
    first, second = conversation(1, 8_000, 2)
    fleet.send(first, "a")
    fleet.send(second, "a")
    for number in range(count):
        fork = [*second, *range(800_000 + 1_000 * number, 800_300 + 1_000 * number)]
        assert not fleet.decide(fork).basis.belonging.begins
        fleet.send(fork, "a")
        again = [*fork, *range(900_000 + 1_000 * number, 900_020 + 1_000 * number)]
        assert not fleet.decide(again).basis.belonging.begins
    conversations, tokens = fleet.live("a")
    assert conversations == count
    assert len(second) <= tokens <= 2 * len(second) + 300 * count


def test_prompt_that_is_too_short_to_be_found_again_belongs_nowhere() -> None:
    made = Fleet().decide(range(20))
    assert (made.basis.belonging, made.basis.charges) == (NOWHERE, {})
