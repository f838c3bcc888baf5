from array import array
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.candidates.pins import Pin, PinnedRank
from extproc.routing.claims.marks import Marks, packed
from extproc.routing.load.endpoint_load import EndpointLoad, LoadSample, Ticket
from extproc.routing.load.loads import Load, Loads
from extproc.routing.load.reports import WorkerLoadReport
from extproc.sharing.messages import RouterReport, decoded, encoded, worker_id
from extproc.sharing.other_routers import ASK_SECONDS, MAX_ROUTERS
from kvstate.overlap import Prompt
from tests.extproc.sharing.routers import KEYS, WORKERS, Router, introduce, met, tell_all, wall_us

A, B = WORKERS
PROMPT = Prompt("m", array("I", range(2_000)), None, None)

# The seconds before a step, a router, a worker and the tokens that the router sends there; at 0 the
# router's oldest request ends, below 0 the worker's oldest prompt is seen to be computed.
STEPS = st.lists(
    st.tuples(
        st.floats(0, 0.5), st.integers(0, 2), st.sampled_from(WORKERS), st.integers(-1_000, 1_000)
    ),
    max_size=40,
)


@given(STEPS)
def test_load_seen_by_sharing_routers_equals_that_of_one_router(
    steps: list[tuple[float, int, str, int]],
) -> None:
    routers = met(*"abc")
    one = Loads({worker: EndpointLoad() for worker in WORKERS}, 1_000)
    under_way = [[] for _ in routers]  # type: ignore[var-annotated]
    waiting = {worker: deque[tuple[Ticket, Ticket, Loads]]() for worker in WORKERS}
    now = 0.0
    tell_all(routers, now)
    for seconds, number, worker, tokens in steps:
        now += seconds
        if tokens > 0:
            loads = routers[number].loads
            both = one.begin(worker, tokens, now), loads.begin(worker, tokens, now)
            under_way[number].append(both)
            waiting[worker].append((*both, loads))
        elif tokens < 0:
            if waiting[worker]:
                alone, shared, loads = waiting[worker].popleft()
                one.note_computed(alone, now)
                loads.note_computed(shared, now)
        elif under_way[number]:
            alone, shared = under_way[number].pop(0)
            one.end(alone, now)
            routers[number].loads.end(shared, now)
        tell_all(routers, now)
        for router in routers:
            for each in WORKERS:
                seen, wanted = router.load(each, now), one.load(each, now)
                assert seen.in_flight + seen.others == wanted.in_flight
                assert seen.backlog_tokens == pytest.approx(wanted.backlog_tokens, abs=3)
                assert seen.utilization == pytest.approx(wanted.utilization, abs=1e-3)


def test_request_of_a_router_is_load_for_others_until_it_ends() -> None:
    one, other = met("one", "other")
    ticket = one.loads.begin(A, 500, 0.0)
    other.hear(one.due(0.0), 0.0)
    assert other.load(A, 0.0) == Load(0, 500.0, 1, 500 / 10_000)
    assert (other.in_flight_of("one"), one.in_flight_of("other")) == (1, 0)
    one.loads.end(ticket, now=0.0)
    other.hear(one.due(0.01), 0.01)
    seen = other.load(A, 0.01)
    assert (seen.others, seen.backlog_tokens) == (0, 0.0)


def test_computed_prompt_of_a_router_leaves_the_backlog_of_others() -> None:
    one, other = met("one", "other")
    first, _ = one.loads.begin(A, 500, 0.0), one.loads.begin(A, 300, 0.0)
    other.hear(one.due(0.0), 0.0)
    other.loads.begin(A, 100, 0.0)
    assert other.load(A, 0.0).backlog_tokens == 900
    one.loads.note_computed(first, 0.05)
    other.hear(one.due(0.05), 0.05)
    seen = other.load(A, 0.05)
    assert (seen.in_flight, seen.others, seen.backlog_tokens) == (1, 2, 400)


