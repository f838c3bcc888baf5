"""Plays the runs of closed loops on all cores, and keeps what they result in."""

import contextlib
import json
import multiprocessing
import os
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from routing_closed_cells import Loop
from routing_closed_play import LoopResult, play


def add_run_arguments(parser: ArgumentParser) -> None:
    """Adds what benchmarks that play such runs may be told, besides the cells."""
    parser.add_argument("--seeds", type=int, metavar="N", help="so many seeds")
    parser.add_argument("--jobs", type=int, metavar="N", default=os.cpu_count(), help="processes")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="as in routing_closed.py")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a table to a file")


class Named(Protocol):
    """A contestant of any kind; its `repr` says all of it."""

    @property
    def name(self) -> str:
        """The name by which it is shown."""


class Job(NamedTuple):
    """One run."""

    loop: Loop
    contestant: Named
    seed: int

    @property
    def key(self) -> str:
        """What the run is, so that the result of another one is not taken for its own."""
        return json.dumps([repr(self.loop), repr(self.contestant), self.seed])


class Runs:
    """The results of runs, by their keys.

    keep: a file that has earlier ones, and gets new ones. plays: makes a result of a run, by its
    loop, contestant and seed; a function of a module, so that other processes find it.
    """

    def __init__(
        self, jobs: int, keep: Path | None, plays: Callable[..., LoopResult] = play
    ) -> None:
        self._plays = plays
        # contents are made in each process, so nothing but what they are made of is sent
        start = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(jobs, mp_context=start)
        self._keep = keep
        self._results = dict(_kept(keep)) if keep is not None and keep.exists() else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def play(self, jobs: Sequence[Job]) -> None:
        """Plays all that have no result yet."""
        missing = [one for one in jobs if one.key not in self._results]
        playing = {self._pool.submit(_timed, self._plays, one): one for one in missing}
        for done in as_completed(playing):
            result, seconds = done.result()
            self._results[playing[done].key] = result
            self._note(playing[done], result, seconds)

    def _note(self, job: Job, result: LoopResult, seconds: float) -> None:
        if self._keep is None:
            return
        line = {
            "key": job.key,
            "cell": job.loop.name,
            "contestant": job.contestant.name,
            "seed": job.seed,
            "seconds": round(seconds, 1),
            "result": result._asdict(),
        }
        with self._keep.open("a") as file:
            file.write("\n" + json.dumps(line))  # begins anew after a line that was cut off

    def results(self, loop: Loop, contestant: Named, seeds: Sequence[int]) -> Sequence[LoopResult]:
        """Returns the results of a contestant in a cell, one for each seed."""
        return [self._results[Job(loop, contestant, seed).key] for seed in seeds]


def _kept(keep: Path) -> Iterator[tuple[str, LoopResult]]:
    for line in keep.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(line)
            yield found["key"], LoopResult(**found["result"])


def _timed(plays: Callable[..., LoopResult], job: Job) -> tuple[LoopResult, float]:
    began = time.process_time()
    return plays(*job), time.process_time() - began
