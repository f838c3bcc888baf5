"""Compares contestants in closed loops, paired by seed, and how many agents a fleet carries."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from measure import Figure
from routing_closed_cells import Loop
from routing_closed_play import PROMPT_SECONDS, LoopResult
from routing_compare import CONTESTANTS as POLICIES
from routing_compare import DEFAULT, PairedRow, interval

from kvtools.whatif.envoy_policies import (
    LEAST_REQUEST,
    MAGLEV,
    RING_HASH,
    RING_HASH_125,
    RING_HASH_150,
    ROUND_ROBIN,
)
from kvtools.whatif.routers import Contestant

OURS = {one.name: one for one in POLICIES if one.name in (DEFAULT, "cache_aware", "prefix_cache")}
FREE = {
    "ring": RING_HASH,
    "maglev": MAGLEV,
    "ring125": RING_HASH_125,
    "ring150": RING_HASH_150,
    "envoy_least_request": LEAST_REQUEST,
    "envoy_round_robin": ROUND_ROBIN,
}
CONTESTANTS: Mapping[str, Contestant] = {
    **OURS,
    **{name: Contestant(policy, policy) for name, policy in FREE.items()},
}

LoopResults = Mapping[str, Sequence[LoopResult]]


def figure(results: Sequence[LoopResult], what: str) -> Figure:
    """Returns one quantity of the runs, one value for each seed."""
    return Figure([max(1e-6, getattr(one, what)) for one in results])


def rows(loop: Loop, results: LoopResults) -> Iterator[PairedRow]:
    """Yields the default's turns and p90, relative to the best of the others."""
    for what in ("turns", "p90"):
        best = best_other(results, what)
        if best:
            label = f"{loop.name}: {what} / {best}'s"
            yield PairedRow(label, figure(results[DEFAULT], what), figure(results[best], what))


def best_other(results: LoopResults, what: str) -> str:
    """Returns who has most turns, or least of another quantity, except the default; "" if none."""
    others = [name for name in results if name != DEFAULT]
    best_of = max if what == "turns" else min
    return best_of(others, key=lambda name: _mean(results[name], what), default="")


def _mean(results: Sequence[LoopResult], what: str) -> float:
    return statistics.geometric_mean(figure(results, what).values)


def summary(loop: Loop, results: LoopResults) -> str:
    """Returns all quantities of all contestants, as means over the seeds."""
    columns = (
        "turns/s  prompt    p50    p90    p99    hit  ideal  computed  busiest"
        f"  turns / {DEFAULT}'s      p90 / {DEFAULT}'s"
    )
    lines = [f"{loop.name} (fill {loop.fill:.2f})", f"  {'':22} {columns}"]
    for name, each in results.items():
        means = [statistics.fmean(column) for column in zip(*each, strict=True)]
        lines.append(
            "  {:22} {:7.2f}{:8.2f}{:7.2f}{:7.2f}{:7.2f}{:7.3f}{:7.3f}{:10.0f}{:9.3f}".format(
                name, *means
            )
            + "".join(f"  {ratio_of(each, results[DEFAULT], what):19}" for what in ("turns", "p90"))
        )
    return "\n".join(line.rstrip() for line in lines)


def ratio_of(results: Sequence[LoopResult], reference: Sequence[LoopResult], what: str) -> str:
    """Returns the geometric mean of the ratios of each seed, and its interval."""
    values = figure(results, what).over(figure(reference, what)).values
    low, high = interval(values)
    return f"{statistics.geometric_mean(values):.3f} ({low:.3f}-{high:.3f})"


CARRIED_HEAD = f"""\
Agents per fleet: how many agents eight workers carry with a p90 of the time to the first token of
{PROMPT_SECONDS:g} s, between two cells by the logarithm of p90; below the smallest cell as if p90
were in proportion to their number, and at most the largest cell's number. Mean over seeds, with its
interval, and {DEFAULT}'s number divided by it, paired by seed.
"""


def carried_summary(cells: Sequence[tuple[Loop, LoopResults]]) -> str:
    """Returns how many agents a fleet carries, by contestant; cells: by increasing numbers."""
    counts = [loop.clients[0][1] for loop, _ in cells]
    lines = []
    ours: Sequence[float] = ()
    for name in cells[0][1]:
        by_seed = zip(*(results[name] for _, results in cells), strict=True)
        found = [carried(counts, [one.p90 for one in each]) for each in by_seed]
        ours = ours or found
        low, high = interval(found)
        ratios = [mine / its for mine, its in zip(ours, found, strict=True)]
        below, above = interval(ratios)
        lines.append(
            f"  {name:22} {statistics.geometric_mean(found):6.1f} ({low:.1f}-{high:.1f})"
            f"  {statistics.geometric_mean(ratios):.2f} ({below:.2f}-{above:.2f})"
        )
    return "\n".join(lines)


def carried(counts: Sequence[int], p90s: Sequence[float]) -> float:
    """Returns the number of agents at which p90 first exceeds the limit.

    Between two counts the logarithm of p90 counts as a straight line; below the least one p90
    counts as in proportion to their number, and beyond the largest one nothing is known.
    """
    if p90s[0] > PROMPT_SECONDS:
        return counts[0] * PROMPT_SECONDS / p90s[0]
    for number in range(1, len(counts)):
        if p90s[number] > PROMPT_SECONDS:
            before, after = math.log(p90s[number - 1]), math.log(p90s[number])
            share = (math.log(PROMPT_SECONDS) - before) / (after - before)
            return counts[number - 1] + share * (counts[number] - counts[number - 1])
    return float(counts[-1])
