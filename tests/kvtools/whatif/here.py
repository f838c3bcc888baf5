"""Plays of `kvsteer whatif` in the process that tests them."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Here(Executor):
    """Does in this process what a pool does in several, which take a second each to start."""

    def __init__(
        self, *_: object, initializer: Callable[..., None], initargs: Any, **__: object
    ) -> None:
        initializer(*initargs)

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*args, **kwargs))
        return done
