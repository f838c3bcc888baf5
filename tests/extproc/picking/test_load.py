from array import array
from collections import deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.picking.load import (
    PREFILL_TOKENS_PER_SECOND,
    REPORT_SECONDS,
    UTILIZATION_SECONDS,
    Booking,
    EndpointLoad,
    Gauges,
    Load,
    Loads,
    Report,
)
from kvstate.overlap import Prompt


def loads_of(rate: float = PREFILL_TOKENS_PER_SECOND) -> Loads:
    return Loads({name: EndpointLoad() for name in ("a", "b", "0", "1", "2")}, rate)


def test_a_booking_is_in_flight_until_it_ends() -> None:
    loads = loads_of()
    booking = loads.begin("a", 100, now=0.0)
    assert (loads.in_flight("a"), loads.in_flight("b")) == (1, 0)
    loads.end(booking, now=0.0)
    assert loads.in_flight("a") == 0


def test_all_is_told_in_one_call() -> None:
    loads = loads_of()
    assert loads.load("a", 0.0) == Load()
    loads.begin("a", 100, now=0.0)
    utilization = 100 / PREFILL_TOKENS_PER_SECOND / UTILIZATION_SECONDS
    assert loads.load("a", 0.0) == Load(1, 100.0, 0.0, utilization)


def test_utilization_is_of_the_last_seconds() -> None:
    loads = loads_of(100)
    for second in range(60):
        loads.end(loads.begin("a", 50, now=float(second)), float(second))
    assert 0.45 < loads.load("a", 60.0).utilization < 0.55
    assert loads.load("a", 60 + 3 * UTILIZATION_SECONDS).utilization < 0.03


def test_ending_twice_changes_nothing() -> None:
    loads = loads_of()
    first, second = loads.begin("a", 1, now=0.0), loads.begin("a", 1, now=0.0)
    loads.end(first, now=0.0)
    loads.end(first, now=0.0)
    assert loads.in_flight("a") == 1
    loads.end(second, now=0.0)
    loads.end(second, now=0.0)
    assert loads.in_flight("a") == 0


def test_the_backlog_is_worked_off_with_time() -> None:
    loads = loads_of()
    loads.begin("a", PREFILL_TOKENS_PER_SECOND, now=0.0)
    assert loads.load("a", 0.5).backlog_tokens == PREFILL_TOKENS_PER_SECOND / 2
    assert loads.load("a", 9.0).backlog_tokens == 0.0


def test_how_fast_it_is_worked_off_can_be_told() -> None:
    loads = loads_of(10)
    loads.begin("a", 100, now=0.0)
    assert loads.load("a", 1.0).backlog_tokens == 90


def test_a_prompt_that_was_computed_leaves_the_backlog_of_what_waits() -> None:
    endpoints = {"a": EndpointLoad()}
    loads = Loads(endpoints, 100, learns=True)
    prompt = Prompt("m", array("I", range(9)))
    first = loads.begin("a", 500, 0.0, prompt=prompt)
    second = loads.begin("a", 300, 0.0, prompt=prompt, is_sure=False)
    loads.computed(first, 1.0)
    assert loads.load("a", 1.0).backlog_tokens == 300
    loads.revise(second, 200)
    assert second.is_sure
    loads.computed(second, 1.0)
    assert loads.load("a", 1.0).backlog_tokens == 0


def test_a_worker_that_was_never_used_ties_with_those_that_are_as_fast_as_one_another() -> None:
    endpoints = {name: EndpointLoad() for name in "abc"}
    loads = Loads(endpoints, 100, learns=True)
    prompt = Prompt("m", array("I", range(9)))
    for n in range(100):
        name, took = "ab"[n % 2], 2.0 + n % 7 / 10  # instead of 10 s at the configured speed
        booking = loads.begin(name, 1_000, 20.0 * n, prompt=prompt)
        loads.computed(booking, 20.0 * n + took)
        loads.end(booking, 20.0 * n + 10)
    slowness = {loads.load(name, 2_000).slowness for name in "abc"}
    assert len(slowness) == 1
    assert slowness.pop() < 0.4


@pytest.mark.parametrize("learns", [False, True])
def test_what_another_router_sent_stays_in_the_queue_when_a_prompt_is_computed(
    learns: bool,  # noqa: FBT001
) -> None:
    loads = Loads({"a": EndpointLoad()}, 100, learns=learns)
    gauges = Gauges(1, 400, 400, 400, 400)
    assert loads.told("other", "a", gauges, 0.0, is_known=True)
    ours = loads.begin("a", 100, 0.0, prompt=Prompt("m", array("I", range(9))))
    loads.computed(ours, 0.0)
    assert loads.load("a", 0.0).backlog_tokens == 400


def test_the_speed_that_the_cost_uses_is_shown_beside_the_workers_own() -> None:
    loads = Loads({name: EndpointLoad() for name in "ab"}, 1_000.0, learns=True)
    for n in range(40):
        for name, took in (("a", 1.9), ("b", 2.1)):
            booking = loads.begin(name, 1_000, 10.0 * n, prompt=Prompt("m", array("I", [1])))
            loads.computed(booking, 10.0 * n + took)
            loads.end(booking, 10.0 * n + 5)
    a, b = map(loads.speed_shown, "ab")
    assert a["tokens_per_second"] > a["used_tokens_per_second"] > b["tokens_per_second"]
    assert a["used_tokens_per_second"] == b["used_tokens_per_second"]


