"""Pulls that are priced in the pick: who offers what, what is named, and what is measured."""

from array import array
from collections.abc import Mapping
from random import Random

import pytest
from msgspec.structs import replace

from extproc.config.schema import Config, Model
from extproc.config.sections import Disaggregation
from extproc.disaggregation.disaggregator import Disaggregator
from extproc.features.fetching.offers import NOTHING_PULLABLE, StoredPrefix
from extproc.features.fetching.pulling import Pull, Pulling, with_priced_source
from extproc.features.fetching.term import fetch_terms
from extproc.requests.request import NO_HEAD, PLAIN_REQUEST, RoutingRequest
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.decision import Decision, PullSource
from extproc.routing.explain import explanation
from extproc.routing.inputs.query import Query, Variant
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.transfers import MAX_MEASURED_SECONDS
from kvstate.overlap import Overlap, Prompt
from tests.extproc.routing.books import Fleet, books, fleet_of

RULES = Disaggregation(
    connector="offloading",
    transfer_tokens_per_second=80_000,
    min_pulled_tokens=1_024,
    price_pulls=True,
)
QUERY = Query("m", [Prompt("m", array("I", range(8_100)))])
WORKERS = [Candidate(name, f"{name}:1", transfer_port=5710) for name in "abc"]


class PricedFleet:
    """Three workers that can pull from each other; `a` has 8,000 tokens, also in host memory."""

    def __init__(
        self, rules: Disaggregation = RULES, on_host: Mapping[str, int] = {"a": 8_000}
    ) -> None:
        config = Config(models=(Model("m"),), disaggregation=rules)
        self.ledger = books(config, Fleet(config))
        self.loads = self.ledger.loads
        self.legs = Disaggregator(config, self.ledger, fleet_of(self.ledger).upstreams)
        self.pulling = Pulling(config, self.loads, lambda _: on_host)
        self.is_priced = rules.price_pulls
        self.held = [{"a": Overlap(16, (500, 0, 0, 0))}]

    def snapshot(self, query: Query = QUERY) -> Snapshot:
        held = self.held * len(query.prompts)
        return self.ledger.snapshot(PLAIN_REQUEST, query, WORKERS, held, lambda _: "live", 0.0)

    def decide(self) -> Decision:
        snapshot, pullable = self.snapshot(), NOTHING_PULLABLE
        if self.is_priced:
            pullable = self.pulling.offers(PLAIN_REQUEST, QUERY, snapshot, 0.0)
        terms = fetch_terms(8_000.0, snapshot, (), pullable)
        made = self.legs.decide(
            PLAIN_REQUEST, QUERY, snapshot, 0.0, Random(0), terms, has_roles=False
        )
        return with_priced_source(made)

    def begin_pull(self, decision: Decision) -> Pull | None:
        return self.pulling.begin_pull(decision, decision.pick[0], 0.0)

    def peers(
        self,
        query: Query = QUERY,
        snapshot: Snapshot | None = None,
        now: float = 0.0,
        request: RoutingRequest = PLAIN_REQUEST,
    ) -> set[str]:
        """The workers from which others could pull."""
        found = self.pulling.offers(request, query, snapshot or self.snapshot(query), now)
        return {one.name for one in found.peers}


def test_busy_holder_loses_to_a_worker_that_pulls_from_it() -> None:
    one = PricedFleet()
    assert one.decide().worker == "a"
    one.loads.begin("a:1", 3_000.0, 0.0)
    made = one.decide()
    assert made.worker in {"b", "c"}
    assert made.source == PullSource("a:1", 5710, 8_000)
    assert "a:1" not in made.pick
    assert made.uncached_tokens == 100
    shown = next(
        each
        for each in explanation(made, lambda _: "live")["candidates"]
        if each["name"] == made.worker
    )
    assert shown["fetch"] == {"tokens": 8_000, "value": 7_200, "from": "a:1"}
    assert shown["cost_terms"]["fetched"] == 7_200
    assert shown["cost"] == pytest.approx(made.basis.costs[WORKERS.index(_named(made.worker))])


def _named(name: str) -> Candidate:
    return next(worker for worker in WORKERS if worker.name == name)


def test_nothing_is_pulled_where_computing_is_faster_or_prices_are_off() -> None:
    slow = Disaggregation("header", "offloading", 128, 4_000, 50, 1_024, price_pulls=True)
    off = Disaggregation(connector="offloading", min_pulled_tokens=1_024)
    for rules, worker in ((slow, "a"), (off, "a")):
        one = PricedFleet(rules)
        one.loads.begin("a:1", 3_000.0, 0.0)
        assert one.decide().worker == worker


