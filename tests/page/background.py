"""A running system beside a blocking test, such as one that drives a browser."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# Less than any test may take.
MOST_SECONDS = 500


class Background(Generic[T]):
    """An event loop in its own thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, it: T) -> None:
        self._loop = loop
        self.it = it

    def do(self, work: Coroutine[object, object, R]) -> R:
        """Runs a coroutine there, and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(MOST_SECONDS)


@contextlib.contextmanager
def in_background(system: AbstractAsyncContextManager[T]) -> Iterator[Background[T]]:
    """Runs a system in its own thread until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def wait(work: Coroutine[object, object, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, loop).result(MOST_SECONDS)

    stack = contextlib.AsyncExitStack()
    try:
        yield Background(loop, wait(stack.enter_async_context(system)))
    finally:
        wait(stack.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
