"""Measures the cost of sharing and the age of shared state, with a real Valkey or Redis.

python benchmarks/sharing.py [--quick | --smoke] [--json FILE] [--directory]

Each router is a process with the router's own books (loads, claims) and sharing code. It makes a
fixed number of decisions per second, in batches of a few milliseconds: a booking on one of 64
workers and the claim of a prompt of 2,048 uncached tokens, both released after half a second. The
cost of sharing is the CPU time of such a process minus that of one that does the same alone. Its
floor is that of one that sends as many bytes as often over the same connection, and ignores what it
receives. The age of state is the time from a change in one router until another one counts it: for
this, each router has a probe worker whose figure is the time of its last change.

It needs redis-server or valkey-server; with --directory it needs none.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from measure import NO_REFERENCE, CannotRunError, Figure, Goal, Row
from rows import Run, arguments, run

from extproc.config.sections import SharingSettings as Options
from extproc.routing.claims.claim_table import Claim, ClaimTable, Holdings
from extproc.routing.claims.homes import Homes
from extproc.routing.claims.lines import Lines
from extproc.routing.claims.marks import marks_of
from extproc.routing.load.endpoint_load import EndpointLoad, Ticket
from extproc.routing.load.loads import Loads
from extproc.routing.load.reports import Place, WorkerLoadReport
from extproc.running.event_loop import Sweeper
from extproc.sharing.carriers import transport_of
from extproc.sharing.reporter import Reporter
from extproc.sharing.sharing import Sharing, SignallingReporter, reporter_of
from tests.ports import free_port

WORKERS = [f"10.0.0.{number}:8000" for number in range(64)]
UNCACHED_TOKENS = 2_048
RATE = 8_000  # tokens per second, as configured
PROMPT = array("I", bytes(4 * UNCACHED_TOKENS))
PACE_SECONDS = 0.005
LASTS_SECONDS = 0.5
PROBE_SECONDS = 0.02
WARM_SECONDS = 1.0
ROUTERS = 4
PROBES = [f"probe-{number}" for number in range(ROUTERS)]
GOAL_CPU = Goal(0.05, "<= 0.05", of_ratio=False)
GOAL_P99 = Goal(1.2, "<= 1.2x")

# Of a hundred ticks a second, at least this many must send a message. With fewer, the machine was
# too busy, and the CPU figures mean nothing.
LEAST_MESSAGES = 70


class AgedLoads(Loads):
    """Loads that record the age of a probe's figure on arrival, in microseconds."""

    def __init__(self, endpoints: dict[str, EndpointLoad], touched: set[str] | None) -> None:
        super().__init__(endpoints, RATE, touched)
        self._probed_at: dict[tuple[str, str], int] = {}
        self.ages: list[int] = []

    def record_reports(
        self,
        router: str,
        told: Sequence[WorkerLoadReport],
        places: Mapping[int, Place],
        now: float,
        *,
        is_known: bool,
    ) -> int:
        unknown = super().record_reports(router, told, places, now, is_known=is_known)
        for name in PROBES:
            counted = self.endpoints[name].gauges.get(router)
            if counted is None or not counted.in_flight:
                continue
            probed_at = counted.booked_tokens
            if self._probed_at.get((router, name)) != probed_at:
                self._probed_at[router, name] = probed_at
                self.ages.append(_now_us() - probed_at)
        return unknown


def records() -> dict[str, EndpointLoad]:
    """Returns the load records of the workers, and of a probe for each router."""
    return {name: EndpointLoad() for name in (*WORKERS, *PROBES)}


class Fleet:
    """The workers of one router, and a probe for each router."""

    def __init__(self, loads: Loads) -> None:
        self.loads = loads
        self.endpoints = loads.endpoints
        self.by_name = {name: Holdings(name) for name in self.endpoints}
        self.changed = asyncio.Event()

    def places(self) -> list[tuple[str, str]]:
        return [(name, name) for name in self.endpoints]

    def holdings(self, name: str) -> Holdings:
        return self.by_name[name]

    def next_change(self) -> asyncio.Event:
        return self.changed


