from array import array
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.config.schema import Config, Cost, Model
from extproc.requests.outline import beginning_of
from extproc.requests.request import NO_HEAD, RoutingRequest
from extproc.routing.claims.claim_table import Claim, ClaimTable, Expected, Holdings
from extproc.routing.claims.homes import NO_TURN
from extproc.routing.health.evidence import RULES, Judge
from extproc.routing.inputs.query import Query
from extproc.routing.ledger import REQUESTS_A_LOOK, Ledger
from extproc.routing.load.endpoint_load import Ticket
from kvstate.overlap import Overlap, Prompt
from tests.extproc.routing.books import (
    QUERY,
    WORKERS,
    Fleet,
    RecordedReports,
    books,
    decided,
    fleet_of,
    ledger,
)


def test_decide_books_nothing() -> None:
    one = ledger()
    decided(one)
    assert (one.loads.in_flight("a:1"), len(one.claims)) == (0, 0)


def test_book_holds_load_and_expectation_until_release() -> None:
    one = ledger()
    made = decided(one)
    ticket = one.book(made, 0.0)
    assert ticket is not None
    assert one.loads.in_flight(made.pick[0]) == 1
    assert decided(one).basis.claims[made.worker].speculative == 960
    one.release(ticket, 1.0)
    one.release(ticket, 1.0)
    assert one.loads.in_flight(made.pick[0]) == 0
    assert not decided(one, now=3.0).basis.claims
    assert decided(one, now=3.0, state="stale").basis.claims[made.worker].approximate == 960


def test_expectation_lasts_as_configured() -> None:
    one = ledger(speculative_ms=500, approximate_ms=2_000)
    one.book(decided(one), 0.0)
    assert decided(one, now=0.4).basis.claims
    assert not decided(one, now=0.6).basis.claims
    assert decided(one, now=1.9, state="stale").basis.claims
    assert not decided(one, now=2.1, state="stale").basis.claims


def test_book_ignores_a_decision_without_a_pick() -> None:
    one = ledger()
    made = decided(one, workers=[])
    assert one.book(made, 0.0) is None


def test_book_of_a_request_without_a_prompt_claims_nothing() -> None:
    one = ledger()
    ticket = one.book(decided(one, Query("m", reason="no_body")), 0.0)
    assert ticket is not None
    one.release(ticket, 0.0)
    assert len(one.claims) == 0


def test_move_takes_load_and_claims_to_the_serving_worker() -> None:
    one = ledger()
    made = decided(one)
    ticket = one.book(made, 0.0)
    assert ticket is not None
    other = next(worker for worker in WORKERS if worker.name != made.worker)
    one.move(ticket, other.name, other.endpoint, 0.0)
    assert set(decided(one).basis.claims) == {other.name}
    assert (one.loads.in_flight(made.pick[0]), one.loads.in_flight(other.endpoint)) == (0, 1)
    one.release(ticket, 0.0)
    assert one.loads.in_flight(other.endpoint) == 0


def test_round_robin_gives_each_worker_its_turn() -> None:
    one = ledger(name="round_robin")
    picks = []
    for _ in range(4):
        made = decided(one)
        one.book(made, 0.0)
        picks.append(made.worker)
    assert picks == ["a", "b", "c", "a"]


def test_ejected_endpoint_is_left_out() -> None:
    one = ledger()
    fleet_of(one).eject("a:1", Judge.SCRAPES, "does not answer")
    assert set(decided(one).pick) == {"b:1", "c:1"}


def test_ejection_and_draining_exclude_an_endpoint_independently() -> None:
    one = ledger()
    fleet_of(one).eject("a:1", Judge.SCRAPES, "does not answer")
    fleet_of(one).eject("b:1", Judge.PROBE, "is not well")
    fleet_of(one).drained.add("c:1")
    assert set(decided(one).pick) == {"a:1", "b:1"}  # they may be dead, but no others are left
    fleet_of(one).drained.clear()
    made = decided(one)
    assert (list(made.basis.excluded), made.pick) == (
        ["does not answer", "is not well", ""],
        ("c:1",),
    )
    fleet_of(one).eject("c:1", Judge.DOUBTS, "is dead")
    fleet_of(one).upstreams.restore(fleet_of(one).upstream("a:1"), Judge.SCRAPES)
    made = decided(one)
    assert (list(made.basis.excluded), made.pick) == (["", "is not well", "is dead"], ("a:1",))
    assert [fleet_of(one).upstreams.reason(f"{name}:1", 0.0) for name in "abc"] == [
        "",
        "is not well",
        "is dead",
    ]


