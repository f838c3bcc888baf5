"""The loads of the workers that a decision compares, in columns.

`Loads.load` is the formula; where a C compiler was at hand at installation, `extproc/native/`
computes all columns at once, so that a decision among many workers takes no more steps than one
among few. Tests hold both equal, to the last bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Protocol

from extproc.config.schema import Cost
from extproc.routing.eligibility import Candidate
from extproc.routing.load import Load, Loads
from extproc.routing.policies import affinity_of

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

    def affinity(self, count: int, cost: Cost, /) -> float:
        """Returns the weight of an uncached token (`policies.affinity_of`).

        By the mean utilization of the first workers, and their shortest queue: tokens of a slow
        worker count as many times as it is slower. count: of them.
        """

    def costs(
        self,
        workers: Sequence[Candidate],
        saved: Mapping[str, float],
        weighed: float,
        affinity: float,
        running: float,
        /,
    ) -> list[float]:
        """Returns what each of the workers costs, in tokens.

        saved: the tokens of the prompt by which they are preferred, by name. weighed: of the whole
        prompt. affinity: the weight of each. running: tokens for each request in flight.
        """

    def requests(self) -> list[float]:
        """Returns the requests on each, other routers' and reported ones included."""


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

    def affinity(self, count: int, cost: Cost) -> float:
        """Returns the weight of an uncached token."""
        if not count:
            return affinity_of(cost, 0.0)
        used, least = 0.0, inf
        for one in self._loads[:count]:
            used += one.utilization
            least = min(least, one.backlog_tokens * one.slowness)
        return affinity_of(cost, used / count, least / cost.prefill_tokens_per_second)

    def costs(
        self,
        workers: Sequence[Candidate],
        saved: Mapping[str, float],
        weighed: float,
        affinity: float,
        running: float,
    ) -> list[float]:
        """Returns what each of the workers costs, in tokens."""
        uncached = affinity * weighed
        costs = [
            (uncached + one.backlog_tokens + running * (one.in_flight + one.others)) * one.slowness
            for one in self._loads
        ]
        for at, worker in enumerate(workers if saved else ()):
            if worker.name in saved:
                costs[at] -= affinity * saved[worker.name] * self._loads[at].slowness
        return costs

    def requests(self) -> list[float]:
        """Returns the requests on each."""
        return [float(one.in_flight + one.others) for one in self._loads]


def columns_of(loads: Loads, workers: Sequence[Candidate], now: float) -> LoadColumns:
    """Returns the columns of these workers' loads at a time."""
    endpoints = loads.endpoints
    if not IS_COMPILED or type(endpoints) is not dict:
        return PlainColumns([loads.load(worker.endpoint, now) for worker in workers])
    return CompiledColumns(Load, endpoints, workers, now, loads.rates)
