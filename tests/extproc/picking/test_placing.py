from array import array
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from extproc.config.schema import Config, Cost, Model, Policy
from extproc.config.sections import Disaggregation
from extproc.picking.decision import Decision, Query
from extproc.picking.eligibility import Candidate
from extproc.picking.load import Loads
from extproc.picking.placing import REQUESTS_A_LOOK, Placing
from extproc.picking.sent import Claim, Holdings, Sent
from extproc.picking.upstreams import (
    FAILURES_UNTIL_LEFT_OUT,
    LEFT_OUT_SECONDS,
    Judge,
    Upstream,
    Upstreams,
)
from kvstate.overlap import Overlap, Prompt

WORKERS = [Candidate(name, f"{name}:1") for name in "abc"]
QUERY = Query("m", [Prompt("m", array("I", range(1000)))])


class Fleet:
    """Three workers, and what picks depend on."""

    def __init__(self, config: Config, ranks: int = 0, *, names_ranks: bool = False) -> None:
        self.upstreams = Upstreams()
        for worker in WORKERS:
            self.upstreams.enter(worker.endpoint)
        rate = config.policy.cost.prefill_tokens_per_second
        self.loads = Loads(self.upstreams.loads, rate)
        self.names_ranks = names_ranks
        self.has_roles = False
        self.drained: set[str] = set()
        self._ranks = ranks
        self._holdings = {worker.name: Holdings(worker.name) for worker in WORKERS}

    def draining(self) -> set[str]:
        return self.drained

    def holdings(self, name: str) -> Holdings:
        return self._holdings[name]

    def block_size(self, _: str) -> int:
        return 1

    def ranks(self, _: str) -> int:
        return self._ranks

    def upstream(self, endpoint: str) -> Upstream:
        found = self.upstreams.get(endpoint)
        assert found is not None
        return found

    def eject(self, endpoint: str, judge: Judge, reason: str) -> None:
        self.upstreams.eject(self.upstream(endpoint), judge, reason)


class Told:
    """Records what other routers would be told."""

    secret = 77

    def __init__(self) -> None:
        self.touched: set[str] = set()
        self.lines: list[tuple[str, object]] = []

    def begun(self, claims: Sequence[Claim], endpoint: str, uncached_tokens: float) -> None:
        self.lines.append((f"begun at {endpoint} with {uncached_tokens:.0f}", list(claims)))

    def ended(self, claim: Claim) -> None:
        self.lines.append(("ended", claim))

    def withdrawn(self, claim: Claim) -> None:
        self.lines.append(("withdrawn", claim))


def books(config: Config, fleet: Fleet, telling: "Told | None" = None) -> Placing:
    """A router's books for these workers."""
    return Placing(config, 1, fleet, telling)


def fleet_of(one: Placing) -> Fleet:
    fleet = one._fleet
    assert isinstance(fleet, Fleet)
    return fleet


def placing(**policy: Any) -> Placing:
    config = Config(models=(Model("m"),), policy=Policy(**policy))
    return books(config, Fleet(config))


def decided(one: Placing, query: Query = QUERY, now: float = 0.0, state: str = "live") -> Decision:
    return one.decide(query, WORKERS, [{} for _ in query.prompts], lambda _: state, now, Random(0))


def test_deciding_books_nothing() -> None:
    one = placing()
    decided(one)
    assert (one.loads.in_flight("a:1"), len(one.sent)) == (0, 0)


def test_a_booked_request_is_in_flight_and_its_prompt_expected_until_it_is_released() -> None:
    one = placing()
    made = decided(one)
    booking = one.book(made, 0.0)
    assert booking is not None
    assert one.loads.in_flight(made.pick[0]) == 1
    assert decided(one).claims[made.worker].speculative == 960
    one.release(booking, 1.0)
    one.release(booking, 1.0)
    assert one.loads.in_flight(made.pick[0]) == 0
    assert not decided(one, now=3.0).claims
    assert decided(one, now=3.0, state="stale").claims[made.worker].approximate == 960