def test_pulls_under_way_make_their_source_worth_less_until_they_are_over() -> None:
    one = PricedFleet()
    one.loads.begin("a:1", 3_000.0, 0.0)
    pulled = 0
    while one.decide().source is not None:
        assert one.begin_pull(one.decide()) is not None
        pulled += 1
    assert 1 < pulled < 20
    assert one.begin_pull(one.decide()) is None


def test_arrival_of_a_pull_teaches_the_speed_of_its_source() -> None:
    one = PricedFleet()
    one.loads.begin("a:1", 3_000.0, 0.0)
    pull = one.begin_pull(one.decide())
    assert pull is not None
    pull.note_arrival(0.0, MAX_MEASURED_SECONDS + 1.0)  # too late to be the transfer
    pull.note_arrival(0.025, 1.025)
    learned = one.loads.transfers("a:1")
    assert learned.measured == 1
    assert 8_000 < learned.speed(80_000, 1.1) < 40_000


def test_speed_of_one_measured_source_is_assumed_of_all_others() -> None:
    one = PricedFleet(on_host={"a": 8_000, "b": 8_000})
    one.held = [{name: Overlap(16, (500, 0, 0, 0)) for name in "ab"}]
    for name in "ab":
        one.loads.begin(f"{name}:1", 3_000.0, 0.0)
    pull = one.begin_pull(one.decide())
    assert pull is not None
    pull.expect()
    assert one.peers(now=1.0) == set()  # it is late
    pull.note_arrival(0.0, 2.0)
    offers = one.pulling.offers(PLAIN_REQUEST, QUERY, one.snapshot(), 2.0)
    assert [peer.tokens_per_second < 8_000 for peer in offers.peers] == [True, True]


def test_pull_of_a_worker_with_a_queue_is_not_measured() -> None:
    one = PricedFleet()
    one.loads.begin("a:1", 9_000.0, 0.0)
    for name in "bc":
        one.loads.begin(f"{name}:1", 1_000.0, 0.0)
    made = one.decide()
    assert made.source is not None
    assert one.begin_pull(made) is None


@pytest.mark.parametrize(
    "query",
    [
        replace(QUERY, reads_cache=False),
        replace(QUERY, prompts=[*QUERY.prompts, *QUERY.prompts]),
        replace(QUERY, variants=(Variant(frozenset("a"), QUERY.prompts, 1),)),
    ],
)
def test_request_that_cannot_say_where_its_blocks_are_is_offered_nothing(query: Query) -> None:
    assert PricedFleet().peers() == {"a"}
    assert PricedFleet().peers(query) == set()


def test_request_for_other_workers_or_of_one_leg_is_offered_nothing() -> None:
    one, elsewhere = PricedFleet(), frozenset({"b:1", "c:1"})
    request = RoutingRequest(replace(NO_HEAD, subset=elsewhere), None)
    assert one.peers(request=request) == set()
    assert one.peers(snapshot=replace(one.snapshot(), may_split=False)) == set()


def test_offers_leave_out_what_is_not_in_host_memory_not_certain_or_failing() -> None:
    assert PricedFleet(on_host={}).peers() == set()
    assert PricedFleet(on_host={"a": 1_000}).peers() == set()
    assert PricedFleet(on_host={"a": 8_000, "b": 8_000}).peers() == {"a"}
    one = PricedFleet()
    assert one.peers(snapshot=replace(one.snapshot(), ejected={"a:1": "fails"})) == set()
    one.held = [{"a": Overlap(16, (50, 0, 0, 0), 450)}]
    assert one.peers() == set()


def test_worker_that_could_load_or_pull_does_what_saves_more() -> None:
    one = PricedFleet()
    one.loads.begin("a:1", 3_000.0, 0.0)
    snapshot = one.snapshot()
    pullable = one.pulling.offers(PLAIN_REQUEST, QUERY, snapshot, 0.0)
    for worth, store in ((0.2, ""), (0.95, "s")):
        stored = StoredPrefix("s", 8_000, worth, ("b",))
        terms = fetch_terms(8_000.0, snapshot, (stored,), pullable)
        made = one.legs.decide(
            PLAIN_REQUEST, QUERY, snapshot, 0.0, Random(0), terms, has_roles=False
        )
        assert made.basis.fetches["b"].store == store


def test_request_of_one_leg_is_booked_as_any_other() -> None:
    one = PricedFleet()
    ticket = one.legs.book(one.decide(), 0.0)
    assert ticket is not None
    assert (ticket.endpoint, ticket.leg) == ("a:1", None)
