"""Follows a source under test: what it reported, and waiting for that."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from extproc.fleet.discovery.view import Sighting, Source, SourceReport, View

WAIT_SECONDS = 60.0


class Seen:
    """The last view, and all faults."""

    def __init__(self) -> None:
        self.view: View | None = None
        self.views = 0
        self.note = ""
        self.fault = ""
        self.faults: list[str] = []
        self.confirmed = 0

    def take(self, view: View, note: str, fault: str = "") -> None:
        self.view, self.note, self.views = view, note, self.views + 1
        if fault:
            self.fail(fault)
        else:
            self.confirm()

    def confirm(self) -> None:
        self.confirmed += 1
        self.fault = ""

    def fail(self, fault: str) -> None:
        self.fault = fault
        self.faults.append(fault)

    @property
    def endpoints(self) -> list[str] | None:
        return None if self.view is None else [one.worker.endpoint for one in self.view]

    def found(self, endpoint: str) -> Sighting:
        return next(one for one in self.view or () if one.worker.endpoint == endpoint)


@contextlib.asynccontextmanager
async def following(source: Source) -> AsyncIterator[Seen]:
    seen = Seen()
    task = asyncio.create_task(source.run(SourceReport(seen.take, seen.confirm, seen.fail)))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
