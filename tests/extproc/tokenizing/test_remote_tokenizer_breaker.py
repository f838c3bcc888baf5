import random
from collections import Counter

from extproc.tokenizing.remote_tokenizer import (
    MAX_FAILURES,
    PROBE_SECONDS,
    Failures,
    choose,
    count_avoided,
    to_probe,
)

chance = random.Random(0).random


def both() -> dict[str, Failures]:
    return {"a": Failures(), "b": Failures()}


def opened() -> dict[str, Failures]:
    """Two workers, the first of which keeps failing."""
    workers = both()
    for _ in range(MAX_FAILURES):
        workers["a"].add(0.0, chance)
    return workers


def chosen(workers: dict[str, Failures]) -> set[str | None]:
    return {choose(workers, chance) for _ in range(50)}


def test_choose_spreads_questions_over_the_workers() -> None:
    workers = both()
    counts = Counter(choose(workers, chance) for _ in range(1_000))
    assert min(counts["a"], counts["b"]) > 400


def test_choose_avoids_a_recent_failure_while_there_is_another_worker() -> None:
    workers = both()
    workers["a"].add(0.0, chance)
    assert chosen(workers) == {"b"}
    assert choose({"a": workers["a"]}, chance) == "a"
    workers["a"].forget()
    assert chosen(workers) == {"a", "b"}


def test_choose_avoids_a_worker_that_keeps_failing() -> None:
    workers = opened()
    assert choose({"a": workers["a"]}, chance) is None
    assert choose(workers, chance) == "b"
    assert choose({}, chance) is None


def test_probe_success_makes_a_worker_eligible_again() -> None:
    workers = opened()
    assert to_probe(workers, 0.0) is None
    assert to_probe(workers, 2 * PROBE_SECONDS[0]) == "a"
    assert to_probe(workers, 2 * PROBE_SECONDS[0]) is None
    workers["a"].forget()
    assert chosen(workers) == {"a", "b"}


def test_probe_failure_lengthens_the_wait() -> None:
    workers = opened()
    now, waits = 0.0, []
    for _ in range(12):
        asked_at = now
        while to_probe(workers, now) is None:
            now += 0.25
        workers["a"].add(now, chance)
        waits.append(now - asked_at)
    assert waits[0] < 2 * PROBE_SECONDS[0]
    assert PROBE_SECONDS[1] / 2 <= waits[-1] <= 2 * PROBE_SECONDS[1]


def test_to_probe_ignores_healthy_workers() -> None:
    workers = both()
    workers["a"].add(0.0, chance)
    assert to_probe(workers, 1_000.0) is None


def test_count_avoided_counts_avoided_workers() -> None:
    workers = opened()
    workers["b"].add(0.0, chance)
    assert count_avoided(workers) == 1
    assert count_avoided({"b": workers["b"]}) == 0
