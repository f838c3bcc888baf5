import pytest
from msgspec.structs import astuple

from extproc.picking.sent import Marks
from extproc.sharing import telling as telling_module
from extproc.sharing.messages import MAX_CLAIMS, MAX_WORKERS, News, decoded
from extproc.sharing.telling import LEAST_UNCACHED_TOKENS, WHOLE_SECONDS
from tests.extproc.sharing.routers import KEYS, WORKERS, Router

A, B = WORKERS


def said(router: Router, now: float) -> list[News]:
    return [decoded(message, KEYS) for message in router.due(now)]


def test_the_first_message_says_hello() -> None:
    router = Router("one")
    assert router.telling.secret == KEYS.marks
    (first,) = said(router, 0.0)
    assert (first.origin, first.incarnation, first.sequence, first.is_hello) == ("one", 1, 1, True)
    router.loads.begin(A, 10, 0.01)
    assert [one.is_hello for one in said(router, 0.01)] == [False]
    router.telling.hello()
    assert [one.is_hello for one in said(router, 0.02)] == [True]


def test_a_tick_without_changes_says_nothing_until_it_would_seem_dead() -> None:
    router = Router("one")
    router.due(0.0)
    assert router.due(0.01) == []
    (alive,) = said(router, 0.05)
    assert alive.workers == ()


def test_only_workers_that_changed_are_told() -> None:
    router = Router("one")
    router.loads.begin(A, 10, 0.0)
    router.due(0.0)
    booking = router.loads.begin(B, 70, 0.01)
    ((second,),) = [one.workers for one in said(router, 0.01)]
    assert astuple(second)[1:] == (1, 70, 70, 70, 70)
    router.loads.move(booking, A, 0.02)
    ((one, two),) = [one.workers for one in said(router, 0.02)]
    assert {one.in_flight, two.in_flight} == {0, 2}


def test_a_worker_that_went_is_not_told() -> None:
    router = Router("one")
    router.due(0.0)
    router.loads.begin(A, 10, 0.01)
    del router.endpoints[A]
    assert [one.workers for one in said(router, 0.01)] == [()]


def test_each_second_all_that_was_used_is_told() -> None:
    router = Router("one")
    router.loads.end(router.loads.begin(A, 10, 0.0), 0.0)
    router.loads.begin(B, 10, 0.0)
    router.due(0.0)
    assert [len(one.workers) for one in said(router, WHOLE_SECONDS - 0.01)] == [0]
    assert [len(one.workers) for one in said(router, WHOLE_SECONDS)] == [2]


def test_a_newcomer_is_told_all_once() -> None:
    router = Router("one")
    router.loads.begin(A, 10, 0.0)
    router.send(A, Marks((64,), (1,)), 0.0)
    router.due(0.0)
    router.telling.asked()
    router.telling.asked()
    assert router.due(0.01) == []  # all was sent a moment ago
    (answer,) = said(router, 0.3)
    assert (len(answer.workers), len(answer.claims)) == (1, 1)
    assert [(one.workers, one.claims) for one in said(router, 0.6)] == [((), ())]


def test_requests_with_little_work_are_not_told() -> None:
    router = Router("one")
    claim = router.send(A, Marks((64,), (1,)), 0.0, LEAST_UNCACHED_TOKENS - 1)
    router.send(A, Marks((), ()), 0.0)
    router.telling.ended(claim)
    router.telling.withdrawn(claim)
    (news,) = said(router, 0.0)
    assert (news.claims, news.ended, news.withdrawn) == ((), (), ())


def test_more_than_one_message_holds_is_told_in_several() -> None:
    workers = [f"10.0.{number // 256}.{number % 256}:1" for number in range(MAX_WORKERS + 5)]
    router = Router("one", workers=workers)
    for worker in workers:
        router.loads.begin(worker, 10, 0.0)
    for key in range(2 * MAX_CLAIMS + 1):
        router.send(workers[0], Marks((64,), (key,)), 0.0)
    told = said(router, 0.0)
    assert [len(one.workers) for one in told] == [MAX_WORKERS, 5, 0]
    assert [len(one.claims) for one in told] == [MAX_CLAIMS, MAX_CLAIMS, 1]
    assert [one.sequence for one in told] == [1, 2, 3]
    assert [one.is_hello for one in told] == [True, False, False]
    assert [one.is_whole for one in told] == [False, True, False]


def test_nothing_waits_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling_module, "MAX_OPEN", 3)
    monkeypatch.setattr(telling_module, "MAX_WAITING", 2)
    workers = [f"10.0.0.{key}:1" for key in range(6)]
    router = Router("one", workers=workers)
    claims = [router.send(worker, Marks((64,), (1,)), 0.0) for worker in workers]
    for claim in claims:
        router.telling.ended(claim)
    (news,) = said(router, 0.0)
    assert router.telling.dropped == 4
    assert (len(news.claims), len(news.ended)) == (2, 2)
