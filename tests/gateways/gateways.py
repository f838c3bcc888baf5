"""Simulated workers, a router as an overlay configures it, and a gateway of another project."""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import yaml

from kvtools.simulator.settings import TINY_MODEL, Settings
from kvtools.simulator.worker import SimulatedWorker
from tests.deploy.manifests import of_kind
from tests.extproc.serving.identities import Identities
from tests.ports import free_port
from tests.system.envoy_process import stop
from tests.system.system import System, started
from tests.waiting import until

MODEL = "my-model"
STOP_SECONDS = 30.0
TAIL_LINES = 40

Tree = dict[str, Any]


class Place(NamedTuple):
    """Where a gateway listens, and where the router and the workers are.

    directory: for its files. workers: host:port of each.
    """

    directory: Path
    port: int
    router_port: int
    workers: Sequence[str]


Start = Callable[[Place], AbstractAsyncContextManager[None]]


class DiedError(AssertionError):
    """A gateway's program ended; the message ends with the last lines of its log."""


class Program:
    """A program of a gateway while it runs."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self._log = log

    def check(self) -> None:
        """Raises DiedError once it has ended."""
        if self.process.returncode is not None:
            raise DiedError(f"{self.process.returncode}, after\n{self.log_tail()}")

    def log(self) -> str:
        """The text of its log."""
        return self._log.read_text(errors="replace")

    def log_tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log().splitlines()[-TAIL_LINES:])


@contextlib.asynccontextmanager
async def running_program(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Program]:
    """Runs a program of a gateway until the block ends; it ends what it started itself.

    environment: variables to add to ours.
    """
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=DEVNULL,
            stdout=out,
            stderr=out,
            env=os.environ | dict(environment or {}),
            cwd=log.parent,
            start_new_session=True,
        )
    program = Program(process, log)
    try:
        yield program
    except DiedError:
        raise
    except Exception as error:
        error.add_note(f"{command[0]} said\n{program.log_tail()}")
        raise
    finally:
        await stop(process, STOP_SECONDS, lambda: os.killpg(process.pid, signal.SIGKILL))


async def answering(program: Program, url: str) -> None:
    """Waits until a gateway knows its route: until it answers anything but 404 and 503."""
    async with aiohttp.ClientSession() as session:

        async def answers() -> bool:
            program.check()
            try:
                async with session.get(url) as response:
                    return response.status not in {404, 503}
            except aiohttp.ClientError:
                return False

        await until(answers, f"{url} is routed")


def published(overlay: str) -> Tree:
    """The router's configuration of an overlay."""
    (found,) = [
        yaml.safe_load(one["data"]["kvsteer.yaml"])
        for one in of_kind(overlay, "ConfigMap")
        if "kvsteer.yaml" in one.get("data", {})
    ]
    return dict(found)


def here(
    configuration: Tree, workers: Sequence[SimulatedWorker], port: int, directory: Path
) -> Tree:
    """A published configuration with the workers, the tokenizer and the ports of this machine.

    port: the gateway's. directory: for a certificate, if the router is to have one.
    """
    told: Tree = configuration | {
        name: configuration.get(name, {}) | {"listen": f"127.0.0.1:{free_port()}"}
        for name in ("extproc", "admin", "metrics")
    }
    if "tls" in told["extproc"]:
        files = Identities(directory)
        named = {"certificate": str(files.certificate_file), "key": str(files.key_file)}
        told["extproc"] |= {"tls": named}
    told["models"] = [one | {"tokenizer": str(TINY_MODEL)} for one in configuration["models"]]
    told["envoy"] = {"listen": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{free_port()}"}
    del told["discovery"]
    told["workers"] = [
        {
            "endpoint": worker.endpoint,
            "model": MODEL,
            "events": {"zmq": worker.events_endpoint, "replay": worker.replay_endpoint},
        }
        for worker in workers
    ]
    return told


@contextlib.asynccontextmanager
async def behind(
    directory: Path, start: Start, configuration: Tree, **settings: Any
) -> AsyncIterator[System]:
    """Runs three workers, a router that is ready, and a gateway in front of them.

    Like pods, the workers have an address each, and all the same port.

    configuration: the router's, as it is published. settings: of the workers.
    """
    async with contextlib.AsyncExitStack() as stack:
        port, worker_port = free_port(), free_port()
        listening = [f"127.0.0.1{number}:{worker_port}" for number in range(1, 4)]
        workers, stops = await started(
            stack, [Settings(model=MODEL, listen=one, **settings) for one in listening]
        )
        told = here(configuration, workers, port, directory)
        config_file = directory / "kvsteer.yaml"
        config_file.write_text(yaml.safe_dump(told))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        system = System(session, config_file, workers, stops)
        stack.push_async_callback(system.end)
        await system.start_router()
        router_port = int(told["extproc"]["listen"].rpartition(":")[2])
        endpoints = [worker.endpoint for worker in workers]
        await stack.enter_async_context(start(Place(directory, port, router_port, endpoints)))
        yield system
