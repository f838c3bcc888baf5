"""Several routers of one fleet, each with its own state, compared with a single router."""

import statistics
from collections.abc import Sequence

from measure import Figure, Goal, Row
from routing_cells import CELLS as STANDARD_CELLS
from routing_cells import SPEED_CELLS, Cell
from routing_compare import NOT_WORSE, PairedRow, Results, interval
from routing_workloads import multi_turn, shared_prefix, single_shot

from extproc.config.schema import Policy
from kvtools.whatif.engines import Result
from kvtools.whatif.routers import Contestant

SEEDS = tuple(range(1000, 1008))

CELLS = (
    Cell("single shot, 64 workers, 200/s", single_shot(200, 20), workers=64),
    Cell("shared prefix, 64 workers, 150/s", shared_prefix(150, 25, groups=600), workers=64),
    Cell("multi-turn, 64 workers, 40 chats/s", multi_turn(40, 20), workers=64),
)

ONE = Contestant("1 router", "cost", expects=True)

ALL_COMPARED = Policy(sample=0)
SAMPLED = Policy(sample=8)


def _contestants() -> Sequence[Contestant]:
    made = [ONE._replace(name="1 router, all workers compared", rules=ALL_COMPARED)]
    for routers in (2, 4, 8):
        alone = ONE._replace(routers=routers)
        made += [
            alone._replace(name=f"{routers} alone, all compared", rules=ALL_COMPARED),
            alone._replace(name=f"{routers} alone, 8 compared", rules=SAMPLED),
        ]
        for ticks in (10, 20, 50):
            sharing = alone._replace(tick_seconds=ticks / 1000)
            name = f"{routers}, every {ticks} ms"
            made += [
                sharing._replace(name=f"{name}, all compared", rules=ALL_COMPARED),
                sharing._replace(name=_shared(routers, ticks)),
            ]
    return tuple(made)


def _shared(routers: int, ticks: int) -> str:
    return f"{routers}, every {ticks} ms"


CONTESTANTS = (ONE, *_contestants())

# Whether routers that share learn speeds as well as one does: with engines that are not as fast as
# configured, with equal and busy ones, and with many.
LEARNED_CELLS = (
    *SPEED_CELLS,
    *(one for one in STANDARD_CELLS if one.name in ("single shot, busy", "mixed")),
    *CELLS,
)

ONE_LEARNED = ONE._replace(name="1 router, learned", learns=True)
FOUR = ONE._replace(routers=4, tick_seconds=0.01, name="4, every 10 ms, nothing learned")
FOUR_LEARNED = FOUR._replace(name="4, every 10 ms, learned", learns=True)
FOUR_KNOW = FOUR._replace(name="4, every 10 ms, right by hand", knows=True)

LEARNED_CONTESTANTS = (ONE_LEARNED, FOUR, FOUR_LEARNED, FOUR_KNOW)

AS_ONE = Goal(1.10, "<= 1.10")
SAME_HITS = Goal(0.01, "<= 0.01", of_ratio=False)


def rows(cell: str, results: Results) -> list[Row]:
    """Returns the rows for routers that share every 10 ms, relative to one router."""
    made: list[Row] = []
    one = results[ONE.name]
    for routers in (2, 4, 8):
        name = _shared(routers, 10)
        ours, what = results[name], f"{cell}: {name}"
        made += [
            Row(f"{what}, p90", _figure(ours, "p90"), _figure(one, "p90"), AS_ONE),
            Row(f"{what}, p99", _figure(ours, "p99"), _figure(one, "p99"), AS_ONE),
            Row(f"{what}, hit share less", Figure(_missed(ours, one)), Figure([1.0]), SAME_HITS),
        ]
    return made


def learned_rows(cell: str, results: Results) -> list[Row]:
    """Returns the rows for whether four routers learn as well as one does."""
    ours, what = _figure(results[FOUR_LEARNED.name], "p90"), f"{cell}: four that learn"
    return [
        Row(f"{what}, p90 / one's", ours, _figure(results[ONE_LEARNED.name], "p90"), AS_ONE),
        PairedRow(
            f"{what}, p90 / nothing learned", ours, _figure(results[FOUR.name], "p90"), NOT_WORSE
        ),
    ]


def summary(cell: str, results: Results) -> str:
    """Returns a cell's contestants: means over seeds, ratios paired by seed with intervals."""
    one = next(iter(results.values()))
    lines = [
        f"{cell}\n  {'':32}  hit   p50 s   p90 s   p99 s  p90 / one router's  p99 / one router's"
    ]
    for name, ours in results.items():
        hit, p50, p90, p99 = (
            statistics.fmean([getattr(each, what) for each in ours])
            for what in ("hit_rate", "p50", "p90", "p99")
        )
        ratios = "".join(f"  {_ratio(ours, one, what):18}" for what in ("p90", "p99"))
        lines.append(f"  {name:32}{hit:5.3f}{p50:8.3f}{p90:8.3f}{p99:8.3f}{ratios}".rstrip())
    return "\n".join(lines)


def _ratio(ours: Sequence[Result], one: Sequence[Result], what: str) -> str:
    ratios = _figure(ours, what).over(_figure(one, what)).values
    if len(set(ratios)) == 1:
        return f"{ratios[0]:.2f}"
    low, high = interval(ratios)
    return f"{statistics.geometric_mean(ratios):.2f} ({low:.2f}-{high:.2f})"


def _figure(results: Sequence[Result], what: str) -> Figure:
    return Figure([getattr(one, what) for one in results])


def _missed(ours: Sequence[Result], one: Sequence[Result]) -> list[float]:
    return [b.hit_rate - a.hit_rate for a, b in zip(ours, one, strict=True)]
