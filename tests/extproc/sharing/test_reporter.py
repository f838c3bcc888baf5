from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from extproc.routing.claims.marks import NO_MARKS, Marks, packed
from extproc.routing.load.reports import MAX_WORKERS
from extproc.sharing.messages import MAX_CHALLENGES, MAX_CLAIMS, RouterReport, decoded
from extproc.sharing.reporter import LEAST_UNCACHED_TOKENS, WHOLE_SECONDS
from tests.extproc.sharing.routers import KEYS, WORKERS, Router

A, B = WORKERS


def said(router: Router, now: float) -> list[RouterReport]:
    return [decoded(message, KEYS) for message in router.due(now)]


def test_first_message_is_a_hello() -> None:
    router = Router("one")
    assert router.reporter.secret == KEYS.marks
    (first,) = said(router, 0.0)
    assert (first.origin, first.incarnation, first.sequence, first.is_hello) == ("one", 1, 1, True)
    router.loads.begin(A, 10, 0.01)
    assert [one.is_hello for one in said(router, 0.01)] == [False]
    router.reporter.hello()
    assert [one.is_hello for one in said(router, 0.02)] == [True]


def test_compose_makes_nothing_without_changes_until_a_sign_of_life_is_needed() -> None:
    router = Router("one")
    router.due(0.0)
    assert router.due(0.01) == []
    (alive,) = said(router, 0.05)
    assert alive.workers == ()


def test_compose_holds_changed_workers_only() -> None:
    router = Router("one")
    router.loads.begin(A, 10, 0.0)
    router.due(0.0)
    ticket = router.loads.begin(B, 70, 0.01)
    ((second,),) = [one.workers for one in said(router, 0.01)]
    assert astuple(second)[1:] == (1, 70, 70, 70, 70)
    router.loads.move(ticket, A, 0.02)
    ((one, two),) = [one.workers for one in said(router, 0.02)]
    assert {one.in_flight, two.in_flight} == {0, 2}


def test_compose_omits_removed_workers() -> None:
    router = Router("one")
    router.due(0.0)
    router.loads.begin(A, 10, 0.01)
    del router.endpoints[A]
    assert [one.workers for one in said(router, 0.01)] == [()]


def test_compose_holds_all_used_workers_each_second() -> None:
    router = Router("one")
    router.loads.end(router.loads.begin(A, 10, 0.0), 0.0)
    router.loads.begin(B, 10, 0.0)
    router.due(0.0)
    assert [len(one.workers) for one in said(router, WHOLE_SECONDS - 0.01)] == [0]
    assert [len(one.workers) for one in said(router, WHOLE_SECONDS)] == [2]


def test_compose_holds_everything_once_for_a_newcomer() -> None:
    router = Router("one")
    router.loads.begin(A, 10, 0.0)
    router.send(A, Marks((64,), packed((1,))), 0.0)
    router.due(0.0)
    router.reporter.note_hello()
    router.reporter.note_hello()
    assert router.due(0.01) == []  # all was sent a moment ago
    (answer,) = said(router, 0.3)
    assert (len(answer.workers), len(answer.claims)) == (1, 1)
    assert [(one.workers, one.claims) for one in said(router, 0.6)] == [((), ())]


def test_compose_omits_requests_with_few_uncached_tokens() -> None:
    router = Router("one")
    claim = router.send(A, Marks((64,), packed((1,))), 0.0, LEAST_UNCACHED_TOKENS - 1)
    router.send(A, NO_MARKS, 0.0)
    router.reporter.end(claim)
    router.reporter.withdraw(claim)
    (news,) = said(router, 0.0)
    assert (news.claims, news.ended, news.withdrawn) == ((), (), ())


def test_compose_splits_news_over_several_messages() -> None:
    workers = [f"10.0.{number // 256}.{number % 256}:1" for number in range(MAX_WORKERS + 5)]
    router = Router("one", workers=workers)
    for worker in workers:
        router.loads.begin(worker, 10, 0.0)
    for key in range(2 * MAX_CLAIMS + 1):
        router.send(workers[0], Marks((64,), packed((key,))), 0.0)
    reports = said(router, 0.0)
    assert [len(one.workers) for one in reports] == [MAX_WORKERS, 5, 0]
    assert [len(one.claims) for one in reports] == [MAX_CLAIMS, MAX_CLAIMS, 1]
    assert [one.sequence for one in reports] == [1, 2, 3]
    assert [one.is_hello for one in reports] == [True, False, False]
    assert [one.is_whole for one in reports] == [False, True, False]


@given(
    older=st.integers(0, 2),
    fates=st.lists(st.booleans(), min_size=MAX_CLAIMS - 2, max_size=2 * MAX_CLAIMS),
)
def test_withdrawn_leaves_other_routers_as_without_the_request(
    older: int, fates: list[bool]
) -> None:
    one, other, sound = Router("one"), Router("other"), Router("sound")
    marks = Marks((64, 128), packed((1, 2)))
    for claim in [one.send(A, marks, 0.0) for _ in range(older)]:
        one.reporter.end(claim)
    both = one.due(0.0)
    other.hear(both, 0.0)
    sound.hear(both, 0.0)
    for is_elsewhere in fates:
        worker = B if is_elsewhere else A
        one.reporter.withdraw(one.send(worker, marks, 1.0))
    other.hear(one.due(1.0), 1.0)
    for now in (1.0, 1.5, 5.0, 500.0):
        assert other.sent.expected(marks, now) == sound.sent.expected(marks, now)


def test_pending_news_are_bounded() -> None:
    workers = [f"10.0.0.{key}:1" for key in range(6)]
    router = Router("one", workers=workers, max_open=3, max_waiting=2)
    claims = [router.send(worker, Marks((64,), packed((1,))), 0.0) for worker in workers]
    for claim in claims:
        router.reporter.end(claim)
    (news,) = said(router, 0.0)
    assert router.reporter.dropped == 4
    assert (len(news.claims), len(news.ended)) == (2, 2)


def test_answers_of_a_message_are_bounded() -> None:
    router = Router("one")
    for number in range(MAX_CHALLENGES + 1):
        router.reporter.answer(number)
    (first, *_) = said(router, 0.0)
    assert first.answers == tuple(range(MAX_CHALLENGES))
