"""Benchmark of routing: policies on a simulated fleet, on the same arrivals.

python benchmarks/routing.py [--quick] [--json FILE] [--plot FILE.svg] [--trace FILE] [--tuning]
    [--speeds] [--seeds N]
python benchmarks/routing.py --routers [--speeds] [--quick] [--seeds N] [--json FILE]
python benchmarks/routing.py --siblings [--quick] [--seeds N] [--tuning] [--json FILE]
python benchmarks/routing.py --pulls [--quick] [--seeds N] [--tuning] [--cell NAME] [--chances N]
    [--json FILE]
python benchmarks/routing.py --stores [--quick] [--seeds N] [--tuning] [--cell NAME] [--chances N]
    [--json FILE]
python benchmarks/routing.py --legs [--quick] [--seeds N] [--tuning] [--json FILE]
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import routing_legs
import routing_pulls
import routing_routers
import routing_siblings
import routing_stores
from routing_cells import CELLS, SEEDS, SPEED_CELLS, TUNING_SEEDS, Cell, arrivals
from routing_compare import (
    CONTESTANTS,
    OTHER_DRAWS,
    PARTS,
    SPEED_CONTESTANTS,
    Results,
    rows,
    speed_rows,
    summary,
)
from routing_seeds import by_seed, inherited
from routing_workloads import trace
from rows import Run, arguments, run

from kvtools.whatif.engines import Result
from kvtools.whatif.outlook import svg
from kvtools.whatif.routers import Arrivals, Contestant
from kvtools.whatif.routers import run as played

METHOD = """\
How: engines in simulated time (kvtools/whatif/engines.py): prompts are computed one after
the other in chunks that share steps with the answers under way; prefixes are cached in blocks of
128 tokens, least recently used out first; events arrive after a delay. The router's own decide(),
load and table of what was sent pick the engine; seeds' policies see the same overlaps and requests
in flight. Envoy's own policies choose as a real Envoy does, by the session that a user, a chat or a
reader of a document names; single requests name none. An engine computes 12,000 prompt tokens a
second at most, unless its cell says otherwise, which the router does not know: it takes it for
8,000 until it learns better. Every contestant gets the same arrivals. p50, p90, p99: time to first
token. Spread: of computed prompt tokens over the engines, standard deviation / mean. Ratios are
paired by seed; intervals are of 95 %. * marks the lowest p90.
"""

ROUTERS_METHOD = """\
How: the fleet, the arrivals and the decision of the benchmark of policies. Each request comes to
one of the routers by chance. All of them see the events of all engines; each books its own
requests, and is told of the others' by the messages of extproc/sharing, a millisecond on the way.
Alone: nothing is told. All compared: `policy.sample: 0`; otherwise its default, 32 for one router
and 12 while others are heard of. With --speeds: where speeds are learned, by one router and by four
that share, in the cells of engines that are not as fast as configured, and in some others. Ratios
are paired by seed; intervals are of 95 %.
"""

SIBLINGS_METHOD = """\
Siblings: groups of requests with one new prefix, within 50 ms, each with 256 tokens of its own; one
group in ten seconds on average, or one a second (busy). Computed tokens: of all prompts' tokens.
"""

PULLS_METHOD = """\
Pulls: an engine sends 50,000 tokens a second, to one other at a time (slow: 4,000, which the router
does not know at first). All that an engine has cached is in its host memory. Half the speed,
double: as the router is configured; it learns better.
"""

CHANCE_METHOD = """\
As itself: the reference relative to itself, with other draws among equal workers.
"""

STORES_METHOD = """\
Stores: the engines that mount it copy what they compute to a common store, and each loads 30,000
tokens a second from it. By half: four of eight mount it. No removals told: it has room for half as
much as one engine caches, and a block counts for 60 s after it was last stored.
"""

LEGS_METHOD = """\
How: the engines of the benchmark of policies. Of eight, four compute prompts for the other four, or
each takes whole requests. The router's own decide_legs() and books pick the workers, and learn
their speeds; fixed rules only say otherwise when a prompt is computed elsewhere: always, or from a
number of tokens on that the worker which answers does not hold. A transfer takes 10 ms and 10 us a
token (slow transfers: 125 us); the answer then begins before prompts that wait there. Goodput:
requests a second whose first token comes within 3 s, and whose tokens come within 25 ms of each
other on average. Ratios are paired by seed; intervals are of 95 %. The better one of the fixed
rules is found for each cell.
"""

QUICK_SEEDS = 3


def main() -> None:
    """Runs every cell."""
    parser = arguments("Benchmark of routing.", "fewer seeds, within two minutes")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw p90 as an SVG picture")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a trace in Mooncake's format")
    parser.add_argument("--speedup", type=float, default=1.0, help="play the trace so much faster")
    parser.add_argument("--workers", type=int, default=8, help="engines that serve the trace")
    parser.add_argument("--tuning", action="store_true", help="the seeds that weights are tuned on")
    parser.add_argument("--routers", action="store_true", help="one router against several")
    parser.add_argument("--legs", action="store_true", help="prompts computed on other workers")
    parser.add_argument("--pulls", action="store_true", help="engines that pull from each other")
    parser.add_argument("--stores", action="store_true", help="engines that share a store")
    parser.add_argument("--siblings", action="store_true", help="one long prefix, many at once")
    parser.add_argument("--speeds", action="store_true", help="engines not as fast as configured")
    parser.add_argument("--cell", metavar="NAME", help="this cell only, of stores or pulls")
    parser.add_argument(
        "--chances", type=int, default=1, metavar="N", help="runs of each seed, with other draws"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="the first N seeds only")
    with run(parser) as one:
        _chances[:] = range(one.options.chances)
        if one.options.routers:
            _compare_routers(one)
        elif one.options.siblings:
            _compare_siblings(one)
        elif one.options.pulls:
            _compare_pulls(one)
        elif one.options.stores:
            _compare_stores(one)
        elif one.options.legs:
            _compare_legs(one)
        else:
            _compare_policies(one)


def _compare_policies(one: Run) -> None:
    wanted = one.options
    cells: Sequence[Cell] = SPEED_CELLS if wanted.speeds else CELLS
    contestants = SPEED_CONTESTANTS if wanted.speeds else (*CONTESTANTS, *PARTS)
    compared = speed_rows if wanted.speeds else rows
    seeds = _seeds(one, TUNING_SEEDS if wanted.tuning else SEEDS)
    if wanted.trace:
        workload = trace(wanted.trace, wanted.speedup)
        cells = (Cell(wanted.trace.name, workload, workers=wanted.workers),)
    p90s: dict[str, dict[str, float]] = {}
    for cell in one.amount(cells[:1], cells, cells):
        results = _results(cell, seeds, contestants)
        print(summary(cell.name, results), flush=True)
        one.add(compared(cell.name, results))
        p90s[cell.name] = {
            name: statistics.geometric_mean([one.p90 for one in each])
            for name, each in results.items()
        }
    print(f"\n{METHOD}Seeds: {len(seeds)}, from {seeds[0]}")
    if wanted.plot:
        wanted.plot.write_text(svg(p90s, [one.name for one in contestants if one not in PARTS]))


def _seeds(one: Run, seeds: Sequence[int]) -> Sequence[int]:
    few = one.amount(2, QUICK_SEEDS, len(seeds))  # an interval needs two
    return seeds[: one.options.seeds or few]


Named = TypeVar("Named", bound=Cell)


def _wanted(one: Run, cells: Sequence[Named]) -> Sequence[Named]:
    """Returns the cell that is asked for, or all."""
    name = one.options.cell
    return [cell for cell in cells if name in (None, cell.name)]


def _compare_routers(one: Run) -> None:
    seeds = _seeds(one, routing_routers.SEEDS)
    cells, contestants, compared = (
        (routing_routers.CELLS, routing_routers.CONTESTANTS, routing_routers.rows)
        if not one.options.speeds
        else (
            routing_routers.LEARNED_CELLS,
            routing_routers.LEARNED_CONTESTANTS,
            routing_routers.learned_rows,
        )
    )
    for cell in one.amount(cells[:1], cells, cells):
        results = _results(cell, seeds, contestants)
        print(routing_routers.summary(cell.name, results), flush=True)
        one.add(compared(cell.name, results))
    print(f"\n{ROUTERS_METHOD}Seeds: {len(seeds)}, from {seeds[0]}")


def _compare_siblings(one: Run) -> None:
    seeds = _seeds(one, TUNING_SEEDS if one.options.tuning else SEEDS)
    quick, cells = routing_siblings.SIBLING_CELLS, routing_siblings.CELLS
    for cell in one.amount(quick[:1], quick, cells):
        results = _results(cell, seeds, routing_siblings.CONTESTANTS)
        print(summary(cell.name, results), flush=True)
        one.add(routing_siblings.rows(cell, results))
    print(f"\n{METHOD}{SIBLINGS_METHOD}Seeds: {len(seeds)}, from {seeds[0]}")


def _compare_pulls(one: Run) -> None:
    seeds = _seeds(one, TUNING_SEEDS if one.options.tuning else SEEDS)
    quick, cells = routing_pulls.PULL_CELLS, routing_pulls.CELLS
    for cell in _wanted(one, one.amount(quick[:1], quick, cells)):
        results = _results(cell, seeds, routing_pulls.CONTESTANTS)
        print(summary(cell.name, results), flush=True)
        one.add(routing_pulls.rows(cell, results))
    print(f"\n{METHOD}{PULLS_METHOD}{CHANCE_METHOD}Seeds: {len(seeds)}, from {seeds[0]}")


def _compare_stores(one: Run) -> None:
    seeds = _seeds(one, TUNING_SEEDS if one.options.tuning else SEEDS)
    quick, cells = routing_stores.STORE_CELLS, routing_stores.CELLS
    for cell in _wanted(one, one.amount(quick[:1], quick, cells)):
        results = _results(cell, seeds, routing_stores.CONTESTANTS)
        print(summary(cell.name, results), flush=True)
        one.add(routing_stores.rows(cell, results))
    print(f"\n{METHOD}{STORES_METHOD}{CHANCE_METHOD}Seeds: {len(seeds)}, from {seeds[0]}")


def _compare_legs(one: Run) -> None:
    seeds = _seeds(one, TUNING_SEEDS if one.options.tuning else routing_legs.SEEDS)
    quick = routing_legs.QUICK_CELLS
    for cell in one.amount(quick[:1], quick, routing_legs.CELLS):
        each = by_seed(cell, seeds, routing_legs.CONTESTANTS, _legs_of_seed)
        results = {name: [one[name] for one in each] for name in each[0]}
        print(routing_legs.summary(cell.name, results), flush=True)
        one.add(routing_legs.rows(cell.name, results))
    print(f"\n{LEGS_METHOD}Seeds: {len(seeds)}, from {seeds[0]}")


def _legs_of_seed(seed: int) -> dict[str, routing_legs.Result]:
    cell, contestants = inherited()
    return {one.name: routing_legs.run(cell, one, seed) for one in contestants}


def _results(cell: Cell, seeds: Sequence[int], contestants: Sequence[Contestant]) -> Results:
    """Runs every contestant on every seed, on all cores."""
    by_name: dict[str, list[Result]] = {one.name: [] for one in contestants}
    for each in by_seed(cell, seeds, contestants, _of_seed):
        for name, result in each.items():
            by_name[name].append(result)
    return by_name


# A router draws among equal workers. A pick that differs changes all later ones, so two runs of the
# same arrivals differ by a percent or two. The mean of several runs of each seed differs by less.
# Other draws are those of runs so much further on.
_chances = [0]
CHANCE_STEP = 100_003
FURTHER_ON = 1_000


def _of_seed(seed: int) -> dict[str, Result]:
    cell, contestants = inherited()
    given = arrivals(cell, seed)
    return {one.name: _mean_of_chances(cell, one, given, seed) for one in contestants}


def _mean_of_chances(cell: Cell, one: Contestant, given: Arrivals, seed: int) -> Result:
    first = FURTHER_ON if one.name.endswith(OTHER_DRAWS) else 0
    draws = [seed + CHANCE_STEP * (first + number) for number in _chances]
    runs = [played(cell.stage, one, given, each) for each in draws]
    return Result(*(statistics.fmean(each) for each in zip(*runs, strict=True)))


if __name__ == "__main__":
    main()
