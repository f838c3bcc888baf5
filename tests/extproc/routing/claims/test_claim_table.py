import gc
import math
import sys
import tracemalloc
from array import array
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.requests.outline import beginning_of
from extproc.routing.claims.claim_table import (
    BYTES_PER_MARK,
    ENDED_CLAIMS,
    MOST_CLAIMS,
    Claim,
    ClaimTable,
    Holdings,
    Lifetimes,
)
from extproc.routing.claims.marks import KEY_BYTES, Marks, marks_of
from kvstate.overlap import Prompt

LIFETIMES = Lifetimes(speculative=10.0, grace=1.0, approximate=100.0)
PROMPT = Prompt("m", array("I", range(300)))
LONGER = Prompt("m", array("I", range(500)))
OTHER = Prompt("m", array("I", range(7, 307)))


def table(limit_bytes: int = 1 << 20) -> ClaimTable:
    return ClaimTable(1, limit_bytes, LIFETIMES)


def test_expected_is_empty_where_nothing_was_sent() -> None:
    sent = table()
    assert sent.expected(sent.marks(PROMPT), 0.0) == {}


def test_expected_holds_the_sent_prompt_on_its_worker_only() -> None:
    a = Holdings("a")
    sent = table()
    sent.record(a, sent.marks(PROMPT), 0.0)
    assert sent.expected(sent.marks(PROMPT), 0.0) == {"a": (256, 256)}
    assert sent.expected(sent.marks(LONGER), 0.0) == {"a": (256, 256)}
    assert sent.expected(sent.marks(OTHER), 0.0) == {}


def test_expected_holds_the_share_of_each_worker() -> None:
    a, b = Holdings("a"), Holdings("b")
    sent = table()
    sent.record(a, sent.marks(PROMPT), 0.0)
    sent.record(b, sent.marks(LONGER), 0.0)
    expected = sent.expected(sent.marks(LONGER), 0.0)
    assert expected == {"a": (256, 256), "b": (448, 448)}


def test_expected_separates_namespaces() -> None:
    a = Holdings("a")
    sent = table()
    sent.record(a, sent.marks(PROMPT), 0.0)
    for other in (replace(PROMPT, lora="x"), replace(PROMPT, salt="x"), replace(PROMPT, model="n")):
        assert sent.expected(sent.marks(other), 0.0) == {}


def test_expected_separates_text_from_tokens_and_models() -> None:
    a = Holdings("a")
    sent = table()
    text = beginning_of(b"word " * 250)
    sent.record(a, sent.text_marks("m", text), 0.0)
    longer = beginning_of(b"word " * 300)
    assert sent.expected(sent.text_marks("m", longer), 0.0) == {"a": (256, 256)}
    assert sent.expected(sent.text_marks("n", text), 0.0) == {}
    assert sent.expected(sent.text_marks("m", text, lora="x"), 0.0) == {}
    assert sent.expected(sent.text_marks("m", text, salt="x"), 0.0) == {}


def test_running_request_is_expected_until_its_deadline() -> None:
    a = Holdings("a")
    sent = table()
    sent.record(a, sent.marks(PROMPT), 0.0)
    assert sent.expected(sent.marks(PROMPT), 9.9) == {"a": (256, 256)}
    assert sent.expected(sent.marks(PROMPT), 10.0) == {"a": (0, 256)}


def test_end_keeps_the_expectation_until_events_are_due() -> None:
    a = Holdings("a")
    sent = table()
    claim = sent.record(a, sent.marks(PROMPT), 0.0)
    sent.end(claim, 2.0)
    sent.end(claim, 5.0)
    assert sent.expected(sent.marks(PROMPT), 2.9) == {"a": (256, 256)}
    assert sent.expected(sent.marks(PROMPT), 3.0) == {"a": (0, 256)}


def test_expected_forgets_old_prompts() -> None:
    a = Holdings("a")
    sent = table()
    sent.record(a, sent.marks(PROMPT), 0.0)
    assert sent.expected(sent.marks(PROMPT), 100.0) == {}


