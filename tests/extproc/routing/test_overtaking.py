"""Requests that wait for blocks, and what it costs to overtake them."""

from array import array
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import Cost
from extproc.routing.arrivals import Arrivals
from extproc.routing.decision import Decision, decide
from extproc.routing.eligibility import Candidate
from extproc.routing.explain import explanation
from extproc.routing.fetching import Offers, Peer, StoredPrefix
from extproc.routing.load import EndpointLoad, Loads
from extproc.routing.query import Query, Snapshot
from kvstate.overlap import Overlap, Prompt

RATE = float(Cost().prefill_tokens_per_second)
WORKERS = [Candidate(name, f"{name}:1") for name in "vw"]


def decided(loads: Loads, tokens: int, now: float = 0.0, offers: Offers | None = None) -> Decision:
    snapshot = Snapshot(
        WORKERS, [{}], loads.load, "cost", 0, offers=offers, arrivals=loads.arrivals
    )
    query = Query("m", [Prompt("m", array("I", range(tokens)))])
    return decide(query, snapshot, now, Random(0))


def idle() -> Loads:
    return Loads({one.endpoint: EndpointLoad() for one in WORKERS})


def test_long_prompt_avoids_a_worker_where_another_request_waits_for_blocks() -> None:
    loads = idle()
    loads.expect_blocks("w:1", 3_000, 0.0)
    made = decided(loads, 20_000)
    assert made.pick[0] == "v:1"
    assert made.basis.overtaking == {"w": 17_000}
    of_v, of_w = made.basis.costs
    assert of_v is not None
    assert of_w == of_v + 17_000


def test_prompt_that_is_computed_before_the_blocks_arrive_delays_nobody() -> None:
    loads = idle()
    loads.expect_blocks("w:1", 3_000, 0.0)
    assert decided(loads, 3_000).basis.overtaking == {}
    assert decided(loads, 20_000, now=3_000 / RATE).basis.overtaking == {}  # they have arrived


def test_each_request_that_waits_is_delayed() -> None:
    loads = idle()
    loads.expect_blocks("w:1", 3_000, 0.0)
    loads.expect_blocks("w:1", 5_000, 0.0)
    assert decided(loads, 20_000).basis.overtaking == {"w": 17_000 + 15_000}


def test_request_that_waits_keeps_its_place_before_one_that_is_queued_for_longer() -> None:
    loads = idle()
    loads.begin("w:1", 4_000.0, 0.0)
    loads.expect_blocks("w:1", 3_000, 0.0)
    assert decided(loads, 20_000).basis.overtaking == {}


def test_request_that_loads_longer_itself_overtakes_nobody() -> None:
    loads = idle()
    loads.expect_blocks("w:1", 3_000, 0.0)
    offers = Offers(RATE, stores=(StoredPrefix("s", 16_000, 0.5, "vw"),))
    assert decided(loads, 20_000, offers=offers).basis.overtaking == {}


def test_slow_worker_delays_those_that_wait_there_for_longer() -> None:
    loads = idle()
    loads.expect_blocks("w:1", 3_000, 0.0)
    loads.endpoints["w:1"].speed.slowness = 2.0
    loads.endpoints["w:1"].speed.is_even = False
    assert decided(loads, 20_000).basis.overtaking == {"w": 37_000}


def test_explanation_shows_what_overtaking_adds_to_the_cost() -> None:
    loads = idle()
    loads.expect_blocks("w:1", 3_000, 0.0)
    made = decided(loads, 20_000)
    shown = explanation(made, str)["candidates"][1]
    assert shown["cost_terms"]["overtaking"] == 17_000
    assert shown["cost"] == made.basis.costs[1]


@given(st.lists(st.tuples(st.sampled_from("vw"), st.floats(0, 10), st.floats(0, 10)), max_size=8))
def test_arrivals_are_those_still_to_come(noted: list[tuple[str, float, float]]) -> None:
    arrivals, now = Arrivals(), 0.0
    for number, (endpoint, seconds, _) in enumerate(noted):
        now += noted[number][2]
        arrivals.expect(endpoint, now + seconds, now)
    clock, all_of = 0.0, {"v": list[float](), "w": list[float]()}
    for endpoint, seconds, passed in noted:
        clock += passed
        all_of[endpoint].append(clock + seconds)
    for endpoint, times in all_of.items():
        assert arrivals.of(endpoint, now) == [at for at in times if at > now]


def test_worker_expects_a_pull_as_long_as_it_takes() -> None:
    peer = Peer("v", "v:1", 1, 16_000, 4_000.0, 40_000.0, work=1e6)
    snapshot_offers = Offers(RATE, (peer,), frozenset("vw"))
    loads = idle()
    loads.begin("v:1", 90_000.0, 0.0)
    held = {"v": Overlap(16, (1_000, 0, 0, 0))}
    snapshot = Snapshot(WORKERS, [held], loads.load, "cost", 0, offers=snapshot_offers)
    query = Query("m", [Prompt("m", array("I", range(16_016)))])
    fetch = decide(query, snapshot, 0.0, Random(0)).basis.fetches["w"]
    assert fetch.delay / RATE == (16_000 + 4_000) / 40_000
