"""The figures of requests by time add up, are bounded, and survive being written."""

import contextlib
import re
from array import array
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import ReportError
from extproc.observing.outcomes import Outcome
from extproc.observing.report import (
    BUCKETS,
    CACHE_UNAWARE,
    DAYS,
    HOURS,
    MAX_BYTES,
    MAX_CLASSES,
    MAX_WORKERS,
    MINUTES,
    OTHERS,
    RESOLUTION,
    SPANS,
    STEERED,
    ClassSide,
    Period,
    Report,
    Side,
    Span,
    bucket_of,
    encode_report,
    hash_of,
    read,
    seconds_at,
)
from extproc.observing.usage import Usage
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
    is_cache_aware=st.booleans(),
    is_comparable=st.booleans(),
    of_class=st.sampled_from(["", "people", "batch"]),
    handed_tokens=st.integers(0, 2_000),
)
# outcomes, each with the seconds after which it is over
timed = st.lists(st.tuples(st.floats(0.0, 200_000.0), outcomes), max_size=40)


def encoded(report: Report, now: float) -> bytes:
    return encode_report([msgspec.json.encode(period) for period in report.periods(now)])


def fed(requests: Iterable[tuple[float, Outcome]]) -> Report:
    report = Report(BEGIN)
    for after, outcome in sorted(requests, key=lambda one: one[0]):
        report.feed(outcome, 1_024.0, BEGIN + after)
    return report


def contents(report: Report, now: float) -> dict[tuple[int, int], Period]:
    return {(one.span, one.number): one for one in report.periods(now)}


NOW = BEGIN + 200_001.0


@given(timed, timed)
def test_merge_equals_the_report_of_all_requests(
    some: list[tuple[float, Outcome]], others: list[tuple[float, Outcome]]
) -> None:
    one, other, both = fed(some), fed(others), fed([*some, *others])
    one.settle(NOW)
    one.merge(other.periods(NOW), NOW)
    assert contents(one, NOW) == contents(both, NOW)


@given(timed)
def test_read_inverts_written_which_holds_numbers_only(
    requests: list[tuple[float, Outcome]],
) -> None:
    report = fed(requests)
    text = encoded(report, NOW)
    again = Report(NOW)
    again.merge(read(text), NOW)
    assert contents(again, NOW) == contents(report, NOW)
    assert not re.findall(rb"[a-df-zA-Z]", text)  # an e is allowed, as in 1e-05


@given(timed)
def test_request_is_in_one_minute_one_hour_and_one_day(
    requests: list[tuple[float, Outcome]],
) -> None:
    kept = contents(fed(requests), NOW).values()
    for span in (HOURS, DAYS):
        found = [one for one in kept if SPANS[one.span] == span]
        count = sum(one.sides().requests for one in found)
        assert count == len(requests)
    seen = sum(one.seen_seconds for one in kept if SPANS[one.span] == DAYS)
    assert seen == pytest.approx(NOW - BEGIN)


def one_side(*requests: Outcome, speed: float = 1_000.0) -> Side:
    report = Report(BEGIN)
    for outcome in requests:
        report.feed(outcome, speed, BEGIN)
    return report.window(60, BEGIN).periods[-1].steered


def test_reported_tokens_precede_the_prediction() -> None:
    side = one_side(over(300, predicted_tokens=500), over(None, predicted_tokens=500))
    assert (side.known, side.reported, side.prompt_tokens) == (2, 1, 2_000)
    assert side.cached_tokens == 800
    assert side.saved_seconds == pytest.approx(0.8)


@pytest.mark.parametrize(
    "outcome",
    [
        over(None, worker="", predicted_tokens=0),  # a stranger answered, and reported nothing
        over(0, 0, reported=Usage(None, None)),
        over(0, 0, reported=Usage(1_000, None)),  # how much was cached is not known
        over(0, 0, reported=Usage(1_000, 2_000)),
        over(500, status=400),
        over(500, status=503),
        over(500, status=None),
    ],
)
def test_unknown_and_failed_requests_are_in_no_share(outcome: Outcome) -> None:
    side = one_side(outcome)
    assert (side.requests, side.known, side.prompt_tokens, side.cached_tokens) == (1, 0, 0, 0)


def test_engine_counts_where_the_tokens_are_not_known() -> None:
    unknown = over(0, 0, reported=Usage(1_000, 640), is_comparable=False)
    side = one_side(unknown)
    assert (side.known, side.reported, side.prompt_tokens, side.cached_tokens) == (1, 1, 1_000, 640)
    assert side.saved_seconds == pytest.approx(0.64)
    assert one_side(unknown, speed=0.0).saved_seconds == 0


