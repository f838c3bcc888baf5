"""How all feeds share the event loop with the picks: in short turns."""

import asyncio
from collections import OrderedDict, deque

# Events are applied in slices of this length, so that a pick never waits behind a replay.
SLICE_SECONDS = 0.001

# Feeds that go on in one round of the loop, each with one batch at least.
MAX_TURNS_AT_ONCE = 8


class Turns:
    """The slices of all feeds of a process.

    Whoever works asks `is_over` before each batch, and waits for the `next` slice if so. However
    many feeds have something to do, between two slices everything else has its turn; and however
    many ranks a worker has, another worker does not wait for all of them.
    """

    def __init__(self) -> None:
        self._ends = 0.0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_scheduled = False

    def is_over(self) -> bool:
        """Whether the present slice is used up."""
        return asyncio.get_running_loop().time() >= self._ends

    async def next(self, worker: str = "") -> None:
        """Waits for a slice: workers one after the other, a worker's feeds in the order of asking.

        worker: whose feed it is; "" for work on none.
        """
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(worker, deque()).append(turn)
        self._schedule()
        await turn

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._is_scheduled = False
        self._ends = asyncio.get_running_loop().time() + SLICE_SECONDS
        for _ in range(MAX_TURNS_AT_ONCE):
            if not self._waiting:
                break
            worker, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[worker] = turns
            if not turn.done():  # its feed was not cancelled
                turn.set_result(None)
        if self._waiting:
            self._schedule()
