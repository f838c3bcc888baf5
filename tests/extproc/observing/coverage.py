"""How often intervals hold the truth: `python -m tests.extproc.observing.coverage`."""

import argparse
from collections.abc import Callable, Iterator
from math import cos, tau
from random import Random
from typing import NamedTuple

from extproc.observing.comparison import Sides, share_gained
from extproc.observing.report import Period, Side, Window

# A minute's requests and prompt tokens of a side, and how far its cached share varies.
REQUESTS, TOKENS, VARIES = 400, 400_000, 0.05

SHARES = 0.6, 0.4
GAIN = SHARES[0] - SHARES[1]


class Design(NamedTuple):
    """When each side had requests.

    volumes: the relative volumes of steered requests and of others, by the part of the window that
    is over.
    """

    name: str
    volumes: Callable[[float], tuple[float, float]]


def _uneven(part: float) -> tuple[float, float]:
    volume = 1 + 0.6 * cos(tau * part)
    return volume, volume


HALF = Design("half of the requests is steered", lambda _: (1.0, 1.0))
FEW = Design("5 % are steered", lambda _: (0.1, 1.9))
UNEVEN = Design("half is steered, uneven volume", _uneven)
STEPS = Design("none is steered, then half, then all", lambda part: (part >= 0.2, part < 0.8))
IN_TURN = Design("none is steered, then all", lambda part: (part >= 0.5, part < 0.5))
DESIGNS = (HALF, FEW, UNEVEN, STEPS, IN_TURN)


def correlated(minutes: int, correlation: float, rng: Random) -> Iterator[float]:
    """Yields a normal deviate for each minute; correlation: of successive ones."""
    now = rng.gauss(0.0, 1.0)
    for _ in range(minutes):
        yield now
        now = correlation * now + (1 - correlation**2) ** 0.5 * rng.gauss(0.0, 1.0)


def _side(volume: float, share: float, rng: Random) -> Side:
    requests = round(REQUESTS * volume)
    if not requests:
        return Side()
    tokens = round(TOKENS * volume)
    side = Side(requests, known=requests, prompt_tokens=tokens)
    noise = rng.gauss(0.0, 0.3 / requests**0.5)
    side.cached_tokens = round(tokens * min(1.0, max(0.0, share + noise)))
    side.reported = requests
    return side


def window(minutes: int, correlation: float, design: Design, rng: Random) -> Window:
    """Draws a window of minutes whose cached shares vary about `SHARES`."""
    walks = [list(correlated(minutes, correlation, rng)) for _ in SHARES]
    periods = []
    for at in range(minutes):
        steered, others = [
            _side(volume, share + VARIES * walk[at], rng)
            for volume, share, walk in zip(design.volumes(at / minutes), SHARES, walks, strict=True)
        ]
        periods.append(Period(0, at, 60.0, steered, others))
    return Window(60, 0, periods)


def coverage(minutes: int, correlation: float, design: Design, runs: int) -> float:
    """Returns which share of the intervals of the gain holds the truth."""
    hits = 0
    for seed in range(runs):
        gain = share_gained(Sides.of(window(minutes, correlation, design, Random(seed))))
        assert gain is not None
        assert gain.low is not None
        assert gain.high is not None
        hits += gain.low <= GAIN <= gain.high
    return hits / runs


def main() -> None:
    """Prints the coverage for windows of several lengths and correlations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000)
    runs = parser.parse_args().runs
    correlations = (0.0, 0.3, 0.5, 0.7)
    print(f"Of 100 intervals hold the truth ({runs} runs each), by the correlation of minutes:")
    for design in DESIGNS:
        print(f"{design.name:>40}  " + "  ".join(f"{one:>5}" for one in correlations))
        for minutes in (6, 12, 30, 60):
            found = (coverage(minutes, one, design, runs) for one in correlations)
            row = "  ".join(f"{100 * one:5.1f}" for one in found)
            print(f"{minutes:>32} minutes  {row}", flush=True)


if __name__ == "__main__":
    main()
