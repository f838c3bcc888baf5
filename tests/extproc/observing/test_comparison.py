"""Shares, times and their intervals, which are right as often as they claim."""

from collections import Counter
from collections.abc import Callable
from random import Random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.observing.comparison import (
    Estimate,
    Sides,
    cached_share,
    difference,
    first_byte,
    half_width,
    length_ratio,
    load_spread,
    needed_for,
    quantile,
    share_gained,
    student,
)
from extproc.observing.report import RESOLUTION, Report, Side, bucket_of
from tests.extproc.observing.simulated import BEGIN, Traffic, over

RUNS = 60


def long_run_shares() -> list[float]:
    """What share of each side's prompts is cached in the long run."""
    rng, found = Random(1), []
    for side in (0, 1):
        draws = [Traffic(1, 1).drawn_share(side, rng) for _ in range(100_000)]
        found.append(mean(draws))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("traffic", "knows_conversations"),
    [
        (Traffic(10, 150), True),
        (Traffic(10, 80, turns=8.0, pause_seconds=40.0), True),
        (Traffic(60, 300), False),
    ],
    ids=["ten minutes", "long conversations", "conversations not known"],
)
def test_nineteen_of_twenty_intervals_hold_the_truth(
    traffic: Traffic, *, knows_conversations: bool
) -> None:
    steered, others = long_run_shares()
    times = [traffic.seconds_at(0.5, is_steered=side) for side in (True, False)]
    hits: Counter[str] = Counter()

    def judge(what: str, estimate: Estimate | None, truth: float) -> None:
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        hits[what] += estimate.low <= truth <= estimate.high

    for seed in range(RUNS):
        report, now = traffic.report(Random(seed), knows_conversations=knows_conversations)
        sides = Sides.of(report.window(traffic.minutes * 60, now))
        medians = [first_byte(sides, which, 0.5) for which in (0, 1)]
        judge("share", cached_share(sides, 0), steered)
        judge("gain", share_gained(sides), steered - others)
        judge("median", medians[0], times[0])
        judge("faster", difference(*medians), times[0] - times[1])
    # 95 % of 60 are 57; chance gives fewer than 52 once in a few hundred times
    assert min(hits.values()) >= 52, hits


@pytest.mark.slow
def test_intervals_that_forget_conversations_would_be_wrong() -> None:
    """The test above would fail if every request counted as independent."""
    traffic, (steered, _) = Traffic(10, 80, turns=8.0, pause_seconds=40.0), long_run_shares()
    hits = 0
    for seed in range(RUNS):
        report, now = traffic.report(Random(seed), knows_conversations=True)
        side = Sides.of(report.window(600, now)).steered
        share = side.cached_tokens / side.prompt_tokens
        half = 1.96 * 0.21 / side.known**0.5  # the shares of single prompts vary by so much
        hits += abs(share - steered) <= half
    assert hits < 52


def test_ten_minutes_of_unknown_conversations_make_no_interval_of_the_share() -> None:
    report, now = Traffic(10, 150).report(Random(0), knows_conversations=False)
    sides = Sides.of(report.window(600, now))
    share = cached_share(sides, 0)
    assert share is not None
    assert share.low is None
    assert first_byte(sides, 0, 0.5) is not None


@given(st.floats(5.0, 1e4))
def test_students_factor_is_as_tables_have_it(degrees: float) -> None:
    assert 1.95 < student(degrees) < 2.6


@pytest.mark.parametrize(
    ("degrees", "factor"), [(3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042)]
)
def test_students_factor_at_some_degrees(degrees: float, factor: float) -> None:
    assert student(degrees) == pytest.approx(factor, rel=0.02)


def conversation(number: int) -> int:
    """A hash that puts each pair of numbers into its own group."""
    return number // 2 * 1_000_003 + 1


def sides_of(*steered: int, others: int = 0) -> Sides:
    """Requests of 1,000 tokens: steered ones with these numbers cached, `others` with none."""
    report = Report(BEGIN)
    for number, cached in enumerate(steered):
        report.feed(over(cached, conversation=conversation(number)), 1.0, BEGIN)
    for number in range(others):
        report.feed(over(0, is_steered=False, conversation=conversation(number)), 1.0, BEGIN)
    return Sides.of(report.window(600, BEGIN))