def test_how_long_prompts_are_expected_is_configured() -> None:
    one = placing(speculative_ms=500, approximate_ms=2_000)
    one.book(decided(one), 0.0)
    assert decided(one, now=0.4).claims
    assert not decided(one, now=0.6).claims
    assert decided(one, now=1.9, state="stale").claims
    assert not decided(one, now=2.1, state="stale").claims


def test_a_decision_without_a_pick_is_not_booked() -> None:
    one = placing()
    made = one.decide(QUERY, [], [{}], lambda _: "live", 0.0, Random(0))
    assert one.book(made, 0.0) is None


def test_a_request_without_a_prompt_claims_nothing() -> None:
    one = placing()
    booking = one.book(decided(one, Query("m", reason="no_body")), 0.0)
    assert booking is not None
    one.release(booking, 0.0)
    assert len(one.sent) == 0


def test_load_and_claims_move_where_the_request_was_served() -> None:
    one = placing()
    made = decided(one)
    booking = one.book(made, 0.0)
    assert booking is not None
    other = next(worker for worker in WORKERS if worker.name != made.worker)
    one.move(booking, other.name, other.endpoint, 0.0)
    assert set(decided(one).claims) == {other.name}
    assert (one.loads.in_flight(made.pick[0]), one.loads.in_flight(other.endpoint)) == (0, 1)
    one.release(booking, 0.0)
    assert one.loads.in_flight(other.endpoint) == 0


def test_turns_go_round() -> None:
    one = placing(name="round_robin")
    picks = []
    for _ in range(4):
        made = decided(one)
        one.book(made, 0.0)
        picks.append(made.worker)
    assert picks == ["a", "b", "c", "a"]


def test_what_is_unfit_is_left_out() -> None:
    one = placing()
    fleet_of(one).eject("a:1", Judge.SCRAPES, "does not answer")
    assert set(decided(one).pick) == {"b:1", "c:1"}


def test_who_speaks_against_an_endpoint_is_asked_apart() -> None:
    one = placing()
    fleet_of(one).eject("a:1", Judge.SCRAPES, "does not answer")
    fleet_of(one).eject("b:1", Judge.PROBE, "is not well")
    fleet_of(one).drained.add("c:1")
    assert set(decided(one).pick) == {"a:1", "b:1"}  # they may be dead, but no others are left
    fleet_of(one).drained.clear()
    made = decided(one)
    assert (list(made.excluded), made.pick) == (["does not answer", "is not well", ""], ("c:1",))
    fleet_of(one).eject("c:1", Judge.DOUBTS, "is dead")
    fleet_of(one).upstreams.restore(fleet_of(one).upstream("a:1"), Judge.SCRAPES)
    made = decided(one)
    assert (list(made.excluded), made.pick) == (["", "is not well", "is dead"], ("a:1",))
    assert [fleet_of(one).upstreams.reason(f"{name}:1", 0.0) for name in "abc"] == [
        "",
        "is not well",
        "is dead",
    ]


def test_a_draining_worker_keeps_what_it_has() -> None:
    one = placing()
    made = decided(one)
    booking = one.book(made, 0.0)
    assert booking is not None
    fleet_of(one).drained.add(made.pick[0])
    assert one.loads.in_flight(made.pick[0]) == 1
    assert made.pick[0] not in decided(one).pick
    one.release(booking, 1.0)
    fleet_of(one).drained.discard(made.pick[0])
    assert made.pick[0] in decided(one).pick


def test_a_worker_that_is_gone_leaves_nothing() -> None:
    one = placing()
    made = decided(one)
    booking = one.book(made, 0.0)
    assert booking is not None
    upstreams, gone = fleet_of(one).upstreams, fleet_of(one).upstream(made.pick[0])
    for judge in Judge:
        upstreams.eject(gone, judge, "away")
    upstreams.doubt(made.pick[0], is_doubted=True)
    upstreams.leave(gone)
    fleet_of(one).holdings(made.worker).lose()
    assert (one.loads.in_flight(made.pick[0]), decided(one).claims) == (0, {})
    assert (upstreams.ejected(0.0), upstreams.has_suspects) == ({}, False)
    one.release(booking, 1.0)


