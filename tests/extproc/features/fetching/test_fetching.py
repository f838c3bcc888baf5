"""What workers could fetch of a prompt, and what that is worth."""

from array import array
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import Cost
from extproc.features.fetching.offers import (
    MAX_PEERS,
    NOTHING,
    Offers,
    Pullable,
    StoredPrefix,
    fetch_of,
    most_held,
)
from extproc.features.fetching.term import FetchTerm, relief, share_of_relief
from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.cost.fetch import Fetch, Peer
from extproc.routing.decide import decide
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.endpoint_load import EndpointLoad
from extproc.routing.load.loads import Loads
from kvstate.overlap import Overlap, Prompt

PREFILL = 8_000.0
AFFINITY = Cost().affinity_percent / 100


def peer(tokens: int, queued: float = 0.0, speed: float = 40_000.0, name: str = "p") -> Peer:
    return Peer(name, f"{name}:1", 5710, tokens, queued, speed, work=1_000.0)


def offers(*peers: Peer, least: int = 1) -> Offers:
    return Offers(PREFILL, Pullable(peers, frozenset({"w", "p"}), least))


def test_pull_is_worth_its_tokens_less_the_time_of_the_transfer() -> None:
    one = peer(10_000)
    assert fetch_of(offers(one), "w", 2_000, 1.0) == Fetch(8_000, 8_000 * (1 - 1 / 5), one)


@pytest.mark.parametrize(
    ("of", "worker"),
    [
        (offers(peer(10_000, speed=PREFILL)), "w"),  # computing is as fast
        (offers(peer(10_000, queued=1e6)), "w"),
        (offers(peer(2_000)), "w"),  # it holds as much itself
        (offers(peer(10_000), least=9_000), "w"),
        (offers(peer(10_000)), "p"),  # no worker pulls from itself
        (offers(peer(10_000)), "other"),  # it cannot pull
        (Offers(PREFILL, stores=(StoredPrefix("s", 10_000, 0.2, ("x",)),)), "w"),
        (Offers(PREFILL, stores=(StoredPrefix("s", 2_000, 0.2, ("w",)),)), "w"),
    ],
)
def test_nothing_is_fetched_where_it_saves_no_time(of: Offers, worker: str) -> None:
    assert fetch_of(of, worker, 2_000, 1.0) == NOTHING


peers_drawn = st.builds(
    Peer,
    st.sampled_from("wpqr"),
    st.just("e:1"),
    st.just(1),
    st.integers(0, 50_000),
    st.floats(0, 1e6),
    st.floats(1, 1e6),
    st.floats(0, 1e6),
)
stores_drawn = st.builds(
    StoredPrefix, st.just("s"), st.integers(0, 50_000), st.floats(0, 1), st.sampled_from("wp")
)
slownesses = st.floats(1 / 16, 16)


@given(st.lists(peers_drawn, max_size=4), stores_drawn, st.integers(0, 50_000), slownesses)
def test_value_is_never_negative_nor_more_than_what_is_fetched(
    drawn: list[Peer], stored: StoredPrefix, held: int, slowness: float
) -> None:
    of = Offers(PREFILL, Pullable(drawn, frozenset("w"), 1), (stored,))
    found = fetch_of(of, "w", held, slowness)
    assert 0 <= found.value <= found.tokens
    assert found.tokens + held <= max([stored.tokens, held, *(one.tokens for one in drawn)])
    assert found.peer is None or found.peer.name != "w"


@given(peers_drawn, st.floats(0, 1e5), slownesses)
def test_busier_or_slower_source_is_never_worth_more(
    one: Peer, more: float, slowness: float
) -> None:
    of = Offers(PREFILL, Pullable([one._replace(name="p")], frozenset("w"), 1))
    busier = [one._replace(name="p", queued_tokens=one.queued_tokens + more)]
    slower = [one._replace(name="p", tokens_per_second=one.tokens_per_second / (1 + more))]
    value = fetch_of(of, "w", 0, slowness).value
    for worse in (busier, slower):
        bad = Offers(PREFILL, Pullable(worse, frozenset("w"), 1))
        assert fetch_of(bad, "w", 0, slowness).value <= value


def test_most_held_are_the_peers_that_hold_most_the_idlest_first() -> None:
    many = [peer(tokens, queued=100 - tokens % 3) for tokens in (30, 10, 20, 20, *range(9))]
    kept = most_held(many)
    assert [one.tokens for one in kept[:4]] == [30, 20, 20, 10]
    assert len(kept) == MAX_PEERS


@given(st.lists(peers_drawn, min_size=1, max_size=4), st.floats(0, 1e6))
def test_pull_relieves_by_how_much_less_the_puller_has_to_do_than_any_holder(
    peers: list[Peer], work: float
) -> None:
    for tokens in {one.tokens for one in peers}:
        least = min(one.work for one in peers if one.tokens >= tokens)
        found = relief(peers, tokens, work)
        assert 0.0 <= found <= 1.0
        assert found == 0.0 if work >= least else found > 0.0 or work > 0.99 * least