def test_draining_worker_keeps_its_bookings() -> None:
    one = ledger()
    made = decided(one)
    ticket = one.book(made, 0.0)
    assert ticket is not None
    fleet_of(one).drained.add(made.pick[0])
    assert one.loads.in_flight(made.pick[0]) == 1
    assert made.pick[0] not in decided(one).pick
    one.release(ticket, 1.0)
    fleet_of(one).drained.discard(made.pick[0])
    assert made.pick[0] in decided(one).pick


def test_removed_worker_loses_load_claims_and_ejections() -> None:
    one = ledger()
    made = decided(one)
    ticket = one.book(made, 0.0)
    assert ticket is not None
    upstreams, gone = fleet_of(one).upstreams, fleet_of(one).upstream(made.pick[0])
    for judge in Judge:
        upstreams.eject(gone, judge, "away", 0.0)
    upstreams.doubt(made.pick[0], is_doubted=True)
    upstreams.leave(gone)
    fleet_of(one).holdings(made.worker).lose()
    assert (one.loads.in_flight(made.pick[0]), decided(one).basis.claims) == (0, {})
    assert (upstreams.ejections(0.0), upstreams.has_suspects) == ({}, False)
    one.release(ticket, 1.0)


@pytest.mark.parametrize("endpoint", ["picked", "other"])
def test_move_ignores_an_ended_request_and_its_present_worker(endpoint: str) -> None:
    one = ledger()
    made = decided(one)
    ticket = one.book(made, 0.0)
    assert ticket is not None
    other = next(worker for worker in WORKERS if worker.name != made.worker)
    if endpoint == "picked":
        one.move(ticket, made.worker, made.pick[0], 5.0)
        assert ticket.began_at == 0.0
        assert decided(one).basis.claims[made.worker].speculative == 960
    one.release(ticket, 5.0)
    one.move(ticket, other.name, other.endpoint, 5.0)
    assert {one.loads.in_flight(worker.endpoint) for worker in WORKERS} == {0}


@pytest.mark.parametrize("status", [404, 429, 500, 503])
def test_answered_withdraws_the_claim_of_a_request_that_was_not_computed(status: int) -> None:
    one = ledger()
    made = decided(one)
    ticket = one.book(made, 0.0)
    assert ticket is not None
    assert one.note_answer(ticket, status, "", 0.0) is None
    assert (one.loads.in_flight(made.pick[0]), decided(one).basis.claims) == (1, {})
    one.release(ticket, 1.0)
    assert one.loads.in_flight(made.pick[0]) == 0


@pytest.mark.parametrize("status", [200, 400, 413, 422])
def test_answered_keeps_the_claim_if_the_status_says_nothing_about_the_cache(status: int) -> None:
    one = ledger()
    made = decided(one)
    ticket = one.book(made, 0.0)
    assert ticket is not None
    one.note_answer(ticket, status, "", 0.0)
    assert decided(one).basis.claims[made.worker].speculative == 960


@pytest.mark.parametrize(("served", "picks"), [("", 2), ("a:1", 2), ("10.9.9.9:9", 3)])
def test_failing_worker_is_ejected_for_a_while(served: str, picks: int) -> None:
    one = ledger(max_in_flight=100)
    made = decided(one, workers=WORKERS[:1])
    for _ in range(RULES[Judge.ANSWERS].failures):
        ticket = one.book(made, 0.0)
        assert ticket is not None
        one.note_answer(ticket, 503, served, 0.0)
    assert len(decided(one).pick) == picks
    assert bool(fleet_of(one).upstreams.reason("a:1", 0.0)) is (picks == 2)
    assert not fleet_of(one).upstreams.reason("a:1", RULES[Judge.ANSWERS].seconds)
    assert len(decided(one, now=RULES[Judge.ANSWERS].seconds).pick) == 3
    fleet_of(one).upstreams.leave(fleet_of(one).upstream("a:1"))
    assert len(decided(one).pick) == 3


