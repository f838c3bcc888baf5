"""Measures for the benchmarks, and formats their results.

All contestants run in the same process, one round of each after the other, so that a slow moment of
the machine affects all of them. A round's cost is the CPU time of all threads, or the elapsed time
if that is less (work spread over threads). Results are medians of rounds, and their spread.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

# Put the repository before this folder, where extproc.py would hide the package of that name; all
# benchmarks import this module first.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

Made = TypeVar("Made")


class CannotRunError(Exception):
    """A contestant cannot run here; the message gives the reason and the remedy."""


@cache
def _told(reason: str) -> None:
    print(f"missing: {reason}", flush=True)


def missed(error: CannotRunError) -> str:
    """Returns why a contestant cannot run, and prints it at once, the first time."""
    _told(str(error))
    return str(error)


def or_reason(make: Callable[[], Made]) -> Made | str:
    """Returns the result, or why there is none."""
    try:
        return make()
    except CannotRunError as error:
        return missed(error)


class Scale(NamedTuple):
    """The amount of work: rounds, passes over prompts in a round, fleets of lookup and memory.

    memory_blocks: the worker-blocks of which the memory is measured.
    """

    rounds: int
    passes: int
    event_rounds: int
    fleets: Sequence[int]
    memory_fleets: Sequence[int]
    memory_blocks: int = 800_000


@dataclass(slots=True)
class Cost:
    """The cost of a piece of work, in seconds."""

    cpu: float = 0.0
    wall: float = 0.0

    @property
    def lesser(self) -> float:
        """CPU time of all threads, or the elapsed time if that is less."""
        return min(self.cpu, self.wall)


Round = Callable[[], Cost]


@contextmanager
def timed() -> Iterator[Cost]:
    """Times the block, without the garbage collector."""
    cost = Cost()
    gc.collect()
    gc.disable()
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        yield cost
    finally:
        cost.cpu, cost.wall = time.process_time() - cpu, time.perf_counter() - wall
        gc.enable()


def interleave(rounds: int, contestants: Mapping[str, Round]) -> dict[str, list[Cost]]:
    """Measures the rounds of each contestant, after one round of each that does not count."""
    costs: dict[str, list[Cost]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        names = list(contestants)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            cost = contestants[name]()
            if number:
                costs[name].append(cost)
    return costs


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity, measured in several rounds."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        """The median value."""
        return statistics.median(self.values)

    def over(self, other: "Figure") -> "Figure":
        """Returns the ratio, round by round."""
        return Figure([a / b for a, b in zip(self.values, other.values, strict=True)])

    def __str__(self) -> str:
        text = _short(self.median)
        if len(self.values) == 1:
            return text
        return f"{text} ({_short(min(self.values))}-{_short(max(self.values))})"


# A figure, or the reason why there is none.
Result = Figure | str

# The reference of a row that is compared with nothing.
NO_REFERENCE = "-"


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal, for the ratio if one is given, else for KVSteer's figure itself."""

    limit: float
    text: str
    of_ratio: bool = True
    at_least: bool = False

    def met(self, value: float) -> bool:
        """Returns whether a value reaches the goal."""
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Without a goal it is for information only."""

    what: str
    ours: Result
    reference: Result
    goal: Goal | None = None

    @property
    def ratio(self) -> Figure | None:
        """KVSteer's figure divided by the reference."""
        if isinstance(self.ours, str) or isinstance(self.reference, str):
            return None
        if len(self.ours.values) == len(self.reference.values):
            return self.ours.over(self.reference)
        return Figure([self.ours.median / self.reference.median])

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; False if a figure is missing."""
        if self.goal is None:
            return None
        if isinstance(self.reference, str) and self.reference != NO_REFERENCE:
            return False
        value = self.ratio if self.goal.of_ratio else self.ours
        return isinstance(value, Figure) and self.goal.met(value.median)

    def as_json(self) -> dict[str, Any]:
        """Returns the row as JSON."""
        return {
            "what": self.what,
            "ours": _number(self.ours),
            "reference": _number(self.reference),
            "ratio": _number(self.ratio),
            "goal": self.goal.text if self.goal else None,
            "met": self.met,
        }


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a text table: medians, and (least-most)."""
    lines = [("what", "ours", "reference", "ratio", "goal", "met")]
    lines += [_cells(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, str, str, str, str, str]:
    met = {True: "yes", False: "NO", None: "-"}[row.met]
    goal = row.goal.text if row.goal else "-"
    return row.what, str(row.ours), str(row.reference), str(row.ratio or "-"), goal, met


def _number(result: Result | None) -> float | str | None:
    return round(result.median, 4) if isinstance(result, Figure) else result


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
