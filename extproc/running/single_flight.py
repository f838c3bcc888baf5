"""Runs one job at a time: one that is wanted again while it runs is run once more after that."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("kvsteer")


class SingleFlight:
    """A job that is run when it is wanted, so that the last run began after the last wish.

    job: one that fails is logged as `fault`.
    """

    def __init__(self, job: Callable[[], Awaitable[None]], fault: str) -> None:
        self._job = job
        self._fault = fault
        self._is_wanted = False
        self._task: asyncio.Task[None] | None = None

    def want(self) -> None:
        """Runs the job, now or after the run under way."""
        self._is_wanted = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        """Ends the run under way, and runs the job no more unless it is wanted again."""
        self._is_wanted = False
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while self._is_wanted:
                self._is_wanted = False
                try:
                    await self._job()
                except Exception:  # it may be wanted again
                    log.exception(self._fault)
        finally:
            self._task = None
