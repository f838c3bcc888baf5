"""Shows where a decision spends its time on one connection, from Envoy's reads to its writes.

    python benchmarks/budget.py [--quick | --smoke] [--json FILE]

Needs Linux and gcc. Envoy and the server that answers it run with a small library around the
system's reads and writes (budget_shim.c), which records when each began and ended, by a common
clock. One request at a time, over one connection; each line is the median of many.
"""

import bisect
import itertools
import json
import shutil
import socket
import statistics
import struct
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from extproc_contestants import GRPC_AIO, LEAN_IDLE, OURS_LEAN, OURS_UNIX, PLAIN, Arena
from extproc_load import MARK, conversations
from measure import CannotRunError, Figure, Goal, Row
from rows import arguments, run

SHIM = Path(__file__).with_name("budget_shim.c")
NAMES = (PLAIN, GRPC_AIO, LEAN_IDLE, OURS_LEAN, OURS_UNIX)
SIZE_KIB = 2
FULL_REQUESTS, QUICK_REQUESTS, SMOKE_REQUESTS, WARM_UP = 2_000, 300, 50, 100
ROUNDS = 5

_HEAD, _NOTE = struct.Struct("Q24x"), struct.Struct("QQiiI4x")

SPANS = (
    "Envoy: request read, to headers sent",
    "way: headers, Envoy's write to our read",
    "router: headers read, to answer written",
    "way: answer, our write to Envoy's read",
    "Envoy: answer read, to body sent",
    "way: body, Envoy's write to our read",
    "router: body read, to pick written",
    "way: pick, our write to Envoy's read",
    "Envoy: pick read, to request sent upstream",
)
WHOLE = "whole: request read, to sent upstream"
ADDED = "added: whole, less the same without ext_proc"


class Note(NamedTuple):
    """One call, its times in nanoseconds. kind: r read, w write, a accept, c connect."""

    began: int
    ended: int
    file: int
    result: int
    kind: str


@dataclass(frozen=True, slots=True)
class Traces:
    """The records of one Envoy and the server that answers it."""

    envoy: list[Note]
    router: list[Note]


def notes_in(path: Path) -> list[Note]:
    """Returns the records of a process, in the order in which the calls ended."""
    with path.open("rb") as trace:
        (count,) = _HEAD.unpack(trace.read(_HEAD.size))
        found = _NOTE.iter_unpack(trace.read(count * _NOTE.size))
        notes = [
            Note(began, ended, file, result, chr(kind))
            for began, ended, file, result, kind in found
        ]
    return sorted(notes, key=lambda one: one.ended)


def spans(traces: Traces, asks: str) -> Iterator[list[float]]:
    """Returns the spans of each request, in microseconds; only the whole one without a router.

    asks: the port that Envoy calls, "0" for a Unix socket, "" if it calls none.
    """
    client, router, upstream = _by_role(traces.envoy, asks)
    accepted = {one.result for one in traces.router if one.kind == "a"}
    calls = [one for one in traces.router if one.kind in "rw" and one.result > 0]
    busiest = Counter(one.file for one in calls if one.file in accepted).most_common(1)
    ours = [one for one in calls if busiest and one.file == busiest[0][0]]
    reads = [one.ended for one in ours if one.kind == "r"]
    writes = [one.began for one in ours if one.kind == "w"]
    starts = [one.ended for one in client if one.kind == "r"]
    for began, following in itertools.pairwise(starts):
        sent = _first(upstream, "w", began, following)
        if sent is None:
            continue
        if not asks:
            yield [(sent.began - began) / 1000]
            continue
        marks = _marks(router, reads, writes, began, sent.began)
        if marks is not None:
            whole = [began, *marks, sent.began]
            yield [(after - before) / 1000 for before, after in itertools.pairwise(whole)]