def test_waiting_requests_may_exceed_the_rest_of_computed_prompts() -> None:
    one, other = met("one", "other")
    for _ in range(500):
        other.loads.end(other.loads.begin(B, 900, 0.0), 0.0)
    mine = [one.loads.begin(A, 900, 0.0) for _ in range(10)]
    one.loads.note_computed(mine[-3], 0.0)
    other.hear(one.due(0.0), 0.0)
    other.loads.report(A, LoadSample(running=9, waiting=1, asked_at=0.1), 0.1)
    assert 1_600 < other.load(A, 0.1).backlog_tokens <= 1_800


def test_lost_message_is_repaired_by_the_next() -> None:
    one, other = met("one", "other")
    other.hear(one.due(0.0), 0.0)
    for _ in range(3):
        one.loads.begin(A, 100, 0.1)
        one.due(0.1)
    one.loads.begin(A, 100, 0.1)
    other.hear(one.due(0.1), 0.1)
    seen = other.load(A, 0.1)
    assert (seen.others, seen.backlog_tokens, other.others.lost()) == (4, 400.0, 3)


def test_lost_message_triggers_one_question_for_all() -> None:
    one, other = met("one", "other")
    other.hear(one.due(0.0), 0.0)
    assert not other.others.asks(0.0)
    for now in (0.1, 0.2):
        one.due(now)  # the message is lost
        one.loads.begin(A, 100, now)
        other.hear(one.due(now + 0.05), now)
    assert other.others.asks(0.3)
    assert not other.others.asks(0.3)
    one.due(0.4)
    one.loads.begin(A, 100, 0.4)
    other.hear(one.due(0.45), 0.45)
    assert not other.others.asks(0.5)
    assert other.others.asks(0.3 + ASK_SECONDS)


def test_silent_router_is_forgotten_with_its_load() -> None:
    one, other = met("one", "other")
    one.loads.begin(A, 500, 0.0)
    other.loads.begin(A, 100, 0.0)
    other.hear(one.due(0.0), 0.0)
    assert not other.others.forget(0.2)
    assert other.load(A, 0.0).backlog_tokens == 600
    assert [each.origin for each in other.others.forget(0.21)] == ["one"]
    seen = other.load(A, 0.21)
    assert (seen.in_flight, seen.others, seen.backlog_tokens) == (1, 0, 100.0)
    for now in (1.0, 1.01, 1.02):
        tell_all([one, other], now)
    assert other.load(A, 1.02).others == 1


def test_restarted_router_begins_without_load() -> None:
    one, other = met("one", "other")
    one.loads.begin(A, 500, 0.0)
    other.hear(one.due(0.0), 0.0)
    again = Router("one", incarnation=2)
    for now in (0.1, 0.11, 0.12):
        tell_all([again, other], now)
    other.others.forget(0.12)
    assert other.load(A, 0.12).others == 0
    other.hear(one.due(0.13), 0.13)
    assert other.load(A, 0.13).others == 0
    assert other.knows("one").identity.incarnation == 2


def test_repeated_message_counts_once() -> None:
    one, other = met("one", "other")
    one.loads.begin(A, 500, 0.0)
    message = one.due(0.0)
    before = other.others.counts.copy()
    other.hear([*message, *message], 0.0)
    assert other.others.counts - before == {"accepted": 1, "out_of_order": 1}


def test_newcomer_learns_everything_with_the_answer_to_its_challenge() -> None:
    one, other = Router("one"), Router("other")
    one.due(0.0)
    ticket = one.loads.begin(A, 500, 0.1)
    claim = one.send(A, one.sent.marks(PROMPT), 0.1)
    assert one.due(0.1)
    assert claim.ended_at > 1e9
    assert ticket.load.tickets
    for now in (0.5, 0.51):
        tell_all([other, one], now)
    seen = other.load(A, 0.51)
    assert (seen.others, round(seen.backlog_tokens)) == (1, 90)
    expected = other.sent.expected(other.sent.marks(PROMPT), 0.51)
    assert expected[f"name of {A}"][0] > 1_500


