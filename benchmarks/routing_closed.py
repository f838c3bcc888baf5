"""Benchmark of routing in closed loops: clients who wait for their answers, on a simulated fleet.

python benchmarks/routing_closed.py [--quick] [--only CELL ...] [--contestants NAME ...]
    [--seeds N] [--jobs N] [--keep FILE] [--markdown FILE] [--json FILE]

A client's next turn comes a pause after its last answer ended, so a slow fleet gets fewer requests,
unlike in cells whose arrivals are fixed. What is asked, and pauses, are the same for every
contestant.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from measure import CannotRunError
from routing_closed_cells import AGENT_LOOPS, LOOPS, QUICK_LOOPS, Loop, agents
from routing_closed_compare import CARRIED_HEAD, CONTESTANTS, carried_summary, rows, summary
from routing_closed_runs import Job, Runs
from routing_closed_tables import tables
from routing_compare import DEFAULT
from rows import Run, arguments, run

from kvtools.whatif.routers import Contestant

METHOD = """\
How: the engines of benchmarks/routing.py: of each 400,000 tokens of cache and 12,000 prompt tokens
a second. Clients wait for their answers, and then for a pause; prompts and pauses are in
benchmarks/routing_clients.py, cells in benchmarks/routing_closed_cells.py. Envoy's policies choose
as a real Envoy does (kvtools/whatif/envoy_policies.py), by the session that clients name. Fill: the
mean context of all clients, by the room of all caches. Turns: answered a second; prompt ones have
their first token within 2 s. p50, p90, p99: time to the first token, in seconds, of turns due after
the warm part. Hit: the share of prompt tokens that were cached; ideal: if caches were endless and
all workers had the same. Computed: prompt tokens a turn. Busiest: the share of these that one
worker computed. Ratios are paired by seed, with intervals of 95 %.
"""

SEEDS = tuple(range(1, 11))
SMOKE_LOOPS = (agents(8, 120.0, 40.0),)


def main() -> None:
    """Plays every cell with every contestant."""
    quick = "three short cells, with two seeds; within two minutes on two idle cores"
    parser = arguments(__doc__, quick)
    parser.add_argument(
        "--only", nargs="+", metavar="CELL", help="these cells; a name, or a part of some"
    )
    parser.add_argument("--contestants", nargs="+", metavar="NAME", choices=list(CONTESTANTS))
    parser.add_argument("--seeds", type=int, metavar="N", help="the first N seeds only")
    parser.add_argument("--jobs", type=int, metavar="N", default=os.cpu_count(), help="processes")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE",
        help="add each run's result to this file, and play none that it has: for runs that are"
        " interrupted; remove it when the code has changed",
    )  # fmt: skip
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write tables to a file")
    with run(parser) as one:
        _compare(one)


def _compare(one: Run) -> None:
    wanted = one.options
    names = dict.fromkeys((DEFAULT, *(wanted.contestants or CONTESTANTS)))
    contestants = [CONTESTANTS[name] for name in names]
    seeds = SEEDS[: wanted.seeds or one.amount(2, 2, len(SEEDS))]  # an interval needs two
    loops = chosen(one.amount(SMOKE_LOOPS, QUICK_LOOPS, LOOPS), wanted.only)
    results = {}
    with Runs(wanted.jobs, wanted.keep) as runs:
        runs.play(list(_jobs(loops, contestants, seeds)))
        for loop in loops:
            found = {
                contestant.name: runs.results(loop, contestant, seeds) for contestant in contestants
            }
            results[loop.name] = found
            print(summary(loop, found), flush=True)
            one.add(rows(loop, found))
    if wanted.markdown:
        wanted.markdown.write_text(tables([(loop, results[loop.name]) for loop in loops]) + "\n")
    carried = [loop for loop in loops if loop in (*AGENT_LOOPS, *QUICK_LOOPS)]
    if len(carried) > 1:
        print(f"\n{CARRIED_HEAD}")
        print(carried_summary([(loop, results[loop.name]) for loop in carried]))
    print(f"\n{METHOD}Seeds: {len(seeds)}, from {seeds[0]}")


def chosen(loops: Sequence[Loop], parts: Sequence[str] | None) -> Sequence[Loop]:
    """Returns the cells of these names, or those whose names have one of these parts.

    Raises:
        CannotRunError: there is none.
    """
    names = [loop.name for loop in loops]
    wanted = {
        name
        for part in parts or names
        for name in ([part] if part in names else [one for one in names if part in one])
    }
    if not wanted:
        raise CannotRunError(f"--only: the cells are: {'; '.join(names)}")
    return [loop for loop in loops if loop.name in wanted]


def _jobs(
    loops: Sequence[Loop], contestants: Sequence[Contestant], seeds: Sequence[int]
) -> Iterator[Job]:
    for loop in loops:
        for seed in seeds:
            for contestant in contestants:
                yield Job(loop, contestant, seed)


if __name__ == "__main__":
    main()