def _marks(
    router: list[Note], reads: list[int], writes: list[int], began: int, end: int
) -> list[int] | None:
    """Returns the times of eight steps, None if the request went another way."""
    marks: list[int] = []
    at = began
    for _ in ("headers", "body"):
        asked = _first(router, "w", at, end)
        answered = asked and _first(router, "r", asked.began, end)
        if asked is None or answered is None:
            return None
        more = _first(router, "w", answered.ended, end)
        # the last read before Envoy continued
        for one in router:
            if one.kind == "r" and answered.ended < one.ended < (more.began if more else end):
                answered = one
        came = _between(reads, asked.began, answered.ended)
        went = _between(writes, came[0], answered.ended) if came else []
        if not came or not went:
            return None
        marks += [asked.began, came[0], went[-1], answered.ended]
        at = answered.ended
    return marks


def _between(times: list[int], after: int, before: int) -> list[int]:
    return times[bisect.bisect_right(times, after) : bisect.bisect_left(times, before)]


def _first(notes: list[Note], kind: str, after: int, before: int) -> Note | None:
    for one in notes[bisect.bisect_left(notes, after, key=lambda one: one.ended) :]:
        if one.began > before:
            return None
        if one.kind == kind and one.began >= after:
            return one
    return None


def _by_role(notes: list[Note], asks: str) -> tuple[list[Note], list[Note], list[Note]]:
    """Groups Envoy's reads and writes by peer: the client, the router and the upstreams."""
    roles: dict[int, str] = {}
    found: dict[str, list[Note]] = {"client": [], "router": [], "upstream": []}
    for one in notes:
        if one.kind == "a":
            roles[one.result] = "client"
        elif one.kind == "c":
            roles[one.file] = "router" if str(one.result) == asks else "upstream"
        elif one.result > 0 and one.file in roles:
            found[roles[one.file]].append(one)
    return found["client"], found["router"], found["upstream"]


def built(directory: Path) -> Path:
    """Builds the library.

    Raises:
        CannotRunError: there is no compiler.
    """
    if shutil.which("gcc") is None:
        raise CannotRunError("gcc is missing: apt-get install gcc")
    made = directory / "budget_shim.so"
    command = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(made), str(SHIM), "-ldl"]
    subprocess.run(command, check=True)
    return made