def test_failures_are_counted_by_kind_without_a_first_byte() -> None:
    statuses = (None, 500, 503, 404)
    side = one_side(*(over(0, status=one) for one in statuses))
    assert (side.unanswered, side.server_errors, side.client_errors) == (1, 2, 1)
    assert not side.first_bytes


def test_impossible_reported_tokens_give_way_to_the_prediction() -> None:
    assert one_side(over(5_000, 1_000, predicted_tokens=64)).cached_tokens == 64
    assert one_side(over(5, 1_000, is_comparable=False)).reported == 0


def test_reported_tokens_count_where_the_worker_is_unknown() -> None:
    prompt = Prompt("m", array("I", [1]) * 1_000)
    side = one_side(over(500, worker="", is_comparable=False, prompt=prompt))
    assert (side.reported, side.cached_tokens, side.saved_seconds) == (1, 500, 0.5)


def test_tokens_handed_over_count_where_the_engine_answered() -> None:
    requests = [over(0, status=status, handed_tokens=1_000) for status in (200, 400, 503, None)]
    assert one_side(*requests, over(0)).handed_tokens == 1_000


def test_saved_seconds_are_zero_without_a_known_speed() -> None:
    assert one_side(over(500), speed=0.0).saved_seconds == 0.0


@given(st.floats(1.2e-4, 900.0))
def test_bucket_of_keeps_the_promised_resolution(seconds: float) -> None:
    bucket = bucket_of(seconds)
    assert seconds_at(bucket) * (1 - 1e-9) <= seconds <= seconds_at(bucket + 1) * (1 + 1e-9)
    assert RESOLUTION <= 1.05


def test_bucket_of_takes_any_time() -> None:
    assert [bucket_of(one) for one in (-1.0, 0.0, 1e-9, 1e9)] == [0, 0, 0, BUCKETS - 1]


def test_class_of_a_request_and_what_was_shed_are_counted() -> None:
    report = fed([(0.0, over(500, of_class="people")), (0.0, over(status=503, of_class="batch"))])
    report.shed("batch", BEGIN + 1)
    report.shed("batch", BEGIN + 120)
    first, second = (one.classes for one in report.window(180, BEGIN + 120).periods if one.classes)
    people, batch = hash_of("people"), hash_of("batch")
    assert (first[people].shed, first[people].side.cached_tokens) == (0, 500)
    assert (first[batch].shed, first[batch].side.server_errors) == (1, 1)
    assert {key: one.shed for key, one in second.items()} == {batch: 1}
    assert not first[people].side.workers


def test_classes_of_a_report_are_bounded() -> None:
    named = [over(of_class=f"class {number}") for number in range(3 * MAX_CLASSES)]
    report = fed([(0.0, one) for one in named])
    report.shed("one more", BEGIN)
    other = fed([(0.0, over(of_class="another"))])
    report.merge(other.periods(BEGIN + 1), BEGIN + 1)
    assert all(len(one.classes) == MAX_CLASSES for one in report.periods(BEGIN + 1))


def test_workers_and_periods_of_a_report_are_bounded() -> None:
    report = Report(BEGIN)
    for number in range(5_000):
        report.feed(over(worker=f"w:{number}"), 1.0, BEGIN + 5 * number)
    for day in range(100):
        report.feed(over(), 1.0, BEGIN + day * 86_400.0)
    now = BEGIN + 99 * 86_400.0
    found = contents(report, now)
    for at, span in enumerate(SPANS):
        assert sum(one == at for one, _ in found) <= span.max_periods
    crowded = fed([(0.0, over(worker=f"w:{number}")) for number in range(5_000)])
    crowded.merge(fed([(0.0, over(worker="one more"))]).periods(BEGIN + 1), BEGIN + 1)
    for period in crowded.periods(BEGIN + 1):
        assert (period.steered.requests, len(period.steered.workers)) == (5_001, MAX_WORKERS)


def test_clock_set_back_loses_only_later_periods() -> None:
    report = fed([(0.0, over()), (3_600.0 * 50, over())])
    report.feed(over(), 1.0, BEGIN)
    window = report.window(3_600 * 24 * 8, BEGIN)
    assert sum(one.steered.requests for one in window.periods) == 2
    assert all(one.seen_seconds <= HOURS.seconds for one in window.periods)


@pytest.mark.parametrize(
    ("seconds", "step", "count"),
    [(600, MINUTES, 10), (3_600, MINUTES, 60), (3_601, HOURS, 2), (9 * 86_400, DAYS, 9)],
)
def test_window_takes_the_shortest_periods_that_reach_back_far_enough(
    seconds: int, step: Span, count: int
) -> None:
    window = Report(BEGIN).window(seconds, BEGIN)
    assert (window.step_seconds, len(window.periods)) == (step.seconds, count)
    assert window.begins_at + count * window.step_seconds > BEGIN


