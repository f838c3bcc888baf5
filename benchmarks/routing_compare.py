"""Compares policies on the same arrivals, paired by seed, with intervals."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from measure import Figure, Goal, Row

from extproc.config.schema import Cost, Policy
from kvtools.whatif.engines import Result
from kvtools.whatif.routers import ENVOY, Contestant

DEFAULT = "cost"

CONTESTANTS = (
    Contestant(DEFAULT, "cost", expects=True, learns=True),
    Contestant("cache_aware", "cache_aware"),
    Contestant("prefix_cache", "prefix_cache"),
    Contestant("least_request", "least_request"),
    Contestant("round_robin", "round_robin"),
    Contestant("random", "random"),
    *(Contestant(policy, policy) for policy in ENVOY),
)

# The end of the name of a contestant that is another one with other draws.
OTHER_DRAWS = ", other draws"

NOTHING_LEARNED = "cost, nothing learned"
RIGHT = "cost, right speeds by hand"
SCRAPED = "cost, nothing learned, scraped"

# Contestants for engines that are not as fast as configured.
SPEED_CONTESTANTS = (
    Contestant(DEFAULT, "cost", expects=True, learns=True),
    Contestant(RIGHT, "cost", expects=True, knows=True),
    Contestant(NOTHING_LEARNED, "cost", expects=True),
    Contestant(SCRAPED, "cost", expects=True, scrape_seconds=1.0),
    Contestant("least_request", "least_request"),
)

# The default without one of its parts, to measure the effect of that part.
PARTS = (
    Contestant(NOTHING_LEARNED, "cost", expects=True),
    Contestant("cost, nothing speculative", "cost", learns=True),
    Contestant("cost, no events", "cost", sees_events=False, expects=True),
    Contestant("cost, constant affinity", "cost", Policy(cost=Cost(150, 0)), expects=True),
    Contestant("cost, workers taken for half as fast", "cost", expects=True, prefill_rate=4_000),
    Contestant("cost, workers taken for twice as fast", "cost", expects=True, prefill_rate=16_000),
    Contestant("cost, scraped", "cost", expects=True, scrape_seconds=1.0),
    Contestant(
        "cost, half as fast, scraped", "cost", expects=True, prefill_rate=4_000, scrape_seconds=1.0
    ),
)

# Two-sided 95 % points of Student's t, by degrees of freedom.
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 9: 2.262, 14: 2.145, 19: 2.093}

# The results of one cell, by contestant, one for each seed.
Results = Mapping[str, Sequence[Result]]

NOT_WORSE = Goal(1.0, "<= 1, or the interval has 1")
AS_BY_HAND = Goal(1.1, "<= 1.1, or the interval has it")


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the geometric mean of ratios, one for each seed."""
    logs = [math.log(ratio) for ratio in ratios]
    freedom = len(logs) - 1
    point = _T[max(known for known in _T if known <= freedom)]
    half = point * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    return math.exp(middle - half), math.exp(middle + half)


class Paired(Figure):
    """Ratios of the same seeds; shown as their geometric mean, with its interval."""

    def __str__(self) -> str:
        low, high = interval(self.values)
        return f"{_geometric_mean(self.values):.3f} ({low:.3f}-{high:.3f})"


@dataclass(frozen=True, slots=True)
class PairedRow(Row):
    """A row whose goal is met unless KVSteer is significantly worse.

    chance: a mean ratio up to this one is what chance makes of the reference itself.
    """

    chance: float = 1.0

    @property
    def ratio(self) -> Figure | None:
        """KVSteer's figure divided by the reference, seed by seed."""
        if isinstance(self.ours, str) or isinstance(self.reference, str):
            return None
        return Paired(self.ours.over(self.reference).values)

    @property
    def met(self) -> bool | None:
        """Whether the interval of the ratio reaches the goal, or its mean is chance."""
        if self.goal is None or self.ratio is None:
            return None
        values = self.ratio.values
        return interval(values)[0] <= self.goal.limit or _geometric_mean(values) <= self.chance


def not_worse(name: str, ours: Figure, today: Figure, other_draws: Figure) -> PairedRow:
    """Returns a row of ours relative to today's, which says how much that differs from itself.

    other_draws: today's, with other draws among equal workers.
    """
    low, high = interval(other_draws.over(today).values)
    goal = Goal(1.0, f"<= 1, or the interval has 1, or as itself ({low:.3f}-{high:.3f})")
    return PairedRow(name, ours, today, goal, high)


def again(one: Contestant) -> Contestant:
    """Returns the same contestant with other draws among equal workers."""
    return one._replace(name=f"{one.name}{OTHER_DRAWS}")


def rows(cell: str, results: Results) -> list[Row]:
    """Returns the rows of TTFT p90 relative to the best policy, to least_request and to random."""
    ours = _p90(results[DEFAULT])
    others = [one.name for one in CONTESTANTS if one.name != DEFAULT]
    best = min(others, key=lambda name: _geometric_mean(_p90(results[name]).values))
    made: list[Row] = [
        PairedRow(f"{cell}: p90 / {name}'s", ours, _p90(results[name]), NOT_WORSE)
        for name in dict.fromkeys((best, "least_request"))
    ]
    made.append(Row(f"{cell}: p90 / random's", ours, _p90(results["random"])))
    return made


def speed_rows(cell: str, results: Results) -> list[Row]:
    """Returns the rows of TTFT p90 in cells whose engines are not as fast as configured."""
    ours = _p90(results[DEFAULT])
    goals = {RIGHT: AS_BY_HAND, NOTHING_LEARNED: NOT_WORSE, SCRAPED: None, "least_request": None}
    return [
        PairedRow(f"{cell}: p90 / {name}'s", ours, _p90(results[name]), goal)
        for name, goal in goals.items()
    ]


def summary(cell: str, results: Results) -> str:
    """Returns all measures of all contestants in one cell, as means over the seeds."""
    names = list(results)
    best = min(names, key=lambda name: _geometric_mean(_p90(results[name]).values))
    lines = [f"{cell}\n  {'':38} hit   p50 s   p90 s   p99 s  req/s  spread  p90 / default's"]
    for name in names:
        means = [statistics.fmean(column) for column in zip(*results[name], strict=True)]
        ratio = _p90(results[name]).over(_p90(results[DEFAULT]))
        low, high = interval(ratio.values)
        hit, p50, p90, p99, throughput, spread = means
        lines.append(
            f"  {name:38}{hit:4.2f}{p50:8.3f}{p90:8.3f}{p99:8.3f}{throughput:7.2f}{spread:8.2f}"
            f"  {_geometric_mean(ratio.values):5.2f} ({low:.2f}-{high:.2f}){' *' * (name == best)}"
        )
    return "\n".join(lines)


def _p90(results: Sequence[Result]) -> Figure:
    return Figure([max(1e-6, one.p90) for one in results])


def _geometric_mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values)
