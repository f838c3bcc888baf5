"""The event loop that the router runs on."""

import asyncio
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
