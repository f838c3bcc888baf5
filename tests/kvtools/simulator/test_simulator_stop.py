"""A worker that stops leaves no connection open, whenever it was made."""

import asyncio
import contextlib
import gc
import socket
import warnings

import pytest

from kvtools.simulator.server import running
from kvtools.simulator.settings import Settings


async def stopped_after(steps: int) -> None:
    """Connects to a worker, and stops it after so many steps of the event loop."""
    with contextlib.ExitStack() as stack:
        async with running(Settings()) as worker:
            host, _, port = worker.endpoint.rpartition(":")
            for _ in range(3):
                stack.enter_context(socket.create_connection((host, int(port))))
            for _ in range(steps):
                await asyncio.sleep(0)


@pytest.mark.parametrize("steps", range(6))
def test_just_accepted_connection_is_closed_with_the_worker(steps: int) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(stopped_after(steps))
        gc.collect()
    assert [str(one.message) for one in warned] == []
