"""Simulated workers, a router in a process of its own and a real Envoy, for one test."""

import contextlib
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import yaml

from extproc.config.reader import load
from extproc.config.schema import Config
from extproc.envoy.envoy_config import render
from kvtools.simulator.server import running as running_worker
from kvtools.simulator.settings import TINY_MODEL, Settings
from kvtools.simulator.worker import SimulatedWorker
from tests import copies
from tests.ports import free_port
from tests.system.configuration import configuration, patient
from tests.system.envoy_process import running_envoy
from tests.waiting import until

CHAT = "/v1/chat/completions"
WAIT_SECONDS = 60.0

# All workers are in the test's process. If a busy machine stops it, a router that probes a worker
# with requests takes it for dead, and sends the next ones elsewhere. And it may find a worker that
# a test has stopped before the test's request, which Envoy then need not send elsewhere.
UNPROBED = {"probe_interval_ms": 0}

# For the tests in which workers die: a router that probes those in doubt, as it does by default.
PROBED = {"policy": {"probe_interval_ms": None}}

Answer = tuple[int, str, dict[str, Any]]


async def all_answer(
    send: Callable[[], Awaitable[tuple[int, str, Any]]], workers: Collection[str]
) -> None:
    """Sends until each of these workers has answered; fails if another one answers.

    Where Envoy chooses at random, one of three workers gets none of 100 requests less than once in
    10^17 runs.
    """
    answered = set()
    for number in range(100):
        status, worker, _ = await send()
        assert status == 200
        answered.add(worker)
        assert answered <= set(workers)
        if number >= 9 and answered == set(workers):
            return
    raise AssertionError(f"none but these answered: {', '.join(answered)}")


Stop = Callable[[], Awaitable[None]]


async def started(
    stack: contextlib.AsyncExitStack, settings: Sequence[Settings]
) -> tuple[list[SimulatedWorker], dict[str, Stop]]:
    """Starts workers that end with the stack.

    Returns them, and by endpoint the functions that stop one of them earlier.
    """
    workers: list[SimulatedWorker] = []
    stops: dict[str, Stop] = {}
    for one in settings:
        own = await stack.enter_async_context(contextlib.AsyncExitStack())
        worker = await own.enter_async_context(running_worker(one))
        workers.append(worker)
        stops[worker.endpoint] = own.aclose
    return workers, stops