def test_answered_request_keeps_its_claim() -> None:
    one = ledger()
    made = decided(one)
    ticket = one.book(made, 0.0)
    assert ticket is not None
    fleet_of(one).upstreams.doubt(made.pick[0], is_doubted=True)
    assert fleet_of(one).upstream(made.pick[0]).is_suspect
    one.note_answer(ticket, 200, made.pick[0], 0.0)
    assert not fleet_of(one).upstream(made.pick[0]).is_suspect
    assert decided(one).basis.claims[made.worker].speculative == 960


class Sending(NamedTuple):
    """A request of a test: its worker, its tokens, the status of its answer, and where it moves.

    moves_to: the worker that takes it over before it is answered, "" for none.
    """

    worker: str
    tokens: int
    status: int
    moves_to: str


SENDINGS = st.builds(
    Sending,
    st.sampled_from("ab"),
    st.sampled_from([1000, 2000]),
    st.sampled_from([200, 400, 404, 422, 429, 503]),
    st.sampled_from(["", "", "b"]),
)
REFUSALS = (404, 429, 503)
LONGEST = 3


def book_to(one: Ledger, worker: str, tokens: int, now: float) -> Ticket:
    """Books a prompt on a worker."""
    query = Query("m", [Prompt("m", array("I", range(tokens)))])
    workers = [each for each in WORKERS if each.name == worker]
    ticket = one.book(decided(one, query, now, workers=workers), now)
    assert ticket is not None
    return ticket


def reported(told: RecordedReports, now: float) -> dict[str, Expected]:
    """What another router expects of the longest prompt, by what it was told."""
    sent, holdings = (
        ClaimTable(RecordedReports.secret),
        {worker.endpoint: Holdings(worker.name) for worker in WORKERS},
    )
    claims: dict[object, Claim] = {}
    for words, told_of in told.lines:
        if isinstance(told_of, Claim):
            end = sent.withdraw if words == "withdrawn" else partial(sent.end, now=now)
            end(claims.pop(told_of))
            continue
        assert isinstance(told_of, list)
        for claim in told_of:
            where = holdings[words.split()[2]]
            claims[claim] = sent.record(where, told.marks[claim], now)
    return sent.expected(sent.marks(Prompt("m", array("I", range(2000)))), now)


@given(st.lists(st.tuples(SENDINGS, st.integers(0, LONGEST)), min_size=2, max_size=8))
def test_answered_with_a_failure_keeps_the_claims_of_other_requests(
    requests: list[tuple[Sending, int]],
) -> None:
    both, sound = shared(), shared()
    waiting: list[tuple[float, Sending, Ticket, Ticket | None]] = []
    last = (Sending("c", 300, 200, ""), 0)  # until all others are over
    for turn, (each, lasts) in enumerate([*requests, *[last] * (LONGEST + 1)]):
        now = turn / 10
        while waiting and waiting[0][0] <= now:
            _, over, *tickets = waiting.pop(0)
            for (one, _), ticket in zip((both, sound), tickets, strict=True):
                if ticket is not None:
                    finish(one, ticket, over, now)
        is_sound = each.status not in REFUSALS
        twin = book_to(sound[0], each.worker, each.tokens, now) if is_sound else None
        ticket = book_to(both[0], each.worker, each.tokens, now)
        waiting = sorted([*waiting, ((turn + lasts) / 10, each, ticket, twin)], key=itemgetter(0))
        if all(one.status not in REFUSALS for _, one, *_ in waiting):
            prompt = Query("m", [Prompt("m", array("I", range(2000)))])
            for state in ("live", "stale"):
                claims = [decided(one, prompt, now, state).basis.claims for one, _ in (both, sound)]
                assert claims[0] == claims[1]
            assert reported(both[1], now) == reported(sound[1], now)


