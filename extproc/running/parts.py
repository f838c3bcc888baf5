"""The parts of a running router: started one after the other, stopped in the reverse order."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

# Starts or stops a part; what it returns is awaited.
Action = Callable[[], Awaitable[object] | None]


def nothing() -> None:
    """Does nothing, for a part that needs no start or no stop."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something that runs from its start to its stop.

    start: may fail. stop: also called if the start failed or was cancelled, so that whatever it had
    begun ends.
    """

    name: str
    start: Action = nothing
    stop: Action = nothing


def task_part(name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> Part:
    """Returns a part that is one task, which runs until it is stopped."""
    tasks: list[asyncio.Task[None]] = []

    async def stop() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    return Part(name, lambda: tasks.append(asyncio.create_task(work())), stop)


@contextlib.asynccontextmanager
async def started(parts: Iterable[Part]) -> AsyncIterator[None]:
    """Runs parts until the block ends: starts them in order, and stops them in the reverse order.

    If one fails to start, it and those before it are stopped. All are stopped even if one fails to;
    its error is raised afterwards.
    """
    async with contextlib.AsyncExitStack() as stack:
        for part in parts:
            stack.push_async_callback(_do, part.stop)
            await _do(part.start)
        yield


async def _do(action: Action) -> None:
    awaited = action()
    if awaited is not None:
        await awaited