def test_holder_of_less_says_nothing_of_the_busy_holder_of_more() -> None:
    busy, idle = peer(8_000), peer(100, name="idle")._replace(work=10.0)
    assert relief([busy, idle], 8_000, 500.0) == 0.5
    assert relief([busy, idle], 100, 500.0) == 0.0


def decided(of: Offers | None, busy: int = 20) -> str:
    """The pick among a busy holder of 4,000 tokens and an idle worker."""
    return decision(of, busy, 0).worker


def decision(of: Offers | None, busy: int, own: int) -> Decision:
    """The same for a worker that has so many requests of its own."""
    loads = Loads({"p:1": EndpointLoad(), "w:1": EndpointLoad()})
    for endpoint in ["p:1"] * busy + ["w:1"] * own:
        loads.begin(endpoint, 100.0, 0.0)
    workers = [Candidate(name, f"{name}:1", transfer_port=5710) for name in "pw"]
    held = {"p": Overlap(16, (250, 0, 0, 0))}
    snapshot = Snapshot(workers, [held], loads.load, "cost", 0)
    query = Query("m", [Prompt("m", array("I", range(4_100)))])
    terms = () if of is None else (FetchTerm(of, held, Cost()),)
    made = decide(PLAIN_REQUEST, query, snapshot, 0.0, Random(0), terms)
    assert set(made.basis.fetches) <= {"w"}
    return made


def test_idle_worker_that_can_fetch_is_picked_over_a_busy_holder() -> None:
    assert decided(None, busy=8) == "p"
    assert decided(offers(peer(4_000)), busy=8) == "w"
    assert decided(offers(peer(4_000, queued=40_000)), busy=8) == "p"
    stored = StoredPrefix("s", 4_000, 0.8, "wp")
    assert decided(Offers(PREFILL, stores=(stored,)), busy=8) == "w"
    delivers_nothing = stored._replace(shares={"w": 0.01})
    assert decided(Offers(PREFILL, stores=(delivers_nothing,)), busy=8) == "p"
    assert decided(offers(peer(4_000)), busy=0) == "p"


def test_worker_that_is_as_busy_as_the_holder_pulls_nothing() -> None:
    assert decided(offers(peer(4_000)._replace(work=1.0)), busy=8) == "w"
    assert decided(offers(peer(4_000)._replace(work=0.0)), busy=8) == "p"


@given(st.integers(1, 12), st.integers(0, 14), st.integers(1, 5_000))
def test_store_counts_by_how_much_less_a_worker_has_to_do_than_any_holder(
    busy: int, own: int, tokens: int
) -> None:
    stored = StoredPrefix("s", tokens, 0.8, "w")
    found = decision(Offers(PREFILL, stores=(stored,)), busy, own).basis.fetches
    share = max(0.0, 1.0 - own / busy) if tokens <= 4_000 else 1.0  # nobody holds more
    assert [one.credit for one in found.values()] == (
        [pytest.approx(0.8 * tokens * share * AFFINITY)] if share else []
    )


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_share_of_relief_is_between_nothing_and_all(least: float, work: float) -> None:
    assert 0.0 <= share_of_relief(least, work) <= 1.0
    assert share_of_relief(inf, work) == 1.0


def test_worker_that_loads_from_a_store_computes_only_the_rest() -> None:
    of = Offers(PREFILL, stores=(StoredPrefix("s", 4_000, 0.8, "wv"),))
    loads = Loads({"w:1": EndpointLoad()})
    workers = [Candidate("w", "w:1"), Candidate("v", "v:1")]
    snapshot = Snapshot(workers, [{}], loads.load, "cost", 0)
    query = Query("m", [Prompt("m", array("I", range(4_100)))])
    terms = (FetchTerm(of, {}, Cost()),)
    made = decide(PLAIN_REQUEST, query, snapshot, 0.0, Random(0), terms)
    assert made.uncached_tokens == 100
    assert set(made.basis.fetches) == {"w", "v"}


def test_store_is_worth_less_to_a_worker_that_loaded_only_a_share() -> None:
    stored = StoredPrefix("s", 1_000, 0.5, "vw", {"w": 0.4})
    found = {name: fetch_of(Offers(PREFILL, stores=(stored,)), name, 200, 1.0) for name in "vw"}
    assert {name: (one.tokens, one.value, one.share, one.held) for name, one in found.items()} == {
        "v": (800, 400.0, 1.0, 200),
        "w": (800, 160.0, 0.4, 200),
    }
    assert found["w"].as_json() == {"tokens": 800, "value": 160, "from": "s", "share": 0.4}
    better = Offers(PREFILL, stores=(stored, stored._replace(store="t", worth=0.3, shares={})))
    assert fetch_of(better, "w", 200, 1.0).store == "t"
    assert fetch_of(Offers(PREFILL, stores=better.stores[::-1]), "w", 200, 1.0).store == "t"