@pytest.mark.parametrize("endpoint", ["picked", "other"])
def test_a_request_that_is_over_or_where_it_should_be_does_not_move(endpoint: str) -> None:
    one = placing()
    made = decided(one)
    booking = one.book(made, 0.0)
    assert booking is not None
    other = next(worker for worker in WORKERS if worker.name != made.worker)
    if endpoint == "picked":
        one.move(booking, made.worker, made.pick[0], 5.0)
        assert booking.began_at == 0.0
        assert decided(one).claims[made.worker].speculative == 960
    one.release(booking, 5.0)
    one.move(booking, other.name, other.endpoint, 5.0)
    assert {one.loads.in_flight(worker.endpoint) for worker in WORKERS} == {0}


def test_a_request_that_its_worker_refused_claims_nothing_and_is_in_flight_until_released() -> None:
    one = placing()
    made = decided(one)
    booking = one.book(made, 0.0)
    assert booking is not None
    assert one.answered(booking, 400, "", 0.0) is None
    assert (one.loads.in_flight(made.pick[0]), decided(one).claims) == (1, {})
    one.release(booking, 1.0)
    assert one.loads.in_flight(made.pick[0]) == 0


@pytest.mark.parametrize(("served", "picks"), [("", 2), ("a:1", 2), ("10.9.9.9:9", 3)])
def test_a_worker_that_fails_again_and_again_is_left_out_for_a_while(
    served: str, picks: int
) -> None:
    one = placing(max_in_flight=100)
    made = one.decide(QUERY, WORKERS[:1], [{}], lambda _: "live", 0.0, Random(0))
    for _ in range(FAILURES_UNTIL_LEFT_OUT):
        booking = one.book(made, 0.0)
        assert booking is not None
        one.answered(booking, 503, served, 0.0)
    assert len(decided(one).pick) == picks
    assert bool(fleet_of(one).upstreams.reason("a:1", 0.0)) is (picks == 2)
    assert not fleet_of(one).upstreams.reason("a:1", LEFT_OUT_SECONDS)
    assert len(decided(one, now=LEFT_OUT_SECONDS).pick) == 3
    fleet_of(one).upstreams.leave(fleet_of(one).upstream("a:1"))
    assert len(decided(one).pick) == 3


def test_a_request_that_its_worker_answers_keeps_its_claim() -> None:
    one = placing()
    made = decided(one)
    booking = one.book(made, 0.0)
    assert booking is not None
    fleet_of(one).upstreams.doubt(made.pick[0], is_doubted=True)
    assert fleet_of(one).upstreams.is_suspect(made.pick[0])
    one.answered(booking, 200, made.pick[0], 0.0)
    assert not fleet_of(one).upstreams.is_suspect(made.pick[0])
    assert decided(one).claims[made.worker].speculative == 960


def test_requests_name_the_rank_that_holds_their_prompt_where_they_may() -> None:
    held = {"b": Overlap(16, (60, 0, 0, 0), rank=1)}
    ranks = []
    for may_name in (False, True):
        config = Config(models=(Model("m"),))
        one = books(config, Fleet(config, 2, names_ranks=may_name))
        made = one.decide(QUERY, WORKERS, [held], lambda _: "live", 0.0, Random(0))
        booking = one.book(made, 0.0)
        assert booking is not None
        assert (made.worker, made.rank) == ("b", booking.rank)
        ranks.append(made.rank)
    assert ranks == [None, 1]


@pytest.mark.parametrize(("rate", "backlog"), [(100, 900), (8_000, 0)])
def test_how_fast_workers_compute_is_configured(rate: int, backlog: int) -> None:
    one = placing(cost=Cost(prefill_tokens_per_second=rate))
    made = decided(one)
    one.book(made, 0.0)
    assert one.loads.load(made.pick[0], 1.0).backlog_tokens == backlog


