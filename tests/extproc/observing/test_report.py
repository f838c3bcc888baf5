"""The figures of requests by time add up, are bounded, and survive being written."""

import contextlib
import re
from array import array
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import ReportError
from extproc.observing.outcomes import Outcome
from extproc.observing.report import (
    BUCKETS,
    DAYS,
    GROUPS,
    HOURS,
    MAX_BYTES,
    MAX_WORKERS,
    MINUTES,
    RESOLUTION,
    SPANS,
    Period,
    Report,
    Side,
    bucket_of,
    group_of,
    read,
    seconds_at,
    written,
)
from kvstate.overlap import Prompt
from tests.extproc.observing.simulated import BEGIN, over

outcomes = st.builds(
    over,
    cached=st.none() | st.integers(0, 2_000),
    tokens=st.integers(0, 1_500),
    status=st.sampled_from([None, 200, 404, 429, 500, 503]),
    worker=st.sampled_from(["", "a:1", "b:1"]),
    ttft_seconds=st.none() | st.floats(0.0, 1e5),
    predicted_tokens=st.integers(0, 2_000),
    is_steered=st.booleans(),
    is_comparable=st.booleans(),
    conversation=st.integers(0, 2**63),
)
# outcomes, each with the seconds after which it is over
timed = st.lists(st.tuples(st.floats(0.0, 200_000.0), outcomes), max_size=40)


def encoded(report: Report, now: float) -> bytes:
    return written([msgspec.json.encode(period) for period in report.periods(now)])


def fed(requests: Iterable[tuple[float, Outcome]]) -> Report:
    report = Report(BEGIN)
    for after, outcome in sorted(requests, key=lambda one: one[0]):
        report.feed(outcome, 1_024.0, BEGIN + after)
    return report


def contents(report: Report, now: float) -> dict[tuple[int, int], Period]:
    return {(one.span, one.number): one for one in report.periods(now)}


NOW = BEGIN + 200_001.0


@given(timed, timed)
def test_two_reports_merged_are_the_report_of_all_requests(
    some: list[tuple[float, Outcome]], others: list[tuple[float, Outcome]]
) -> None:
    one, other, both = fed(some), fed(others), fed([*some, *others])
    one.settle(NOW)
    one.merge(other.periods(NOW), NOW)
    assert contents(one, NOW) == contents(both, NOW)


@given(timed)
def test_what_is_written_is_read_and_holds_numbers_only(
    requests: list[tuple[float, Outcome]],
) -> None:
    report = fed(requests)
    text = encoded(report, NOW)
    again = Report(NOW)
    again.merge(read(text), NOW)
    assert contents(again, NOW) == contents(report, NOW)
    assert not re.findall(rb"[a-df-zA-Z]", text)  # an e is allowed, as in 1e-05


@given(timed)
def test_every_request_is_in_one_minute_one_hour_and_one_day(
    requests: list[tuple[float, Outcome]],
) -> None:
    kept = contents(fed(requests), NOW).values()
    for span in (HOURS, DAYS):
        found = [one for one in kept if SPANS[one.span] == span]
        count = sum(one.steered.requests + one.others.requests for one in found)
        assert count == len(requests)
    seen = sum(one.seen_seconds for one in kept if SPANS[one.span] == DAYS)
    assert seen == pytest.approx(NOW - BEGIN)


def one_side(*requests: Outcome, speed: float = 1_000.0) -> Side:
    report = Report(BEGIN)
    for outcome in requests:
        report.feed(outcome, speed, BEGIN)
    return report.window(60, BEGIN).periods[-1].steered


def test_a_report_of_the_engine_counts_before_the_prediction() -> None:
    side = one_side(over(300, predicted_tokens=500), over(None, predicted_tokens=500))
    assert (side.known, side.reported, side.prompt_tokens) == (2, 1, 2_000)
    assert side.cached_tokens == 800
    assert side.saved_seconds == pytest.approx(0.8)


@pytest.mark.parametrize(
    "outcome",
    [
        over(None, worker="", predicted_tokens=0),  # a stranger answered, and reported nothing
        over(0, 0),
        over(500, status=400),
        over(500, status=503),
        over(500, status=None),
    ],
)
def test_what_is_not_known_or_failed_is_in_no_share(outcome: Outcome) -> None:
    side = one_side(outcome)
    assert (side.requests, side.known, side.prompt_tokens, side.cached_tokens) == (1, 0, 0, 0)


def test_failures_are_counted_apart_and_have_no_time_to_their_first_byte() -> None:
    statuses = (None, 500, 503, 404)
    side = one_side(*(over(0, status=one) for one in statuses))
    assert (side.unanswered, side.server_errors, side.client_errors) == (1, 2, 1)
    assert not side.first_bytes


def test_a_report_that_cannot_be_true_is_left_for_the_prediction() -> None:
    assert one_side(over(5_000, 1_000, predicted_tokens=64)).cached_tokens == 64
    assert one_side(over(5, 1_000, is_comparable=False)).reported == 0


def test_of_whom_nobody_knows_who_answered_the_engines_report_counts() -> None:
    prompt = Prompt("m", array("I", [1]) * 1_000)
    side = one_side(over(500, worker="", is_comparable=False, prompt=prompt))
    assert (side.reported, side.cached_tokens, side.saved_seconds) == (1, 500, 0.5)


