"""Waits until a condition holds; a test that gives up says what it saw last."""

import asyncio
import contextlib
import inspect
import reprlib
import time
from collections.abc import Callable

WAIT_SECONDS = 60.0

# Shows long values of a failed condition in part.
_SHORT = reprlib.Repr()
_SHORT.maxother = 400


def _failure(condition: Callable[[], object], what: str, last: object, seconds: float) -> str:
    text = f"not within {seconds:g} s: {what or _words(condition)}; its last value was {last!r}"
    with contextlib.suppress(TypeError):  # it is no Python function
        used = inspect.getclosurevars(condition).nonlocals
        text += "".join(f"\n  {name} = {_SHORT.repr(value)}" for name, value in used.items())
    return text


def _words(condition: Callable[[], object]) -> str:
    """Returns the name of a condition, or the source of a lambda."""
    name = getattr(condition, "__qualname__", repr(condition))
    if "<lambda>" not in name:
        return name
    try:
        return " ".join(inspect.getsource(condition).split())
    except OSError:
        return name


async def until(
    condition: Callable[[], object],
    what: str = "",
    *,
    seconds: float = WAIT_SECONDS,
    pause: float = 0.005,
) -> None:
    """Waits until a condition holds, which may be a coroutine.

    what: the condition in words. pause: seconds between two looks.

    Raises:
        AssertionError: it was not true in time; the message has its last value and variables.
    """
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        value: object = await found if inspect.isawaitable(found) else found
        if value:
            return
        assert time.monotonic() < deadline, _failure(condition, what, value, seconds)
        await asyncio.sleep(pause)


def blocked_until(
    condition: Callable[[], object],
    what: str = "",
    *,
    seconds: float = WAIT_SECONDS,
    pause: float = 0.01,
) -> None:
    """Does the same as `until`, without an event loop."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, _failure(condition, what, value, seconds)
        time.sleep(pause)
