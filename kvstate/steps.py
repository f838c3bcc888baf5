"""Long work in steps: a generator that yields between them and returns a result."""

from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Steps(Generic[Result]):
    """Does one step of some work for each iteration, and keeps its result.

    result: there after the last step.
    """

    result: Result

    def __init__(self, work: Generator[None, None, Result]) -> None:
        self._work = work

    def __iter__(self) -> Iterator[None]:
        self.result = yield from self._work


def finished(work: Generator[None, None, Result]) -> Result:
    """Does all steps of some work at once and returns its result."""
    steps = Steps(work)
    for _ in steps:
        pass
    return steps.result
