"""The fleet over time, for the admin server: one ring for each worker and figure."""

from array import array
from collections.abc import Mapping
from math import isnan, nan
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    _Ring: TypeAlias = array[float]
else:
    _Ring = array


STEP_SECONDS = 5.0
STEPS = 180

# The name of the sum of all workers; no worker has it.
FLEET = ""


class Figures(NamedTuple):
    """The figures of one worker: current ones, and those of the last step's requests."""

    in_flight: int
    blocks: int
    # Of the prompts that were sent to it: all, those that it certainly held, and those that the
    # workers held on average.
    prompt_tokens: int
    predicted_tokens: int
    average_tokens: int = 0
    # Of the steered prompts that it answered and whose cached tokens its engine reported: all, and
    # these.
    answered_tokens: int = 0
    reported_tokens: int = 0


_COLUMNS = Figures._fields


class History:
    """One ring for each worker and figure, 8 bytes a step; removed with the worker."""

    def __init__(self, steps: int = STEPS) -> None:
        self._steps = steps
        self._next = 0
        self._noted = 0
        self._times = self._empty()
        self._rings: dict[str, tuple[_Ring, ...]] = {}

    def sample(self, at: float, figures: Mapping[str, Figures]) -> None:
        """Records one step; at: seconds since the epoch."""
        total = Figures(*map(sum, zip(*figures.values(), strict=True))) if figures else None
        all_figures = {**figures, **({} if total is None else {FLEET: total})}
        for gone in self._rings.keys() - all_figures.keys():
            del self._rings[gone]
        self._times[self._next] = round(at, 3)
        for name, one in all_figures.items():
            if name not in self._rings:
                self._rings[name] = tuple(self._empty() for _ in _COLUMNS)
            for ring, value in zip(self._rings[name], one, strict=True):
                ring[self._next] = value
        self._next = (self._next + 1) % self._steps
        self._noted = min(self._noted + 1, self._steps)

    def names(self) -> list[str]:
        """Returns the workers that have a history."""
        return [name for name in self._rings if name != FLEET]

    def series(self, name: str) -> dict[str, list[Any]]:
        """Returns a worker's figures by name, the oldest first; None for steps without a record."""
        rings = self._rings.get(name) or tuple(self._empty() for _ in _COLUMNS)
        return {column: self._unrolled(ring) for column, ring in zip(_COLUMNS, rings, strict=True)}

    def times(self) -> list[float | None]:
        """Returns when each step was recorded, in seconds since the epoch, the oldest first."""
        return self._unrolled(self._times)

    def _unrolled(self, ring: _Ring) -> list[float | None]:
        in_order = (ring[self._next :] + ring[: self._next])[self._steps - self._noted :]
        return [None if isnan(value) else value for value in in_order]

    def _empty(self) -> _Ring:
        return array("d", [nan]) * self._steps