def test_claim_of_another_router_counts_until_its_request_ends() -> None:
    one, other = met("one", "other")
    claim = one.send(B, one.sent.marks(PROMPT), 0.0)
    other.hear(one.due(0.0), 0.0)
    marks = other.sent.marks(PROMPT)
    speculative, approximate = other.sent.expected(marks, 10.0)[f"name of {B}"]
    assert speculative == approximate > 1_500
    one.reporter.end(claim)
    other.hear(one.due(10.0), 10.0)
    assert other.sent.expected(marks, 20.0)[f"name of {B}"] == (0, approximate)


def test_claim_repeated_for_a_newcomer_counts_once() -> None:
    one, other = met("one", "other")
    one.send(B, one.sent.marks(PROMPT), 0.0)
    other.hear(one.due(0.0), 0.0)
    kept = dict(other.knows("one").claims)
    one.reporter.note_hello()
    answer = one.due(0.5)
    assert decoded(answer[0], KEYS).claims
    other.hear(answer, 0.5)
    assert other.knows("one").claims == kept


def test_withdrawn_claim_of_another_router_is_dropped() -> None:
    one, other = met("one", "other")
    claim = one.send(B, one.sent.marks(PROMPT), 0.0)
    other.hear(one.due(0.0), 0.0)
    one.reporter.withdraw(claim)
    other.hear(one.due(0.1), 0.1)
    assert other.sent.expected(other.sent.marks(PROMPT), 0.1) == {}


def test_claims_of_an_ended_router_end() -> None:
    one, other = met("one", "other")
    one.send(B, one.sent.marks(PROMPT), 0.0)
    other.hear(one.due(0.0), 0.0)
    other.others.forget(1.0)
    speculative, approximate = other.sent.expected(other.sent.marks(PROMPT), 5.0)[f"name of {B}"]
    assert (speculative, approximate > 1_500) == (0, True)


def test_news_of_unknown_workers_change_nothing() -> None:
    one, other = met("one", "other")
    other.forget_worker(A)
    one.loads.begin(A, 500, 0.0)
    claim = one.send(A, one.sent.marks(PROMPT), 0.0)
    one.reporter.end(claim)
    other.hear(one.due(0.0), 0.0)
    assert other.others.unknown_workers == 2
    assert other.sent.expected(other.sent.marks(PROMPT), 0.0) == {}
    stranger = one.send(A, one.sent.marks(PROMPT), 0.0)
    one.reporter.withdraw(stranger)
    other.hear(one.due(0.1), 0.1)
    assert len(other.sent) == 0


def test_worker_removed_before_its_news_is_unknown() -> None:
    one, other = met("one", "other")
    one.loads.begin(A, 500, 0.0)
    del other.endpoints[A]
    other.hear(one.due(0.0), 0.0)
    assert other.others.unknown_workers == 1


def test_routers_beyond_the_bound_are_refused() -> None:
    other = Router("other")
    for number in range(MAX_ROUTERS):
        introduce(other, RouterReport(f"r{number}", 1, 1, 0), 0.0)
    other.hear([encoded(RouterReport("r64", 1, 1, 0), KEYS)], 0.0)
    assert (len(other.others.peers), other.others.counts["too_many_routers"]) == (MAX_ROUTERS, 1)


def test_claims_beyond_the_bound_expire_by_lifetime() -> None:
    one, other = met("one", "other", max_claims=2)
    for key in range(5):
        one.send(A, Marks((64,), packed((key,))), 0.0)
    other.hear(one.due(0.0), 0.0)
    assert len(other.knows("one").claims) == 2
    assert len(other.sent) == 5


def test_delay_of_news_is_computed_from_both_clocks() -> None:
    other = Router("other")
    introduce(other, RouterReport("one", 1, 1, wall_us(0.0)), 0.25)
    assert other.knows("one").delay_seconds == 0.25
    other.hear([encoded(RouterReport("one", 1, 2, wall_us(9.0)), KEYS)], 0.3)
    assert other.knows("one").delay_seconds == 0.0


