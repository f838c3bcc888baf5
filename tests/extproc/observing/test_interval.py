"""Intervals hold the truth as often as they claim, and are the same for the same requests."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.observing.comparison import Sides, share_gained
from extproc.observing.interval import BLOCKS, Blocks, Estimate, effective, half_width
from extproc.observing.report import Period, Side, Window
from tests.extproc.observing.coverage import FEW, HALF, STEPS, UNEVEN, Design, coverage
from tests.extproc.observing.coverage import window as drawn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("minutes", "correlation", "design"),
    [
        (6, 0.0, HALF),
        (12, 0.0, FEW),
        (12, 0.3, HALF),
        (30, 0.3, STEPS),
        (30, 0.5, HALF),
        (60, 0.5, UNEVEN),
        (60, 0.7, FEW),
    ],
    ids=lambda one: one.name if isinstance(one, Design) else str(one),
)
def test_intervals_of_95_percent_hold_the_truth_93_to_97_times_of_100(
    minutes: int, correlation: float, design: Design
) -> None:
    assert 0.93 <= coverage(minutes, correlation, design, runs=1_000) <= 0.97


@pytest.mark.slow
def test_interval_of_a_few_equal_minutes_is_too_narrow() -> None:
    """The test above can fail; docs/operations.md says what is needed."""
    assert coverage(6, 0.7, HALF, runs=500) < 0.85


minutes = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 100)), max_size=40
)


def window_of(counts: list[tuple[int, int, int]]) -> Window:
    """Minutes of steered and other requests of 100 tokens, with so many cached of each."""

    def side(count: int, cached: int) -> Side:
        return Side(count, 0, 0, 0, count, count, 100 * count, cached * count)

    periods = [
        Period(0, at, 60.0, side(steered, cached), side(others, cached))
        for at, (steered, others, cached) in enumerate(counts)
    ]
    return Window(60, 0, periods)


@given(minutes)
def test_interval_contains_its_figure_and_is_reproducible(
    counts: list[tuple[int, int, int]],
) -> None:
    gain = share_gained(Sides.of(window_of(counts)))
    assert gain == share_gained(Sides.of(window_of(counts)))
    if gain is not None and gain.low is not None and gain.high is not None:
        assert gain.low < gain.value < gain.high


@given(minutes)
def test_blocks_leave_out_each_request_once(counts: list[tuple[int, int, int]]) -> None:
    blocks = Blocks.of(window_of(counts).periods, [0, 1])
    if blocks.without:
        for side in (0, 1):
            left = [pair[side].requests for pair in blocks.without]
            assert sum(left) == (BLOCKS - 1) * blocks.total[side].requests
            assert len(left) == BLOCKS


numbers = st.lists(st.integers(-1_000, 1_000), min_size=BLOCKS, max_size=BLOCKS)


@given(numbers, st.integers(1, 64), st.integers(-64, 64))
def test_half_width_scales_with_the_values_and_not_with_their_mean(
    parts: list[int], scale: int, shift: int
) -> None:
    half = half_width(parts)
    assert 0 <= half <= 2 * (max(parts) - min(parts))
    moved = half_width([scale * one + shift for one in parts])
    assert moved == pytest.approx(scale * half, rel=1e-6, abs=1e-6)


def test_half_width_of_equal_blocks_is_zero() -> None:
    assert half_width([0.1] * BLOCKS) == 0.0
    assert effective([3, 3, 3]) == pytest.approx(3)
    assert effective([]) == 0.0


@pytest.mark.parametrize(
    ("counts", "missing"),
    [
        ([(9, 9, 5)] * 4, 2),  # fewer minutes than blocks
        ([(9, 9, 5)] * 5 + [(0, 0, 5)] * 9, 1),  # minutes without requests are none
        ([(900, 900, 5)] + [(9, 9, 5)] * 9, 0),  # nearly all came in one minute
        ([(9, 0, 5)] * 9 + [(0, 900, 5)], 0),  # one side came in one minute
        ([(9, 0, 5)] * 9, 0),  # there is no other side
    ],
)
def test_interval_is_missing_without_enough_blocks(
    counts: list[tuple[int, int, int]], missing: int
) -> None:
    blocks = Blocks.of(window_of(counts).periods, [0, 1])
    assert (list(blocks.without), blocks.missing) == ([], missing)
    assert blocks.estimate(lambda pair: pair.steered.requests) == Estimate(
        float(blocks.total.steered.requests)
    )


def test_interval_narrows_with_more_minutes() -> None:
    widths = []
    for length in (6, 24, 96):
        gains = [share_gained(Sides.of(drawn(length, 0.0, HALF, Random(at)))) for at in range(9)]
        widths.append(
            sum(gain.high - gain.low for gain in gains if gain and gain.low and gain.high)
        )
    assert widths == sorted(widths, reverse=True)
    assert widths[2] < widths[0] / 2
