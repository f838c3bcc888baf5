from array import array
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import WorkerSettings as Configured
from extproc.fleet.discovery.view import FleetMember, Sighting
from extproc.fleet.load.computed import LOOKS_WHILE_IDLE, MAX_AHEAD, MAX_TOKENS_A_LOOK, Computed
from extproc.fleet.records.table import Table
from extproc.routing.load.endpoint_load import Ticket
from extproc.routing.load.loads import Loads
from kvstate.overlap import Overlap, Prompt

A, B = "10.0.0.1:80", "10.0.0.2:80"
BROKEN = "an adapter whose prompts cannot be looked up"


class Fleet:
    """Two workers whose feeds announce computed prompts when a test says so."""

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size
        members = {name: FleetMember(Sighting(Configured(name)), "workers") for name in (A, B)}
        self.table = Table(members)
        self.loads = Loads(self.table.upstreams.loads, 1_000.0, learns=True)
        self.held: list[tuple[str, Prompt, int]] = []
        self.batches = 0
        self.now = 0.0
        self.looked_up = 0
        self.computed = Computed(
            self.table,
            self.loads,
            self._overlaps,
            lambda _: self.batches,
            lambda _: self.block_size,
            lambda: self.now,
        )

    def _overlaps(self, prompt: Prompt) -> Mapping[str, Overlap]:
        self.looked_up += 1
        if prompt.lora == BROKEN:
            raise ValueError(BROKEN)
        held = {worker: count for worker, one, count in self.held if one is prompt}
        return {
            worker: Overlap(self.block_size, (blocks, 0, 0, 0)) for worker, blocks in held.items()
        }

    def send(
        self, worker: str, tokens: int, *, is_sure: bool = True, lora: str | None = None
    ) -> Ticket:
        prompt = Prompt("m", array("I", [0]) * tokens, lora)
        return self.loads.begin(worker, tokens, self.now, prompt=prompt, is_sure=is_sure)

    def store(self, worker: str, ticket: Ticket, blocks: int) -> None:
        assert ticket.prompt is not None
        self.held.append((worker, ticket.prompt, blocks))
        self.batches += 1

    def look(self, now: float) -> None:
        self.now = now
        self.computed.check.run()


def test_look_finds_a_prompt_once_all_reusable_blocks_are_stored() -> None:
    fleet = Fleet()
    ticket = fleet.send(A, 1_000)
    fleet.store(A, ticket, 61)
    fleet.look(1.0)
    assert [ticket.computed_at] == [None]
    fleet.store(A, ticket, 62)
    fleet.look(2.03)
    assert ticket.computed_at == 2.03
    assert fleet.loads.load(A, 2.03).slowness > 1.5
    assert fleet.loads.load(A, 2.03).backlog_tokens == 0.0
    assert fleet.loads.speed_as_json(A)["confidence"] > 0.5
    assert fleet.loads.speed_as_json(B)["confidence"] == 0.0


def test_look_skips_workers_without_a_new_batch() -> None:
    fleet = Fleet()
    ticket = fleet.send(A, 1_000)
    fleet.store(A, ticket, 1)
    for step in range(20):
        fleet.look(step / 20)
    assert fleet.looked_up == 2


def test_look_counts_only_the_uncached_rest_of_a_prompt_behind_a_shared_prefix() -> None:
    fleet = Fleet()
    first = fleet.send(A, 1_000)
    second = fleet.send(A, 1_008, is_sure=False)
    fleet.store(A, first, 62)
    fleet.store(A, second, 61)  # only the prefix
    fleet.look(1.03)
    assert first.computed_at == 1.03
    assert second.computed_at is None
    assert second.is_sure
    assert [work for work, _ in second.load.speed.waiting.values()] == [0.032]


def test_look_finds_a_prompt_behind_one_that_is_never_computed() -> None:
    fleet = Fleet()
    fleet.send(A, 500)
    behind = fleet.send(A, 500)
    fleet.store(A, behind, 31)
    fleet.look(1.0)
    assert behind.computed_at == 1.0


@given(st.integers(0, 10 * MAX_AHEAD))
def test_look_finds_a_prompt_behind_any_number_of_unannounced_ones(ahead: int) -> None:
    fleet = Fleet()
    for _ in range(ahead):
        fleet.send(A, 500)
    behind = fleet.send(A, 500)
    fleet.store(A, behind, 31)
    for look in range(max(1, ahead)):  # each looks at one more of those behind the first
        fleet.batches += 1  # the worker goes on to announce other prompts
        fleet.look(1.0 + look / 20)
    assert behind.computed_at is not None
    assert not behind.load.speed.waiting


