from array import array
from collections.abc import Mapping, Sequence
from random import Random

import pytest
from msgspec.structs import replace

from extproc.config.schema import Config, Model
from extproc.config.sections import Disaggregation
from extproc.disaggregation.disaggregator import Disaggregator
from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.decision import Decision
from extproc.routing.health.evidence import RULES, Judge
from extproc.routing.inputs.query import Query
from extproc.routing.ledger import REQUESTS_A_LOOK
from extproc.routing.load.endpoint_load import Ticket
from kvstate.overlap import Overlap, Prompt
from tests.extproc.routing.books import (
    QUERY,
    Fleet,
    books,
    decided,
    fleet_of,
)

Held = Sequence[Mapping[str, Overlap]]

SPLITTING = Disaggregation("header", min_uncached_tokens=100)


class Both:
    """The books of a router and its step after the pick, used as the router uses them."""

    def __init__(self, rules: Disaggregation) -> None:
        config = Config(models=(Model("m"),), disaggregation=rules)
        self.ledger = books(config, Fleet(config))
        self.fleet = fleet_of(self.ledger)
        self.loads = self.ledger.loads
        self.legs = Disaggregator(config, self.ledger, self.fleet.upstreams)

    def decide(self, query: Query, workers: list[Candidate], held: Held, now: float) -> Decision:
        snapshot = self.ledger.snapshot(PLAIN_REQUEST, query, workers, held, lambda _: "live", now)
        roles = self.fleet.has_roles
        return self.legs.decide(PLAIN_REQUEST, query, snapshot, now, Random(0), has_roles=roles)

    def book(self, decision: Decision, now: float) -> Ticket:
        ticket = self.legs.book(decision, now)
        assert ticket is not None
        return ticket

    def answered(self, ticket: Ticket, status: int, served: str, now: float) -> None:
        self.legs.note_answer(ticket, status, now)
        self.ledger.note_answer(ticket, status, served, now)

    def release(self, ticket: Ticket, now: float) -> None:
        self.legs.release(ticket, now)
        self.ledger.release(ticket, now)


def of_legs(loads: int = 8, now: float = 0.0) -> tuple[Both, Decision]:
    """Books, and a decision whose prompt `c` computes and `a` answers; `a` also answers others."""
    one = Both(SPLITTING)
    one.fleet.has_roles = True
    for _ in range(loads):
        one.loads.begin("a:1", 0.0, 0.0)
    return one, split(one, now)


def split(one: Both, now: float = 0.0, first: int = 0) -> Decision:
    """Decides on a prompt whose tokens count up from the first one."""
    query = Query("m", [Prompt("m", array("I", range(first, first + 1000)))])
    roles = {"a": "decode", "c": "prefill"}
    workers = [Candidate(name, f"{name}:1", role=role) for name, role in roles.items()]
    return one.decide(query, workers, [{}], now)


def test_book_counts_two_legs_on_their_workers_until_release() -> None:
    one, made = of_legs()
    ticket = one.book(made, 0.0)
    assert (one.loads.in_flight("a:1"), one.loads.in_flight("c:1")) == (9, 1)
    loads = [one.loads.load(f"{name}:1", 0.0).backlog_tokens for name in "ac"]
    assert loads == [0.0, 1000.0]
    assert set(decided(one.ledger).basis.claims) == {"a", "c"}
    one.release(ticket, 0.0)
    assert (one.loads.in_flight("a:1"), one.loads.in_flight("c:1")) == (8, 0)
    one.release(ticket, 0.0)
    assert one.loads.in_flight("a:1") == 8


def test_prefill_leg_is_no_load_after_its_expected_time() -> None:
    one, made = of_legs()
    first = one.book(made, 0.0)
    # 1,000 tokens should take 125 ms, and count as load for twice as long
    second = one.book(split(one, 0.2, 2000), 0.2)
    assert one.loads.in_flight("c:1") == 2
    third = one.book(split(one, 0.3, 4000), 0.3)
    assert one.loads.in_flight("c:1") == 2
    for ticket in (first, second, third):
        one.release(ticket, 0.4)
    assert (one.loads.in_flight("a:1"), one.loads.in_flight("c:1")) == (8, 0)