def test_what_came_before_a_computed_prompt_leaves_the_queue_and_what_came_after_stays() -> None:
    loads, prompt = Loads({"a": EndpointLoad()}, 100, learns=True), Prompt("m", array("I", [1]))
    loads.begin("a", 200, 0.0)  # no feed reports this one
    seen = loads.begin("a", 100, 0.0, prompt=prompt)
    after = [loads.begin("a", tokens, 0.0) for tokens in (700, 50)]
    loads.computed(seen, 0.0)
    loads.computed(seen, 0.0)
    assert loads.load("a", 0.0).backlog_tokens == 750
    assert loads.move(seen, "nowhere", 0.0)
    assert loads.load("a", 0.0).backlog_tokens == 750
    for booking in after:
        loads.end(booking, 0.0)
    assert loads.load("a", 0.0) == Load(1, 0.0, 0.0, 1.05)


@pytest.mark.parametrize("slowness", [0.5, 2.0])
def test_the_speed_is_learned_where_other_routers_send_most_of_it(slowness: float) -> None:
    loads, rng = Loads({"a": EndpointLoad()}, 1_000.0, learns=True), Random(1)
    seconds = 0.2 * slowness  # for each prompt of 200 tokens
    now = free_at = 0.0
    sent, theirs = 0, deque[float]()
    ours: deque[tuple[float, Booking]] = deque()
    for _ in range(400):
        now += rng.expovariate(0.9 / seconds)
        while ours and ours[0][0] <= now:
            computed_at, booking = ours.popleft()
            loads.computed(booking, computed_at)
            loads.end(booking, computed_at + 1.0)
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
        loads.told("other", "a", gauges, now, is_known=True)
    assert loads.load("a", now).slowness == pytest.approx(slowness, rel=0.25)
    assert loads.speed_shown("a")["confidence"] > 0.5
    assert loads.tokens_per_second("a") == pytest.approx(loads._rate / slowness, rel=0.25)


def test_an_endpoint_of_which_nothing_is_learned_has_the_configured_speed() -> None:
    loads = loads_of(500.0)
    assert [loads.tokens_per_second(one) for one in ("a", "elsewhere")] == [500.0, 500.0]


def test_a_prompt_that_waits_for_anothers_is_revised_without_them() -> None:
    loads = Loads({"a": EndpointLoad()}, 1_000.0, learns=True)
    prompt = Prompt("m", array("I", [0]) * 500)
    loads.begin("a", 500, 0.0, prompt=prompt)
    loads.told("other", "a", Gauges(1, 300, 300, 300, 300), 0.0, is_known=True)
    behind = loads.begin("a", 500, 0.0, prompt=prompt, is_sure=False)
    assert behind.ahead_tokens == 300
    loads.computed(next(iter(behind.load.speed.waiting)), 0.5)
    loads.revise(behind, 100)
    assert behind.load.speed.waiting[behind] == (0.4, True)


def test_a_request_that_is_over_leaves_no_backlog() -> None:
    loads = loads_of()
    long = loads.begin("a", 10_000, now=0.0)
    loads.begin("a", 50, now=0.0)
    loads.end(long, now=0.0)
    assert loads.load("a", 0.0).backlog_tokens == 50


def test_a_request_that_was_served_elsewhere_is_booked_there() -> None:
    loads = loads_of()
    booking = loads.begin("a", 100, now=0.0)
    loads.move(booking, "b", now=0.0)
    left, taken = loads.load("a", 0.0), loads.load("b", 0.0)
    assert (left.in_flight, left.backlog_tokens) == (0, 0.0)
    assert (taken.in_flight, taken.backlog_tokens) == (1, 100.0)
    loads.end(booking, now=0.0)
    assert loads.in_flight("b") == 0


def test_a_request_that_is_over_is_booked_nowhere_else() -> None:
    loads = loads_of()
    booking = loads.begin("a", 100, 0.0)
    loads.end(booking, now=0.0)
    assert not loads.move(booking, "b", 1.0)
    assert (loads.in_flight("a"), loads.in_flight("b")) == (0, 0)


def test_an_endpoint_that_is_gone_is_idle_when_it_comes_back() -> None:
    endpoints = {"a": EndpointLoad()}
    loads = Loads(endpoints)
    booking = loads.begin("a", 100, 0.0)
    endpoints["a"] = EndpointLoad()
    assert (loads.load("a", 0.0), loads.in_flight("a")) == (Load(), 0)
    loads.end(booking, now=0.0)
    assert loads.load("a", 0.0) == Load()


def test_what_is_told_of_an_endpoint_that_is_gone_changes_nothing() -> None:
    loads = Loads({})
    loads.report("a", Report(3, 0, 1.0), now=1.0)
    booking = loads.begin("a", 100, 1.0)
    loads.end(booking, now=0.0)
    assert (loads.load("a", 1.0), loads.in_flight("a")) == (Load(), 0)
    assert loads.work_by_rank("a", 1.0, 10.0) == {}