class Client:
    """One connection, one request at a time."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._texts = [json.dumps(one) for one in conversations(SIZE_KIB)]
        self._number = itertools.count()

    def send(self, count: int) -> float:
        """Sends this many requests; returns the median latency in microseconds."""
        taken = []
        for _ in range(count):
            number = next(self._number)
            text = self._texts[number % len(self._texts)].replace(MARK, f"{number:x}")
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(text)}"
            whole = f"{head}\r\ncontent-type: application/json\r\n\r\n{text}".encode()
            began = time.perf_counter()
            self._socket.sendall(whole)
            self._receive()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken) * 1e6

    def _receive(self) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._socket.recv(65_536)
        head, _, body = data.partition(b"\r\n\r\n")
        assert b" 200 " in head, head
        (length,) = (
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        )
        while len(body) < length:
            body += self._socket.recv(65_536)


def measured(requests: int) -> dict[str, list[list[float]]]:
    """Measures the contestants in turns; returns their spans by round, medians in microseconds."""
    with tempfile.TemporaryDirectory(prefix="kvsteer-budget-") as name, ExitStack() as stack:
        directory = Path(name)
        shim = built(directory)

        def prefix(process: str) -> Sequence[str]:
            if not process.startswith(("envoy-", "router-", "idle-")):
                return ()
            return ("env", f"LD_PRELOAD={shim}", f"BUDGET_NOTES={directory}/{process}.notes")

        arena = Arena(stack, directory, NAMES, prefix)
        if arena.missing:
            raise CannotRunError("; ".join(arena.missing.values()))
        arena.learn(conversations(SIZE_KIB))
        clients = {name: Client(one.url) for name, one in arena.contestants.items()}
        for client in clients.values():
            client.send(WARM_UP)
        windows: dict[str, list[tuple[int, int]]] = {name: [] for name in clients}
        for turn in range(ROUNDS):
            names = list(clients)
            for who in names[turn:] + names[:turn]:
                began = time.monotonic_ns()
                clients[who].send(requests // ROUNDS)
                windows[who].append((began, time.monotonic_ns()))
        return {
            who: [_medians(directory, who, window) for window in windows[who]] for who in clients
        }


def _medians(directory: Path, name: str, window: tuple[int, int]) -> list[float]:
    """Returns the median of each span over the requests of one round; the last is the whole."""
    stem = "".join(letter if letter.isalnum() else "-" for letter in name)
    answering = {GRPC_AIO: "idle-grpc.aio", LEAN_IDLE: "idle-lean"}.get(name, f"router-{stem}")
    asks = ""
    router: list[Note] = []
    if name != PLAIN:
        settings = json.dumps(_listen(directory / f"{stem}.yaml"))
        asks = "0" if "unix:" in settings else settings.strip('"').rpartition(":")[2]
        router = _within(notes_in(directory / f"{answering}.notes"), window)
    envoy = _within(notes_in(directory / f"envoy-{stem}.notes"), window)
    found = [*spans(Traces(envoy, router), asks)]
    if not found:
        raise CannotRunError(f"{name}: no request could be followed")
    each = [statistics.median(column) for column in zip(*found, strict=True)]
    whole = statistics.median(sum(one) for one in found)
    return [*each, whole] if asks else [whole]


def _listen(file: Path) -> str:
    import yaml

    return str(yaml.safe_load(file.read_text())["extproc"]["listen"])


def _within(notes: Sequence[Note], window: tuple[int, int]) -> list[Note]:
    """Returns the records of this time, preceded by all earlier accepts and connects."""
    first, last = window
    before = [one for one in notes if one.kind in "ac" and one.began < first]
    return before + [one for one in notes if first <= one.began and one.ended <= last]


def rows_of(found: Mapping[str, list[list[float]]]) -> list[Row]:
    """Returns rows of the added time, compared with idle grpc.aio."""

    def added(name: str) -> Figure:
        pairs = zip(found[name], found[PLAIN], strict=True)
        return Figure([asked[-1] - plain[-1] for asked, plain in pairs])

    reference = added(GRPC_AIO)
    goal = Goal(0.7, "<= 0.7x")
    return [
        Row(f"added at one connection (us), {name} / {GRPC_AIO}", added(name), reference, goal)
        for name in (LEAN_IDLE, OURS_LEAN, OURS_UNIX)
    ]


def budget(found: Mapping[str, list[list[float]]]) -> str:
    """Returns the table of spans: microseconds, and percent of the whole."""
    plain = statistics.median(one[-1] for one in found[PLAIN])
    names = [name for name in NAMES if name != PLAIN]
    lines = [f"{'us (% of the whole)':<46}" + "".join(f"{name:>24}" for name in names)]
    columns = {
        name: [statistics.median(each) for each in zip(*found[name], strict=True)] for name in names
    }
    for at, what in enumerate((*SPANS, WHOLE)):
        cells = (f"{columns[n][at]:.0f} ({columns[n][at] / columns[n][-1]:.0%})" for n in names)
        lines.append(f"{what:<46}" + "".join(f"{cell:>24}" for cell in cells))
    cells = (f"{columns[name][-1] - plain:.0f}" for name in names)
    lines.append(f"{ADDED:<46}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join([*lines, f"whole without ext_proc: {plain:.0f} us"])


def main() -> None:
    """Measures and prints both tables."""
    with run(arguments(__doc__, "fewer requests")) as one:
        found = measured(one.amount(SMOKE_REQUESTS, QUICK_REQUESTS, FULL_REQUESTS))
        one.add(rows_of(found))
        print(f"\n{budget(found)}\n{SIZE_KIB} KB x 1")


if __name__ == "__main__":
    main()
