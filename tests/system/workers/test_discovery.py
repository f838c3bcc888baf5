"""Workers that come and go behind a real Envoy: a watched file, and the files that Envoy reads."""

import asyncio
import contextlib
import itertools
import re
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import aiohttp
import pytest
import yaml

from extproc.config.reader import load
from extproc.envoy.endpoint_files import Lane, assignment, path_of
from extproc.envoy.envoy_config import render
from kvtools.simulator.server import running as running_worker
from kvtools.simulator.settings import TINY_MODEL, Settings
from kvtools.simulator.worker import SimulatedWorker
from tests.system.configuration import configuration, patient
from tests.system.envoy_process import running_envoy
from tests.system.system import System, chat, long_text
from tests.waiting import until

# Of each worker in Envoy's own list, its address and whether Envoy may choose it.
_FLAGS = re.compile(r"^workers::(\S+)::health_flags::(\S+)$", re.MULTILINE)


class Following:
    """A system whose workers are named by a file."""

    def __init__(self, system: System, file: Path) -> None:
        self.system = system
        self.text = ""
        self._file = file

    def name(self, workers: Iterable[SimulatedWorker], **more: object) -> None:
        """Rewrites the file with these workers; more: further keys of every worker."""
        listed = [
            {
                "endpoint": one.endpoint,
                "events": {"zmq": one.events_endpoint, "replay": one.replay_endpoint},
                **more,
            }
            for one in workers
        ]
        self.write(yaml.safe_dump(listed))

    def write(self, text: str) -> None:
        """Replaces the file."""
        self.text = text
        name_in(self._file, text)

    async def placed(
        self, open_ones: Iterable[SimulatedWorker], draining: Iterable[SimulatedWorker] = ()
    ) -> None:
        """Waits until the router has exactly these workers and, later, Envoy has them, too."""
        states = {one.endpoint: "healthy" for one in open_ones}
        states |= {one.endpoint: "/eds_status_draining" for one in draining}
        url = f"{self.system.envoy_admin}/clusters"

        async def are_placed() -> bool:
            listed = {one["endpoint"] for one in await self.system.status()}
            async with self.system.session.get(url) as response:
                shown = dict(_FLAGS.findall(await response.text()))
            return listed == states.keys() and shown == states

        await until(are_placed, "the router and Envoy have these workers")

    async def answering(self, seed: str) -> str:
        """Sends a request with this seed; returns the worker that answers."""
        status, worker, _ = await self.system.send(chat(long_text(seed)))
        assert status == 200
        return worker


def name_in(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


@pytest.fixture
async def following() -> AsyncIterator[Following]:
    """Three workers, of which the file names the first; Envoy and the router run."""
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsteer-test-")))
        fleet = [await stack.enter_async_context(running_worker(Settings())) for _ in range(3)]
        raw = configuration(
            {
                "models": [{"name": "tiny", "tokenizer": str(TINY_MODEL)}],
                "discovery": {"file": str(directory / "workers.yaml")},
                "envoy": {"eds_directory": str(directory)},
            }
        )
        config_file = directory / "kvsteer.yaml"
        config_file.write_text(yaml.safe_dump(patient(raw)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        system = System(session, config_file, fleet)
        one = Following(system, directory / "workers.yaml")
        one.name(fleet[:1])
        # Envoy starts only if the file exists; here an earlier router has left it
        left = assignment("workers", [Lane(fleet[0].endpoint, is_open=True)])
        name_in(Path(path_of(str(directory), "workers")), left)
        config = load(str(config_file))
        admin_port = int(config.envoy.admin.rpartition(":")[2])
        await stack.enter_async_context(running_envoy(render(config), admin_port))
        stack.push_async_callback(system.stop_router)
        await system.start_router()

        async def found() -> bool:
            return len(await system.status()) == 1

        await until(found, "the first worker is found")
        yield one


async def test_added_worker_gets_requests_and_a_removed_one_none(
    following: Following,
) -> None:
    system = following.system
    first, second, third = system.workers
    assert {await following.answering(f"at first {n}") for n in range(4)} == {first.endpoint}
    following.name([first, second])

    numbers = itertools.count()

    async def reached() -> bool:
        return await following.answering(f"added {next(numbers)}") == second.endpoint

    await until(reached, "the added worker answers")
    following.name([second, third])
    await following.placed([second, third])
    answers = {await following.answering(f"in the end {n}") for n in range(12)}

    async def several() -> bool:
        answers.add(await following.answering(f"later {next(numbers)}"))
        return len(answers) > 1

    await until(several, "more than one answers")
    assert answers == {second.endpoint, third.endpoint}


@pytest.mark.slow
async def test_envoy_without_the_router_knows_removed_and_draining_workers(
    following: Following,
) -> None:
    system = following.system
    _, second, third = system.workers
    following.name([second, third])
    await following.placed([second, third])
    drain = {"endpoint": third.endpoint, "draining": True}
    async with system.session.post(f"{system.admin}/draining", json=drain) as response:
        assert await response.json() == {"draining": [third.endpoint]}
    await following.placed([second], draining=[third])
    await system.stop_router()
    answers = {await following.answering(f"alone {n}") for n in range(8)}
    assert answers == {second.endpoint}


@pytest.mark.slow
async def test_broken_discovery_file_changes_nothing_and_is_shown(following: Following) -> None:
    system = following.system
    good = following.text
    following.write(good[: len(good) // 2])

    async def shown() -> bool:
        return bool((await system.status())[0]["source_fault"])

    await until(shown, "the fault is shown")
    assert await following.answering("still there") == system.workers[0].endpoint
    assert await system.metric('kvsteer_discovery_fault{source="file"}') == 1
    following.write(good)

    async def healed() -> bool:
        return not (await system.status())[0]["source_fault"]

    await until(healed, "the fault is gone")


async def test_draining_worker_gets_no_new_requests_and_keeps_its_feeds(
    following: Following,
) -> None:
    system = following.system
    first, second, _ = system.workers
    following.name([first, second])
    await following.placed([first, second])

    async def are_live() -> bool:
        feeds = [feed["state"] for one in await system.status() for feed in one["feeds"]]
        return feeds == ["live", "live"]

    await until(are_live, "both feeds are live")
    drain = {"endpoint": first.endpoint, "draining": True}
    async with system.session.post(f"{system.admin}/draining", json=drain) as response:
        assert response.status == 200
    answers = await asyncio.gather(*(following.answering(f"drain {n}") for n in range(8)))
    assert set(answers) == {second.endpoint}
    assert await are_live()
    drain["draining"] = False
    async with system.session.post(f"{system.admin}/draining", json=drain) as response:
        assert await response.json() == {"draining": []}