def test_nothing_is_saved_where_no_speed_is_known() -> None:
    assert one_side(over(500), speed=0.0).saved_seconds == 0.0


@given(st.floats(1.2e-4, 900.0))
def test_a_time_is_told_as_exactly_as_is_said(seconds: float) -> None:
    bucket = bucket_of(seconds)
    assert seconds_at(bucket) * (1 - 1e-9) <= seconds <= seconds_at(bucket + 1) * (1 + 1e-9)
    assert RESOLUTION <= 1.05


def test_no_time_is_beside_the_buckets() -> None:
    assert [bucket_of(one) for one in (-1.0, 0.0, 1e-9, 1e9)] == [0, 0, 0, BUCKETS - 1]


def test_a_group_says_nothing_of_the_side_that_a_hash_is_on() -> None:
    sides = [one for one in range(0, 2**63, 2**63 // 9_973) if one % 100 < 5]
    assert {group_of(one) for one in sides} == set(range(GROUPS))


def test_workers_and_periods_are_bounded() -> None:
    report = Report(BEGIN)
    for number in range(5_000):
        report.feed(over(worker=f"w:{number}"), 1.0, BEGIN + 5 * number)
    for day in range(100):
        report.feed(over(), 1.0, BEGIN + day * 86_400.0)
    now = BEGIN + 99 * 86_400.0
    found = contents(report, now)
    for at, span in enumerate(SPANS):
        assert sum(one == at for one, _ in found) <= span.kept
    crowded = fed([(0.0, over(worker=f"w:{number}")) for number in range(5_000)])
    crowded.merge(fed([(0.0, over(worker="one more"))]).periods(BEGIN + 1), BEGIN + 1)
    for period in crowded.periods(BEGIN + 1):
        assert (period.steered.requests, len(period.steered.workers)) == (5_001, MAX_WORKERS)


def test_a_clock_that_is_set_back_loses_only_what_is_to_come() -> None:
    report = fed([(0.0, over()), (3_600.0 * 50, over())])
    report.feed(over(), 1.0, BEGIN)
    window = report.window(3_600 * 24 * 8, BEGIN)
    assert sum(one.steered.requests for one in window.periods) == 2
    assert all(one.seen_seconds <= HOURS.seconds for one in window.periods)


@pytest.mark.parametrize(
    ("seconds", "step", "count"),
    [(600, MINUTES, 10), (3_600, MINUTES, 60), (3_601, HOURS, 2), (9 * 86_400, DAYS, 9)],
)
def test_a_window_is_of_the_shortest_periods_that_reach_back_so_far(
    seconds: int, step: object, count: int
) -> None:
    window = Report(BEGIN).window(seconds, BEGIN)
    assert (window.step_seconds, len(window.periods)) == (getattr(step, "seconds"), count)  # noqa: B009
    assert window.begins_at + count * window.step_seconds > BEGIN


def test_a_window_beyond_what_is_kept_is_what_is_kept() -> None:
    assert len(Report(BEGIN).window(1e9, BEGIN).periods) == DAYS.kept


def sound() -> list[object]:
    found: list[object] = msgspec.json.decode(encoded(fed([(0.0, over(500))]), BEGIN))
    return found


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"nothing",
        b"[1]",
        b"[2,[]]",
        b"[1,[[3,1]]]",
        b"[1,[[0,-1]]]",
        b"[1,[[0,1,1e999]]]",
        b"[1,[[0,1,0.0,[1,0,0,0,2]]]]",  # more known requests than requests
        b"[1,[[0,1,0.0,[1,0,0,0,1,0,10,20]]]]",  # more cached tokens than prompt tokens
        b"[1,[[0,1,0.0,[1,0,0,0,0,0,0,0,0.0,[1]]]]]",
        b'[1,[[0,1,0.0,[1,0,0,0,0,0,0,0,0.0,%s,{"9999":1}]]]]' % str([0] * 3 * GROUPS).encode(),
        b'[1,[[0,1,0.0,[1,0,0,0,0,0,0,0,0.0,%s,{},{"1":5}]]]]' % str([0] * 3 * GROUPS).encode(),
        b"[1,[%s]]" % b",".join([b"[0,1]"] * 400),
        b"[" * 100_000,
        b"1" * (MAX_BYTES + 1),
    ],
)
def test_what_is_no_report_is_refused_with_the_reason(text: bytes) -> None:
    with pytest.raises(ReportError, match=r"^(cannot be read|has |is larger)"):
        read(text)


@given(st.binary(max_size=60))
def test_whatever_is_read_is_a_report_or_refused(text: bytes) -> None:
    for one in (text, b"[1,[[0,1," + text + b"]]]"):
        with contextlib.suppress(ReportError):
            Report(BEGIN).merge(read(one), BEGIN)


def test_the_largest_report_fits_its_file() -> None:
    groups = [2**40] * (3 * GROUPS)
    side = Side(
        prompt_tokens=2**49,
        cached_tokens=2**49,
        saved_seconds=1e14 / 3,
        groups=groups,
        first_bytes=dict.fromkeys(range(BUCKETS), 2**40),
        workers={2**32 - 1 - one: 2**40 for one in range(MAX_WORKERS)},
    )
    count = sum(span.kept + 1 for span in SPANS)
    text = msgspec.json.encode(Period(0, 2**31, 86_399.123456789, side, side))
    assert count * len(text) < MAX_BYTES
