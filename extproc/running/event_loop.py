"""The event loop that the router runs on, and when its garbage is collected."""

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

new_event_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    from uvloop import new_event_loop
except ImportError:  # not every platform has it
    from asyncio import new_event_loop


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine as `asyncio.run` does, on the faster uvloop if it is installed."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


# Threshold that keeps Python from collecting the oldest of its three generations by itself.
_NEVER = 1 << 30

# Interval of checks for garbage, in seconds; and the interval while there is some but the loop is
# busy.
LOOK_SECONDS = 1.0
LOOK_AGAIN_SECONDS = 0.05

# A timer that is later than this means that the loop is busy.
BUSY_SECONDS = 0.0005

# After this many seconds, or this many collections of the middle generation (thousands of objects
# each), garbage is collected even if the loop is busy, to bound memory.
PATIENCE_SECONDS = 30.0
MOST_PENDING = 64

# A collection is followed by a rest of at least this many times its length; the smaller number is
# for overdue ones.
IDLE_PARTS = 100
BUSY_PARTS = 10


class Sweeper:
    """Collects the oldest garbage while the event loop is idle.

    Collecting all generations takes a millisecond for some ten thousand objects. Python would do it
    in the middle of a decision. It still collects the young generations, in microseconds.

    pending: returns how many collections of the middle generation await one of the oldest.
    collect: collects all generations. seconds: a clock. look_seconds: between looks.
    """

    def __init__(
        self,
        pending: Callable[[], int] = lambda: gc.get_count()[2],
        collect: Callable[[], object] = gc.collect,
        seconds: Callable[[], float] = time.monotonic,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._look_seconds = look_seconds
        self._pending = pending
        self._collect = collect
        self._seconds = seconds
        self._began_at = self._ended_at = seconds()
        self._sweep_seconds = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts; the objects that exist now are not examined until `close`."""
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        self._look_in(self._look_seconds)

    def close(self) -> None:
        """Stops; Python collects all generations again."""
        if self._timer is not None:
            self._timer.cancel()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, 10)
        gc.unfreeze()

    def look(self, late_seconds: float) -> float:
        """Collects if it is time to; returns the seconds until the next look.

        late_seconds: how late this call is.
        """
        began, pending = self._seconds(), self._pending()
        if not pending:
            self._began_at = began
            return self._look_seconds
        is_idle = late_seconds < BUSY_SECONDS
        is_overdue = pending >= MOST_PENDING or began - self._began_at >= PATIENCE_SECONDS
        parts = BUSY_PARTS if is_overdue else IDLE_PARTS
        if not (is_idle or is_overdue) or began - self._ended_at < parts * self._sweep_seconds:
            return LOOK_AGAIN_SECONDS
        self._collect()
        self._began_at = self._ended_at = self._seconds()
        self._sweep_seconds = self._ended_at - began
        return self._look_seconds

    def _look_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._wake, loop.time() + seconds)

    def _wake(self, due_at: float) -> None:
        self._look_in(self.look(asyncio.get_running_loop().time() - due_at))
