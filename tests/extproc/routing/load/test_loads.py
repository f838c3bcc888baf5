from array import array
from collections import deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.candidates.pins import Pin, PinnedRank
from extproc.routing.load.endpoint_load import EndpointLoad, LoadSample, Ticket
from extproc.routing.load.loads import (
    PREFILL_TOKENS_PER_SECOND,
    REPORT_SECONDS,
    UTILIZATION_SECONDS,
    Gauges,
    Load,
    Loads,
)
from kvstate.overlap import Prompt


def loads_of(rate: float = PREFILL_TOKENS_PER_SECOND) -> Loads:
    return Loads({name: EndpointLoad() for name in ("a", "b", "0", "1", "2")}, rate)


def test_begin_counts_a_request_in_flight_until_its_end() -> None:
    loads = loads_of()
    ticket = loads.begin("a", 100, now=0.0)
    assert (loads.in_flight("a"), loads.in_flight("b")) == (1, 0)
    loads.end(ticket, now=0.0)
    assert loads.in_flight("a") == 0


def test_load_holds_requests_tokens_and_utilization_at_once() -> None:
    loads = loads_of()
    assert loads.load("a", 0.0) == Load()
    loads.begin("a", 100, now=0.0)
    utilization = 100 / PREFILL_TOKENS_PER_SECOND / UTILIZATION_SECONDS
    assert loads.load("a", 0.0) == Load(1, 100.0, 0.0, utilization)


def test_utilization_covers_the_last_seconds() -> None:
    loads = loads_of(100)
    for second in range(60):
        loads.end(loads.begin("a", 50, now=float(second)), float(second))
    assert 0.45 < loads.load("a", 60.0).utilization < 0.55
    assert loads.load("a", 60 + 3 * UTILIZATION_SECONDS).utilization < 0.03


def test_end_of_a_booking_counts_once() -> None:
    loads = loads_of()
    first, second = loads.begin("a", 1, now=0.0), loads.begin("a", 1, now=0.0)
    loads.end(first, now=0.0)
    loads.end(first, now=0.0)
    assert loads.in_flight("a") == 1
    loads.end(second, now=0.0)
    loads.end(second, now=0.0)
    assert loads.in_flight("a") == 0


def test_backlog_decreases_with_time() -> None:
    loads = loads_of()
    loads.begin("a", PREFILL_TOKENS_PER_SECOND, now=0.0)
    assert loads.load("a", 0.5).backlog_tokens == PREFILL_TOKENS_PER_SECOND / 2
    assert loads.load("a", 9.0).backlog_tokens == 0.0


def test_backlog_decreases_at_the_configured_speed() -> None:
    loads = loads_of(10)
    loads.begin("a", 100, now=0.0)
    assert loads.load("a", 1.0).backlog_tokens == 90


def test_computed_takes_its_prompt_from_the_backlog() -> None:
    endpoints = {"a": EndpointLoad()}
    loads = Loads(endpoints, 100, learns=True)
    prompt = Prompt("m", array("I", range(9)))
    first = loads.begin("a", 500, 0.0, prompt=prompt)
    second = loads.begin("a", 300, 0.0, prompt=prompt, is_sure=False)
    loads.note_computed(first, 1.0)
    assert loads.load("a", 1.0).backlog_tokens == 300
    loads.revise(second, 200)
    assert second.is_sure
    loads.note_computed(second, 1.0)
    assert loads.load("a", 1.0).backlog_tokens == 0


def test_slowness_of_an_unused_worker_ties_with_workers_of_one_speed() -> None:
    endpoints = {name: EndpointLoad() for name in "abc"}
    loads = Loads(endpoints, 100, learns=True)
    prompt = Prompt("m", array("I", range(9)))
    for n in range(100):
        name, took = "ab"[n % 2], 2.0 + n % 7 / 10  # instead of 10 s at the configured speed
        ticket = loads.begin(name, 1_000, 20.0 * n, prompt=prompt)
        loads.note_computed(ticket, 20.0 * n + took)
        loads.end(ticket, 20.0 * n + 10)
    slowness = {loads.load(name, 2_000).slowness for name in "abc"}
    assert len(slowness) == 1
    assert slowness.pop() < 0.4


