"""Long work in steps: a generator that yields between them, and returns a result.

The event loop also serves requests, so what may take long here is written as steps of well under a
millisecond. A function that returns `Steps` has done nothing yet when it returns. Its caller does
the steps: by `yield from` if it is written as steps itself, with pauses (`Turns.run`), or all at
once (`finished`). A call whose steps nobody does is an error that mypy does not see, as it lets the
value of any call go; tests/kvstate/test_steps.py finds it, by the names of these functions.

A step yields None, or what else its caller needs to know of it: a `Pace`.
"""

from collections.abc import Generator, Iterator
from enum import Enum
from typing import Any, Generic, TypeAlias, TypeVar

Result = TypeVar("Result")


class Pace(Enum):
    """When work should continue, if not like any other.

    WAITS: it has done nothing, since other work has to end first; the rest of the slice is for that
    one. HURRIES: other work may wait for it, so it is not put off.
    """

    WAITS = "waits"
    HURRIES = "hurries"


# `Pace | None`, which mypy would not let a bare `yield` give.
Steps: TypeAlias = Generator[Any, None, Result]


class StepByStep(Generic[Result]):
    """Does one step of some work for each iteration, and keeps its result.

    result: there after the last step.
    """

    result: Result

    def __init__(self, steps: Steps[Result]) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[Pace | None]:
        self.result = yield from self._steps


def finished(steps: Steps[Result]) -> Result:
    """Does all steps of some work at once and returns its result."""
    run = StepByStep(steps)
    for _ in run:
        pass
    return run.result
