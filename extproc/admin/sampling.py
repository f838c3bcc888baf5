"""Notes the fleet's state in even steps, for the page's history."""

import asyncio
import logging
from collections.abc import Callable, Iterator

from extproc.admin.history import STEP_SECONDS
from extproc.admin.observed import Observed

log = logging.getLogger("kvsteer.admin")

# A worker's name, its requests in flight and its blocks.
Fill = tuple[str, int, int]

# Workers that are looked at in one go, on the loop that picks.
AT_ONCE = 32


class Sampling:
    """Samples until it is closed.

    fills: looks at one worker after the other. clock: seconds since the epoch.
    """

    def __init__(
        self,
        observed: Observed,
        fills: Callable[[], Iterator[Fill]],
        clock: Callable[[], float],
        step_seconds: float = STEP_SECONDS,
    ) -> None:
        self._observed = observed
        self._fills = fills
        self._clock = clock
        self._step_seconds = step_seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins, with a sample at once."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Ends it, and the streams of those who watch."""
        self._observed.is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._sample()
            except Exception:  # the next step must be noted all the same
                log.exception("the fleet could not be sampled")
            await asyncio.sleep(self._step_seconds)

    async def _sample(self) -> None:
        found: dict[str, tuple[int, int]] = {}
        for name, in_flight, blocks in self._fills():
            found[name] = in_flight, blocks
            if len(found) % AT_ONCE == 0:
                await asyncio.sleep(0)
        self._observed.sample(self._clock(), found)