@pytest.mark.parametrize("learns", [False, True])
def test_computed_keeps_the_tokens_of_other_routers_in_the_backlog(
    learns: bool,
) -> None:
    loads = Loads({"a": EndpointLoad()}, 100, learns=learns)
    gauges = Gauges(1, 400, 400, 400, 400)
    assert loads.record_report("other", "a", gauges, 0.0, is_known=True)
    ours = loads.begin("a", 100, 0.0, prompt=Prompt("m", array("I", range(9))))
    loads.note_computed(ours, 0.0)
    assert loads.load("a", 0.0).backlog_tokens == 400


def test_speed_as_json_names_the_used_speed_beside_that_of_the_worker() -> None:
    loads = Loads({name: EndpointLoad() for name in "ab"}, 1_000.0, learns=True)
    for n in range(40):
        for name, took in (("a", 1.9), ("b", 2.1)):
            ticket = loads.begin(name, 1_000, 10.0 * n, prompt=Prompt("m", array("I", [1])))
            loads.note_computed(ticket, 10.0 * n + took)
            loads.end(ticket, 10.0 * n + 5)
    a, b = map(loads.speed_as_json, "ab")
    assert a["tokens_per_second"] > a["used_tokens_per_second"] > b["tokens_per_second"]
    assert a["used_tokens_per_second"] == b["used_tokens_per_second"]


def test_computed_takes_earlier_prompts_from_the_backlog_and_keeps_later_ones() -> None:
    loads, prompt = Loads({"a": EndpointLoad()}, 100, learns=True), Prompt("m", array("I", [1]))
    loads.begin("a", 200, 0.0)  # no feed reports this one
    seen = loads.begin("a", 100, 0.0, prompt=prompt)
    after = [loads.begin("a", tokens, 0.0) for tokens in (700, 50)]
    loads.note_computed(seen, 0.0)
    loads.note_computed(seen, 0.0)
    assert loads.load("a", 0.0).backlog_tokens == 750
    assert loads.move(seen, "nowhere", 0.0)
    assert loads.load("a", 0.0).backlog_tokens == 750
    for ticket in after:
        loads.end(ticket, 0.0)
    assert loads.load("a", 0.0) == Load(1, 0.0, 0.0, 1.05)


@pytest.mark.parametrize("slowness", [0.5, 2.0])
def test_speed_is_learned_where_other_routers_send_most_requests(slowness: float) -> None:
    loads, rng = Loads({"a": EndpointLoad()}, 1_000.0, learns=True), Random(1)
    seconds = 0.2 * slowness  # for each prompt of 200 tokens
    now = free_at = 0.0
    sent, theirs = 0, deque[float]()
    ours: deque[tuple[float, Ticket]] = deque()
    for _ in range(400):
        now += rng.expovariate(0.9 / seconds)
        while ours and ours[0][0] <= now:
            computed_at, ticket = ours.popleft()
            loads.note_computed(ticket, computed_at)
            loads.end(ticket, computed_at + 1.0)
        while theirs and theirs[0] <= now:
            theirs.popleft()
        free_at = max(free_at, now) + seconds
        if rng.random() < 0.25:
            prompt = Prompt("m", array("I", [0]) * 200)
            ours.append((free_at, loads.begin("a", 200, now, prompt=prompt)))
        else:
            sent += 200
            theirs.append(free_at)
        gauges = Gauges(len(theirs), 200 * len(theirs), sent, 0, 0)
        loads.record_report("other", "a", gauges, now, is_known=True)
    assert loads.load("a", now).slowness == pytest.approx(slowness, rel=0.25)
    assert loads.speed_as_json("a")["confidence"] > 0.5
    assert loads.tokens_per_second("a") == pytest.approx(1_000.0 / slowness, rel=0.25)


def test_tokens_per_second_is_the_configured_speed_of_an_unmeasured_endpoint() -> None:
    loads = loads_of(500.0)
    assert [loads.tokens_per_second(one) for one in ("a", "elsewhere")] == [500.0, 500.0]