def take(one: Ledger, ticket: Ticket, step: str) -> None:
    """Lets one thing happen to a request."""
    if step == "move":
        one.move(ticket, "b", "b:1", 0.1)
    elif step in ("answer", "fail"):
        one.note_answer(ticket, 200 if step == "answer" else 503, "", 0.1)
    elif step == "disclaim":
        one.disclaim(ticket)
    elif step == "lose":
        one.lose(ticket, 0.1)
    else:
        one.release(ticket, 0.1)


STEPS = st.sampled_from(["move", "answer", "fail", "disclaim", "lose", "release"])


@given(st.lists(st.lists(STEPS, max_size=6), min_size=1, max_size=4), st.booleans())
def test_what_is_released_is_gone_whatever_came_before_and_however_often(
    requests: list[list[str]], is_steered: bool
) -> None:
    one, told = shared()
    tickets = []
    for steps in requests:
        made = decided(one)
        ticket = one.book(made, 0.0) if is_steered else one.note(made, 0.0)
        assert ticket is not None
        tickets.append(ticket)
        for step in steps:
            take(one, ticket, step)
    for ticket in tickets:
        one.release(ticket, 0.2)
    lines = len(told.lines)
    for ticket in tickets:
        one.release(ticket, 0.3)
        assert (ticket.claims, ticket.turn) == ((), NO_TURN)
    assert len(told.lines) == lines
    assert [one.loads.in_flight(worker.endpoint) for worker in WORKERS] == [0, 0, 0]


def finish(one: Ledger, ticket: Ticket, how: Sending, now: float) -> None:
    """Moves a request if it moves, then ends it with its status."""
    if how.moves_to:
        one.move(ticket, how.moves_to, f"{how.moves_to}:1", now)
    one.note_answer(ticket, how.status, "", now)
    one.release(ticket, now)


def test_book_names_the_rank_that_holds_the_prompt_where_ranks_may_be_named() -> None:
    held = {"b": Overlap(16, (60, 0, 0, 0), rank=1)}
    ranks = []
    for may_name in (False, True):
        config = Config(models=(Model("m"),))
        one = books(config, Fleet(config, 2))
        made = decided(one, held=held, names_ranks=may_name)
        ticket = one.book(made, 0.0)
        assert ticket is not None
        assert (made.worker, made.rank) == ("b", ticket.rank)
        ranks.append(made.rank and made.rank.rank)
    assert ranks == [None, 1]


@pytest.mark.parametrize(("rate", "backlog"), [(100, 900), (8_000, 0)])
def test_backlog_decreases_at_the_configured_speed(rate: int, backlog: int) -> None:
    one = ledger(cost=Cost(prefill_tokens_per_second=rate))
    made = decided(one)
    one.book(made, 0.0)
    assert one.loads.load(made.pick[0], 1.0).backlog_tokens == backlog


def test_wants_status_is_true_for_a_sample_and_for_all_during_a_failure() -> None:
    one = ledger()
    looks = [one.wants_status() for _ in range(2 * REQUESTS_A_LOOK)]
    assert [at for at, is_wanted in enumerate(looks) if is_wanted] == [
        REQUESTS_A_LOOK - 1,
        2 * REQUESTS_A_LOOK - 1,
    ]
    fleet_of(one).upstreams.note_answer("a:1", 503, 0.0)
    assert all(one.wants_status() for _ in range(REQUESTS_A_LOOK))
    fleet_of(one).upstreams.note_answer("a:1", 200, 0.0)
    assert not one.wants_status()


def shared() -> tuple[Ledger, RecordedReports]:
    config, told = Config(models=(Model("m"),)), RecordedReports()
    return books(config, Fleet(config), told), told


def test_marks_are_equal_in_routers_of_one_secret() -> None:
    one, told = shared()
    assert one.claims.marks(QUERY.prompts[0]) == ClaimTable(told.secret).marks(QUERY.prompts[0])


