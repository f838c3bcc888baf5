"""Benchmark of two fleets under a router that asks both by probe, on simulated engines.

python benchmarks/routing_probe.py [--quick] [--seeds N] [--jobs N] [--keep FILE]
    [--markdown FILE] [--json FILE]

Each fleet is behind a KVSteer of its own, which knows nothing of the other. The router above sends
a turn to the fleet whose POST /probe promises the first token soonest, or chooses by chance, by the
requests that it has under way at each, or by a hash of the session that the client names.
"""

import statistics
from collections.abc import Mapping, Sequence

from measure import Figure
from routing_closed_cells import QUICK_LOOPS, Loop, agents, mixed
from routing_closed_compare import figure, ratio_of
from routing_closed_play import LoopResult
from routing_closed_runs import Job, Runs, add_run_arguments
from routing_compare import CONTESTANTS, DEFAULT, PairedRow
from routing_probe_play import (
    LEAST_REQUEST,
    ONE,
    PROBE,
    RANDOM,
    SESSION,
    WEIGHTED_SESSION,
    Above,
    play,
)
from rows import Run, arguments, run

METHOD = """\
How: the engines and clients of benchmarks/routing_closed.py, in two fleets, each behind a KVSteer
with the default policy that knows its own fleet alone. The router above asks both for each turn, as
POST /probe answers (extproc/routing/warmth.py): it adds the seconds of the queue and of the rest of
the prompt, and takes the fleet with less. Asking takes no time here; what it costs is measured in
benchmarks/probe_cost.py. random, least_request, session (a hash of it) and weighted_session (the
same, by the number of workers): the router above asks nobody. one: one KVSteer that knows all
workers, as if there were one fleet. Ratios are paired by seed, with intervals of 95 %.
"""

SEEDS = tuple(range(1, 11))
(COST,) = [one for one in CONTESTANTS if one.name == DEFAULT]
HALVES, UNEVEN = (0.5, 0.5), (0.25, 0.75)


def _above(shares: Sequence[float]) -> Sequence[Above]:
    weighted = () if len(set(shares)) == 1 else (WEIGHTED_SESSION,)
    choices = (PROBE, RANDOM, LEAST_REQUEST, SESSION, *weighted, ONE)
    return [Above(choice, choice, COST, shares) for choice in choices]


# The cells, each with the shares of its engines.
CELLS: Sequence[tuple[Loop, Sequence[float]]] = (
    *(
        (agents(count)._replace(name=f"{count} agents, 4 + 4 workers"), HALVES)
        for count in (48, 80)
    ),
    (agents(112)._replace(name="112 agents, 4 + 4 workers"), HALVES),
    (agents(80)._replace(name="80 agents, 2 + 6 workers"), UNEVEN),
    (mixed(0.8)._replace(name="mix, 0.8 of the caches, 4 + 4 workers"), HALVES),
)
SMOKE_CELLS = ((agents(8, 120.0, 40.0), HALVES),)
QUICK_CELLS = ((QUICK_LOOPS[0], HALVES),)

Found = Mapping[str, Sequence[LoopResult]]


def main() -> None:
    """Plays every cell with every way to choose."""
    parser = arguments(__doc__, "one short cell, with two seeds")
    add_run_arguments(parser)
    with run(parser) as one:
        _compare(one)


def _compare(one: Run) -> None:
    wanted = one.options
    cells = one.amount(SMOKE_CELLS, QUICK_CELLS, CELLS)
    seeds = SEEDS[: wanted.seeds or one.amount(2, 2, len(SEEDS))]  # an interval needs two
    tables = []
    with Runs(wanted.jobs, wanted.keep, play) as runs:
        runs.play(
            [
                Job(loop, each, seed)
                for seed in seeds
                for loop, shares in cells
                for each in _above(shares)
            ]
        )
        for loop, shares in cells:
            found = {each.name: runs.results(loop, each, seeds) for each in _above(shares)}
            tables.append(table(loop, found))
            print(tables[-1], flush=True)
            one.add(rows(loop, found))
    if wanted.markdown:
        wanted.markdown.write_text("\n\n".join(tables) + "\n")
    print(f"\n{METHOD}Seeds: {len(seeds)}, from {seeds[0]}")


def rows(loop: Loop, found: Found) -> Sequence[PairedRow]:
    """Returns the turns and p90 of asking, relative to each way that asks nobody."""
    return [
        PairedRow(f"{loop.name}: {what} / {name}'s", _asked(found, what), figure(found[name], what))
        for name in (RANDOM, LEAST_REQUEST, SESSION, WEIGHTED_SESSION)
        if name in found
        for what in ("turns", "p90")
    ]


def _asked(found: Found, what: str) -> Figure:
    return figure(found[PROBE], what)


def table(loop: Loop, found: Found) -> str:
    """Returns a table in Markdown: means over the seeds, and ratios to the probe's."""
    lines = [
        f"{loop.name}:",
        "",
        "| chosen by | turns/s | hit | p50 s | p90 s | turns / probe's | p90 / probe's |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, results in found.items():
        turns, hit, p50, p90 = (
            statistics.fmean([getattr(one, what) for one in results])
            for what in ("turns", "hit_rate", "p50", "p90")
        )
        ratios = [ratio_of(results, found[PROBE], what) for what in ("turns", "p90")]
        cells = (f"{turns:.2f}", f"{hit:.3f}", f"{p50:.2f}", f"{p90:.2f}", *ratios)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