def test_revise_recounts_a_waiting_prompt_without_the_tokens_of_others() -> None:
    loads = Loads({"a": EndpointLoad()}, 1_000.0, learns=True)
    prompt = Prompt("m", array("I", [0]) * 500)
    loads.begin("a", 500, 0.0, prompt=prompt)
    loads.record_report("other", "a", Gauges(1, 300, 300, 300, 300), 0.0, is_known=True)
    behind = loads.begin("a", 500, 0.0, prompt=prompt, is_sure=False)
    assert behind.ahead_tokens == 300
    loads.note_computed(next(iter(behind.load.speed.waiting)), 0.5)
    loads.revise(behind, 100)
    assert behind.load.speed.waiting[behind] == (0.4, True)


def test_end_of_a_request_clears_its_backlog() -> None:
    loads = loads_of()
    long = loads.begin("a", 10_000, now=0.0)
    loads.begin("a", 50, now=0.0)
    loads.end(long, now=0.0)
    assert loads.load("a", 0.0).backlog_tokens == 50


def test_move_books_a_request_where_it_is_served() -> None:
    loads = loads_of()
    ticket = loads.begin("a", 100, now=0.0)
    loads.move(ticket, "b", now=0.0)
    left, taken = loads.load("a", 0.0), loads.load("b", 0.0)
    assert (left.in_flight, left.backlog_tokens) == (0, 0.0)
    assert (taken.in_flight, taken.backlog_tokens) == (1, 100.0)
    loads.end(ticket, now=0.0)
    assert loads.in_flight("b") == 0


def test_move_of_an_ended_request_books_nothing() -> None:
    loads = loads_of()
    ticket = loads.begin("a", 100, 0.0)
    loads.end(ticket, now=0.0)
    assert not loads.move(ticket, "b", 1.0)
    assert (loads.in_flight("a"), loads.in_flight("b")) == (0, 0)


def test_endpoint_that_returns_is_idle() -> None:
    endpoints = {"a": EndpointLoad()}
    loads = Loads(endpoints)
    ticket = loads.begin("a", 100, 0.0)
    endpoints["a"] = EndpointLoad()
    assert (loads.load("a", 0.0), loads.in_flight("a")) == (Load(), 0)
    loads.end(ticket, now=0.0)
    assert loads.load("a", 0.0) == Load()


def test_report_of_a_removed_endpoint_changes_nothing() -> None:
    loads = Loads({})
    loads.report("a", LoadSample(3, 0, 1.0), now=1.0)
    ticket = loads.begin("a", 100, 1.0)
    loads.end(ticket, now=0.0)
    assert (loads.load("a", 1.0), loads.in_flight("a")) == (Load(), 0)
    assert loads.work_by_rank("a", 1.0, 10.0) == {}


def named(rank: int) -> PinnedRank:
    return PinnedRank(rank, Pin("x-rank"), "/v1/completions")


def test_work_by_rank_counts_requests_that_name_a_rank() -> None:
    loads = loads_of(100)
    assert loads.work_by_rank("a", 0.0, 10.0) == {}
    for tokens, rank in ((100, 0), (200, 1), (300, 1)):
        loads.begin("a", tokens, 0.0, named(rank))
    loads.begin("a", 400, 0.0)
    assert loads.work_by_rank("a", 0.0, 10.0) == {0: 110, 1: 520}
    assert loads.work_by_rank("a", 5.0, 10.0) == {0: 60, 1: 270}
    loads.begin("b", 0, 0.0, named(3))
    assert loads.work_by_rank("b", 0.0, 10.0) == {3: 10}


def test_report_counts_requests_of_others_and_fades_with_its_age() -> None:
    loads = loads_of()
    loads.begin("a", 0, now=0.0)
    report = LoadSample(running=5, waiting=0, asked_at=0.0)
    loads.report("a", report, now=0.0)
    assert loads.load("a", 0.0) == Load(1, 0.0, 4.0, 0.0, report, 0.0)
    assert loads.load("a", REPORT_SECONDS / 2).others == 2.0
    assert loads.load("a", REPORT_SECONDS) == Load(1)


def test_report_of_own_requests_adds_none_of_others() -> None:
    loads = loads_of()
    for _ in range(3):
        loads.begin("a", 100, now=0.0)
    loads.report("a", LoadSample(running=2, waiting=1, asked_at=0.0), now=0.0)
    assert loads.load("a", 0.0).others == 0.0