def test_report_of_known_requests_counts_once() -> None:
    one, other = met("one", "other")
    for _ in range(3):
        one.loads.begin(A, 100, 0.0)
        other.loads.begin(A, 200, 0.0)
    other.hear(one.due(0.0), 0.0)
    other.loads.report(A, LoadSample(running=2, waiting=4, asked_at=0.1), 0.1)
    seen = other.load(A, 0.1)
    assert (seen.in_flight, seen.others) == (3, 3)
    assert 600 <= seen.backlog_tokens <= 900
    other.loads.report(A, LoadSample(6, 2, asked_at=0.2, pending_tokens=450), 0.2)
    seen = other.load(A, 0.2)
    assert (seen.in_flight, seen.others, seen.backlog_tokens) == (3, 5, 450)


def test_work_by_rank_is_a_share_of_the_whole_backlog() -> None:
    one, other = met("one", "other")
    one.loads.begin(A, 300, 0.0)
    other.loads.begin(A, 100, 0.0, rank=PinnedRank(1, Pin("x-rank"), "/v1/completions"))
    other.hear(one.due(0.0), 0.0)
    assert other.loads.work_by_rank(A, 0.2, 10.0) == {1: 60.0}


def test_earlier_figures_reach_a_newcomer_with_the_news() -> None:
    other = Router("other")
    gone = WorkerLoadReport(worker_id(KEYS, A), 0, 900, 5_000, 700, 2_000)
    introduce(other, RouterReport("one", 1, 9, 0, workers=(gone,)), 0.0)
    seen = other.load(A, 0.0)
    assert (seen.backlog_tokens, seen.utilization) == (700, 2_000 / 10_000)


def test_figures_of_a_worker_readded_by_the_sender_begin_at_zero() -> None:
    other = Router("other")
    introduce(other, RouterReport("one", 1, 1, 0, is_whole=True), 0.0)
    for sequence, sent in ((2, 5_000), (3, 100)):
        figures = WorkerLoadReport(worker_id(KEYS, A), 0, 6_000, sent, 0, sent)
        other.hear(
            [encoded(RouterReport("one", 1, sequence, 0, workers=(figures,)), KEYS)],
            0.0,
        )
    assert other.load(A, 0.0).backlog_tokens == 5_100


def test_figures_before_a_worker_is_readded_here_are_no_load() -> None:
    one, other = met("one", "other")
    for now in range(1_000):
        one.loads.end(one.loads.begin(A, 900, now), now + 0.9)
        other.hear(one.due(now), now)
    before = other.load(A, 1_000).utilization
    other.endpoints[A] = EndpointLoad()
    one.loads.begin(A, 900, 1_000)
    other.hear(one.due(1_000), 1_000)
    assert before < other.load(A, 1_000).utilization < 1


def test_whole_news_count_earlier_figures_as_zero() -> None:
    figures = WorkerLoadReport(worker_id(KEYS, A), 1, 900, 900, 30, 900)
    for is_whole, backlog in ((True, 900), (False, 30)):
        other = Router("other")
        introduce(other, RouterReport("one", 1, 5, 0, is_whole=is_whole), 0.0)
        other.hear([encoded(RouterReport("one", 1, 6, 0, workers=(figures,)), KEYS)], 0.0)
        assert other.load(A, 0.0).backlog_tokens == backlog


def test_repeated_hello_is_answered_with_everything() -> None:
    one, other = met("one", "other")
    other.loads.begin(A, 500, 0.0)
    one.hear(other.due(0.0), 0.0)
    one.reporter.hello()
    other.hear(one.due(0.3), 0.3)
    (whole,) = [decoded(message, KEYS) for message in other.due(0.3)]
    assert [worker.in_flight for worker in whole.workers] == [1]