def test_later_request_renews_the_claim() -> None:
    a, b = Holdings("a"), Holdings("b")
    sent = table()
    sent.end(sent.record(a, sent.marks(PROMPT), 0.0), 1.0)
    sent.record(b, sent.marks(PROMPT), 60.0)
    sent.record(a, sent.marks(PROMPT), 60.0)
    expected = sent.expected(sent.marks(PROMPT), 61.0)
    assert expected == {"a": (256, 256), "b": (256, 256)}


def test_withdraw_clears_the_claim_of_a_request_that_never_arrived() -> None:
    a = Holdings("a")
    sent = table()
    sent.withdraw(sent.record(a, sent.marks(PROMPT), 0.0))
    assert sent.expected(sent.marks(PROMPT), 0.0) == {}


def test_lose_clears_the_earlier_expectations_of_a_worker() -> None:
    a, b = Holdings("a"), Holdings("b")
    sent = table()
    sent.record(a, sent.marks(PROMPT), 0.0)
    sent.record(b, sent.marks(PROMPT), 0.0)
    a.lose(1.0)
    assert set(sent.expected(sent.marks(PROMPT), 2.0)) == {"b"}
    sent.record(a, sent.marks(PROMPT), 2.0)
    assert set(sent.expected(sent.marks(PROMPT), 2.0)) == {"a", "b"}


def test_lose_of_a_removed_worker_spares_a_later_worker_of_its_name() -> None:
    sent, gone, other = table(), Holdings("a"), Holdings("a")
    sent.record(gone, sent.marks(PROMPT), 0.0)
    gone.lose()
    assert sent.expected(sent.marks(PROMPT), 2.0) == {}
    sent.record(other, sent.marks(PROMPT), 2.0)
    sent.record(gone, sent.marks(LONGER), 2.0)
    assert sent.expected(sent.marks(LONGER), 2.0) == {"a": (256, 256)}


def test_record_evicts_the_oldest_half_of_a_full_table() -> None:
    a = Holdings("a")
    sent = table(2 * 16 * BYTES_PER_MARK)
    for number in range(50):
        prompt = Prompt("m", array("I", range(number, number + 300)))
        sent.record(a, sent.marks(prompt), float(number) / 100)
        assert set(sent.expected(sent.marks(prompt), 0.5)) == {"a"}
        assert len(sent) <= 2 * (16 + 4)
    assert sent.expected(sent.marks(Prompt("m", array("I", range(300)))), 0.5) == {}


def test_mark_takes_no_more_memory_than_its_counted_bytes() -> None:
    a = Holdings("a")
    sent = table(1 << 30)
    gc.collect()
    tracemalloc.start()
    for number in range(500):
        marks = marks_of(number, array("I", bytes(4 * 8000)))
        sent.record(a, marks, 0.0)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / len(sent) < BYTES_PER_MARK


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 400)), max_size=20
    ),
    st.tuples(st.integers(0, 3), st.integers(1, 400)),
)
def test_expected_never_exceeds_the_common_prefix(
    sends: list[tuple[str, int, int]], asked: tuple[int, int]
) -> None:
    def tokens(kind: int, length: int) -> "array[int]":
        return array("I", [*range(100), *[kind] * length])

    sent, holdings = table(), {name: Holdings(name) for name in "abc"}
    for worker, kind, length in sends:
        sent.record(holdings[worker], sent.marks(Prompt("m", tokens(kind, length))), 0.0)
    kind, length = asked
    for worker, (speculative, approximate) in sent.expected(
        sent.marks(Prompt("m", tokens(kind, length))), 0.0
    ).items():
        own = [(k, n) for name, k, n in sends if name == worker]
        most = max(100 + (min(n, length) if k == kind else 0) for k, n in own)
        assert 0 < speculative == approximate <= most


class Request(NamedTuple):
    """A request of a test: its worker, its prompt, when it begins and ends, and how.

    is_refused: whether its claim is withdrawn at the end.
    """

    worker: str
    kind: int
    length: int
    begins: float
    lasts: float
    is_refused: bool


REQUESTS = st.lists(
    st.builds(
        Request,
        st.sampled_from("abc"),
        st.integers(0, 2),
        st.integers(1, 400),
        st.integers(0, 120).map(float),
        st.integers(0, 20).map(float),
        st.booleans(),
    ),
    max_size=20,
)
LOSSES = st.lists(st.tuples(st.integers(0, 140).map(float), st.sampled_from("abc")), max_size=3)


