"""Records of workers that are asked something, and the client to ask them with."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from extproc.config.schema import Worker as Configured
from extproc.discovery.view import listed, merged
from extproc.picking.upstreams import Judge
from extproc.workers.asking import Pace
from extproc.workers.polling import Client
from extproc.workers.record import Table, Worker
from extproc.workers.workers import Workers

DEADLINE_SECONDS = 20


def table_of(*names: str) -> Table:
    """The records of these workers."""
    return Table(merged({"file": listed([Configured(name, "m") for name in names])}))


def pace(interval_seconds: float = 5.0) -> Pace:
    """A pace without jitter."""
    return Pace(interval_seconds, lambda: 0.5, lambda: 0.0)


def against(table: Table, judge: Judge) -> Mapping[str, str]:
    """The endpoints that a judge ejects, and why."""
    return {one.endpoint: one.against[judge] for one in table.upstreams if judge in one.against}


def only(table: Table) -> Worker:
    """The record of the one worker."""
    (worker,) = table
    return worker


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[Client]:
    """A client that is closed when the block ends."""
    one = Client()
    try:
        yield one
    finally:
        await one.close()


@contextlib.asynccontextmanager
async def running(workers: Workers) -> AsyncIterator[Workers]:
    """Follows and asks the workers until the block ends."""
    await workers.start()
    try:
        yield workers
    finally:
        await workers.close()


async def until(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds; raises TimeoutError after DEADLINE_SECONDS."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.01)
