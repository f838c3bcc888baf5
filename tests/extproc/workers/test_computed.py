from array import array
from collections.abc import Mapping

import pytest

from extproc.config.schema import Worker as Configured
from extproc.discovery.view import Found, Member
from extproc.picking.load import Booking, Loads
from extproc.workers.asking import LOOKS_WHILE_IDLE, MAX_TOKENS_A_LOOK, Computed
from extproc.workers.record import Table
from kvstate.overlap import Overlap, Prompt

A, B = "10.0.0.1:80", "10.0.0.2:80"


class Fleet:
    """Two workers whose feeds announce computed prompts when a test says so."""

    def __init__(self) -> None:
        members = {name: Member(Found(Configured(name)), "workers") for name in (A, B)}
        self.table = Table(members)
        self.loads = Loads(self.table.upstreams.loads, 1_000.0, learns=True)
        self.held: list[tuple[str, Prompt, int]] = []
        self.batches = 0
        self.now = 0.0
        self.looked_up = 0
        self.computed = Computed(
            self.table, self.loads, self._overlaps, lambda _: self.batches, lambda: self.now
        )

    def _overlaps(self, prompt: Prompt) -> Mapping[str, Overlap]:
        self.looked_up += 1
        held = {worker: blocks for worker, one, blocks in self.held if one is prompt}
        return {worker: Overlap(16, (blocks, 0, 0, 0)) for worker, blocks in held.items()}

    def send(self, worker: str, tokens: int, *, is_sure: bool = True) -> Booking:
        prompt = Prompt("m", array("I", [0]) * tokens)
        return self.loads.begin(worker, tokens, self.now, prompt=prompt, is_sure=is_sure)

    def store(self, worker: str, booking: Booking, blocks: int) -> None:
        assert booking.prompt is not None
        self.held.append((worker, booking.prompt, blocks))
        self.batches += 1

    def look(self, now: float) -> None:
        self.now = now
        self.computed.look()


def test_a_prompt_is_computed_when_the_feed_tells_of_all_that_can_be_reused() -> None:
    fleet = Fleet()
    booking = fleet.send(A, 1_000)
    fleet.store(A, booking, 61)
    fleet.look(1.0)
    assert [booking.computed_at] == [None]
    fleet.store(A, booking, 62)
    fleet.look(2.03)
    assert booking.computed_at == 2.03
    assert fleet.loads.load(A, 2.03).slowness > 1.5
    assert fleet.loads.load(A, 2.03).backlog_tokens == 0.0
    assert fleet.loads.speed_shown(A)["confidence"] > 0.5
    assert fleet.loads.speed_shown(B)["confidence"] == 0.0


def test_nothing_is_looked_up_while_no_batch_comes() -> None:
    fleet = Fleet()
    booking = fleet.send(A, 1_000)
    fleet.store(A, booking, 1)
    for step in range(20):
        fleet.look(step / 20)
    assert fleet.looked_up == 2


def test_of_a_prompt_that_waits_for_a_shared_prefix_only_the_rest_is_its_work() -> None:
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


def test_a_prompt_that_is_never_computed_does_not_hide_those_behind_it() -> None:
    fleet = Fleet()
    fleet.send(A, 500)
    behind = fleet.send(A, 500)
    fleet.store(A, behind, 31)
    fleet.look(1.0)
    assert behind.computed_at == 1.0


def test_one_look_is_bounded_and_the_next_one_goes_on_where_it_ended() -> None:
    fleet = Fleet()
    long = [fleet.send(worker, MAX_TOKENS_A_LOOK) for worker in (A, B)]
    for worker, booking in zip((A, B), long, strict=True):
        fleet.store(worker, booking, MAX_TOKENS_A_LOOK // 16 - 1)
    fleet.look(1.0)
    assert [one.computed_at for one in long] == [1.0, None]
    fleet.look(1.05)
    assert [one.computed_at for one in long] == [1.0, 1.05]


def test_no_worker_waits_for_one_that_has_nothing_under_way_any_more() -> None:
    fleet = Fleet()
    long = [fleet.send(worker, MAX_TOKENS_A_LOOK) for worker in (A, B)]
    fleet.store(B, long[1], MAX_TOKENS_A_LOOK // 16 - 1)
    fleet.look(1.0)
    fleet.loads.end(long[1], 1.0)
    fleet.store(A, long[0], MAX_TOKENS_A_LOOK // 16 - 1)
    fleet.look(1.05)
    assert long[0].computed_at == 1.05


def test_what_is_late_makes_a_worker_slow_and_what_is_old_is_forgotten() -> None:
    fleet = Fleet()
    for turn in range(20):
        fleet.now = turn * 10.0
        booking = fleet.send(A, 1_000)
        fleet.store(A, booking, 62)
        fleet.look(fleet.now + 1.03)
    late = fleet.send(A, 1_000)
    for _ in range(20):
        fleet.look(fleet.now + 0.5)
    assert fleet.loads.load(A, fleet.now).slowness > 1.5
    fleet.loads.end(late, fleet.now)
    fleet.now += 3_600.0
    for _ in range(LOOKS_WHILE_IDLE):
        fleet.look(fleet.now)
    assert fleet.loads.speed_shown(A)["confidence"] == 0.0


def test_a_worker_without_an_address_is_left_out() -> None:
    fleet = Fleet()
    members = {"nowhere.example:80": Member(Found(Configured("nowhere.example:80")), "workers")}
    fleet.table.replace(members)
    for _ in range(LOOKS_WHILE_IDLE):
        fleet.look(1.0)
    assert fleet.looked_up == 0


@pytest.mark.parametrize("learns", [True, False])
def test_the_speed_counts_only_where_it_is_learned(*, learns: bool) -> None:
    fleet = Fleet()
    loads = fleet.loads if learns else Loads(fleet.table.upstreams.loads, 1_000.0)
    prompt = Prompt("m", array("I", [0]) * 2_000)
    booking = loads.begin(A, 2_000, 0.0, prompt=prompt)
    loads.computed(booking, 8.0)
    assert (loads.load(A, 8.0).slowness > 2) == learns
