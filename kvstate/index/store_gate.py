"""Does one after the other what changes stores or copies one as a whole, each in short steps."""

from collections import deque

from kvstate.steps import Pace, Result, StepByStep, Steps


class StoreGate:
    """Lets one piece of work after the other pass, in the order in which they came.

    Whoever repeats changes whole, in the order in which they ended, so gets the same store: no part
    of a change lies between two parts of another.
    """

    def __init__(self) -> None:
        self._queue: deque[Steps[object]] = deque()  # the first one passes

    def passing(self, steps: Steps[Result]) -> Steps[Result]:
        """Does some work in steps, alone, and returns its result."""
        self._queue.append(steps)
        try:
            while self._queue[0] is not steps:
                yield Pace.WAITS
            run = StepByStep(steps)
            for _ in run:
                yield Pace.HURRIES
            return run.result
        finally:
            steps.close()
            self._queue.remove(steps)
