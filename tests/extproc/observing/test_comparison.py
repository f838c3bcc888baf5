"""Shares, times and their intervals, which are right as often as they claim."""

from collections import Counter
from math import log
from random import Random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.observing.comparison import (
    Sides,
    cached_share,
    first_byte,
    first_byte_gained,
    length_ratio,
    load_spread,
    more_saved,
    needed_for,
    quantile,
    saved_seconds,
    share_gained,
)
from extproc.observing.interval import Estimate
from extproc.observing.report import RESOLUTION, Report, Side, bucket_of, seconds_at
from tests.extproc.observing.simulated import BEGIN, Traffic, over

RUNS = 200


def long_run_shares() -> list[float]:
    """What share of each side's prompts is cached in the long run."""
    rng, found = Random(1), []
    for side in (0, 1):
        draws = [Traffic(1, 1).drawn_share(side, rng) for _ in range(100_000)]
        found.append(mean(draws))
    return found


@pytest.mark.slow
def test_intervals_of_conversations_hold_the_truth_19_times_of_20() -> None:
    """Conversations of a minute, on average, in a window of an hour."""
    traffic, (steered, others) = Traffic(60, 400), long_run_shares()
    times = [traffic.seconds_at(0.5, is_steered=side) for side in (True, False)]
    hits: Counter[str] = Counter()

    def judge(what: str, estimate: Estimate | None, truth: float) -> None:
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        hits[what] += estimate.low <= truth <= estimate.high

    for seed in range(RUNS):
        report, now = traffic.report(Random(seed))
        sides = Sides.of(report.window(traffic.minutes * 60, now))
        judge("share", cached_share(sides, 0), steered)
        judge("gain", share_gained(sides), steered - others)
        judge("median", first_byte(sides, 0, 0.5), times[0])
        judge("faster", first_byte_gained(sides, 0.5), times[0] - times[1])
    # 95 % of 200 are 190; by chance, fewer than 182 once in a hundred times
    assert min(hits.values()) >= 182, hits


def sides_of(*steered: int, others: int = 0, minutes: int = 10) -> Sides:
    """Requests of 1,000 tokens: steered ones with these numbers cached, `others` with none."""
    report = Report(BEGIN)
    requests = [*(over(one) for one in steered), *(over(0, is_steered=False),) * others]
    by_minute = sorted(enumerate(requests), key=lambda one: one[0] % minutes)
    for at, outcome in by_minute:
        report.feed(outcome, 1.0, BEGIN + 60 * (at % minutes))
    return Sides.of(report.window(60 * minutes, BEGIN + 60 * (minutes - 1)))


def test_figures_are_none_without_requests() -> None:
    sides = sides_of()
    assert cached_share(sides, 0) is None
    assert share_gained(sides) is None
    assert length_ratio(sides) is None
    assert first_byte(sides, 0, 0.5) is None
    assert first_byte_gained(sides, 0.5) is None
    assert load_spread(sides.total.steered, set()) is None


def test_few_requests_give_a_figure_without_an_interval() -> None:
    sides = sides_of(*[500] * 99, others=5)
    assert cached_share(sides, 0) == Estimate(0.5)
    assert share_gained(sides) == Estimate(0.5)
    found = first_byte(sides, 0, 0.5)
    assert found is not None
    assert found.low is None


def test_requests_of_one_minute_give_no_interval() -> None:
    assert cached_share(sides_of(*[500] * 300, minutes=1), 0) == Estimate(0.5)
    assert cached_share(sides_of(*[500] * 300, minutes=5), 0) == Estimate(0.5)


def test_equal_requests_still_give_an_interval() -> None:
    share = cached_share(sides_of(*[0] * 300), 0)
    assert share == Estimate(0.0, 0.0, 0.01)
    gain = share_gained(sides_of(*[1_000] * 300, others=100))
    assert gain == Estimate(1.0, 0.97, 1.03)


def test_saved_seconds_are_per_request() -> None:
    sides = sides_of(*[500, 700] * 150, others=200)
    saved = saved_seconds(sides, 0)
    assert saved is not None
    assert saved.value == pytest.approx(600.0)
    assert more_saved(sides) is None  # the others saved nothing, or their speeds are unknown
    report = Report(BEGIN)
    for at in range(600):
        report.feed(over(500 + at % 7, is_steered=at % 3 > 0), 1.0, BEGIN + at)
    gained = more_saved(Sides.of(report.window(600, BEGIN + 599)))
    assert gained is not None
    assert gained.low is not None
    assert gained.high is not None
    assert gained.low < 0 < gained.high  # twice as many requests save no more each


def test_length_ratio_shows_longer_prompts_of_one_side() -> None:
    report = Report(BEGIN)
    for number in range(400):
        outcome = over(0, 3_000 if number % 2 else 1_000, is_steered=bool(number % 2))
        report.feed(outcome, 1.0, BEGIN + number)
    ratio = length_ratio(Sides.of(report.window(600, BEGIN + 399)))
    assert ratio is not None
    assert ratio.value == pytest.approx(log(3.0))
    assert ratio.low is not None
    assert ratio.low > log(2.0)
    assert length_ratio(sides_of(0, others=1)) == Estimate(0.0)


@given(st.lists(st.floats(1e-3, 100.0), min_size=1, max_size=200), st.floats(0.0, 1.0))
def test_quantile_is_as_exact_as_its_buckets(times: list[float], share: float) -> None:
    buckets = Counter(map(bucket_of, times))
    found, ordered = seconds_at(quantile(buckets, share)), sorted(times)
    at = share * len(ordered)
    low, high = ordered[max(0, int(at - 1e-6) - 1)], ordered[min(len(ordered) - 1, int(at) + 1)]
    assert low / RESOLUTION <= found * (1 + 1e-9)
    assert found <= high * RESOLUTION * (1 + 1e-9)


def test_quantile_of_1_is_the_end_of_the_last_bucket() -> None:
    assert quantile({3: 1}, 1.0 + 1e-9) == quantile({3: 1}, 1.0)


def test_quantile_of_rare_times_needs_more_requests() -> None:
    assert [needed_for(share) for share in (0.5, 0.9, 0.99)] == [100, 100, 1_000]


def test_quantile_interval_needs_requests_at_several_times() -> None:
    briefly = first_byte(sides_of(*[0] * 300, minutes=1), 0, 0.5)
    assert briefly is not None
    assert briefly.low is None
    longer = first_byte(sides_of(*[0] * 300), 0, 0.5)
    assert longer is not None
    assert longer.low is not None
    assert longer.high is not None
    assert longer.high / longer.low == pytest.approx(RESOLUTION)  # no time is told more exactly


def test_load_spread_covers_all_workers_of_either_side() -> None:
    side = Side(workers={1: 30, 2: 10})
    spread = load_spread(side, {1, 2, 3, 4})
    assert spread is not None
    assert (spread.workers, spread.busiest) == (4, 3.0)
    assert spread.variation == pytest.approx(1.2247, rel=1e-3)
    assert load_spread(side, set(range(5))) is None
