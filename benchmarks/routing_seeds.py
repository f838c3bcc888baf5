"""Runs the seeds of one cell of the routing benchmarks, on all cores."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Made = TypeVar("Made")

_inherited: list[tuple[Any, Any]] = []


def by_seed(
    cell: object, seeds: Sequence[int], contestants: object, of_seed: Callable[[int], Made]
) -> list[Made]:
    """Returns what `of_seed` makes of each seed; it finds cell and contestants in `inherited`."""
    # a workload is a closure, which cannot be sent to a process, only inherited by it
    start = multiprocessing.get_context("fork")
    with start.Pool(
        os.cpu_count(), initializer=_inherited.append, initargs=((cell, contestants),)
    ) as pool:
        return pool.map(of_seed, seeds, chunksize=1)


def inherited() -> tuple[Any, Any]:
    """Returns the cell and the contestants of this process."""
    return _inherited[-1]