def test_one_response_in_a_few_is_looked_at_and_each_while_one_fails() -> None:
    one = placing()
    looks = [one.wants_status() for _ in range(2 * REQUESTS_A_LOOK)]
    assert [at for at, is_wanted in enumerate(looks) if is_wanted] == [
        REQUESTS_A_LOOK - 1,
        2 * REQUESTS_A_LOOK - 1,
    ]
    fleet_of(one).upstreams.answered("a:1", 503, 0.0)
    assert all(one.wants_status() for _ in range(REQUESTS_A_LOOK))
    fleet_of(one).upstreams.answered("a:1", 200, 0.0)
    assert not one.wants_status()


def shared() -> tuple[Placing, Told]:
    config, told = Config(models=(Model("m"),)), Told()
    return books(config, Fleet(config), told), told


def test_routers_that_share_mark_prompts_alike() -> None:
    one, told = shared()
    assert one.sent.marks(QUERY.prompts[0]) == Sent(told.secret).marks(QUERY.prompts[0])


def test_other_routers_are_told_of_a_request_from_its_pick_to_its_end() -> None:
    one, told = shared()
    decision = decided(one)
    booking = one.book(decision, 0.0)
    assert booking is not None
    ((words, claims),) = told.lines
    assert words == f"begun at {decision.pick[0]} with 1000"
    one.release(booking, 1.0)
    one.release(booking, 1.0)
    assert told.lines[1:] == [("ended", claim) for claim in claims]  # type: ignore[attr-defined]


def test_other_routers_are_told_where_a_request_went_instead_and_that_it_failed() -> None:
    one, told = shared()
    decision = decided(one)
    booking = one.book(decision, 0.0)
    assert booking is not None
    other = next(worker for worker in WORKERS if worker.name != decision.worker)
    one.move(booking, other.name, other.endpoint, 0.0)
    one.disclaim(booking)
    assert [words for words, _ in told.lines][1:] == [
        "withdrawn", f"begun at {other.endpoint} with 1000", "withdrawn",
    ]  # fmt: skip


SPLITTING = Disaggregation("header", min_uncached_tokens=100)


def of_legs(loads: int = 8, now: float = 0.0) -> tuple[Placing, Decision]:
    """Books, and a decision whose prompt `c` computes and `a` answers; `a` also answers others."""
    config = Config(models=(Model("m"),), disaggregation=SPLITTING)
    one = books(config, Fleet(config))
    fleet_of(one).has_roles = True
    for _ in range(loads):
        one.loads.begin("a:1", 0.0, 0.0)
    return one, split(one, now)


def split(one: Placing, now: float = 0.0, first: int = 0) -> Decision:
    """Decides on a prompt whose tokens count up from the first one."""
    query = Query("m", [Prompt("m", array("I", range(first, first + 1000)))])
    roles = {"a": "decode", "c": "prefill"}
    workers = [Candidate(name, f"{name}:1", role=role) for name, role in roles.items()]
    return one.decide(query, workers, [{}], lambda _: "live", now, Random(0))


def test_two_legs_are_booked_where_their_work_is_and_released_together() -> None:
    one, made = of_legs()
    booking = one.book(made, 0.0)
    assert booking is not None
    assert (one.loads.in_flight("a:1"), one.loads.in_flight("c:1")) == (9, 1)
    loads = [one.loads.load(f"{name}:1", 0.0).backlog_tokens for name in "ac"]
    assert loads == [0.0, 1000.0]
    assert set(decided(one).claims) == {"a", "c"}
    one.release(booking, 0.0)
    assert (one.loads.in_flight("a:1"), one.loads.in_flight("c:1")) == (8, 0)
    one.release(booking, 0.0)
    assert one.loads.in_flight("a:1") == 8


def test_a_prompt_that_must_be_computed_by_now_is_no_load_while_it_is_answered() -> None:
    one, made = of_legs()
    first = one.book(made, 0.0)
    # 1,000 tokens should take 125 ms, and count as load for twice as long
    second = one.book(split(one, 0.2, 2000), 0.2)
    assert first is not None
    assert second is not None
    assert one.loads.in_flight("c:1") == 2
    third = one.book(split(one, 0.3, 4000), 0.3)
    assert one.loads.in_flight("c:1") == 2
    for booking in (first, second, third):
        assert booking is not None
        one.release(booking, 0.4)
    assert (one.loads.in_flight("a:1"), one.loads.in_flight("c:1")) == (8, 0)