def test_the_work_of_a_rank_is_what_names_it() -> None:
    loads = loads_of(100)
    assert loads.work_by_rank("a", 0.0, 10.0) == {}
    for tokens, rank in ((100, 0), (200, 1), (300, 1), (400, None)):
        loads.begin("a", tokens, 0.0, rank)
    assert loads.work_by_rank("a", 0.0, 10.0) == {0: 110, 1: 520}
    assert loads.work_by_rank("a", 5.0, 10.0) == {0: 60, 1: 270}
    loads.begin("b", 0, 0.0, 3)
    assert loads.work_by_rank("b", 0.0, 10.0) == {3: 10}


def test_requests_of_others_are_told_by_a_report_and_fade_with_its_age() -> None:
    loads = loads_of()
    loads.begin("a", 0, now=0.0)
    report = Report(running=5, waiting=0, asked_at=0.0)
    loads.report("a", report, now=0.0)
    assert loads.load("a", 0.0) == Load(1, 0.0, 4.0, 0.0, report, 0.0)
    assert loads.load("a", REPORT_SECONDS / 2).others == 2.0
    assert loads.load("a", REPORT_SECONDS) == Load(1)


def test_a_report_of_our_own_requests_adds_nothing() -> None:
    loads = loads_of()
    for _ in range(3):
        loads.begin("a", 100, now=0.0)
    loads.report("a", Report(running=2, waiting=1, asked_at=0.0), now=0.0)
    assert loads.load("a", 0.0).others == 0.0


def test_tokens_that_the_worker_says_are_pending_replace_our_estimate() -> None:
    loads = loads_of()
    loads.begin("a", 1000, now=0.0)
    loads.report("a", Report(1, 0, asked_at=0.1, pending_tokens=400), now=0.1)
    assert loads.load("a", 0.1).backlog_tokens == 400
    loads.report("a", Report(1, 0, asked_at=0.1, pending_tokens=50), now=0.1)
    assert loads.load("a", 0.1).backlog_tokens == 50


def test_what_is_pending_beyond_our_own_is_the_work_of_others() -> None:
    loads = loads_of()
    loads.begin("a", 100, now=0.0)
    loads.report("a", Report(1, 4, asked_at=0.1, pending_tokens=900), now=0.1)
    assert loads.load("a", 0.1).backlog_tokens == 900
    assert loads.load("a", 0.1 + REPORT_SECONDS / 2).backlog_tokens == 400


def test_a_request_that_was_on_its_way_when_the_worker_was_asked_stays_in_the_backlog() -> None:
    loads = loads_of()
    loads.begin("a", 700, now=1.0)
    for report in (Report(0, 0, asked_at=0.99, pending_tokens=0), Report(0, 0, asked_at=0.99)):
        loads.report("a", report, now=1.0)
        assert loads.load("a", 1.0).backlog_tokens == 700


def test_a_worker_where_nothing_waits_has_one_request_to_compute_at_most() -> None:
    loads = loads_of()
    for number, tokens in enumerate((3000, 2000, 1000)):
        loads.begin("a", tokens, now=number / 1000)
    loads.report("a", Report(3, 0, asked_at=0.01), now=0.01)
    assert loads.load("a", 0.01).backlog_tokens == 1000


def test_a_worker_where_requests_wait_is_slower_than_we_took_it_for() -> None:
    loads = loads_of()
    for number, tokens in enumerate((9000, 3000, 2000, 1000)):
        loads.begin("a", tokens, now=number / 1000)
    loads.report("a", Report(2, 2, asked_at=60.0), now=60.0)
    assert loads.load("a", 60.0).backlog_tokens == 2000 + 1000


def test_of_what_waits_a_share_is_the_work_of_others() -> None:
    loads = loads_of()
    for _ in range(500):
        loads.end(loads.begin("b", 1000, now=0.0), now=0.0)
    loads.begin("a", 300, now=0.0)
    loads.begin("a", 700, now=0.1)
    loads.report("a", Report(0, 4, asked_at=0.2), now=0.2)
    assert loads.load("a", 0.2).others == 2
    assert 2850 < loads.load("a", 0.2).backlog_tokens <= 3000


def test_a_report_older_than_the_last_one_is_ignored() -> None:
    loads = loads_of()
    loads.report("a", Report(5, 0, asked_at=2.0), now=2.0)
    loads.report("a", Report(9, 0, asked_at=1.0), now=2.0)
    assert loads.load("a", 2.0).others == 5.0


def test_a_report_outlives_our_own_requests() -> None:
    loads = loads_of()
    booking = loads.begin("a", 10, now=0.0)
    loads.report("a", Report(3, 0, asked_at=0.0), now=0.0)
    loads.end(booking, now=0.0)
    assert loads.load("a", 0.0).others == 2.0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.floats(0, 1e5)), max_size=60))
def test_whatever_begins_and_ends_counts_stay_true(
    steps: list[tuple[bool, int, float]],
) -> None:
    loads, open_bookings = loads_of(), list[Booking]()
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
