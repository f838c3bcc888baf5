"""The results of closed loops as Markdown tables, for benchmarks/results.md."""

import statistics
from collections.abc import Callable, Iterator, Sequence

from routing_closed_cells import Loop
from routing_closed_compare import LoopResults, best_other, figure, ratio_of
from routing_closed_play import LoopResult
from routing_compare import DEFAULT

Cells = Sequence[tuple[Loop, LoopResults]]


def tables(cells: Cells) -> str:
    """Returns a table for each kind of figures: means over the seeds, by cell and contestant."""
    made = [
        _table("turns/s (with the first token within 2 s)", cells, _turns),
        _table("TTFT p50 / p90 / p99, s", cells, _times),
        _table("hit share, % / computed tokens a turn / busiest worker's share, %", cells, _work),
        _ratios(cells),
    ]
    return "\n\n".join(made)


def _table(what: str, cells: Cells, shown: Callable[[Sequence[LoopResult]], str]) -> str:
    names = list(cells[0][1])
    head = [f"{what}; fill", *(_short(name) for name in names)]
    rows = [
        [f"{loop.name}; {loop.fill:.2f}", *(shown(results[name]) for name in names)]
        for loop, results in cells
    ]
    return _markdown(head, rows)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _short(name: str) -> str:
    ours = name if name.startswith("Envoy") else f"`{name}`"
    return ours.removeprefix("Envoy ")


def _mean(results: Sequence[LoopResult], what: str) -> float:
    return statistics.fmean(getattr(one, what) for one in results)


def _turns(results: Sequence[LoopResult]) -> str:
    return f"{_mean(results, 'turns'):.2f} ({_mean(results, 'prompt_turns'):.2f})"


def _times(results: Sequence[LoopResult]) -> str:
    p50, p90, p99 = (_mean(results, what) for what in ("p50", "p90", "p99"))
    return f"{p50:.2f} / {p90:.1f} / {p99:.1f}"


def _work(results: Sequence[LoopResult]) -> str:
    hit, busiest = 100 * _mean(results, "hit_rate"), 100 * _mean(results, "busiest")
    return f"{hit:.1f} / {_mean(results, 'computed'):,.0f} / {busiest:.0f}"


def _ratios(cells: Cells) -> str:
    """Returns the default beside the best other contestant of each cell, and the best hits."""
    head = [
        f"`{DEFAULT}` / the best other, with its interval of 95 %",
        "turns/s",
        "p90",
        "hit share: ideal, best",
    ]
    return _markdown(head, list(_ratio_rows(cells)))


def _ratio_rows(cells: Cells) -> Iterator[Sequence[str]]:
    for loop, results in cells:
        row = [loop.name]
        for what in ("turns", "p90"):
            best = best_other(results, what)
            if best:
                row.append(f"{ratio_of(results[DEFAULT], results[best], what)}, {_short(best)}")
        hits = max(statistics.fmean(figure(each, "hit_rate").values) for each in results.values())
        ideal = _mean(results[DEFAULT], "ideal_hit_rate")
        yield [*row, f"{100 * ideal:.1f} %, {100 * hits:.1f} %"]