def branch(kind: int, length: int) -> Prompt:
    """A prompt that shares its first 200 tokens with those of other kinds."""
    return Prompt("m", array("I", [*range(200), *[kind] * length]))


class Side:
    """A table, and what was claimed in it by the number of the request."""

    def __init__(self) -> None:
        self.sent, self.claims = table(), dict[int, Claim]()
        self.holdings = {name: Holdings(name) for name in "abc"}

    def begin(self, number: int, one: Request) -> None:
        marks = self.sent.marks(branch(one.kind, one.length))
        self.claims[number] = self.sent.record(self.holdings[one.worker], marks, one.begins)

    def end(self, number: int, one: Request) -> None:
        claim = self.claims.pop(number)
        if one.is_refused:
            self.sent.withdraw(claim)
        else:
            self.sent.end(claim, one.begins + one.lasts)

    def lose(self, name: str, now: float) -> None:
        self.holdings[name].lose(now)

    def seen(self, now: float) -> list[dict[str, tuple[int, int]]]:
        kinds = range(3)
        return [self.sent.expected(self.sent.marks(branch(kind, 400)), now) for kind in kinds]


@given(requests=REQUESTS, losses=LOSSES)
def test_withdraw_leaves_the_table_as_without_the_request(
    requests: list[Request], losses: list[tuple[float, str]]
) -> None:
    steps: list[tuple[float, Callable[[Side], None], bool]] = []
    for number, one in enumerate(requests):
        begin, end = (
            partial(Side.begin, number=number, one=one),
            partial(Side.end, number=number, one=one),
        )
        steps += [
            (one.begins, begin, one.is_refused),
            (one.begins + one.lasts, end, one.is_refused),
        ]
    for at, name in losses:
        steps.append((at, partial(Side.lose, name=name, now=at), False))
    both, sound = Side(), Side()
    for at, step, is_refused in sorted(steps, key=itemgetter(0)):
        step(both)
        if not is_refused:
            step(sound)
        if not any(requests[number].is_refused for number in both.claims):
            for later in (0.0, 1.0, 5.0, 15.0, 99.0):
                assert both.seen(at + later) == sound.seen(at + later)


def test_withdraw_frees_its_memory() -> None:
    sent, a = table(2 * 16 * BYTES_PER_MARK), Holdings("a")
    sent.record(a, sent.marks(PROMPT), 0.0)
    before = len(sent)
    for number in range(1, 100):
        marks = sent.marks(Prompt("m", array("I", range(number, number + 300))))
        sent.withdraw(sent.record(a, marks, 0.0))
    assert len(sent) == before
    assert sent.expected(sent.marks(PROMPT), 0.0) == {"a": (256, 256)}


