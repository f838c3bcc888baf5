"""Compares the sides of a report: shares, times, saved work and load spread."""

from collections.abc import Callable, Mapping
from math import ceil, log, sqrt
from typing import NamedTuple, Self

from extproc.observing.interval import Blocks, Estimate, Figure
from extproc.observing.report import (
    CACHE_UNAWARE,
    OTHERS,
    RESOLUTION,
    STEERED,
    Side,
    SideSums,
    Window,
    seconds_at,
)

# With fewer requests of a side there is no interval.
LEAST_REQUESTS = 100

# A quantile needs at least this many requests beyond it.
LEAST_BEYOND = 10

# With fewer requests for each worker, the load spread is mostly chance.
LEAST_EACH = 10

# Times are counted in buckets, so an interval reaches at least half a bucket to both sides.
HALF_BUCKET = 0.5

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Sides(NamedTuple):
    """A window: its sums, and its blocks for figures of each side and of the two compared.

    base: the index of the side with which steered requests are compared: the proxy's, or if it has
    none the cache-unaware ones.
    """

    window: Window
    alone: tuple[Blocks, ...]
    together: Blocks
    base: int

    @classmethod
    def of(cls, window: Window) -> Self:
        """Sums up a window."""
        alone = tuple(Blocks.of(window.periods, [one]) for one in (STEERED, OTHERS, CACHE_UNAWARE))
        _, others, unaware = alone[STEERED].total
        base = CACHE_UNAWARE if unaware.requests and not others.requests else OTHERS
        return cls(window, alone, Blocks.of(window.periods, [STEERED, base]), base)

    @property
    def total(self) -> SideSums:
        """The sums of all sides."""
        return self.together.total

    @property
    def compared(self) -> tuple[Side, Side]:
        """The sums of steered requests, and of those with which they are compared."""
        return self.total.steered, self.total[self.base]


def _of_side(which: int, figure: Callable[[Side], float | None]) -> Figure:
    return lambda sums: figure(sums[which])


def _gain(sides: Sides, figure: Callable[[Side], float | None]) -> Figure:
    """Returns the difference of a figure: of steered requests, minus those to compare with."""

    def gain(sums: SideSums) -> float | None:
        steered, base = figure(sums.steered), figure(sums[sides.base])
        return None if steered is None or base is None else steered - base

    return gain


def _share(side: Side) -> float | None:
    return side.cached_tokens / side.prompt_tokens if side.prompt_tokens else None


def _saved(side: Side) -> float | None:
    return side.saved_seconds / side.known if side.saved_seconds else None


def _length(side: Side) -> float | None:
    """Returns the logarithm of the mean prompt length."""
    return log(side.prompt_tokens / side.known) if side.prompt_tokens else None


def _least(*sides: Side) -> float:
    """Returns how far an interval of shares reaches at least.

    Equal requests only show that other ones are rare (the rule of three).
    """
    return max(3 / side.known for side in sides)


def _with_enough(
    found: Estimate | None, *counts: int, needed: int = LEAST_REQUESTS
) -> Estimate | None:
    """Returns an estimate without its interval if there are too few requests."""
    return found if found is None or min(counts) >= needed else Estimate(found.value)


def cached_share(sides: Sides, which: int) -> Estimate | None:
    """Returns the share of prompt tokens that were cached; None if none are known."""
    side = sides.total[which]
    if not side.prompt_tokens:
        return None
    found = sides.alone[which].estimate(_of_side(which, _share), _least(side))
    found = _with_enough(found, side.known)
    if found is None or found.low is None or found.high is None:
        return found
    return Estimate(found.value, max(0.0, found.low), min(1.0, found.high))


def share_gained(sides: Sides) -> Estimate | None:
    """Returns the cached share of steered requests minus that of the base; None if unknown."""
    both = sides.compared
    if not all(side.prompt_tokens for side in both):
        return None
    found = sides.together.estimate(_gain(sides, _share), _least(*both))
    return _with_enough(found, *(side.known for side in both))


def saved_seconds(sides: Sides, which: int) -> Estimate | None:
    """Returns the prefill seconds that cached tokens saved a request; None if unknown."""
    found = sides.alone[which].estimate(_of_side(which, _saved))
    return _with_enough(found, sides.total[which].known)


def more_saved(sides: Sides) -> Estimate | None:
    """Returns the seconds saved per steered request minus those of the base."""
    found = sides.together.estimate(_gain(sides, _saved))
    return _with_enough(found, *(side.known for side in sides.compared))


def length_ratio(sides: Sides) -> Estimate | None:
    """Returns the logarithm of the ratio of steered prompts' mean length to that of the base."""
    return sides.together.estimate(_gain(sides, _length))


def quantile(first_bytes: Mapping[int, int], share: float) -> float:
    """Returns the position in the buckets before which this share of the first bytes lies."""
    wanted = share * sum(first_bytes.values())
    for bucket in sorted(first_bytes):
        count = first_bytes[bucket]
        if wanted <= count:
            return bucket + max(0.0, wanted) / count
        wanted -= count
    return float(max(first_bytes) + 1)


def _position(share: float) -> Callable[[Side], float | None]:
    return lambda side: quantile(side.first_bytes, share) if side.first_bytes else None


def _seconds(share: float) -> Callable[[Side], float | None]:
    return lambda side: seconds_at(quantile(side.first_bytes, share)) if side.first_bytes else None


def first_byte(sides: Sides, which: int, share: float) -> Estimate | None:
    """Returns a quantile of the times to the first byte, in seconds; None if there are none."""
    found = sides.alone[which].estimate(_of_side(which, _position(share)), HALF_BUCKET)
    count = sum(sides.total[which].first_bytes.values())
    found = _with_enough(found, count, needed=needed_for(share))
    if found is None or found.low is None or found.high is None:
        return found and Estimate(seconds_at(found.value))
    return Estimate(*map(seconds_at, (found.value, found.low, found.high)))


def first_byte_gained(sides: Sides, share: float) -> Estimate | None:
    """Returns a quantile of steered requests minus that of the base, in seconds."""
    counts = [sum(side.first_bytes.values()) for side in sides.compared]
    if not all(counts):
        return None
    longest = max(seconds_at(quantile(side.first_bytes, share)) for side in sides.compared)
    found = sides.together.estimate(_gain(sides, _seconds(share)), longest * (RESOLUTION - 1) / 2)
    return _with_enough(found, *counts, needed=needed_for(share))


def needed_for(share: float) -> int:
    """Returns how many requests a quantile needs for an interval."""
    return max(LEAST_REQUESTS, ceil(LEAST_BEYOND / (1 - share) - 1e-6))


class LoadSpread(NamedTuple):
    """How unevenly requests went to workers.

    busiest: requests of the busiest worker, as a multiple of the mean. variation: the standard
    deviation of the workers' requests, as a share of the mean.
    """

    workers: int
    busiest: float
    variation: float


def load_spread(side: Side, workers: set[int]) -> LoadSpread | None:
    """Returns the load spread; None if there are too few requests.

    workers: all workers that any side used.
    """
    counts = [side.workers.get(worker, 0) for worker in workers]
    if sum(counts) < max(1, LEAST_EACH * len(counts)):
        return None
    mean = sum(counts) / len(counts)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    return LoadSpread(len(counts), max(counts) / mean, sqrt(variance) / mean)
