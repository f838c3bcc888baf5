"""Examines prompts that do not simply go on from a known one, in a thread and within bounds."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from extproc.http2.limits import MIB

# At most this share of one processor is used for it, with some seconds in advance.
SHARE = 0.05
ADVANCE_SECONDS = 2.0

# Most requests that wait for it, and most bytes of their bodies.
MOST_WAITING = 64
MOST_BYTES = 64 * MIB

# So many bytes are read in a tenth of a millisecond.
HERE_BYTES = 32_768

Result = TypeVar("Result")


class Examining:
    """One thread, and what it may still use. clock: seconds of a monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="misses")
        self._credit, self._credited_at = ADVANCE_SECONDS, clock()
        self._waiting = self._bytes = 0

    def admit(self, size: int) -> bool:
        """Takes a place for a request with a body of so many bytes, if there is one.

        The caller gives it back by `leave`.
        """
        now = self._clock()
        gained = (now - self._credited_at) * SHARE
        self._credit, self._credited_at = min(ADVANCE_SECONDS, self._credit + gained), now
        if self._credit <= 0 or self._waiting == MOST_WAITING or self._bytes + size > MOST_BYTES:
            return False
        self._waiting += 1
        self._bytes += size
        return True

    def leave(self, size: int) -> None:
        """Gives a place back."""
        self._waiting -= 1
        self._bytes -= size

    async def run(self, work: Callable[[], Result], size: int | None = None) -> Result:
        """Runs a piece of work: in the thread, or at once if it takes less than to go there.

        size: of what it reads, in bytes; None if it may be long.
        """
        if size is not None and size <= HERE_BYTES:
            result, seconds = _timed(work)
        else:
            loop = asyncio.get_running_loop()
            result, seconds = await loop.run_in_executor(self._thread, _timed, work)
        self._credit -= seconds
        return result


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """Does a piece of work; returns the seconds of the processor that it took, too."""
    began = time.thread_time()
    return work(), time.thread_time() - began
