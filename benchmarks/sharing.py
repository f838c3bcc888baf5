"""Measures the cost of sharing and the age of shared state, with a real Valkey or Redis.

python benchmarks/sharing.py [--quick] [--json FILE] [--directory]

Each router is a process with the router's own books (loads, claims) and sharing code. It makes a
fixed number of decisions per second, in batches of a few milliseconds: a booking on one of 64
workers and the claim of a prompt of 2,048 uncached tokens, both released after half a second. The
cost of sharing is the CPU time of such a process minus that of one that does the same alone. The
age of state is the time from a change in one router until another one counts it: for this, each
router has a probe worker whose figure is the time of its last change.

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
from collections import deque
from pathlib import Path
from typing import Any

import measure  # first: it makes the product importable
import uvloop

from extproc.config.sections import Sharing as Options
from extproc.event_loop import Sweeper
from extproc.picking.load import EndpointLoad, GaugesOf, Loads
from extproc.picking.sent import Holdings, Sent, marks_of
from extproc.sharing.sharing import shared, telling_of

assert measure

WORKERS = [f"10.0.0.{number}:8000" for number in range(64)]
UNCACHED_TOKENS = 2_048
PACE_SECONDS = 0.005
LASTS_SECONDS = 0.5
PROBE_SECONDS = 0.02
WARM_SECONDS = 1.0
ROUTERS = 4
GOAL_CPU = 0.05
GOAL_P99 = 1.2

# Of a hundred ticks a second, at least this many must send a message. With fewer, the machine was
# too busy, and the CPU figures mean nothing.
LEAST_MESSAGES = 70


class AgedLoads(Loads):
    """Loads that record the age of a probe's figure on arrival, in microseconds."""

    def __init__(self, endpoints: dict[str, EndpointLoad], touched: set[str] | None) -> None:
        super().__init__(endpoints, 8_000, touched)
        self.ages: list[int] = []

    def told(
        self, router: str, endpoint: str, gauges: GaugesOf, now: float, *, is_known: bool
    ) -> bool:
        if endpoint.startswith("probe") and gauges.in_flight:
            self.ages.append(_now_us() - gauges.booked_tokens)
            return True
        return super().told(router, endpoint, gauges, now, is_known=is_known)


class Fleet:
    """The workers of one router, and a probe for each router."""

    def __init__(self, touched: set[str] | None) -> None:
        names = [*WORKERS, *(f"probe-{number}" for number in range(ROUTERS))]
        self.endpoints = {name: EndpointLoad() for name in names}
        self.loads = AgedLoads(self.endpoints, touched)
        self.by_name = {name: Holdings(name) for name in names}
        self.changed = asyncio.Event()

    def places(self) -> list[tuple[str, str]]:
        return [(name, name) for name in self.endpoints]

    def holdings(self, name: str) -> Holdings:
        return self.by_name[name]

    def next_change(self) -> asyncio.Event:
        return self.changed


def _now_us() -> int:
    return time.monotonic_ns() // 1000  # one clock for all processes of a machine


async def router(url: str, number: int, rate: float, seconds: float) -> dict[str, Any]:
    """Runs one router for this long; url: "" shares nothing."""
    options = Options(url, name=f"router-{number}") if url else None
    telling = None if options is None else telling_of(options)
    fleet = Fleet(None if telling is None else telling.touched)
    sent = Sent(1 if telling is None else telling.secret)
    async with shared(options, telling, fleet, sent) as sharing:
        Sweeper().start()  # as a router does
        await asyncio.sleep(WARM_SECONDS)
        begun = time.monotonic()
        cpu = time.process_time()
        fleet.loads.ages.clear()
        before = None if sharing is None else (sharing.sent, sharing.sent_bytes)
        steps, due, under_way = [], begun, deque[Any]()
        probe, probed_at, count = None, 0.0, 0
        while (now := time.monotonic()) < begun + seconds:
            while due <= now:
                due += 1 / rate
                started = time.perf_counter()
                count += 1
                worker = WORKERS[(count * 7 + number) % len(WORKERS)]
                booking = fleet.loads.begin(worker, UNCACHED_TOKENS, now)
                marks = marks_of(count * ROUTERS + number, bytes(4 * UNCACHED_TOKENS))
                claim = sent.record(fleet.by_name[worker], marks, now)
                if telling is not None:
                    telling.begun([claim], worker, UNCACHED_TOKENS)
                under_way.append((now, booking, claim))
                steps.append(time.perf_counter() - started)
            while under_way and under_way[0][0] < now - LASTS_SECONDS:
                _, booking, claim = under_way.popleft()
                fleet.loads.end(booking, now)
                sent.end(claim, now)
                if telling is not None:
                    telling.ended(claim)
            if now - probed_at >= PROBE_SECONDS:
                probed_at = now
                if probe is not None:
                    fleet.loads.end(probe, now)
                probe = fleet.loads.begin(f"probe-{number}", float(_now_us()), now)
            slept = time.perf_counter()
            await asyncio.sleep(PACE_SECONDS)
            steps.append(max(0.0, time.perf_counter() - slept - PACE_SECONDS))
        passed = time.monotonic() - begun
        cpu = time.process_time() - cpu
        found: dict[str, Any] = {
            "cpu": cpu / passed,
            "decisions": count / passed,
            "p99_us": 1e6 * statistics.quantiles(steps, n=100)[98],
        }
        if sharing is not None and before is not None:
            found["messages"] = (sharing.sent - before[0]) / passed
            found["bytes"] = (sharing.sent_bytes - before[1]) / passed
            found["ages"] = sorted(fleet.loads.ages)
            found["lost"] = sharing.picture.lost()
            found["others"] = len(sharing.picture.others)
        return found


