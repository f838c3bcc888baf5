"""The event loop that the router runs on, and when its garbage is collected."""

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_new_event_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    from uvloop import new_event_loop as _new_event_loop
except ImportError:  # there is none for every platform
    from asyncio import new_event_loop as _new_event_loop


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine as `asyncio.run` does, on uvloop, which is faster, if it is installed."""
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        return runner.run(main)


# Of the three generations that Python keeps, the oldest one is never collected by itself.
_NEVER = 1 << 30

# How often it is looked whether there is anything to collect, in seconds; and, while there is and
# the loop is busy, how often it is looked whether it still is.
LOOK_SECONDS = 1.0
LOOK_AGAIN_SECONDS = 0.05

# A timer that is late by more than this had to wait for something else.
BUSY_SECONDS = 0.0005

# After so many seconds, or so many collections of the middle generation, of at most 7,700 objects
# each, nobody waits for an idle moment any more: memory has to be bounded, too.
PATIENCE_SECONDS = 30.0
MOST_PENDING = 64

# Of the time, collections take one part in so many; if they cannot be put off, in so few.
IDLE_PARTS = 100
BUSY_PARTS = 10


class Sweeper:
    """Collects the oldest garbage while the loop has nothing else to do.

    To collect all generations takes a millisecond for some ten thousand objects. Python does so
    whenever enough was made, which would be in the middle of a decision. The young generations are
    left to it: they take microseconds.

    pending: how many collections of the middle generation have left something for the oldest one.
    collect: collects all. seconds: a clock.
    """

    def __init__(
        self,
        pending: Callable[[], int] = lambda: gc.get_count()[2],
        collect: Callable[[], object] = gc.collect,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pending = pending
        self._collect = collect
        self._seconds = seconds
        self._since = self._ended_at = seconds()
        self._took = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins; what there is now is never looked through again."""
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        self._look_in(LOOK_SECONDS)

    def close(self) -> None:
        """Leaves everything to Python again."""
        if self._timer is not None:
            self._timer.cancel()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, 10)
        gc.unfreeze()

    def look(self, late_seconds: float) -> float:
        """Collects if it is time to; returns after how many seconds to look again.

        late_seconds: by how much this call is late.
        """
        began, pending = self._seconds(), self._pending()
        if not pending:
            self._since = began
            return LOOK_SECONDS
        is_idle = late_seconds < BUSY_SECONDS
        is_overdue = pending >= MOST_PENDING or began - self._since >= PATIENCE_SECONDS
        parts = BUSY_PARTS if is_overdue else IDLE_PARTS
        if not (is_idle or is_overdue) or began - self._ended_at < parts * self._took:
            return LOOK_AGAIN_SECONDS
        self._collect()
        self._since = self._ended_at = self._seconds()
        self._took = self._ended_at - began
        return LOOK_SECONDS

    def _look_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._wake, loop.time() + seconds)

    def _wake(self, due_at: float) -> None:
        self._look_in(self.look(asyncio.get_running_loop().time() - due_at))