def test_peers_hear_of_a_request_from_book_to_release() -> None:
    one, told = shared()
    decision = decided(one)
    ticket = one.book(decision, 0.0)
    assert ticket is not None
    ((words, claims),) = told.lines
    assert words == f"begun at {decision.pick[0]} with 1000"
    one.release(ticket, 1.0)
    one.release(ticket, 1.0)
    assert told.lines[1:] == [("ended", claim) for claim in claims]  # type: ignore[attr-defined]


def test_peers_hear_of_move_and_disclaim() -> None:
    one, told = shared()
    decision = decided(one)
    ticket = one.book(decision, 0.0)
    assert ticket is not None
    other = next(worker for worker in WORKERS if worker.name != decision.worker)
    one.move(ticket, other.name, other.endpoint, 0.0)
    one.disclaim(ticket)
    assert [words for words, _ in told.lines][1:] == [
        "withdrawn", f"begun at {other.endpoint} with 1000", "withdrawn",
    ]  # fmt: skip


def test_found_books_an_unsteered_request_once() -> None:
    one = ledger()
    for query in (QUERY, Query("m", [])):
        made = decided(one, query)
        ticket = one.note(made, 0.0)
        assert ticket is not None
        for _ in range(2):  # the second time, it is known already
            one.note_worker(ticket, made, "b", "b:1", 0.0)
        assert one.loads.in_flight("b:1") == 1
        one.release(ticket, 0.0)
    assert one.loads.in_flight("b:1") == 0


def test_other_routers_are_told_where_conversations_and_responses_belong() -> None:
    config = Config(models=(Model("m"),))
    told = RecordedReports()
    one = books(config, Fleet(config), told)
    said = beginning_of(bytes(range(200)))
    query = Query("m", reason="no_tokenizer", outline=said, session="s", salt=None)

    def homes() -> list[tuple[str, object]]:
        lines, told.homes = told.homes, []
        return lines

    made = decided(one, query)
    ticket = one.book(made, 0.0)
    assert ticket is not None
    keys = made.basis.belonging.turn.keys
    assert (homes(), len(keys)) == ([(f"turn at {ticket.endpoint}", (keys, 0))], 2)
    other = next(each for each in WORKERS if each.endpoint != ticket.endpoint)
    one.move(ticket, other.name, other.endpoint, 0.1)
    assert homes() == [(f"turn at {other.endpoint}", (keys, 0))]
    one.disclaim(ticket)
    one.disclaim(ticket)
    assert homes() == [(f"over at {other.endpoint}", keys)]
    one.note_response(other.name, "resp_1", 0.2)
    one.homes.note((), Holdings("gone"), 0.2)
    assert [line for line, _ in homes()] == [f"home at {other.endpoint}"]
    keyed = decided(one)
    one.book(keyed, 0.3)
    assert homes() == [(f"turn at {keyed.pick[0]}", (keyed.basis.belonging.turn.keys, 0))]


def test_snapshot_follows_the_policy_that_a_request_names() -> None:
    one = ledger(header="x-policy")
    named = RoutingRequest(replace(NO_HEAD, policy="round_robin"), None)
    assert decided(one, request=named).basis.policy == "round_robin"
    assert decided(one).basis.policy != "round_robin"


def test_book_claims_each_prompt_of_a_request() -> None:
    one, both = ledger(), ledger()
    other = Prompt("m", array("I", range(5000, 6000)))
    one.book(decided(one), 0.0)
    both.book(decided(both, replace(QUERY, prompts=[*QUERY.prompts, other])), 0.0)
    assert len(both.claims) == 2 * len(one.claims) > 0


def test_book_fills_a_cache_of_known_size_by_what_was_not_there() -> None:
    one = ledger()
    holdings = [one.fleet.holdings(each.name) for each in WORKERS]
    for each in holdings:
        each.capacity_tokens, each.is_blind = 500, True
    for number in range(2 * len(WORKERS)):  # of 1,000 tokens each, all of them new
        prompt = Prompt("m", array("I", range(1000 * number, 1000 * number + 1000)))
        one.book(decided(one, replace(QUERY, prompts=[prompt])), 5.0 + number)
    assert all(each.lost_at >= 5.0 for each in holdings)