def test_failed_request_leaves_no_claim_on_either_worker() -> None:
    one, made = of_legs()
    ticket = one.book(made, 0.0)
    one.answered(ticket, 500, "a:1", 0.1)
    assert not decided(one.ledger, now=0.1).basis.claims


def test_disclaim_leaves_no_claim_on_the_prefill_worker() -> None:
    one, made = of_legs()
    ticket = one.book(made, 0.0)
    one.legs.disclaim(ticket)
    assert set(decided(one.ledger).basis.claims) == {"a"}


def test_prefill_leg_that_cannot_be_booked_leaves_no_load_and_no_claim() -> None:
    one, made = of_legs()
    assert made.prefill is not None
    nowhere = replace(made.prefill, pick=())
    assert made.split is not None
    with pytest.raises(IndexError):
        one.legs.book(replace(made, split=replace(made.split, prefill=nowhere)), 0.0)
    assert (one.loads.in_flight("a:1"), one.loads.in_flight("c:1")) == (8, 0)
    assert not decided(one.ledger).basis.claims


def test_decision_without_an_endpoint_books_no_leg() -> None:
    one, made = of_legs()
    assert one.legs.book(replace(made, pick=()), 0.0) is None


def test_prefill_worker_that_fails_with_every_partner_is_ejected() -> None:
    one, _ = of_legs()
    for _ in range(RULES[Judge.ANSWERS].failures):
        ticket = one.book(split(one), 0.0)
        one.answered(ticket, 500, "a:1", 0.0)
        one.release(ticket, 0.0)
        other = one.loads.begin("a:1", 0.0, 0.0)
        one.answered(other, 200, "a:1", 0.0)
    assert set(one.fleet.upstreams.ejections(0.1)) == {"c:1"}
    assert split(one, 0.1).prefill is None


def test_failure_is_counted_for_both_workers_of_a_request() -> None:
    one, _ = of_legs()
    for status in (500, 503, 200, 400):
        ticket = one.book(split(one), 0.0)
        one.answered(ticket, status, "a:1", 0.0)
        one.release(ticket, 0.0)
    one.answered(one.loads.begin("a:1", 0.0, 0.0), 500, "a:1", 0.0)  # not a split request
    counted = [one.fleet.upstream(f"{name}:1").failed_halves for name in "ac"]
    assert counted == [2, 2]


def test_wants_status_is_true_for_every_request_where_workers_have_roles() -> None:
    one, _ = of_legs()
    assert {one.ledger.wants_status() for _ in range(REQUESTS_A_LOOK)} == {True}


def test_prefill_worker_is_doubted_after_one_failure_until_a_success() -> None:
    one, made = of_legs()
    for status, is_doubted in ((200, False), (400, False), (500, True), (200, True)):
        ticket = one.book(made, 0.0)
        one.answered(ticket, status, "a:1", 0.0)
        assert one.fleet.upstream("c:1").is_doubted is is_doubted
        assert ("c:1" in one.fleet.upstreams.doubts()) is is_doubted
        one.release(ticket, 0.0)


def test_failure_of_a_removed_endpoint_is_not_counted() -> None:
    one, _ = of_legs()
    one.fleet.upstreams.note_failed_half("gone:1")
    assert one.fleet.upstreams.get("gone:1") is None


def test_source_names_a_fuller_worker_where_pulling_is_configured() -> None:
    rules = Disaggregation("header", "offloading", min_pulled_tokens=64)
    one = Both(rules)
    for _ in range(20):
        one.loads.begin("b:1", 0.0, 0.0)
    workers = [Candidate(name, f"{name}:1", transfer_port=5710) for name in "ab"]
    held = [{"b": Overlap(16, (20, 0, 0, 0))}]
    made = one.decide(QUERY, workers, held, 0.0)
    assert made.worker == "a"
    assert made.source is not None
    assert (made.source.endpoint, made.source.tokens) == ("b:1", 320)