def steps_of(work: Callable[[], object]) -> int:
    """Counts the lines of Python that some work runs through."""
    count, before = 0, sys.gettrace()

    def trace(_frame: object, event: str, _arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def crowded(workers: int, *, is_over: bool) -> tuple[ClaimTable, Marks]:
    """A table in which each of many workers claims 20 beginnings of one prompt."""
    sent = table(1 << 30)
    everything = sent.marks(Prompt("m", array("I", range(20_000))))
    for length in range(1, 21):
        marks = Marks(everything.lengths[:length], everything.keys[: KEY_BYTES * length])
        for number in range(workers):
            claim = sent.record(Holdings(str(number)), marks, length / 10)
            if is_over:
                sent.end(claim, length / 10)
    return sent, everything


@pytest.mark.parametrize("is_over", [True, False])
def test_expected_and_record_take_no_more_steps_for_a_thousand_workers(*, is_over: bool) -> None:
    steps = []
    for workers in (MOST_CLAIMS, 1_000):
        sent, marks = crowded(workers, is_over=is_over)
        reading = steps_of(partial(sent.expected, marks, 5.0))
        writing = [
            steps_of(partial(sent.record, Holdings("new"), marks, 5.0)) for _ in range(MOST_CLAIMS)
        ]
        assert len(sent.expected(marks, 5.0)) >= MOST_CLAIMS / 4
        steps.append((reading, sum(writing)))
    (reads, writes), (many_reads, many_writes) = steps
    assert 0 < many_reads <= 1.5 * reads
    assert 0 < many_writes <= 1.5 * writes


@pytest.mark.parametrize(
    "tokens", [65, *(pytest.param(n, marks=pytest.mark.slow) for n in (300, 5_000))]
)
def test_record_keeps_the_limit_of_memory_for_any_number_of_workers(tokens: int) -> None:
    limit, holdings = 1 << 20, [Holdings(str(number)) for number in range(64)]
    sent = table(limit)
    gc.collect()
    tracemalloc.start()
    for number in range(max(150, 60_000 // tokens)):
        marks = sent.marks(Prompt("m", array("I", range(number, number + tokens))))
        for one in holdings:
            keys = bytes(bytearray(marks.keys))  # as every request has its own
            sent.record(one, Marks(marks.lengths, keys), 0.0)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 1.2 * limit


@given(
    ended=st.integers(1, ENDED_CLAIMS),
    refused=st.lists(st.integers(0, 99), min_size=1, max_size=4 * MOST_CLAIMS),
    at_once=st.booleans(),
)
def test_withdraw_keeps_ended_claims_for_any_number_of_claims_of_a_mark(
    ended: int, refused: list[int], *, at_once: bool
) -> None:
    sent, holdings = table(), [Holdings(str(number)) for number in range(100)]
    marks = sent.marks(PROMPT)
    for one in holdings[:ended]:
        sent.end(sent.record(one, marks, 0.0), 0.0)
    before = [sent.expected(marks, now) for now in (1.5, 50.0)]
    claims = []
    for number in refused:
        claims.append(sent.record(holdings[number], marks, 1.0))
        if not at_once:
            sent.withdraw(claims.pop())
    for claim in claims:
        sent.withdraw(claim)
    assert [sent.expected(marks, now) for now in (1.5, 50.0)] == before


def filled(capacity: int | None, *sent: int) -> Holdings:
    """The record of a worker to which so many new tokens were sent, one request a second."""
    holdings = Holdings("w")
    holdings.capacity_tokens, holdings.is_blind = capacity, True
    for now, tokens in enumerate(sent, 1):
        holdings.fill(tokens, float(now))
    return holdings


def test_what_no_longer_fits_into_a_cache_of_known_size_does_not_count() -> None:
    sent = table()
    marks, holdings = sent.marks(PROMPT), filled(500)
    sent.record(holdings, marks, 0.0)
    holdings.fill(300, 0.0)
    holdings.fill(499, 1.0)
    assert sent.expected(marks, 2.0)["w"][1] == 256
    holdings.fill(1, 2.0)
    assert sent.expected(marks, 2.0) == {}


def test_cache_of_unknown_size_and_a_lost_one_have_room() -> None:
    assert filled(None, 10_000, 10_000).lost_at == -math.inf
    holdings = filled(100, 90)
    holdings.lose(1.5)
    holdings.fill(50, 2.0)
    holdings.fill(90, 3.0)
    assert holdings.lost_at == 1.5


PROMPTS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60)), max_size=80)


@given(PROMPTS, st.integers(1, 200))
def test_what_counts_as_evicted_is_evicted_by_least_recent_use(
    sent: list[tuple[int, int]], capacity: int
) -> None:
    holdings, sizes, last_sent = filled(capacity), dict[int, int](), dict[int, float]()
    lru = list[int]()
    for now, (name, tokens) in enumerate(sent, 1):
        size = sizes.setdefault(name, tokens)
        is_there = last_sent.get(name, -math.inf) > holdings.lost_at
        holdings.fill(0 if is_there else size, float(now))
        last_sent[name] = float(now)
        lru = [*(one for one in lru if one != name), name]
        while sum(sizes[one] for one in lru) > capacity:
            lru.pop(0)
        gone = {one for one, at in last_sent.items() if at <= holdings.lost_at}
        assert not gone.intersection(lru)


def test_memory_of_what_fills_a_cache_is_bounded() -> None:
    holdings = filled(6_400, *[1] * 10_000)
    assert len(holdings._filled) <= 66
    assert holdings.lost_at == pytest.approx(10_000 - 6_400, abs=200)