class Traffic:
    """The decisions of one router. count: how many there were. reporter: notes them, if shared."""

    def __init__(
        self, number: int, fleet: Fleet, sent: ClaimTable, reporter: Reporter | None
    ) -> None:
        self._number = number
        self._fleet = fleet
        self._sent = sent
        self.reporter = reporter
        self._under_way = deque[tuple[float, Ticket, Claim]]()
        self._probe: Ticket | None = None
        self.count = 0

    def decide(self, now: float) -> None:
        """Sends a request to a worker."""
        self.count += 1
        worker = WORKERS[(self.count * 7 + self._number) % len(WORKERS)]
        ticket = self._fleet.loads.begin(worker, UNCACHED_TOKENS, now)
        marks = marks_of(self.count * ROUTERS + self._number, PROMPT)
        claim = self._sent.record(self._fleet.by_name[worker], marks, now)
        if self.reporter is not None:
            self.reporter.begin([claim], worker, UNCACHED_TOKENS)
        self._under_way.append((now, ticket, claim))

    def end(self, now: float) -> None:
        """Ends the requests that are due."""
        while self._under_way and self._under_way[0][0] < now - LASTS_SECONDS:
            _, ticket, claim = self._under_way.popleft()
            self._fleet.loads.end(ticket, now)
            self._sent.end(claim, now)
            if self.reporter is not None:
                self.reporter.end(claim)

    def probe(self, now: float) -> None:
        """Changes the probe's figure to the time."""
        if self._probe is not None:
            self._fleet.loads.end(self._probe, now)
        self._probe = self._fleet.loads.begin(PROBES[self._number], float(_now_us()), now)


def _now_us() -> int:
    return time.monotonic_ns() // 1000  # one clock for all processes of a machine


@asynccontextmanager
async def _sharing(
    options: Options | None, reporter: SignallingReporter | None, fleet: Fleet, sent: ClaimTable
) -> AsyncIterator[Sharing | None]:
    """Yields a started sharing, which is closed at the end; None where nothing is shared."""
    if options is None or reporter is None:
        yield None
        return
    homes = Homes(reporter.secret)
    lines = Lines(reporter.secret, 120.0, 512)
    sharing = Sharing(options, reporter, fleet, sent, homes, lines, time.monotonic)
    sharing.start()
    try:
        yield sharing
    finally:
        await sharing.close()


@asynccontextmanager
async def _connected(url: str, message_bytes: int) -> AsyncIterator[None]:
    """Sends messages of so many bytes at each tick, and ignores what arrives; 0: does nothing."""
    if not message_bytes:
        yield
        return
    options = Options(url)
    transport = transport_of(options, lambda _: 0.0, lambda: None, WARM_SECONDS)

    async def tick() -> None:
        while True:
            await asyncio.sleep(options.tick_ms / 1000)
            transport.send([bytes(message_bytes)])

    tasks = [asyncio.create_task(each) for each in (transport.run(), tick())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def router(
    url: str, number: int, rate: float, seconds: float, message_bytes: int = 0
) -> dict[str, Any]:
    """Runs one router for this long.

    url: "" shares nothing. message_bytes: of each message of one that is only connected.
    """
    options = Options(url, name=f"router-{number}") if url and not message_bytes else None
    reporter = None if options is None else reporter_of(options)
    loads = AgedLoads(records(), None if reporter is None else reporter.touched)
    fleet = Fleet(loads)
    sent = ClaimTable(1 if reporter is None else reporter.secret)
    async with (
        _connected(url, message_bytes),
        _sharing(options, reporter, fleet, sent) as sharing,
    ):
        Sweeper().start()  # as a router does
        await asyncio.sleep(WARM_SECONDS)
        begun = time.monotonic()
        cpu = time.process_time()
        loads.ages.clear()
        before = None if sharing is None else (sharing.sent, sharing.sent_bytes)
        traffic = Traffic(number, fleet, sent, reporter)
        steps, due, probed_at = [], begun, 0.0
        while (now := time.monotonic()) < begun + seconds:
            while due <= now:
                due += 1 / rate
                started = time.perf_counter()
                traffic.decide(now)
                steps.append(time.perf_counter() - started)
            traffic.end(now)
            if now - probed_at >= PROBE_SECONDS:
                probed_at = now
                traffic.probe(now)
            slept = time.perf_counter()
            await asyncio.sleep(PACE_SECONDS)
            steps.append(max(0.0, time.perf_counter() - slept - PACE_SECONDS))
        passed = time.monotonic() - begun
        cpu = time.process_time() - cpu
        found: dict[str, Any] = {
            "cpu": cpu / passed,
            "decisions": traffic.count / passed,
            "p99_us": 1e6 * statistics.quantiles(steps, n=100)[98],
        }
        if sharing is not None and before is not None:
            found["messages"] = (sharing.sent - before[0]) / passed
            found["bytes"] = (sharing.sent_bytes - before[1]) / passed
            found["ages"] = sorted(loads.ages)
            found["lost"] = sharing.others.lost()
            found["others"] = len(sharing.others.peers)
        return found


def routers_run(
    url: str, routers: int, rate: float, seconds: float, message_bytes: int = 0
) -> list[dict[str, Any]]:
    """Runs this many routers at the same time; returns their results."""
    commands = [
        [
            sys.executable,
            __file__,
            "--router",
            json.dumps([url, number, rate, seconds, message_bytes]),
        ]
        for number in range(routers)
    ]
    running = [subprocess.Popen(one, stdout=subprocess.PIPE) for one in commands]
    return [json.loads(one.communicate()[0]) for one in running]


def engine(folder: str) -> tuple[subprocess.Popen[bytes], str]:
    """Starts a real Valkey or Redis; returns its process and its URL."""
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        raise CannotRunError("neither redis-server nor valkey-server: apt-get install redis-server")
    port = free_port()
    process = subprocess.Popen(
        [server, "--port", str(port), "--save", "", "--dir", folder, "--loglevel", "warning"],
        stdout=subprocess.DEVNULL,
    )
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.02)
            continue
        return process, f"redis://127.0.0.1:{port}"