def test_window_is_at_most_what_is_kept() -> None:
    assert len(Report(BEGIN).window(1e9, BEGIN).periods) == DAYS.max_periods


def sound() -> list[object]:
    found: list[object] = msgspec.json.decode(encoded(fed([(0.0, over(500))]), BEGIN))
    return found


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"nothing",
        b"[1]",
        b"[5,[]]",
        b'[3,[[0,1,0.0,[],[],{"1":[0,[0,0,0,0,1]]}]]]',
        b"[1,[[0,1,0.0,[1]]]",
        b"[1,[[0,1,0.0,[1,0,0,0,2]]]]",
        b"[2,[[3,1]]]",
        b"[2,[[0,-1]]]",
        b"[2,[[0,1,1e999]]]",
        b"[2,[[0,1,0.0,[1,0,0,0,2]]]]",  # more known requests than requests
        b"[2,[[0,1,0.0,[1,0,0,0,1,0,10,20]]]]",  # more cached tokens than prompt tokens
        b"[2,[[0,1,0.0,[1,0,0,0,0,0,0,0,0.0,[1]]]]]",
        b'[2,[[0,1,0.0,[1,0,0,0,0,0,0,0,0.0,{"9999":1}]]]]',
        b'[2,[[0,1,0.0,[1,0,0,0,0,0,0,0,0.0,{},{"1":5}]]]]',
        b"[1,5]",
        b"[1,[5,[0,1,0.0,5]]]",
        b"[2,[%s]]" % b",".join([b"[0,1]"] * 400),
        b"[" * 100_000,
        b"1" * (MAX_BYTES + 1),
    ],
)
def test_read_refuses_malformed_text_with_the_reason(text: bytes) -> None:
    with pytest.raises(ReportError, match=r"^(cannot be read|has |is larger)"):
        read(text)


@given(timed)
def test_read_accepts_a_report_of_the_first_version(requests: list[tuple[float, Outcome]]) -> None:
    periods = list(fed(requests).periods(BEGIN + 200_000))
    found = msgspec.json.decode(msgspec.json.encode(periods))
    for period in found:
        for side in period[3:5]:
            side[9:] = [[7] * 60, *side[9:11]]
        del period[5:]
    for one in periods:
        one.classes, one.cache_unaware = {}, Side()
        one.steered.handed_tokens = one.others.handed_tokens = 0
    assert read(msgspec.json.encode([1, found])) == periods


@given(st.binary(max_size=60))
def test_read_returns_a_report_or_refuses_for_any_bytes(text: bytes) -> None:
    for one in (text, b"[1,[[0,1," + text + b"]]]", b"[2,[[0,1," + text + b"]]]"):
        with contextlib.suppress(ReportError):
            Report(BEGIN).merge(read(one), BEGIN)


def test_report_of_version_3_is_read_without_cache_unaware_requests() -> None:
    (period,) = read(b"[3,[[0,1,60.0,[2],[1],{}]]]")
    assert [side.requests for side in period.sides()] == [2, 1, 0]


@pytest.mark.parametrize(
    ("is_steered", "is_cache_aware", "side"),
    [(True, True, STEERED), (True, False, CACHE_UNAWARE), (False, True, OTHERS)],
)
def test_request_counts_on_the_side_of_who_placed_it_and_by_what(
    side: int, *, is_steered: bool, is_cache_aware: bool
) -> None:
    report = fed([(0.0, over(is_steered=is_steered, is_cache_aware=is_cache_aware))])
    (period,) = report.window(60, BEGIN).periods
    assert [one.requests for one in period.sides()] == [int(at == side) for at in range(3)]


def test_largest_report_fits_its_file() -> None:
    side = Side(
        prompt_tokens=2**49,
        cached_tokens=2**49,
        saved_seconds=1e14 / 3,
        first_bytes=dict.fromkeys(range(BUCKETS), 2**40),
        workers={2**32 - 1 - one: 2**40 for one in range(MAX_WORKERS)},
        handed_tokens=2**49,
    )
    count = sum(span.max_periods + 1 for span in SPANS)
    of_class = ClassSide(2**40, msgspec.structs.replace(side, workers={}))
    classes = {2**32 - 1 - one: of_class for one in range(MAX_CLASSES)}
    text = msgspec.json.encode(Period(0, 2**31, 86_399.123456789, side, side, classes, side))
    assert count * len(text) < MAX_BYTES
