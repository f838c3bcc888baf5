"""The time slices in which the feeds of a process work."""

import asyncio
from collections import OrderedDict, deque

from kvstate.feeds.transport import SLICE_SECONDS
from kvstate.steps import Pace, Result, StepByStep, Steps

# Feeds that continue in one round of the loop, each with at least one batch.
MAX_TURNS_AT_ONCE = 8


class Turns:
    """The time slices of all feeds of a process.

    A feed checks `is_over` before each step, and if so waits for the `next` slice. Between two
    slices everything else in the process can run, however many feeds have work. Workers take turns,
    so none waits for all ranks of another.

    slice_seconds: how long a slice is.
    """

    def __init__(self, slice_seconds: float = SLICE_SECONDS) -> None:
        self._slice_seconds = slice_seconds
        self._ends = 0.0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_scheduled = False

    def is_over(self) -> bool:
        """Whether the present slice is used up."""
        return asyncio.get_running_loop().time() >= self._ends

    def begin(self) -> bool:
        """Begins a slice at once, unless somebody waits for one; returns whether it did."""
        if self._waiting:
            return False
        self._ends = asyncio.get_running_loop().time() + self._slice_seconds
        return True

    async def next(self, worker: str = "") -> None:
        """Waits for a slice: workers take turns, and a worker's feeds queue in order.

        worker: the feed's worker; "" for work of no worker.
        """
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(worker, deque()).append(turn)
        self._schedule()
        await turn

    async def run(self, steps: Steps[Result]) -> Result:
        """Does steps of no worker in slices, so that nothing waits for them; returns the result."""
        run = StepByStep(steps)
        try:
            for pace in run:
                if pace is Pace.WAITS or self.is_over():
                    await self.next()
        finally:
            steps.close()  # now, since other work may wait for it
        return run.result

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._is_scheduled = False
        self._ends = asyncio.get_running_loop().time() + self._slice_seconds
        for _ in range(MAX_TURNS_AT_ONCE):
            if not self._waiting:
                break
            worker, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[worker] = turns
            if not turn.done():  # unless its feed was cancelled
                turn.set_result(None)
        if self._waiting:
            self._schedule()
