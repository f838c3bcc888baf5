"""Compares both sides of a report: shares, times and load spread, with confidence intervals.

Intervals are at 95 %. Requests of one conversation, or of one time, are correlated, so they do not
count as independent. The requests are put into blocks, and an interval is computed from how much
the figure changes when each block in turn is left out (the jackknife), with Student's t for the
effective number of equally large blocks. Blocks are made in two ways: stretches of time, and random
groups of whole conversations, if those are known. The wider interval counts.

A quantile's interval comes from the same distribution: the quantiles between which the share of
requests below it varies (Woodruff). The interval of two quantiles' difference combines both
intervals (recovered variances); that of two shares' difference is computed block by block.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import ceil, exp, log, sqrt
from operator import mul
from typing import NamedTuple, Self

from extproc.observing.report import GROUPS, RESOLUTION, Side, Window, seconds_at

# With fewer requests or blocks there is no interval.
LEAST_REQUESTS = 100
LEAST_BLOCKS = 5.0

# Stretches of time that a share needs if conversations are not known: with fewer, long
# conversations would make the interval too narrow.
LEAST_STRETCHES = 12.0

# A quantile needs at least this many requests beyond it.
LEAST_BEYOND = 10

# Blocks of conversations are used if at least this percentage of requests belongs to known ones.
KNOWN_PERCENT = 90

# A window is cut into about this many stretches of time.
STRETCHES = 24

# With fewer requests for each worker, the load spread is mostly chance.
LEAST_EACH = 10

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

Cells = tuple[float, ...]


class Estimate(NamedTuple):
    """A figure and its interval; low and high are None if there is none yet."""

    value: float
    low: float | None = None
    high: float | None = None

    def shown(self) -> dict[str, float | None]:
        """Returns the estimate for JSON."""
        low, high = self.low, self.high
        return {
            "value": _rounded(self.value),
            "low": None if low is None else _rounded(low),
            "high": None if high is None else _rounded(high),
        }


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def student(degrees: float) -> float:
    """Returns the 97.5 % quantile of Student's t, for three degrees of freedom and more.

    Uses the Cornish-Fisher expansion; the error is below 2 %.
    """
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def half_width(
    blocks: Sequence[Cells],
    estimate: Callable[[Cells], float],
    sizes: Sequence[int],
    lags: int = 0,
    least: float = LEAST_BLOCKS,
) -> float | None:
    """Returns half the interval of an estimate, None if there are too few blocks.

    blocks: the sums of each; the estimate is a function of all blocks' sums. sizes: which of a
    block's sums measure its size. lags: blocks up to this distance may be correlated. least: the
    least number of blocks.
    """
    blocks = [block for block in blocks if any(block)]
    if not blocks:
        return None
    total = tuple(map(sum, zip(*blocks, strict=True)))
    effective = min(_effective(blocks, total, at) for at in sizes)
    if effective < least:
        return None
    without = [
        estimate(tuple(all_of - own for all_of, own in zip(total, block, strict=True)))
        for block in blocks
    ]
    count, mean = len(without), sum(without) / len(without)
    off = [one - mean for one in without]
    variance = own = sum(one * one for one in off)
    for lag in range(1, lags + 1):
        weight = 2 * (1 - lag / (lags + 1))
        variance += weight * sum(map(mul, off, off[lag:]))
    degrees = min(effective - 1, 1.5 * count / (lags + 1)) if lags else effective - 1
    return student(degrees) * sqrt((count - 1) / count * max(variance, own))


def _effective(blocks: Sequence[Cells], total: Cells, at: int) -> float:
    """Returns the effective number of equally large blocks."""
    squares = sum(block[at] ** 2 for block in blocks)
    return total[at] ** 2 / squares if squares else 0.0


def _summed(sides: Sequence[Side]) -> Side:
    total = Side()
    for side in sides:
        total.add(side)
    return total


def _stretches(window: Window) -> list[tuple[Side, Side]]:
    size = ceil(len(window.periods) / STRETCHES)
    bounds = [*range(0, len(window.periods), size), len(window.periods)]
    cut = [window.periods[begin:end] for begin, end in pairwise(bounds)]
    return [
        (_summed([one.steered for one in some]), _summed([one.others for one in some]))
        for some in cut
    ]


class Sides(NamedTuple):
    """A window with both sides' sums, in all and for each stretch of time."""

    window: Window
    steered: Side
    others: Side
    stretches: list[tuple[Side, Side]]

    @classmethod
    def of(cls, window: Window) -> Self:
        """Sums up a window."""
        stretches = _stretches(window)
        steered = _summed([pair[0] for pair in stretches])
        return cls(window, steered, _summed([pair[1] for pair in stretches]), stretches)

    @property
    def both(self) -> tuple[Side, Side]:
        """The sums of both sides."""
        return self.steered, self.others