@pytest.mark.parametrize("broken", [A, B])
def test_look_continues_with_other_workers_after_a_failure(broken: str) -> None:
    fleet, sound = Fleet(), B if broken == A else A
    fleet.send(broken, 1_000, lora=BROKEN)
    ticket = fleet.send(sound, 1_000)
    fleet.store(sound, ticket, 62)
    fleet.look(1.0)
    assert ticket.computed_at == 1.0


@given(
    block_size=st.sampled_from([64, 528, 1_024, 2_096]),
    share=st.floats(0.1, 1.0),
    seconds=st.floats(0.5, 60.0),
    count=st.integers(1, 5),
)
def test_look_does_not_take_prompts_shorter_than_a_block_for_late(
    block_size: int, share: float, seconds: float, count: int
) -> None:
    fleet = Fleet(block_size)
    for turn in range(20):
        fleet.now = turn * 10.0
        ticket = fleet.send(A, 10 * block_size + 1)
        fleet.store(A, ticket, 10)
        fleet.look(fleet.now + 10 * block_size / 1_000 + 0.03)
        fleet.loads.end(ticket, fleet.now + 1)
    before = fleet.loads.speed_as_json(A)["used_tokens_per_second"]
    fleet.now = 300.0
    for _ in range(count):
        fleet.send(A, max(1, round(share * block_size)))
    fleet.batches += 1
    for step in range(20):
        fleet.look(300.0 + step * seconds / 20)
        shown = fleet.loads.speed_as_json(A)["used_tokens_per_second"]
        assert shown == pytest.approx(before, rel=0.05)


def test_look_is_bounded_and_continues_where_the_last_one_ended() -> None:
    fleet = Fleet()
    long = [fleet.send(worker, MAX_TOKENS_A_LOOK) for worker in (A, B)]
    for worker, ticket in zip((A, B), long, strict=True):
        fleet.store(worker, ticket, MAX_TOKENS_A_LOOK // 16 - 1)
    fleet.look(1.0)
    assert [one.computed_at for one in long] == [1.0, None]
    fleet.look(1.05)
    assert [one.computed_at for one in long] == [1.0, 1.05]


def test_look_skips_a_worker_whose_requests_have_ended() -> None:
    fleet = Fleet()
    long = [fleet.send(worker, MAX_TOKENS_A_LOOK) for worker in (A, B)]
    fleet.store(B, long[1], MAX_TOKENS_A_LOOK // 16 - 1)
    fleet.look(1.0)
    fleet.loads.end(long[1], 1.0)
    fleet.store(A, long[0], MAX_TOKENS_A_LOOK // 16 - 1)
    fleet.look(1.05)
    assert long[0].computed_at == 1.05


def test_look_slows_a_worker_for_late_prompts_and_forgets_old_ones() -> None:
    fleet = Fleet()
    for turn in range(20):
        fleet.now = turn * 10.0
        ticket = fleet.send(A, 1_000)
        fleet.store(A, ticket, 62)
        fleet.look(fleet.now + 1.03)
    late = fleet.send(A, 1_000)
    for _ in range(20):
        fleet.look(fleet.now + 0.5)
    assert fleet.loads.load(A, fleet.now).slowness > 1.5
    fleet.loads.end(late, fleet.now)
    fleet.now += 3_600.0
    for _ in range(LOOKS_WHILE_IDLE):
        fleet.look(fleet.now)
    assert fleet.loads.speed_as_json(A)["confidence"] == 0.0


def test_look_skips_a_worker_without_an_address() -> None:
    fleet = Fleet()
    members = {
        "nowhere.example:80": FleetMember(Sighting(Configured("nowhere.example:80")), "workers")
    }
    fleet.table.replace(members)
    for _ in range(LOOKS_WHILE_IDLE):
        fleet.look(1.0)
    assert fleet.looked_up == 0


@pytest.mark.parametrize("learns", [True, False])
def test_speed_counts_only_where_it_is_learned(*, learns: bool) -> None:
    fleet = Fleet()
    loads = fleet.loads if learns else Loads(fleet.table.upstreams.loads, 1_000.0)
    prompt = Prompt("m", array("I", [0]) * 2_000)
    ticket = loads.begin(A, 2_000, 0.0, prompt=prompt)
    loads.note_computed(ticket, 8.0)
    assert (loads.load(A, 8.0).slowness > 2) == learns
