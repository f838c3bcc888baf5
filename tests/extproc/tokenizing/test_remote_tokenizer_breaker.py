import random
from collections import Counter

from extproc.tokenizing.remote_tokenizer import MAX_FAILURES, PROBE_SECONDS, Breaker

BOTH = ("a", "b")


def breaker(seed: int = 0) -> Breaker:
    return Breaker(random.Random(seed).random)


def opened(worker: str, now: float = 0.0) -> Breaker:
    one = breaker()
    for _ in range(MAX_FAILURES):
        one.failed(worker, now)
    return one


def test_questions_are_spread_over_the_workers() -> None:
    one = breaker()
    chosen = Counter(one.choose(BOTH) for _ in range(1_000))
    assert min(chosen["a"], chosen["b"]) > 400


def test_one_that_failed_just_now_is_not_asked_while_there_is_another() -> None:
    one = breaker()
    one.failed("a", 0.0)
    assert {one.choose(BOTH) for _ in range(50)} == {"b"}
    assert one.choose(["a"]) == "a"
    one.succeeded("a")
    assert {one.choose(BOTH) for _ in range(50)} == {"a", "b"}


def test_one_that_keeps_failing_is_left_alone() -> None:
    one = opened("a")
    assert one.choose(["a"]) is None
    assert one.choose(BOTH) == "b"
    assert one.choose([]) is None


def test_of_one_that_is_gone_nothing_is_remembered() -> None:
    one = opened("a")
    assert len(one) == 1
    one.forget("a")
    one.forget("never heard of")
    assert (len(one), one.choose(["a"])) == (0, "a")


def test_a_probe_closes_it_again() -> None:
    one = opened("a")
    assert one.to_probe(BOTH, 0.0) is None
    assert one.to_probe(BOTH, 2 * PROBE_SECONDS[0]) == "a"
    assert one.to_probe(BOTH, 2 * PROBE_SECONDS[0]) is None
    one.succeeded("a")
    assert one.choose(["a"]) == "a"


def test_a_probe_that_fails_waits_longer() -> None:
    one = opened("a")
    now, waits = 0.0, []
    for _ in range(12):
        asked_at = now
        while one.to_probe(["a"], now) is None:
            now += 0.25
        one.failed("a", now)
        waits.append(now - asked_at)
    assert waits[0] < 2 * PROBE_SECONDS[0]
    assert PROBE_SECONDS[1] / 2 <= waits[-1] <= 2 * PROBE_SECONDS[1]


def test_workers_that_are_well_are_not_probed() -> None:
    one = breaker()
    one.failed("a", 0.0)
    assert one.to_probe(BOTH, 1_000.0) is None


def test_those_that_are_left_alone_are_counted() -> None:
    one = opened("a")
    one.failed("b", 0.0)
    assert one.away(BOTH) == 1
    assert one.away(["b"]) == 0