def _groups(side: Side) -> list[Cells] | None:
    """Returns the cells of each group of conversations; None if too few of those are known."""
    cells = side.groups
    if 100 * sum(cells[::3]) < KNOWN_PERCENT * side.known:
        return None
    return [tuple(map(float, cells[at : at + 3])) for at in range(0, 3 * GROUPS, 3)]


def _cells(side: Side) -> Cells:
    """Returns requests, prompt tokens and cached tokens."""
    return float(side.known), float(side.prompt_tokens), float(side.cached_tokens)


def _ways(sides: Sides, which: Sequence[int]) -> list[list[Cells]]:
    """Returns the blocks of one side or both, as cells of `_cells`; stretches of time first."""
    ways = [[sum((_cells(pair[at]) for at in which), ()) for pair in sides.stretches]]
    groups = [_groups(sides.both[at]) for at in which]
    found = [one for one in groups if one is not None]
    if len(found) == len(groups):
        ways.append([sum(cells, ()) for cells in zip(*found, strict=True)])
    return ways


def _lags(stretches: int) -> int:
    """Returns the distance up to which stretches are correlated: a conversation's duration."""
    return stretches // 5


def _widest(
    ways: Sequence[Sequence[Cells]], estimate: Callable[[Cells], float], sizes: Sequence[int]
) -> float | None:
    stretches, *groups = ways
    by_group = [half_width(one, estimate, sizes) for one in groups]
    is_known = any(one is not None for one in by_group)
    least = LEAST_BLOCKS if is_known else LEAST_STRETCHES
    by_time = half_width(stretches, estimate, sizes, _lags(len(stretches)), least)
    known = [one for one in (by_time, *by_group) if one is not None]
    return max(known) if known else None


def _share(cells: Cells) -> float:
    return cells[2] / cells[1]


def _gain(cells: Cells) -> float:
    return _share(cells) - _share(cells[3:])


def _longer(cells: Cells) -> float:
    """Returns the logarithm of the ratio of both sides' mean prompt lengths."""
    return log(cells[1] / cells[0]) - log(cells[4] / cells[3])


def cached_share(sides: Sides, which: int) -> Estimate | None:
    """Returns the share of prompt tokens that were cached; None if none are known."""
    side = sides.both[which]
    if not side.prompt_tokens:
        return None
    share = side.cached_tokens / side.prompt_tokens
    half = None
    if side.known >= LEAST_REQUESTS:
        half = _widest(_ways(sides, [which]), _share, [1])
    if half is None:
        return Estimate(share)
    # equal blocks only show that other values are rare (the rule of three)
    half = max(half, 3 / side.known)
    return Estimate(share, max(0.0, share - half), min(1.0, share + half))


