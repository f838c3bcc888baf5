"""Siblings: requests with one long new prefix go to one worker, though they wait there."""

from array import array
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import Cost, Policy
from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.claims.claim_table import ClaimTable, Holdings
from extproc.routing.cost.siblings import LEAST_TOKENS, WITHIN_SECONDS, siblings_of
from extproc.routing.decide import decide
from extproc.routing.decision import Decision
from extproc.routing.explain import explanation
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.endpoint_load import EndpointLoad
from extproc.routing.load.loads import Loads
from extproc.routing.savings.claims import Claims
from kvstate.overlap import Prompt

NAMES = ("a", "b", "c", "d")
SHARED = 16_000
OFF, ON = Policy(), Policy(cost=Cost(siblings_percent=60))


class Fleet:
    """Four idle workers with live feeds, which have announced nothing."""

    def __init__(self, rules: Policy) -> None:
        self._rules = rules
        self._loads = Loads({name: EndpointLoad() for name in NAMES})
        self._claims = ClaimTable(1)
        self._holdings = {name: Holdings(name) for name in NAMES}
        self._workers = [Candidate(name, name) for name in NAMES]

    def send(self, prompt: Prompt, now: float, sample: int = 0) -> Decision:
        """Decides where a request goes, and books it there."""
        snapshot = Snapshot(
            self._workers,
            [{}],
            self._loads.load,
            "cost",
            0,
            self._rules,
            self._claims,
            sample=sample,
        )
        decision = decide(PLAIN_REQUEST, Query("m", [prompt]), snapshot, now, Random(0))
        self._loads.begin(decision.pick[0], decision.uncached_tokens, now)
        self._claims.record(self._holdings[decision.worker], decision.marks[0], now)
        return decision

    def burden(self, worker: str, tokens: float) -> None:
        """Books other work on a worker."""
        self._loads.begin(worker, tokens, 0.0)


def sibling(number: int, shared: int = SHARED) -> Prompt:
    return Prompt("m", array("I", [*range(shared), *[100_000 + number] * 256]))


def spread(rules: Policy, count: int = 4, shared: int = SHARED) -> set[str]:
    """The workers to which siblings go."""
    fleet = Fleet(rules)
    return {fleet.send(sibling(number, shared), 0.005 * number).worker for number in range(count)}


def test_siblings_go_to_one_worker_only_if_that_is_on() -> None:
    assert len(spread(ON)) == 1
    assert len(spread(OFF)) == len(NAMES)


def test_explanation_has_the_credit_of_siblings_among_the_terms_of_a_cost() -> None:
    fleet = Fleet(ON)
    fleet.send(sibling(0), 0.0)
    made = fleet.send(sibling(1), 0.001)
    shown = explanation(made, lambda _: "live")["candidates"]
    credits_of = {one["name"]: one["cost_terms"]["siblings"] for one in shown}
    assert credits_of.pop(made.worker) == pytest.approx(0.6 * SHARED, rel=0.05)
    assert set(credits_of.values()) == {0.0}
    assert [one["cost"] for one in shown] == pytest.approx(list(made.basis.costs), abs=0.01)


def test_short_prefixes_are_no_siblings() -> None:
    assert len(spread(ON, shared=LEAST_TOKENS // 2)) > 1


def test_siblings_leave_a_worker_whose_queue_is_much_longer_than_their_prefix() -> None:
    fleet = Fleet(ON)
    first = fleet.send(sibling(0), 0.0).worker
    fleet.burden(first, 60_000)
    assert fleet.send(sibling(1), 0.001).worker != first


@given(
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3 * LEAST_TOKENS)),
    st.dictionaries(st.sampled_from(NAMES), st.floats(-1, 1)),
)
def test_siblings_are_the_workers_with_tokens_that_were_just_sent(
    tokens: dict[str, int], begun_at: dict[str, float]
) -> None:
    claims = {name: Claims(float(count), count) for name, count in tokens.items()}
    most = max(tokens.values(), default=0)
    long = {name: count for name, count in tokens.items() if count > most / 2}
    just = all(begun_at.get(name, -9.0) >= 1.0 - WITHIN_SECONDS for name in long)
    expected = long if most >= LEAST_TOKENS and just else {}
    assert siblings_of(claims, begun_at, 1.0) == expected


def test_request_that_comes_later_is_no_sibling() -> None:
    fleet = Fleet(ON)
    first = fleet.send(sibling(0), 0.0).worker
    assert fleet.send(sibling(1), 0.9 * WITHIN_SECONDS).worker == first
    elsewhere = fleet.send(sibling(2), 1.1 * WITHIN_SECONDS).worker
    assert elsewhere != first
    assert fleet.send(sibling(3), 1.2 * WITHIN_SECONDS).worker not in (first, elsewhere)


def test_begun_at_is_the_first_request_under_way_with_the_longest_part() -> None:
    table, here, there = ClaimTable(1), Holdings("here"), Holdings("there")
    short, long = (table.marks(Prompt("m", array("I", range(count)))) for count in (2_000, 9_000))
    table.record(here, short, 1.0)
    for at in (2.0, 3.0):
        table.record(here, long, at)
    ended = table.record(there, long, 1.5)
    assert table.begun_at(long) == {"here": 2.0, "there": 1.5}
    table.end(ended, 4.0)
    assert table.begun_at(long) == {"here": 2.0, "there": -inf}


@pytest.mark.parametrize("sample", [1, 2])
def test_siblings_are_found_by_a_decision_that_compares_few(sample: int) -> None:
    fleet = Fleet(ON)
    first = fleet.send(sibling(0), 0.0, sample).worker
    assert fleet.send(sibling(1), 0.001, sample).worker == first


@pytest.mark.parametrize(("prompts", "claims"), [(2, ClaimTable(1)), (1, None)])
def test_request_of_several_prompts_or_without_claims_has_no_sibling(
    prompts: int, claims: ClaimTable | None
) -> None:
    workers = [Candidate(name, name) for name in NAMES]
    load = Loads({name: EndpointLoad() for name in NAMES}).load
    snapshot = Snapshot(workers, [{}] * prompts, load, "cost", 0, ON, claims)
    query = Query("m", [sibling(number) for number in range(prompts)])
    assert decide(PLAIN_REQUEST, query, snapshot, 0.0, Random(0)).reason == "nothing_cached"
