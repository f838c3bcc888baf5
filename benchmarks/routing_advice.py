"""How right the router's advice is: so many more workers would hold all that lives.

python benchmarks/routing_advice.py [--quick] [--seeds N] [--jobs N] [--keep FILE] [--markdown FILE]
"""

from collections.abc import Sequence
from operator import attrgetter

from measure import Figure
from routing_clients import CHAT, ENDLESS, FORKING
from routing_closed_cells import QUICK_SECONDS, Loop, agents, filled
from routing_closed_compare import CONTESTANTS
from routing_closed_play import LoopResult
from routing_closed_runs import Job, Runs, add_run_arguments
from routing_compare import DEFAULT, PairedRow
from rows import Run, arguments, run

from extproc.routing.claims.occupancy import Occupancy

LOOPS = (
    *(agents(count) for count in (112, 128, 160, 200)),
    *(filled(FORKING, share) for share in (1.3, 2.0)),
    *(filled(ENDLESS, share) for share in (1.3, 2.0)),
    filled(CHAT, 1.3),
)
QUICK_LOOPS = (agents(160, QUICK_SECONDS),)
SMOKE_LOOPS = (agents(8, 120.0, 40.0),)
SEEDS = tuple(range(11, 21))
COST = CONTESTANTS[DEFAULT]

HEAD = """\
| cell | live contexts | computed again | with | computed again |
|---|---|---|---|---|"""

METHOD = """\
How: as benchmarks/routing_closed.py. Of each run, what the router says at its end (GET /contexts:
`more_workers`); then the same clients with so many more workers. Computed again: what endless
caches would have found, less what was found, as a share of the prompt tokens."""


def main() -> None:
    """Plays each cell, and again with the workers that are missing."""
    parser = arguments(__doc__, "one short cell, with two seeds")
    add_run_arguments(parser)
    with run(parser) as one:
        _play(one)


def _play(one: Run) -> None:
    wanted = one.options
    seeds = SEEDS[: wanted.seeds or one.amount(2, 2, len(SEEDS))]
    loops = one.amount(SMOKE_LOOPS, QUICK_LOOPS, LOOPS)
    lines = [HEAD]
    with Runs(wanted.jobs, wanted.keep) as runs:
        runs.play([Job(loop, COST, seed) for seed in seeds for loop in loops])
        advised = [(loop, _advised(loop, runs.results(loop, COST, seeds))) for loop in loops]
        runs.play([Job(more, COST, seed) for seed in seeds for _, more in advised])
        for loop, more in advised:
            before, after = (runs.results(each, COST, seeds) for each in (loop, more))
            lines.append(_line(loop, more, before, after))
            print(lines[-1], flush=True)
            one.add([_row(loop, after)])
    if wanted.markdown:
        wanted.markdown.write_text("\n".join(lines) + "\n")
    print(f"\n{METHOD} Seeds: {len(seeds)}, from {seeds[0]}")


def _advised(loop: Loop, results: Sequence[LoopResult]) -> Loop:
    """Returns a cell with the workers that the router would have, by the median of the runs."""
    share = Figure([one.filled for one in results]).median
    more = Occupancy(0.0, 1.0, 0.0, share).missing_workers(loop.workers)
    return loop._replace(workers=loop.workers + more)


def _row(loop: Loop, after: Sequence[LoopResult]) -> PairedRow:
    """Returns a row of what is computed beside what has to be, with the workers that it names."""
    computed, needed = (
        Figure([1.0 - share(one) for one in after])
        for share in (attrgetter("hit_rate"), attrgetter("ideal_hit_rate"))
    )
    return PairedRow(f"{loop.name}: computed with them / needed", computed, needed)


def _again(results: Sequence[LoopResult]) -> str:
    shares = [one.ideal_hit_rate - one.hit_rate for one in results]
    low, high = min(shares), max(shares)
    return f"{Figure(shares).median:.1%} ({low:.1%} to {high:.1%})"


def _line(loop: Loop, more: Loop, before: Sequence[LoopResult], after: Sequence[LoopResult]) -> str:
    share = Figure([one.filled for one in before]).median
    workers = f"{more.workers - loop.workers} more workers"
    return f"| {loop.name} | {share:.0%} | {_again(before)} | {workers} | {_again(after)} |"


if __name__ == "__main__":
    main()