def share_gained(sides: Sides) -> Estimate | None:
    """Returns the cached share of steered requests minus that of the others; None if unknown."""
    steered, others = sides.both
    if not steered.prompt_tokens or not others.prompt_tokens:
        return None
    gain = steered.cached_tokens / steered.prompt_tokens
    gain -= others.cached_tokens / others.prompt_tokens
    half = None
    if min(steered.known, others.known) >= LEAST_REQUESTS:
        half = _widest(_ways(sides, [0, 1]), _gain, [1, 4])
    if half is None:
        return Estimate(gain)
    half = max(half, 3 / steered.known, 3 / others.known)
    return Estimate(gain, gain - half, gain + half)


def length_ratio(sides: Sides) -> Estimate | None:
    """Returns the ratio of steered to other prompts' mean lengths; None if unknown."""
    steered, others = sides.both
    if not steered.prompt_tokens or not others.prompt_tokens:
        return None
    found = _longer((*_cells(steered), *_cells(others)))
    half = _widest(_ways(sides, [0, 1]), _longer, [0, 3])
    if half is None:
        return Estimate(exp(found))
    return Estimate(exp(found), exp(found - half), exp(found + half))


def quantile(first_bytes: Mapping[int, int], share: float) -> float:
    """Returns the seconds within which this share of the requests had their first byte."""
    wanted = share * sum(first_bytes.values())
    for bucket in sorted(first_bytes):
        count = first_bytes[bucket]
        if wanted <= count:
            return seconds_at(bucket + max(0.0, wanted) / count)
        wanted -= count
    return seconds_at(max(first_bytes) + 1)


def _below(first_bytes: Mapping[int, int], position: float) -> float:
    """Returns how many requests had their first byte before a position in the buckets."""
    return sum(
        count * min(max(position - bucket, 0.0), 1.0) for bucket, count in first_bytes.items()
    )


def first_byte(sides: Sides, which: int, share: float) -> Estimate | None:
    """Returns a quantile of the times to the first byte, in seconds; None if there are none."""
    times = sides.both[which].first_bytes
    count = sum(times.values())
    if not count:
        return None
    found = quantile(times, share)
    if count < needed_for(share):
        return Estimate(found)
    position = log(found / seconds_at(0)) / log(RESOLUTION)
    blocks = [
        (_below(one[which].first_bytes, position), float(sum(one[which].first_bytes.values())))
        for one in sides.stretches
    ]
    half = half_width(blocks, lambda cells: cells[0] / cells[1], [1], _lags(len(blocks)))
    if half is None:
        return Estimate(found)
    half = max(half, student(count) * sqrt(share * (1 - share) / count))
    low, high = quantile(times, share - half), quantile(times, min(1.0, share + half))
    return Estimate(found, low, high)


def needed_for(share: float) -> int:
    """Returns how many requests a quantile needs for an interval."""
    return max(LEAST_REQUESTS, ceil(LEAST_BEYOND / (1 - share) - 1e-6))


def difference(one: Estimate | None, other: Estimate | None) -> Estimate | None:
    """Returns the difference of two independent figures."""
    if one is None or other is None:
        return None
    found = one.value - other.value
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return Estimate(found)
    below = sqrt((one.value - one.low) ** 2 + (other.high - other.value) ** 2)
    above = sqrt((one.high - one.value) ** 2 + (other.value - other.low) ** 2)
    return Estimate(found, found - below, found + above)


class Spread(NamedTuple):
    """How unevenly requests went to workers.

    busiest: requests of the busiest worker, as a multiple of the mean. variation: the standard
    deviation of the workers' requests, as a share of the mean.
    """

    workers: int
    busiest: float
    variation: float


def load_spread(side: Side, workers: set[int]) -> Spread | None:
    """Returns the load spread; None if there are too few requests.

    workers: all workers that either side used.
    """
    counts = [side.workers.get(worker, 0) for worker in workers]
    if sum(counts) < max(1, LEAST_EACH * len(counts)):
        return None
    mean = sum(counts) / len(counts)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    return Spread(len(counts), max(counts) / mean, sqrt(variance) / mean)