def run(url: str, routers: int, rate: float, seconds: float) -> list[dict[str, Any]]:
    """Runs this many routers at the same time; returns their results."""
    commands = [
        [sys.executable, __file__, "--router", json.dumps([url, number, rate, seconds])]
        for number in range(routers)
    ]
    running = [subprocess.Popen(one, stdout=subprocess.PIPE) for one in commands]  # noqa: S603
    return [json.loads(one.communicate()[0]) for one in running]


def engine(folder: str) -> tuple[subprocess.Popen[bytes], str]:
    """Starts a real Valkey or Redis; returns its process and its URL."""
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        raise SystemExit("neither redis-server nor valkey-server is installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(  # noqa: S603
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


def compare(url: str, process: int | None, seconds: float) -> list[dict[str, Any]]:
    """Returns the rows of the table."""
    rows: list[dict[str, Any]] = []

    def row(what: str, ours: float, reference: float | None, goal: float | None) -> None:
        ratio = ours / reference if reference else ours
        met = None if goal is None else ratio <= goal and not is_starved
        rows.append({
            "what": what, "ours": ours, "reference": reference, "ratio": ratio, "goal": goal,
            "met": met,
        })  # fmt: skip

    for rate, whose in ((1_000 / ROUTERS, "1,000 decisions/s in all"), (1_000, "1,000 each")):
        alone = run("", ROUTERS, rate, seconds)
        before = 0.0 if process is None else cpu_of(process)
        together = run(url, ROUTERS, rate, seconds)
        told = f"{ROUTERS} routers, {whose}"
        is_starved = mean(together, "messages") < LEAST_MESSAGES
        if is_starved:
            print(f"{told}: the machine is too busy, nothing counts as met")
        added = mean(together, "cpu") - mean(alone, "cpu")
        row(f"{told}: CPU of sharing a router, cores", added, None, GOAL_CPU)
        if process is not None:
            spent = (cpu_of(process) - before) / (seconds + WARM_SECONDS)
            row(f"{told}: CPU of the engine, cores", spent, None, None)
        ages = sorted(age for one in together for age in one["ages"])
        row(f"{told}: age of news, p50 ms", ages[len(ages) // 2] / 1000, None, None)
        row(f"{told}: age of news, p99 ms", ages[len(ages) * 99 // 100] / 1000, None, None)
        row(f"{told}: messages/s a router", mean(together, "messages"), None, None)
        row(f"{told}: KB/s a router", mean(together, "bytes") / 1000, None, None)
        row(f"{told}: messages lost", sum(one["lost"] for one in together), None, None)
        if process is not None and rate < 1_000:
            os.kill(process, signal.SIGSTOP)
            stopped = run(url, ROUTERS, rate, seconds)
            os.kill(process, signal.SIGCONT)
            row(
                f"{told}: p99 of a decision or a wait, engine stopped against running, us",
                mean(stopped, "p99_us"), mean(together, "p99_us"), GOAL_P99,
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds each")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    parser.add_argument("--directory", action="store_true", help="without an engine")
    parser.add_argument("--router", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.router:
        print(json.dumps(uvloop.run(router(*json.loads(arguments.router)))))
        return
    seconds = 5.0 if arguments.quick else 20.0
    with tempfile.TemporaryDirectory() as folder:
        if arguments.directory:
            rows = compare(f"directory:{folder}/routers", None, seconds)
        else:
            process, url = engine(folder)
            try:
                rows = compare(url, process.pid, seconds)
            finally:
                process.kill()
                process.wait()
    for one in rows:
        goal = (
            ""
            if one["goal"] is None
            else f"  goal {one['goal']:g}: {'met' if one['met'] else 'not met'}"
        )
        print(f"{one['what']:78} {one['ours']:10.3f}  ratio {one['ratio']:.3f}{goal}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