class System:
    """A running system.

    stops: functions that stop a worker early, by endpoint.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        config_file: Path,
        workers: Sequence[SimulatedWorker],
        stops: Mapping[str, Stop] = MappingProxyType({}),
    ) -> None:
        config = load(str(config_file))
        self.session = session
        self.config_file = config_file
        self.workers = list(workers)
        self.envoy = f"http://{config.envoy.listen}"
        self.envoy_admin = f"http://{config.envoy.admin}"
        self.admin = f"http://{config.admin.listen}"
        self.metrics = f"http://{config.metrics.listen}"
        self.router: copies.Copy | None = None
        self._stops = dict(stops)
        self._again = contextlib.AsyncExitStack()
        self.log = config_file.with_name("router.log")

    async def start_router(self) -> None:
        """Starts the router and waits until it is ready and follows every feed."""
        with self.log.open("ab") as log:
            self.router = await copies.started(["serve", "--config", str(self.config_file)], log)
        await until(self._feeds_live, "feeds live")

    async def stop_router(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends the router."""
        if self.router is not None and self.router.returncode is None:
            self.router.send_signal(number)
            await self.router.wait()

    async def stop_worker(self, endpoint: str) -> None:
        """Stops a worker: its port refuses connections from now on."""
        await self._stops[endpoint]()

    async def kill_worker(self, endpoint: str) -> None:
        """Kills a worker: all its connections end at once, including those of events."""
        at = [one.endpoint for one in self.workers].index(endpoint)
        for rank in self.workers[at].ranks:
            rank.close()
        await self.stop_worker(endpoint)

    async def start_worker(self, endpoint: str) -> None:
        """Restarts a stopped worker of one rank: same ports, empty cache."""
        at = [one.endpoint for one in self.workers].index(endpoint)
        again = await self._again.enter_async_context(contextlib.AsyncExitStack())
        running_again = running_worker(self.workers[at].settings)
        self.workers[at] = await again.enter_async_context(running_again)
        self._stops[endpoint] = again.aclose

    async def end(self) -> None:
        """Ends the router, and the workers that were brought back."""
        await self.stop_router()
        await self._again.aclose()

    async def _feeds_live(self) -> bool:
        assert self.router is not None
        assert self.router.returncode is None, self.log.read_text()
        try:
            async with self.session.get(f"{self.metrics}/readyz") as response:
                is_listening = not (await response.text()).startswith("starting")
            states = [feed["state"] for worker in await self.status() for feed in worker["feeds"]]
        except aiohttp.ClientError:
            return False
        return is_listening and set(states) <= {"live"}

    async def status(self) -> list[dict[str, Any]]:
        """GET /workers."""
        async with self.session.get(f"{self.admin}/workers") as response:
            workers: list[dict[str, Any]] = await response.json()
            return workers

    async def in_flight(self, count: int) -> bool:
        """Whether this many requests are in flight, over all workers."""
        return sum(int(worker["in_flight"]) for worker in await self.status()) == count

    async def explain(self, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
        """POST /explain."""
        envelope = {"path": path, "headers": {}, "body": body}
        async with self.session.post(f"{self.admin}/explain", json=envelope) as response:
            assert response.status == 200, await response.text()
            decision: dict[str, Any] = await response.json()
            return decision

    async def send(self, body: dict[str, Any], **options: Any) -> Answer:
        """Sends a chat request through Envoy; returns status, answering worker and answer."""
        async with self.session.post(f"{self.envoy}{CHAT}", json=body, **options) as response:
            is_json = response.content_type == "application/json"
            answer = await response.json() if is_json else {"text": await response.text()}
            return response.status, response.headers.get("x-worker", ""), answer

    async def serve(self, worker: SimulatedWorker, text: str) -> None:
        """Sends a request to this worker directly, so that it computes and publishes blocks."""
        async with self.session.post(f"{worker.url}{CHAT}", json=chat(text)) as response:
            assert response.status == 200, await response.text()

    async def learned(self, body: dict[str, Any], worker: str) -> None:
        """Waits until the router knows that a worker holds all reusable blocks of this prompt."""

        async def known() -> bool:
            decision = await self.explain(body)
            overlaps = {one["endpoint"]: one["overlap_tokens"] for one in decision["candidates"]}
            return bool(overlaps[worker] >= (decision["prompt_tokens"] - 1) // 16 * 16 > 0)

        await until(known, f"{worker} is known to hold the prompt")

    async def metric(self, line: str) -> float:
        """The value of one metric, named with its labels; 0 if absent."""
        async with self.session.get(f"{self.metrics}/metrics") as response:
            found = re.search(rf"^{re.escape(line)} (\S+)$", await response.text(), re.MULTILINE)
            return float(found[1]) if found else 0.0


def chat(text: str, model: str = "tiny", **rest: Any) -> dict[str, Any]:
    """A chat request of one message."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        **rest,
    }


def long_text(seed: str) -> str:
    """About two hundred tokens, with a different beginning for each seed."""
    return f"{seed}: " + " ".join(f"{seed} argument {number} of the parser" for number in range(30))


@contextlib.asynccontextmanager
async def running(
    workers: int = 3,
    models: Sequence[str] = ("tiny",),
    changes: dict[str, Any] | None = None,
    envoy_config: Callable[[Config], str] = render,
    roles: Sequence[str] = (),
    proxied: Callable[[SimulatedWorker], str] | None = None,
    each: Sequence[dict[str, Any]] = (),
    **settings: Any,
) -> AsyncIterator[System]:
    """Workers (of each model in turn), a router that is ready, and Envoy.

    changes: sections of the configuration to replace; without `PROBED` no worker is probed.
    envoy_config: makes Envoy's from it. settings: those that all simulated workers share. roles:
    one for each worker, instead of their number. proxied: returns the address of a worker for the
    router and Envoy, where requests reach it through something else. each: further settings of each
    worker, instead of their number.
    """
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsteer-test-")))
        wanted: list[Settings] = []
        for position in range(len(roles) or len(each) or workers):
            own: dict[str, Any] = {} if "ranks" in settings else {**_ports()}
            if roles:
                own |= {"role": roles[position], "transfer_listen": f"127.0.0.1:{free_port()}"}
            own |= settings | (each[position] if each else {})
            wanted.append(Settings(model=models[position % len(models)], **own))
        fleet, stops = await started(stack, wanted)
        config_file = directory / "kvsteer.yaml"
        written = patient(configuration(_fleet(fleet, models) | (changes or {})))
        written["policy"] = UNPROBED | written.get("policy", {})
        if proxied is not None:
            for listed, worker in zip(written["workers"], fleet, strict=True):
                listed["endpoint"] = proxied(worker)
        config_file.write_text(yaml.safe_dump(written))
        timeout = aiohttp.ClientTimeout(total=100)  # some tests have requests outlast them
        connector = aiohttp.TCPConnector(limit=0)
        session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        system = System(await stack.enter_async_context(session), config_file, fleet, stops)
        stack.push_async_callback(system.end)
        config = load(str(config_file))
        admin_port = int(config.envoy.admin.rpartition(":")[2])
        await stack.enter_async_context(running_envoy(envoy_config(config), admin_port))
        await system.start_router()
        yield system


def _ports() -> dict[str, str]:
    """Chooses the ports of a worker of one rank, so that it keeps them while it is stopped."""
    listen, events, replay = (free_port() for _ in range(3))
    return {
        "listen": f"127.0.0.1:{listen}",
        "events_endpoint": f"tcp://127.0.0.1:{events}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
    }


def _half_of(worker: SimulatedWorker) -> dict[str, Any]:
    """What the configuration says of a worker's role, if it has one."""
    settings = worker.settings
    if settings.transfer_listen is None:
        return {}
    port = int(settings.transfer_listen.rpartition(":")[2])
    return {"role": settings.role, "transfer_port": port}


def _fleet(workers: Sequence[SimulatedWorker], models: Sequence[str]) -> dict[str, Any]:
    return {
        "models": [{"name": model, "tokenizer": str(TINY_MODEL)} for model in models],
        "workers": [
            {
                "endpoint": worker.endpoint,
                "model": models[position % len(models)],
                **_half_of(worker),
                "events": {
                    "zmq": worker.events_endpoint,
                    "replay": worker.replay_endpoint,
                    "ranks": len(worker.ranks),
                    "load": next(iter(worker.load_endpoints), None),
                },
            }
            for position, worker in enumerate(workers)
        ],
    }