def test_without_requests_nothing_is_told() -> None:
    sides = sides_of()
    assert cached_share(sides, 0) is None
    assert share_gained(sides) is None
    assert length_ratio(sides) is None
    assert first_byte(sides, 0, 0.5) is None
    assert load_spread(sides.steered, set()) is None
    assert difference(None, Estimate(1.0)) is None


def test_few_requests_have_a_figure_and_no_interval() -> None:
    sides = sides_of(*[500] * 99, others=5)
    assert cached_share(sides, 0) == Estimate(0.5)
    assert share_gained(sides) == Estimate(0.5)
    found = first_byte(sides, 0, 0.5)
    assert found is not None
    assert found.low is None
    assert difference(found, Estimate(1.0, 0.9, 1.1)) == Estimate(found.value - 1.0)


def test_many_requests_of_one_conversation_are_no_evidence() -> None:
    report = Report(BEGIN)
    for _ in range(500):
        report.feed(over(500, conversation=7), 1.0, BEGIN)
    assert cached_share(Sides.of(report.window(600, BEGIN)), 0) == Estimate(0.5)


def test_requests_that_are_all_alike_do_not_make_it_certain() -> None:
    share = cached_share(sides_of(*[0] * 300), 0)
    assert share == Estimate(0.0, 0.0, 0.01)
    gain = share_gained(sides_of(*[1_000] * 300, others=100))
    assert gain == Estimate(1.0, 0.97, 1.03)


def test_longer_prompts_of_one_side_are_seen() -> None:
    report = Report(BEGIN)
    for number in range(400):
        outcome = over(0, 3_000 if number % 2 else 1_000, is_steered=bool(number % 2))
        report.feed(outcome._replace(conversation=conversation(number)), 1.0, BEGIN)
    ratio = length_ratio(Sides.of(report.window(600, BEGIN)))
    assert ratio is not None
    assert ratio.value == pytest.approx(3.0)
    assert ratio.low is not None
    assert ratio.low > 2.0
    few = length_ratio(sides_of(0, others=1))
    assert few == Estimate(1.0)


@given(st.lists(st.floats(1e-3, 100.0), min_size=1, max_size=200), st.floats(0.0, 1.0))
def test_a_quantile_is_as_exact_as_its_buckets(times: list[float], share: float) -> None:
    buckets = Counter(map(bucket_of, times))
    found, ordered = quantile(buckets, share), sorted(times)
    at = share * len(ordered)
    low, high = ordered[max(0, int(at - 1e-6) - 1)], ordered[min(len(ordered) - 1, int(at) + 1)]
    assert low / RESOLUTION <= found * (1 + 1e-9)
    assert found <= high * RESOLUTION * (1 + 1e-9)


def test_the_last_quantile_is_the_end_of_the_last_bucket() -> None:
    assert quantile({3: 1}, 1.0 + 1e-9) == quantile({3: 1}, 1.0)


def test_rare_times_need_more_requests() -> None:
    assert [needed_for(share) for share in (0.5, 0.9, 0.99)] == [100, 100, 1_000]


def test_an_interval_of_a_time_needs_requests_at_several_times() -> None:
    assert first_byte(sides_of(*[0] * 300), 0, 0.5) == Estimate(
        pytest.approx(0.1, rel=0.05)  # type: ignore[arg-type]
    )


def test_blocks_that_are_too_few_or_empty_make_no_interval() -> None:
    share: Callable[[tuple[float, ...]], float] = lambda cells: cells[0] / cells[1]  # noqa: E731
    assert half_width([], share, [1]) is None
    assert half_width([(0.0, 0.0)] * 9, share, [1]) is None
    assert half_width([(1.0, 2.0)] * 4, share, [1]) is None
    assert half_width([(1.0, 2.0)] * 9, share, [1]) == 0.0
    assert half_width([(1.0, 0.0)] * 9, share, [1]) is None


def test_load_is_spread_over_all_workers_that_either_side_used() -> None:
    side = Side(workers={1: 30, 2: 10})
    spread = load_spread(side, {1, 2, 3, 4})
    assert spread is not None
    assert (spread.workers, spread.busiest) == (4, 3.0)
    assert spread.variation == pytest.approx(1.2247, rel=1e-3)
    assert load_spread(side, set(range(5))) is None
