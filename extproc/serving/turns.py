"""Lets long bodies be edited in threads, in turn: what one client sends delays itself.

Each body waits in the queue of whose it is. The next one is whose queue has had the fewest bytes
edited lately, counted from when it had nothing to wait for (start-time fair queueing: P. Goyal,
H. Vin and H. Cheng, 1996). So who sends little goes before who sends much. Very long bodies have a
thread of their own, since one that has begun is not interrupted.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from extproc.base.errors import UnclearError

T = TypeVar("T")

# A longer body goes to the thread of very long ones.
VERY_LONG_BYTES = 1024 * 1024

# Bytes of the bodies that wait: of one client, and of all together in each thread. Beyond the
# second limit a body takes the place of the last one of the client with the most.
MAX_WAITING_BYTES = 64 * 1024 * 1024
MAX_ALL_BYTES = 160 * 1024 * 1024

# Why a body is refused that finds no place in its queue.
CROWDED = "crowded"


@dataclass(order=True, slots=True)
class _Turn:
    """A body that waits. begins, number: its place in the order."""

    begins: float
    number: int
    size: int = field(compare=False)
    whose: bytes = field(compare=False)
    job: Callable[[], Any] = field(compare=False, repr=False)
    result: "asyncio.Future[Any]" = field(compare=False)


class _Lane:
    """One thread, and the queues of the bodies that wait for it."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: list[_Turn] = []
        self._bytes: dict[bytes, int] = {}
        self._ends: dict[bytes, float] = {}  # where the next body of each client begins
        self._now = 0.0
        self._numbers = itertools.count()
        self._is_busy = False

    async def run(self, whose: bytes, size: int, job: Callable[[], T]) -> T:
        self._make_room(whose, size)
        begins = max(self._now, self._ends.get(whose, 0.0))
        self._ends[whose] = begins + size
        result = asyncio.get_running_loop().create_future()
        turn = _Turn(begins, next(self._numbers), size, whose, job, result)
        heapq.heappush(self._waiting, turn)
        self._bytes[whose] = self._bytes.get(whose, 0) + size
        self._begin_next()
        try:
            done: T = await result
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._leave(turn)
            raise
        return done

    def _make_room(self, whose: bytes, size: int) -> None:
        """Drops the last body of the client that has the most, if there is no room for this one."""
        if self._bytes.get(whose, 0) + size > MAX_WAITING_BYTES:
            raise UnclearError(CROWDED)
        while sum(self._bytes.values()) + size > MAX_ALL_BYTES:
            most = max(self._bytes, key=self._bytes.__getitem__)
            if self._bytes[most] <= self._bytes.get(whose, 0) + size:
                raise UnclearError(CROWDED)
            last = max(turn for turn in self._waiting if turn.whose == most)
            self._leave(last)
            if not last.result.done():
                last.result.set_exception(UnclearError(CROWDED))

    def _leave(self, turn: _Turn) -> None:
        self._waiting.remove(turn)
        heapq.heapify(self._waiting)
        self._forget(turn)

    def _forget(self, turn: _Turn) -> None:
        left = self._bytes[turn.whose] - turn.size
        if left:
            self._bytes[turn.whose] = left
        else:
            del self._bytes[turn.whose]

    def _begin_next(self) -> None:
        if self._is_busy or not self._waiting:
            return
        turn = heapq.heappop(self._waiting)
        self._forget(turn)
        self._now = turn.begins
        self._ends = {one: end for one, end in self._ends.items() if end > self._now}
        self._is_busy = True
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._thread, turn.job)
        running.add_done_callback(lambda done: self._ended(turn, done))

    def _ended(self, turn: _Turn, done: "asyncio.Future[Any]") -> None:
        self._is_busy = False
        error = None if done.cancelled() else done.exception()
        if not turn.result.done():
            if error is not None:
                turn.result.set_exception(error)
            elif not done.cancelled():
                turn.result.set_result(done.result())
        self._begin_next()


class Turns:
    """Runs jobs on bodies in threads."""

    def __init__(self) -> None:
        self._long = _Lane("editing")
        self._very_long = _Lane("editing-long")

    async def run(self, whose: bytes, size: int, job: Callable[[], T]) -> T:
        """Returns what a job returns, when its turn has come.

        whose: the client whose body it is; size: of the body, in bytes.

        Raises:
            UnclearError: too many bodies of this client wait (`CROWDED`).
        """
        lane = self._very_long if size > VERY_LONG_BYTES else self._long
        return await lane.run(whose, size, job)
