"""The 95 % interval of a figure, by a bootstrap over blocks of time.

Requests of one minute are alike, and so are neighbouring minutes, since conversations go on. The
time with requests is therefore cut into six long blocks, and only the blocks are compared. Leaving
out one block after the other shows how much each contributes to the figure. The interval follows
from all 462 ways of drawing six of these contributions with replacement (the bootstrap of a
studentized mean). Nothing is random, so the same requests have the same interval.

With independent minutes, 93 to 97 of 100 intervals hold the truth. If successive minutes are
correlated, they do so from about the 12th minute on (correlation 0.3), the 30th (0.5), or the 60th
(0.7), and fewer do before: `python -m tests.extproc.observing.coverage` counts them.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate, combinations_with_replacement
from math import factorial, inf, prod, sqrt
from operator import mul, truediv
from typing import NamedTuple, Self

from extproc.observing.report import Period, SideSums

# Periods that make an interval, since each block has at least one.
BLOCKS = 6

# With fewer blocks of equal size, most requests came nearly at once.
LEAST_EFFECTIVE = 4.5

# The same for each of two sides, which may have been steered one after the other.
LEAST_OF_A_SIDE = 2.0

# Of the draws, so many are within the interval. With six blocks and 95 %, 97 of 100 intervals of
# independent minutes would hold the truth.
_WITHIN = 0.94

# One block that differs from five equal ones tells no more: an interval has a largest width.
_LARGEST_RATIO = 3.0

# Differences below this share are those of rounding.
_ROUNDING = 1e-12


class Estimate(NamedTuple):
    """A figure and its interval; low and high are None if there is none yet."""

    value: float
    low: float | None = None
    high: float | None = None

    def as_json(self) -> dict[str, float | None]:
        """Returns the estimate for JSON."""
        low, high = self.low, self.high
        return {
            "value": _rounded(self.value),
            "low": None if low is None else _rounded(low),
            "high": None if high is None else _rounded(high),
        }


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


# A figure of one side, or of two; None if it is unknown.
Figure = Callable[[SideSums], float | None]


class Blocks(NamedTuple):
    """The requests of a window, cut into blocks of time.

    total: all of them. without: all but those of each block; empty if there is no interval yet.
    missing: how many more periods with requests an interval needs.
    """

    total: SideSums
    without: Sequence[SideSums] = ()
    missing: int = 0

    @classmethod
    def of(cls, periods: Sequence[Period], sides: Sequence[int]) -> Self:
        """Cuts a window; sides: the indices of those that a figure depends on."""
        parts = [one.sides() for one in periods]
        whole = SideSums.of(parts)
        totals = whole.known(sides)
        used = [one for one in parts if any(one.known(sides))]
        if len(used) < BLOCKS or not all(totals):
            return cls(whole, missing=max(0, BLOCKS - len(used)))
        weights = [sum(map(truediv, one.known(sides), totals)) for one in used]
        blocks = [SideSums.of(part) for part in _parts(used, weights)]
        sizes = [one.known(sides) for one in blocks]
        each = min(map(effective, zip(*sizes, strict=True)))
        together = effective([sum(map(truediv, size, totals)) for size in sizes])
        if together < LEAST_EFFECTIVE or each < LEAST_OF_A_SIDE:
            return cls(whole)
        return cls(whole, [SideSums.of(blocks[:at] + blocks[at + 1 :]) for at in range(BLOCKS)])

    def estimate(self, figure: Figure, least: float = 0.0) -> Estimate | None:
        """Returns a figure with its interval, None if the figure is unknown.

        least: the interval reaches at least this far to both sides.
        """
        value = figure(self.total)
        if value is None:
            return None
        left = [figure(sums) for sums in self.without]
        parts = [BLOCKS * value - (BLOCKS - 1) * one for one in left if one is not None]
        if len(parts) < BLOCKS:
            return Estimate(value)
        half = max(half_width(parts), least)
        return Estimate(value, value - half, value + half)


def _parts(used: Sequence[SideSums], weights: Sequence[float]) -> list[list[SideSums]]:
    """Cuts periods in order into blocks of about the same weight, none of them empty."""
    parts: list[list[SideSums]] = []
    total, before = sum(weights), 0.0
    for at, (sums, weight) in enumerate(zip(used, weights, strict=True)):
        wanted = int(BLOCKS * (before + weight / 2) / total)
        is_last_chance = BLOCKS - len(parts) >= len(used) - at
        if not parts or is_last_chance or (wanted >= len(parts) and len(parts) < BLOCKS):
            parts.append([])
        parts[-1].append(sums)
        before += weight
    return parts


def effective(sizes: Iterable[float]) -> float:
    """Returns how many blocks of equal size tell as much as blocks of these sizes."""
    sizes = list(sizes)
    squares = sum(size * size for size in sizes)
    return sum(sizes) ** 2 / squares if squares else 0.0


@cache
def _draws() -> list[tuple[tuple[int, ...], float]]:
    """Returns how often each block is drawn, for every way to draw, and the way's chance."""
    found = []
    for drawn in combinations_with_replacement(range(BLOCKS), BLOCKS):
        counts = tuple(drawn.count(block) for block in range(BLOCKS))
        orders = factorial(BLOCKS) // prod(map(factorial, counts))
        found.append((counts, orders / BLOCKS**BLOCKS))
    return found


def half_width(parts: Sequence[float]) -> float:
    """Returns half the interval of the mean of `BLOCKS` independent numbers."""
    mean = sum(parts) / BLOCKS
    off = [one - mean for one in parts]
    squares = [one * one for one in off]
    spread = sum(squares) / BLOCKS
    if spread <= _ROUNDING * mean * mean:
        return 0.0
    ratios = []
    for counts, chance in _draws():
        drawn = sum(map(mul, counts, off)) / BLOCKS
        drawn_spread = sum(map(mul, counts, squares)) / BLOCKS - drawn * drawn
        is_one = drawn_spread <= _ROUNDING * spread  # one block, drawn each time
        ratios.append((inf if is_one else drawn * drawn / drawn_spread, chance))
    ratios.sort()
    so_far = accumulate(chance for _, chance in ratios)
    at = next(at for at, chance in enumerate(so_far) if chance >= _WITHIN)
    return sqrt(min(ratios[at][0], _LARGEST_RATIO) * spread)