def test_a_failed_request_leaves_no_claim_on_either_worker() -> None:
    one, made = of_legs()
    booking = one.book(made, 0.0)
    assert booking is not None
    one.answered(booking, 500, "a:1", 0.1)
    assert not decided(one, now=0.1).claims


def test_a_prefill_worker_that_fails_with_every_partner_is_left_out() -> None:
    one, _ = of_legs()
    for _ in range(FAILURES_UNTIL_LEFT_OUT):
        booking = one.book(split(one), 0.0)
        assert booking is not None
        one.answered(booking, 500, "a:1", 0.0)
        one.release(booking, 0.0)
        other = one.loads.begin("a:1", 0.0, 0.0)
        one.answered(other, 200, "a:1", 0.0)
    assert set(fleet_of(one).upstreams.ejected(0.1)) == {"c:1"}
    assert split(one, 0.1).prefill is None


def test_a_failure_is_counted_for_both_workers_that_shared_the_request() -> None:
    one, _ = of_legs()
    for status in (500, 503, 200, 400):
        booking = one.book(split(one), 0.0)
        assert booking is not None
        one.answered(booking, status, "a:1", 0.0)
        one.release(booking, 0.0)
    one.answered(one.loads.begin("a:1", 0.0, 0.0), 500, "a:1", 0.0)  # not a split request
    counted = [fleet_of(one).upstream(f"{name}:1").failed_halves for name in "ac"]
    assert counted == [2, 2]


def test_where_workers_have_roles_every_response_is_looked_at() -> None:
    one, _ = of_legs()
    assert {one.wants_status() for _ in range(REQUESTS_A_LOOK)} == {True}


def test_after_one_failure_only_its_health_clears_a_prefill_worker() -> None:
    one, made = of_legs()
    for status, is_doubted in ((200, False), (400, False), (500, True), (200, True)):
        booking = one.book(made, 0.0)
        assert booking is not None
        one.answered(booking, status, "a:1", 0.0)
        assert fleet_of(one).upstream("c:1").is_doubted is is_doubted
        assert ("c:1" in fleet_of(one).upstreams.doubted()) is is_doubted
        one.release(booking, 0.0)


def test_a_request_that_is_not_steered_is_booked_once_where_it_is_found() -> None:
    one = placing()
    for query in (QUERY, Query("m", [])):
        made = decided(one, query)
        booking = one.note(made, 0.0)
        assert booking is not None
        for _ in range(2):  # the second time, it is known already
            one.found(booking, made, "b", "b:1", 0.0)
        assert one.loads.in_flight("b:1") == 1
        one.release(booking, 0.0)
    assert one.loads.in_flight("b:1") == 0


def test_a_failure_of_an_endpoint_that_is_gone_is_counted_nowhere() -> None:
    one, _ = of_legs()
    fleet_of(one).upstreams.failed_half("gone:1")
    assert fleet_of(one).upstreams.get("gone:1") is None


def test_a_worker_that_holds_more_is_named_to_pull_from_where_that_is_configured() -> None:
    rules = Disaggregation("header", "offloading", min_pulled_tokens=64)
    config = Config(models=(Model("m"),), disaggregation=rules)
    one = books(config, Fleet(config))
    for _ in range(20):
        one.loads.begin("b:1", 0.0, 0.0)
    workers = [Candidate(name, f"{name}:1", transfer_port=5710) for name in "ab"]
    held = [{"b": Overlap(16, (20, 0, 0, 0))}]
    made = one.decide(QUERY, workers, held, lambda _: "live", 0.0, Random(0))
    assert made.worker == "a"
    assert made.source is not None
    assert (made.source.endpoint, made.source.tokens) == ("b:1", 320)
