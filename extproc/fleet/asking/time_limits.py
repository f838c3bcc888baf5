"""Waits for an answer for as long as the router itself could hear it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Answer = TypeVar("Answer")

# The wait is made of so many parts. The router is held up in few of them, and hears in the others.
PARTS = 5


async def answered_within(asking: Coroutine[Any, Any, Answer], seconds: float) -> Answer:
    """Returns an answer.

    seconds: the time limit. While the event loop is held up, an answer may lie there unread: such a
    pause, however long, uses up one part of the time.

    Raises:
        TimeoutError: there is none in this time.
    """
    task = asyncio.get_running_loop().create_task(asking)
    try:
        for _ in range(PARTS):
            if (await asyncio.wait({task}, timeout=seconds / PARTS))[0]:
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()
        await asyncio.wait({task})