def test_pending_tokens_of_a_report_replace_the_estimate() -> None:
    loads = loads_of()
    loads.begin("a", 1000, now=0.0)
    loads.report("a", LoadSample(1, 0, asked_at=0.1, pending_tokens=400), now=0.1)
    assert loads.load("a", 0.1).backlog_tokens == 400
    loads.report("a", LoadSample(1, 0, asked_at=0.1, pending_tokens=50), now=0.1)
    assert loads.load("a", 0.1).backlog_tokens == 50


def test_pending_tokens_beyond_the_own_backlog_count_as_work_of_others() -> None:
    loads = loads_of()
    loads.begin("a", 100, now=0.0)
    loads.report("a", LoadSample(1, 4, asked_at=0.1, pending_tokens=900), now=0.1)
    assert loads.load("a", 0.1).backlog_tokens == 900
    assert loads.load("a", 0.1 + REPORT_SECONDS / 2).backlog_tokens == 400


def test_report_keeps_requests_sent_after_it_in_the_backlog() -> None:
    loads = loads_of()
    loads.begin("a", 700, now=1.0)
    for report in (
        LoadSample(0, 0, asked_at=0.99, pending_tokens=0),
        LoadSample(0, 0, asked_at=0.99),
    ):
        loads.report("a", report, now=1.0)
        assert loads.load("a", 1.0).backlog_tokens == 700


@pytest.mark.parametrize(
    ("begun", "running", "waiting", "now", "backlog"),
    [
        ((3000, 2000, 1000), 3, 0, 0.01, 1000),
        ((9000, 3000, 2000, 1000), 2, 2, 60.0, 2000 + 1000),
    ],
)
def test_report_keeps_the_latest_requests_in_the_backlog_one_at_least(
    begun: tuple[int, ...], running: int, waiting: int, now: float, backlog: int
) -> None:
    loads = loads_of()
    for number, tokens in enumerate(begun):
        loads.begin("a", tokens, now=number / 1000)
    loads.report("a", LoadSample(running, waiting, asked_at=now), now=now)
    assert loads.load("a", now).backlog_tokens == backlog


def test_report_counts_a_share_of_waiting_requests_as_work_of_others() -> None:
    loads = loads_of()
    for _ in range(500):
        loads.end(loads.begin("b", 1000, now=0.0), now=0.0)
    loads.begin("a", 300, now=0.0)
    loads.begin("a", 700, now=0.1)
    loads.report("a", LoadSample(0, 4, asked_at=0.2), now=0.2)
    assert loads.load("a", 0.2).others == 2
    assert 2850 < loads.load("a", 0.2).backlog_tokens <= 3000


def test_report_older_than_the_last_one_is_ignored() -> None:
    loads = loads_of()
    loads.report("a", LoadSample(5, 0, asked_at=2.0), now=2.0)
    loads.report("a", LoadSample(9, 0, asked_at=1.0), now=2.0)
    assert loads.load("a", 2.0).others == 5.0


def test_report_outlives_the_requests_of_this_router() -> None:
    loads = loads_of()
    ticket = loads.begin("a", 10, now=0.0)
    loads.report("a", LoadSample(3, 0, asked_at=0.0), now=0.0)
    loads.end(ticket, now=0.0)
    assert loads.load("a", 0.0).others == 2.0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.floats(0, 1e5)), max_size=60))
def test_counts_stay_true_for_any_order_of_begin_and_end(
    steps: list[tuple[bool, int, float]],
) -> None:
    loads, open_bookings = loads_of(), list[Ticket]()
    for now, (begins, number, tokens) in enumerate(steps):
        if begins or not open_bookings:
            open_bookings.append(loads.begin(str(number), tokens, float(now)))
        else:
            loads.end(open_bookings.pop(number % len(open_bookings)), now=0.0)
        for endpoint in "012":
            mine = [one for one in open_bookings if one.endpoint == endpoint]
            assert loads.in_flight(endpoint) == len(mine)
            total = sum(one.uncached_tokens for one in mine)
            assert 0.0 <= loads.load(endpoint, float(now)).backlog_tokens <= total + 1e-6


@pytest.mark.parametrize("learns", [False, True])
def test_unseen_work_spoils_what_is_learned_of_the_speed(*, learns: bool) -> None:
    loads = Loads({"a": EndpointLoad()}, 100, learns=learns)
    loads.note_unseen("a", 2.0, 0.0)
    assert loads.load("a", 0.0) == Load()
