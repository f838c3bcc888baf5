"""How long something takes of which not all has ended: the estimate of Kaplan and Meier (1958)."""

from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """How long something took, in seconds, or has taken so far if it is not over."""

    seconds: float
    is_over: bool


def mean_and_p90(spans: Iterable[Span]) -> tuple[float, float]:
    """Returns the mean and the 0.9 quantile of the times; zeros if too few are over.

    Leaving out what is not over would flatter whoever lets some take very long. The mean is that of
    the times until the longest one that is known.
    """
    ordered = sorted(spans, key=lambda one: (one.seconds, not one.is_over))
    going_on, mean, p90, before = 1.0, 0.0, 0.0, 0.0
    for index, one in enumerate(ordered):
        mean += going_on * (one.seconds - before)
        before = one.seconds
        if one.is_over:
            going_on *= 1 - 1 / (len(ordered) - index)
        if going_on <= 0.1 and not p90:
            p90 = one.seconds
    return (mean, p90) if going_on < 0.5 else (0.0, 0.0)
