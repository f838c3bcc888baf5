"""Requests without known tokens belong to the worker of their conversation."""

from collections.abc import Mapping
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import Policy
from extproc.requests.outline import Outline, outline_of
from extproc.requests.request import NO_HEAD, PLAIN_REQUEST, RoutingRequest
from extproc.requests.tenant_salt import Tenant, name_apart
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.claims.claim_table import ClaimTable, Holdings
from extproc.routing.claims.homes import HOME_TOKENS, Homes
from extproc.routing.cost.room import CONVERSATIONS
from extproc.routing.decide import decide
from extproc.routing.decision import Decision
from extproc.routing.explain import explanation, reason_sentence
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from extproc.routing.savings.belonging import CONVERSATION, RESPONSE, SESSION

WORKERS = [Candidate(name, f"{name}:1") for name in "abc"]
IDLE: Mapping[str, Load] = {}


def said(*texts: str) -> Outline:
    turns = ", ".join(f'{{"role": "user", "content": "{text * 40}"}}' for text in texts)
    return outline_of(f'{{"messages": [{turns}]}}'.encode())


def query(*texts: str, session: str = "", previous: str = "") -> Query:
    return Query("m", reason="x", outline=said(*texts), session=session, previous=previous)


class Fleet:
    """Three workers, and what is remembered of requests to them."""

    def __init__(self) -> None:
        self.homes = Homes(1)
        self.sent = ClaimTable(1)
        self.holdings = {name: Holdings(name) for name in "abc"}

    def decide(
        self,
        asked: Query,
        loads: Mapping[str, Load] = IDLE,
        request: RoutingRequest = PLAIN_REQUEST,
        **known: object,
    ) -> Decision:
        here = Snapshot(
            WORKERS, [], lambda name, _: loads.get(name[0], Load()), "cost", 0,
            claims=self.sent, homes=self.homes, records=list(self.holdings.values()),
        )  # fmt: skip
        return decide(request, asked, msgspec.structs.replace(here, **known), 1.0, Random(0))

    def send(self, asked: Query, worker: str, request: RoutingRequest = PLAIN_REQUEST) -> None:
        made = self.decide(asked, request=request)
        for marks in made.marks:
            self.sent.record(self.holdings[worker], marks, 0.0)
        self.homes.turn(made.basis.belonging.turn, self.holdings[worker], 0.0)

    def live(self, worker: str) -> float:
        return self.holdings[worker].contexts.once + self.holdings[worker].contexts.returned


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_next_turn_belongs_to_the_worker_of_the_turn_before(fleet: Fleet) -> None:
    fleet.send(query("system", "one"), "b")
    fleet.send(query("system", "two"), "c")
    made = fleet.decide(query("system", "one", "more"))
    assert (made.worker, made.basis.belonging.by) == ("b", CONVERSATION)
    claimed = made.basis.claims_on("b").saved
    assert made.basis.belonging.credit == {"b": claimed + HOME_TOKENS}
    assert made.uncached_tokens == made.basis.weighed_tokens - made.basis.claims_on("b").approximate
    assert fleet.decide(query("system", "three")).basis.belonging.by == ""


def test_conversation_leaves_its_worker_where_that_is_too_busy(fleet: Fleet) -> None:
    fleet.send(query("system", "one"), "b")
    asked = query("system", "one", "more")
    assert fleet.decide(asked, {"b": Load(3)}).worker == "b"
    assert fleet.decide(asked, {"b": Load(0, 100_000.0)}).worker != "b"
    assert fleet.decide(asked, unfit={"b:1": "draining"}).worker != "b"
    assert fleet.decide(asked, ejected={"b:1": "fails"}).worker != "b"
    full = Policy(max_in_flight=3)
    assert fleet.decide(asked, {"b": Load(3)}, rules=full).worker != "b"


def test_session_belongs_to_the_worker_of_its_last_request(fleet: Fleet) -> None:
    for worker in "abc":
        fleet.send(query("one", session="s"), worker)
        made = fleet.decide(query("another", session="s"))
        assert (made.worker, made.basis.belonging.by) == (worker, SESSION)
    unread = Query("m", reason="body_too_large", unread_bytes=40_000, session="s")
    assert fleet.decide(unread).basis.belonging.credit == {"c": 5_000.0 + HOME_TOKENS}


def test_conversation_counts_more_than_the_session(fleet: Fleet) -> None:
    fleet.send(query("one", session="s"), "b")
    fleet.send(query("two", session="s"), "c")
    assert fleet.decide(query("one", "more", session="s")).worker == "b"


def test_session_counts_more_than_a_system_that_others_share(fleet: Fleet) -> None:
    shared = "a long system " * 200
    fleet.send(query(shared, "of another"), "c")
    fleet.send(query("a title", session="s"), "b")
    assert fleet.decide(query(shared, "one", session="s")).worker == "b"
    assert fleet.decide(query(shared, "one", session="s"), {"b": Load(5, 1e5)}).worker == "c"


def test_session_moves_no_request_of_others(fleet: Fleet) -> None:
    fleet.send(query("one", session="s"), "b")
    for asked in (query("two", session="t"), query("two")):
        before = Fleet().decide(asked)
        assert fleet.decide(asked).basis.belonging.credit == before.basis.belonging.credit
    other = msgspec.structs.replace(query("two", session="s"), model="n")
    assert (
        fleet.decide(other).basis.belonging.credit == Fleet().decide(other).basis.belonging.credit
    )


