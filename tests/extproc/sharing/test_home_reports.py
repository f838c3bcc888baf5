"""Homes of conversations, told from router to router by messages alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.claims.claim_table import Holdings
from extproc.routing.claims.homes import Homes, Turn
from extproc.routing.claims.live_contexts import Context
from extproc.sharing.home_reports import MAX_KNOWN, MAX_WAITING, HomeReports, known_homes
from extproc.sharing.messages import (
    KEYS_OF_HOME,
    MAX_HOME_KEYS,
    MAX_HOMES,
    HomeKind,
    RouterReport,
    decoded,
    encoded,
    known_report,
    turn_report,
    worker_id,
)
from extproc.sharing.other_routers import MARKS_AT_ONCE
from tests.extproc.sharing.routers import (
    KEYS,
    WORKERS,
    Router,
    introduce,
    met,
    tell_all,
    wall_us,
)

A, B = WORKERS
A_ID = worker_id(KEYS, A)

# Requests: through which router, of which conversation, to which worker.
TURNS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.sampled_from(WORKERS)))


@given(TURNS)
def test_routers_that_share_know_the_homes_that_one_router_would(
    turns: list[tuple[int, int, str]],
) -> None:
    routers, one = met(*"abc"), Router("alone")
    last = dict.fromkeys(range(5), 0)
    for number, (at, conversation, worker) in enumerate(turns, start=1):
        follows, now = last[conversation], number / 100
        keys = (1_000 * conversation + number, conversation)  # its end, and its session
        last[conversation] = keys[0]
        routers[at].turn(keys, follows, worker, now)
        one.turn(keys, follows, worker, now)
        tell_all(routers, now)
        for router in routers:
            for key in (*keys, follows):
                assert router.home_of(key, now) == one.home_of(key, now)
            for each in WORKERS:
                assert router.live(each, now) == one.live(each, now)


def test_request_that_was_not_computed_leaves_no_home_at_its_worker() -> None:
    one, other = met("one", "other")
    one.turn((7,), 0, A, 0.0)
    one.turn((8,), 0, A, 0.0)
    other.turn((8,), 0, B, 0.0)  # the client tried again through the other router
    tell_all([one, other], 0.0)
    other.turn((8,), 0, B, 0.01)
    one.homes.forget((7, 8))
    one.reporter.note_not_computed((7, 8), A)
    tell_all([one, other], 0.01)
    assert [other.home_of(key, 0.1) for key in (7, 8)] == ["", B]
    assert (other.live(A, 0.1), other.live(B, 0.1)) == (0, 1)


def test_other_routers_know_with_what_a_sub_agent_began() -> None:
    one, other = met("one", "other")
    context = Context(100.0, 900.0, 5, has_returned=True, forked=700.0)
    one.reporter.note_turn(Turn((7,), 6, context), A)
    tell_all([one, other], 0.0)
    assert other.homes.counted(7, 0.1) == context
    assert other.homes.grown(7, 1_500.0).begun_with == 200.0


def test_response_is_continued_where_it_is_kept_through_any_router() -> None:
    one, other = met("one", "other")
    key = one.homes.key("response", None, None, "resp_1")
    one.reporter.note_home(key, B)
    tell_all([one, other], 0.0)
    assert other.home_of(other.homes.key("response", None, None, "resp_1"), 0.1) == B
    assert other.live(B, 0.1) == 0


def test_newcomer_learns_homes_with_their_ages() -> None:
    one, other = met("one", "other")
    one.turn((7, 70), 0, A, 0.0)
    other.turn((8,), 0, B, 5.0)
    tell_all([one, other], 5.0)
    other.holdings[A].lose(6.0)
    newcomer = Router("newcomer")
    newcomer.holdings[A].lose(3.0)  # it was added before, and knows that
    for now in (9.0, 9.01, 9.02, 9.5, 9.51):
        tell_all([one, other, newcomer], now)
    assert [newcomer.home_of(key, 9.6) for key in (7, 70, 8)] == ["", "", B]
    assert newcomer.live(B, 9.6) == 0  # nobody knows whether it goes on


def test_homes_told_again_change_nothing() -> None:
    one, other = met("one", "other")
    one.turn((7,), 0, A, 0.0)
    tell_all([one, other], 0.0)
    other.turn((8,), 0, B, 0.5)
    one.turn((8,), 0, A, 0.4)  # what is told later, though it was earlier
    one.reporter.note_hello()
    one.due(0.5)  # the message is lost
    other.reporter.hello()
    tell_all([other, one], 1.0)
    assert other.home_of(7, 1.1) == A
    assert other.live(A, 1.1) == 1


@pytest.mark.parametrize(("since", "home"), [(2.0, "b"), (1.0, "a"), (0.5, "a")])
def test_learn_keeps_the_later_home(since: float, home: str) -> None:
    homes = Homes(1)
    homes.turn(Turn((7,)), Holdings("a"), 1.0)
    homes.learn(7, Holdings("b"), since)
    assert homes.find_worker((7,), 3.0) == home


def test_learn_replaces_a_home_that_lost_its_cache() -> None:
    homes, a = Homes(1), Holdings("a")
    homes.turn(Turn((7,)), a, 1.0)
    a.lose(2.0)
    homes.learn(7, Holdings("b"), 0.5)
    assert homes.find_worker((7,), 3.0) == "b"


def test_homes_at_workers_that_are_not_known_are_counted() -> None:
    one, other = met("one", "other")
    other.forget_worker(A)
    one.turn((7,), 0, A, 0.0)
    tell_all([one, other], 0.0)
    assert (other.others.unknown_workers, len(other.homes)) == (1, 0)


def test_changes_that_wait_are_bounded() -> None:
    reports = HomeReports()
    for key in range(MAX_WAITING + 3):
        reports.note_turn(A_ID, Turn((key,) * (KEYS_OF_HOME + 1), key))
    reports.note_not_computed(A_ID, range(KEYS_OF_HOME + 1))
    taken = reports.take()
    assert (len(taken), reports.dropped) == (MAX_WAITING, 4)
    assert {one.key_count for one in taken} == {KEYS_OF_HOME}
    assert [one.kind for one in taken][-2:] == [HomeKind.TURN, HomeKind.OVER]
    assert not reports.take()


def test_homes_are_told_in_order_in_as_many_messages_as_needed() -> None:
    one, other = met("one", "other")
    count = MAX_HOMES + 3
    for key in range(1, count + 1):
        one.turn((key, 1_000 + key % 2), 0, WORKERS[key % 2], 0.0)
    one.reporter.note_not_computed(range(1, KEYS_OF_HOME), B)
    messages = one.due(0.0)
    sent_reports = [decoded(message, KEYS).homes for message in messages]
    assert [len(homes) for homes in sent_reports] == [MAX_HOMES, 4]
    other.hear(messages, 0.0)
    assert other.home_of(count, 0.1) == WORKERS[count % 2]
    assert other.home_of(1, 0.1) == ""
    assert one.reporter.dropped == 0
    many = range(KEYS_OF_HOME)
    for _ in range(MAX_HOME_KEYS // KEYS_OF_HOME + 1):
        one.turn(many, 0, A, 1.0)
    counts = [sum(each.key_count for each in decoded(one, KEYS).homes) for one in one.due(1.0)]
    assert counts == [MAX_HOME_KEYS, KEYS_OF_HOME]


def test_newcomer_is_told_only_the_latest_homes() -> None:
    homes, worker = Homes(1), Holdings("a")
    for key in range(MAX_KNOWN + KEYS_OF_HOME):
        homes.note((key,), worker, float(key))
    sent_reports = known_homes(homes, {"a": A_ID}, 2_000.0)
    assert sum(one.key_count for one in sent_reports) == MAX_KNOWN
    assert known_homes(homes, {"b": A_ID}, 2_000.0) == []
    last = sent_reports[-1]
    assert (last.each_key[-1], last.each_age[-1]) == (1_087, 913)
    assert last.follows == b""


def test_homes_of_a_router_that_sends_too_many_are_left_out() -> None:
    other = Router("other")
    introduce(other, RouterReport("one", 1, 1, 0), 0.0)
    keys = list(range(KEYS_OF_HOME))
    many = (known_report(A_ID, keys, keys),) * (MAX_HOME_KEYS // KEYS_OF_HOME + 2)
    other.hear([encoded(RouterReport("one", 1, 2, wall_us(0.0), homes=many), KEYS)], 0.0)
    assert other.others.excess_claims == 2
    left = (MARKS_AT_ONCE - MAX_HOME_KEYS) // MAX_HOME_KEYS
    for sequence in range(left + 1):
        news = RouterReport("one", 1, 3 + sequence, wall_us(0.0), homes=many[2:])
        other.hear([encoded(news, KEYS)], 0.0)
    assert other.others.excess_claims == 2 + len(many) - 2
    late = RouterReport("one", 1, 999, wall_us(0.0), homes=(turn_report(A_ID, Turn((7,))),))
    other.hear([encoded(late, KEYS)], 0.0)
    assert other.others.excess_claims == 3 + len(many) - 2
