"""Benchmark of the parts of a decision: each on and off, in the cells where it acts.

python benchmarks/ablation.py [--quick] [--only TERM ...] [--seeds N] [--json FILE]
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import routing_pulls
import routing_siblings
import routing_stores
from measure import Figure
from routing_cells import CELLS, SEEDS, SPEED_CELLS, Cell, arrivals
from routing_closed_cells import agents
from routing_closed_play import LoopResult
from routing_closed_play import play as play_loop
from routing_compare import PairedRow, interval
from routing_seeds import by_seed, inherited
from rows import Run, arguments, run

from extproc.config.schema import Cost, Policy
from kvtools.whatif.engines import Result
from kvtools.whatif.routers import Contestant
from kvtools.whatif.routers import run as played

METHOD = """\
How: the fleet, the cells and the decision of benchmarks/routing.py, and closed loops of agents
(benchmarks/routing_closed.py). Each row is the figure with the part on, relative to the part off,
paired by seed, with its interval of 95 %. p90: of the time to the first token. Computed: the share
of the prompt tokens that were not cached. Turns: answered a second. A pick that differs changes all
later ones, also the draws among equal workers, so one row in twenty is outside its interval by
chance. Sessions and patience act on requests whose tokens are not known, of which
these cells have none.
"""

USUAL = Contestant("cost", "cost", expects=True, learns=True)

# Some 95 agents' contexts fill the caches of eight engines.
LOOPS = tuple(agents(count, 2_500.0, 1_000.0) for count in (64, 96, 128, 160))
QUICK_LOOPS = (agents(96, 900.0, 400.0),)
SMOKE_LOOPS = (agents(8, 120.0, 40.0),)


def _believes_all(*_: object) -> float:
    return 1.0


def _charges_nothing(*_: object) -> None:
    return None


class Term(NamedTuple):
    """A part of the decision.

    on, off: contestants with it and without. replaced: what does without it where no setting does,
    and by what. cells: where it acts. others: where it should do no harm, which a quick run leaves
    out. is_in_loops: whether it acts where agents wait for their answers.
    """

    on: Contestant
    off: Contestant
    cells: Sequence[Cell]
    others: Sequence[Cell] = ()
    is_in_loops: bool = True
    replaced: Mapping[str, Callable[..., object]] = {}


_OFF_ROOM = {"extproc.routing.cost.room.Room.charge": _charges_nothing}
_OFF_SHARE = {"extproc.routing.store_share.StoreShare.share": _believes_all}


def _weighs(**weights: int) -> Contestant:
    return USUAL._replace(rules=Policy(cost=Cost(**weights)))


def _of_stores(
    off: str = routing_stores.KNOWN, replaced: Mapping[str, Callable[..., object]] = {}
) -> Term:
    """Returns a part that acts where a store is known. off: the contestant without it."""
    named = {one.name: one for one in routing_stores.CONTESTANTS}
    on, cells = named[routing_stores.KNOWN], routing_stores.STORE_CELLS
    return Term(on, named[off], cells, routing_stores.OTHER_CELLS, False, replaced)


def _of_pulls(off: str) -> Term:
    """Returns a part that acts where pulls are priced. off: the contestant without it."""
    named = {one.name: one for one in routing_pulls.CONTESTANTS}
    on, cells = named[routing_pulls.PRICED], routing_pulls.PULL_CELLS
    return Term(on, named[off], cells, routing_pulls.OTHER_CELLS, False)


_SIBLINGS = _weighs(siblings_percent=routing_siblings.PERCENT)

TERMS: Mapping[str, Term] = {
    "hits first": Term(USUAL._replace(hits_first=True), USUAL, ()),
    "room": Term(USUAL, USUAL, CELLS, replaced=_OFF_ROOM),
    "siblings": Term(_SIBLINGS, USUAL, routing_siblings.SIBLING_CELLS, CELLS),
    "store share": _of_stores(replaced=_OFF_SHARE),
    "stores": _of_stores(routing_stores.TODAY),
    "price_pulls": _of_pulls(routing_pulls.AFTER),
    "learned speeds": Term(USUAL, USUAL._replace(learns=False), SPEED_CELLS, CELLS),
    "requests in flight": Term(USUAL, USUAL._replace(expects=False), CELLS),
    "affinity by utilization": Term(USUAL, _weighs(busy_affinity_percent=0), CELLS),
    "cost of running requests": Term(USUAL, _weighs(running_tokens=0), CELLS),
}


@contextlib.contextmanager
def _without(term: Term) -> Iterator[None]:
    """Switches a part off that no setting does."""
    with contextlib.ExitStack() as stack:
        for name, instead in term.replaced.items():
            stack.enter_context(patch(name, instead))
        yield


def _open_of_seed(seed: int) -> tuple[Result, Result]:
    cell, term = inherited()
    given = arrivals(cell, seed)
    on = played(cell.stage, term.on, given, seed)
    with _without(term):
        return on, played(cell.stage, term.off, given, seed)


def _loop_of_seed(seed: int) -> tuple[LoopResult, LoopResult]:
    loop, term = inherited()
    on = play_loop(loop, term.on, seed)
    with _without(term):
        return on, play_loop(loop, term.off, seed)


# What is measured of a run, by its label.
_MEASURES: Mapping[str, Callable[[Any], float]] = {
    "p90": lambda result: result.p90,
    "computed": lambda result: 1.0 - result.hit_rate,
    "turns": lambda result: result.turns,
}
_OF_CELLS, _OF_LOOPS = ("p90", "computed"), ("p90", "computed", "turns")
_MORE_IS_BETTER = "turns"


def _paired(name: str, each: Sequence[tuple[object, object]], what: str) -> PairedRow:
    """Returns the row of one measure of runs with the part on, and off."""
    on, off = ([max(1e-6, _MEASURES[what](pair[at])) for pair in each] for at in (0, 1))
    return PairedRow(f"{name}: {what}", Figure(on), Figure(off))


def _rows(name: str, term: Term, one: Run, seeds: Sequence[int]) -> Iterator[PairedRow]:
    for cell in one.amount(term.cells[:1], term.cells, (*term.cells, *term.others)):
        pairs = by_seed(cell, seeds, term, _open_of_seed)
        for what in _OF_CELLS:
            yield _paired(f"{name}, {cell.name}", pairs, what)
    for loop in one.amount(SMOKE_LOOPS, QUICK_LOOPS, LOOPS) if term.is_in_loops else ():
        played_loops = by_seed(loop, seeds, term, _loop_of_seed)
        for what in _OF_LOOPS:
            yield _paired(f"{name}, {loop.name}", played_loops, what)


def _verdict(name: str, rows: Sequence[PairedRow]) -> str:
    """Returns in how many rows of each measure a part does better, and worse, by interval."""
    counts: list[str] = []
    for what in _MEASURES:
        ratios = [row.ratio for row in rows if row.what.endswith(f": {what}") and row.ratio]
        spans = [interval(ratio.values) for ratio in ratios]
        less = sum(high < 1.0 for _, high in spans)
        more = sum(low > 1.0 for low, _ in spans)
        better, worse = (more, less) if what == _MORE_IS_BETTER else (less, more)
        if ratios:
            counts.append(f"{what} better in {better}, worse in {worse} of {len(ratios)}")
    return f"{name}: {'; '.join(counts)}"


def main(one: Run) -> None:
    """Measures each part in its cells, and says what it brings."""
    seeds = SEEDS[: one.options.seeds or one.amount(2, 3, 10)]  # an interval needs two
    verdicts = []
    for name in one.options.only or TERMS:
        made: list[PairedRow] = []
        for row in _rows(name, TERMS[name], one, seeds):
            one.add([row])
            made.append(row)
        verdicts.append(_verdict(name, made))
    print("\n" + "\n".join(verdicts))
    print(f"\n{METHOD}Seeds: {len(seeds)}, from {seeds[0]}")


if __name__ == "__main__":
    parser = arguments(__doc__, "three seeds, a short loop, and only cells where a part acts")
    parser.add_argument("--only", nargs="+", choices=list(TERMS), metavar="TERM")
    parser.add_argument("--seeds", type=int, metavar="N", help="the first N seeds only")
    with run(parser) as made:
        main(made)
