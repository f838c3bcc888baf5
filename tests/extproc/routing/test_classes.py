"""Loads and decisions of requests with classes: lower classes do not stand in the way."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import Policy
from extproc.requests.request import NO_HEAD, RoutingRequest
from extproc.requests.request_class import RequestClass
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.decide import decide
from extproc.routing.decision import Decision, Verdict
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.limits import OVER_CLASS_LIMIT
from extproc.routing.load.endpoint_load import EndpointLoad, Ticket
from extproc.routing.load.loads import Loads

HERE, THERE = "10.0.0.1:1", "10.0.0.2:1"
WORKERS = [Candidate("a", HERE), Candidate("b", THERE)]
PEOPLE, BATCH = RequestClass("people", 0, 0, None), RequestClass("batch", 1, 10, 2)


class Fleet:
    """The loads of two workers."""

    def __init__(self, **rules: object) -> None:
        self.endpoints = {HERE: EndpointLoad(), THERE: EndpointLoad()}
        self.loads = Loads(self.endpoints)
        self._rules = Policy(**rules)  # type: ignore[arg-type]

    def begin(self, at: str, one: RequestClass | None, tokens: float = 1_000.0) -> Ticket:
        return self.loads.begin(at, tokens, 0.0, level=None if one is None else one.level)

    def place(self, one: RequestClass, sample: int = 0, seed: int = 0) -> Decision:
        def load(endpoint: str, now: float) -> object:
            return self.loads.load_of_level(one.level, endpoint, now)

        request = RoutingRequest(NO_HEAD, None, of_class=one)
        snapshot = Snapshot(WORKERS, [], load, "cost", 0, self._rules, sample=sample)  # type: ignore[arg-type]
        return decide(request, Query("m"), snapshot, 0.0, Random(seed))


def test_queue_of_lower_classes_does_not_count() -> None:
    fleet = Fleet()
    for _ in range(3):
        fleet.begin(HERE, BATCH)
    fleet.begin(HERE, PEOPLE, 500.0)
    people, batch = (fleet.loads.load_of_level(level, HERE, 0.0) for level in (0, 1))
    assert people.backlog_tokens == pytest.approx(500.0)
    assert batch.backlog_tokens == pytest.approx(3_500.0)
    assert (people.below, people.peers, batch.below, batch.peers) == (3, 1, 0, 3)
    assert people.in_flight == batch.in_flight == 4


def test_requests_without_classes_count_for_all() -> None:
    fleet = Fleet()
    fleet.begin(HERE, None)
    assert fleet.loads.load_of_level(0, HERE, 0.0) == fleet.loads.load(HERE, 0.0)
    assert fleet.loads.load_of_level(0, "10.0.0.9:1", 0.0).in_flight == 0


@given(st.lists(st.tuples(st.sampled_from([HERE, THERE]), st.booleans(), st.integers(0, 5))))
def test_levels_add_up_to_the_requests_in_flight(orders: list[tuple[str, bool, int]]) -> None:
    fleet, running = Fleet(), list[Ticket]()
    for at, is_batch, end in orders:
        running.append(fleet.begin(at, BATCH if is_batch else PEOPLE, 100.0 * end))
        if end == 1:
            fleet.loads.note_computed(running[-1], 0.0)
        if end == 2:
            fleet.loads.move(running[-1], THERE, 0.0)
        if end > 2:
            fleet.loads.end(running.pop(end % len(running)), 0.0)
        for state in fleet.endpoints.values():
            levels = state.levels.values()
            assert sum(one.requests for one in levels) == len(state.tickets)
            booked = state.numbers.booked_tokens
            assert state.numbers.in_flight == len(state.tickets)
            assert sum(one.queued_tokens for one in levels) == pytest.approx(booked)


def test_class_goes_where_its_own_queue_is_the_shortest() -> None:
    fleet = Fleet()
    fleet.begin(HERE, BATCH, 9_000.0)
    fleet.begin(THERE, PEOPLE, 4_000.0)
    assert fleet.place(PEOPLE).pick[0] == HERE
    assert fleet.place(BATCH).pick[0] == THERE


@pytest.mark.parametrize("sample", [0, 1])
def test_class_over_its_limit_is_shed_and_the_others_are_not(sample: int) -> None:
    fleet = Fleet()
    for at in (HERE, HERE, THERE):
        fleet.begin(at, BATCH)
    for seed in range(8):
        decision = fleet.place(BATCH, sample, seed)
        assert decision.pick == (THERE,)
        assert sample or OVER_CLASS_LIMIT in decision.basis.excluded
    fleet.begin(THERE, BATCH)
    assert fleet.place(BATCH, sample).verdict is Verdict.SHED
    assert fleet.place(PEOPLE).verdict is Verdict.STEER


def test_limit_of_a_worker_sheds_the_lowest_class_first() -> None:
    fleet = Fleet(max_in_flight=2, shed=True)
    free = BATCH._replace(max_in_flight=None)
    for at in (HERE, THERE):
        fleet.begin(at, PEOPLE)
        fleet.begin(at, free)
    assert fleet.place(free).verdict is Verdict.SHED
    assert fleet.place(PEOPLE).verdict is Verdict.STEER
    for at in (HERE, THERE):
        fleet.begin(at, PEOPLE)
    assert fleet.place(PEOPLE).verdict is Verdict.SHED