def test_response_is_continued_where_it_is_kept_whatever_the_load(fleet: Fleet) -> None:
    key = fleet.homes.key(RESPONSE, None, None, "resp_1")
    fleet.homes.note((key,), fleet.holdings["c"], 0.0)
    asked = query("go on", previous="resp_1")
    busy = {"c": Load(500, 1e6)}
    assert fleet.decide(asked, busy).pick == ("c:1",)
    assert fleet.decide(asked, busy, policy="random").pick == ("c:1",)
    assert fleet.decide(asked, busy, sample=1).pick == ("c:1",)
    assert fleet.decide(asked, busy, unfit={"c:1": "draining"}).worker != "c"
    assert fleet.decide(asked, busy, workers=WORKERS[:2]).basis.belonging.by == ""
    assert fleet.decide(query("go on", previous="resp_2")).basis.belonging.by == ""


def test_request_whose_salt_is_unknown_has_no_end(fleet: Fleet) -> None:
    asked = msgspec.structs.replace(query("one"), salt="")
    assert fleet.decide(asked).basis.belonging.turn.keys == ()


# A shared system is worth one conversation, so a worker may get one more than it had beyond others;
# and one more, since not all conversations are expected to return.
MOST_APART = 3


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 600),
)
def test_live_conversations_never_differ_by_more_than_three_between_equal_workers(
    begun: list[tuple[int, bool]], words: int
) -> None:
    fleet, systems = Fleet(), [f"system {at} " * words for at in range(4)]
    for number, (system, is_named) in enumerate(begun):
        session = f"s{number}" if is_named else ""
        asked = query(systems[system], f"task {number}", session=session)
        fleet.send(asked, fleet.decide(asked).worker)
        live = [fleet.live(name) for name in "abc"]
        assert max(live) - min(live) <= MOST_APART
        assert sum(live) == number + 1


def test_new_conversation_follows_its_system_only_to_a_worker_that_has_few(fleet: Fleet) -> None:
    system = "a long system " * 100
    picked = []
    for number in range(12):
        asked = query(system, f"task {number}")
        picked.append(fleet.decide(asked).worker)
        fleet.send(asked, picked[-1])
    assert picked[0] == picked[1]
    assert sorted(picked.count(name) for name in "abc") in ([4, 4, 4], [3, 4, 5])


def test_later_turn_stays_with_however_many_conversations(fleet: Fleet) -> None:
    system = "a long system " * 100
    for number in range(20):
        fleet.send(query(system, f"task {number}"), "b")
    made = fleet.decide(query(system, "task 3", "more"))
    assert (made.worker, CONVERSATIONS in made.basis.charges) == ("b", False)
    assert fleet.decide(query(system, "task 3", "more"), {"b": Load(6)}).worker == "b"


def test_explanation_tells_that_a_worker_has_fewer_conversations(fleet: Fleet) -> None:
    system = "a long system " * 100
    for number in range(3):
        fleet.send(query(system, f"task {number}"), "b")
    made = fleet.decide(query(system, "another task"))
    told = explanation(made, lambda _: "live")
    assert made.worker != "b"
    assert told["decided_by"] == "spread"
    assert reason_sentence(made).endswith(told["decided"])
    terms = {one["name"]: one["cost_terms"]["conversations"] for one in told["candidates"]}
    saved = made.basis.claims_on("b").saved
    expected = 3 * (1_024 + saved / 2) * fleet.homes.returning**2
    assert terms.pop("b") == pytest.approx(expected * made.basis.affinity, abs=0.01)
    assert set(terms.values()) == {0.0}
    costs = {one["endpoint"]: one["cost"] for one in told["candidates"]}
    assert list(costs.values()) == pytest.approx(list(made.basis.costs), abs=0.01)


def test_failing_worker_without_conversations_does_not_make_others_crowded(fleet: Fleet) -> None:
    for number in range(4):
        fleet.send(query("a long system " * 100, f"task {number}"), "ab"[number % 2])
    for unsure in ({"ejected": {"c:1": "fails"}}, {"doubted": ["c:1"]}):
        made = fleet.decide(query("a long system " * 100, "more"), **unsure)
        assert not made.basis.charges
    assert not fleet.decide(query("x"), workers=[]).basis.charges


def of_tenant(name: bytes) -> RoutingRequest:
    return RoutingRequest(NO_HEAD, None, tenant=Tenant(name))


def test_session_of_another_tenant_is_another_one(fleet: Fleet) -> None:
    fleet.send(query("one", session="s"), "b", of_tenant(b"a"))
    own = fleet.decide(query("else", session="s"), request=of_tenant(b"a")).basis.belonging
    other = fleet.decide(query("else", session="s"), request=of_tenant(b"c")).basis.belonging
    assert (own.home, other.home) == ("b", "")
    assert own.turn.keys[-1] != other.turn.keys[-1]


def test_response_of_another_tenant_is_not_known(fleet: Fleet) -> None:
    key = fleet.homes.key(RESPONSE, None, None, name_apart(Tenant(b"a"), "resp_1"))
    fleet.homes.note((key,), fleet.holdings["c"], 0.0)
    asked = query("more", previous="resp_1")
    made = [fleet.decide(asked, request=of_tenant(name)) for name in (b"a", b"b")]
    assert [one.basis.belonging.by for one in made] == [RESPONSE, ""]
