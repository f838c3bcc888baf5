"""Requests per second with two router processes, relative to one.

    python benchmarks/processes.py [--quick | --smoke] [--json FILE]

wrk with one thread, one Envoy with one worker thread for each, as `kvsteer envoy` prints it; chats
of 2 KB as in benchmarks/extproc.py. The goal is for a machine with enough cores: Envoy, wrk, the
upstreams and both processes need one each.
"""

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from extproc_contestants import OURS_LEAN, OURS_TWO, Arena
from extproc_load import Sample, conversations, found_wrk, load, write
from measure import CannotRunError, Figure, Goal, Result, Row
from rows import arguments, run

CONNECTIONS = (16, 64)
SIZE_KIB = 2
WANTED_CORES = 6
GOAL = Goal(1.7, ">= 1.7x, 6 cores", at_least=True)


def measured(rounds: int, seconds: int) -> list[Row]:
    """Returns one row for each number of connections; the two take turns."""
    wrk = found_wrk()
    with tempfile.TemporaryDirectory(prefix="kvsteer-bench-") as name, ExitStack() as stack:
        directory = Path(name)
        arena = Arena(stack, directory, (OURS_LEAN, OURS_TWO))
        if arena.missing:
            raise CannotRunError("; ".join(arena.missing.values()))
        requests = conversations(SIZE_KIB)
        write(requests, directory / "bodies")
        arena.learn(requests)
        samples: dict[tuple[int, str], list[Sample]] = {}
        for connections in CONNECTIONS:
            for turn in range(rounds + 1):
                for who in sorted(arena.contestants, reverse=bool(turn % 2)):
                    url = arena.contestants[who].url
                    one = load(wrk, url, directory / "bodies", connections, seconds)
                    if turn:
                        samples.setdefault((connections, who), []).append(one)
    return [_row(samples, connections) for connections in CONNECTIONS]


def _row(samples: dict[tuple[int, str], list[Sample]], connections: int) -> Row:
    one, two = (_rate(samples[connections, who]) for who in (OURS_LEAN, OURS_TWO))
    what = f"requests/s, {SIZE_KIB} KB x {connections}, two processes / one"
    return Row(what, two, one, GOAL)


def _rate(samples: list[Sample]) -> Result:
    rates = [sample.per_second for sample in samples]
    return Figure(rates) if all(rates) else "no request was answered in one of the rounds"


def main() -> None:
    """Measures and prints the table."""
    with run(arguments(__doc__, "fewer rounds")) as one:
        if (os.cpu_count() or 1) < WANTED_CORES:
            print(f"fewer than {WANTED_CORES} cores: processes, Envoy and wrk take turns")
        one.add(measured(*one.amount((1, 1), (3, 1), (9, 2))))


if __name__ == "__main__":
    main()
