"""The loads of the workers that a decision compares, in columns.

`Loads.load` is the formula; where a C compiler was at hand at installation, `extproc/native/`
computes all columns at once, so that a decision among many workers takes no more steps than one
among few. Tests hold both equal, to the last bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Protocol

from extproc.routing.eligibility import Candidate
from extproc.routing.load import REPORT_SECONDS, UTILIZATION_SECONDS, Load, Loads

try:
    from extproc._core import CompiledColumns
except ImportError:  # there was no C compiler at installation
    IS_COMPILED = False
else:
    IS_COMPILED = True


class LoadColumns(Protocol):
    """The loads of the compared workers, a row for each, in their order."""

    def __len__(self) -> int:
        """Returns how many workers there are."""

    def __getitem__(self, at: int, /) -> Load:
        """Returns the load of a worker."""

    def __iter__(self) -> Iterator[Load]:
        """Returns the loads, one by one."""

    def typical(self, count: int, /) -> tuple[float, float]:
        """Returns the mean utilization of the first workers, and the shortest queue in tokens.

        count: of them, at least one. Tokens of a slow worker count as many times as it is slower.
        """

    def costs(self, uncached: float, running: float, /) -> list[float]:
        """Returns what each would cost if it held nothing of the prompt, in tokens.

        uncached: the weighed tokens of the prompt. running: of each request in flight.
        """

    def requests(self) -> list[float]:
        """Returns the requests on each, other routers' and reported ones included."""

    def add(
        self,
        costs: list[float],
        workers: Sequence[Candidate],
        tokens: Mapping[str, float],
        weight: float,
        /,
    ) -> None:
        """Adds tokens to the costs of workers, by their names. weight: of each token."""


class PlainColumns:
    """The columns in Python."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self._loads = loads

    def __len__(self) -> int:
        return len(self._loads)

    def __getitem__(self, at: int) -> Load:
        return self._loads[at]

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads)

    def typical(self, count: int) -> tuple[float, float]:
        """Returns the mean utilization of the first workers, and the shortest queue in tokens."""
        used, least = 0.0, inf
        for one in self._loads[:count]:
            used += one.utilization
            least = min(least, one.backlog_tokens * one.slowness)
        return used / count, least

    def costs(self, uncached: float, running: float) -> list[float]:
        """Returns what each would cost if it held nothing of the prompt, in tokens."""
        return [
            (uncached + one.backlog_tokens + running * (one.in_flight + one.others)) * one.slowness
            for one in self._loads
        ]

    def requests(self) -> list[float]:
        """Returns the requests on each."""
        return [float(one.in_flight + one.others) for one in self._loads]

    def add(
        self,
        costs: list[float],
        workers: Sequence[Candidate],
        tokens: Mapping[str, float],
        weight: float,
    ) -> None:
        """Adds tokens to the costs of workers, by their names."""
        for at, worker in enumerate(workers):
            if worker.name in tokens:
                costs[at] += weight * tokens[worker.name] * self._loads[at].slowness


def columns_of(loads: Loads, workers: Sequence[Candidate], now: float) -> LoadColumns:
    """Returns the columns of these workers' loads at a time."""
    endpoints = loads.endpoints
    if not IS_COMPILED or type(endpoints) is not dict:
        return PlainColumns([loads.load(worker.endpoint, now) for worker in workers])
    rules = (now, *loads.rates, UTILIZATION_SECONDS, REPORT_SECONDS)
    return CompiledColumns(Load, endpoints, workers, rules)