def cpu_of(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def mean(found: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(one[key] for one in found)


def compare(one: Run, url: str, process: int | None, seconds: float) -> None:
    """Measures all rows; process: the engine's, None without one."""
    for rate, whose in ((1_000 / ROUTERS, "1,000 decisions/s in all"), (1_000, "1,000 each")):
        alone = routers_run("", ROUTERS, rate, seconds)
        before = 0.0 if process is None else cpu_of(process)
        together = routers_run(url, ROUTERS, rate, seconds)
        told = f"{ROUTERS} routers, {whose}"
        is_starved = mean(together, "messages") < LEAST_MESSAGES
        starved = "the machine is too busy: too few messages" if is_starved else None
        added = starved or Figure([mean(together, "cpu") - mean(alone, "cpu")])
        one.add([Row(f"{told}: CPU of sharing a router, cores", added, NO_REFERENCE, GOAL_CPU)])
        if process is not None:
            spent = (cpu_of(process) - before) / (seconds + WARM_SECONDS)
            one.add([Row(f"{told}: CPU of the engine, cores", Figure([spent]), NO_REFERENCE)])
        message_bytes = round(mean(together, "bytes") / max(1.0, mean(together, "messages")))
        connected = routers_run(url, ROUTERS, rate, seconds, message_bytes)
        floor = starved or Figure([mean(connected, "cpu") - mean(alone, "cpu")])
        one.add([Row(f"{told}: CPU of such a connection alone, cores", floor, NO_REFERENCE)])
        ages = sorted(age for each in together for age in each["ages"])
        figures = {
            "age of news, p50 ms": ages[len(ages) // 2] / 1000,
            "age of news, p99 ms": ages[len(ages) * 99 // 100] / 1000,
            "messages/s a router": mean(together, "messages"),
            "KB/s a router": mean(together, "bytes") / 1000,
            "messages lost": sum(each["lost"] for each in together),
        }
        one.add(
            Row(f"{told}: {what}", Figure([each]), NO_REFERENCE) for what, each in figures.items()
        )
        if process is not None and rate < 1_000:
            os.kill(process, signal.SIGSTOP)
            stopped = routers_run(url, ROUTERS, rate, seconds)
            os.kill(process, signal.SIGCONT)
            what = f"{told}: p99 of a decision or a wait, engine stopped against running, us"
            late = starved or Figure([mean(stopped, "p99_us")])
            one.add([Row(what, late, Figure([mean(together, "p99_us")]), GOAL_P99)])


def main() -> None:
    """Measures all and prints the table, or is one of the routers."""
    parser = arguments(__doc__, "a few seconds each")
    parser.add_argument("--directory", action="store_true", help="without an engine")
    parser.add_argument("--router", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.router:
        print(json.dumps(uvloop.run(router(*json.loads(options.router)))))
        return
    with run(parser) as one, tempfile.TemporaryDirectory() as folder:
        seconds = one.amount(1.0, 5.0, 20.0)
        if options.directory:
            compare(one, f"directory:{folder}/routers", None, seconds)
            return
        process, url = engine(folder)
        try:
            compare(one, url, process.pid, seconds)
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
