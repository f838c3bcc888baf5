import asyncio
import contextlib
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

from simulator.server import running
from simulator.settings import Settings
from simulator.worker import SimulatedWorker
from tests.waiting import until

MAIN = (
    "import argparse, sys; from simulator.traffic import add_arguments, run;"
    "parser = argparse.ArgumentParser(); add_arguments(parser);"
    "sys.exit(run(parser.parse_args()))"
)


def has_begun_to_repeat(worker: SimulatedWorker) -> bool:
    found = worker.ranks[0].engine.counters  # of requests that are not yet answered, too
    return found.hit_tokens > 0.7 * max(found.queried_tokens, 1)


@contextlib.asynccontextmanager
async def sending(*options: str) -> AsyncIterator[tuple[SimulatedWorker, Process]]:
    """Sends chats to a worker."""
    settings = Settings(listen="127.0.0.1:0", events_endpoint=None, replay_endpoint=None)
    async with running(settings) as worker:
        command = (sys.executable, "-c", MAIN, "--url", worker.url, *options)
        yield worker, await asyncio.create_subprocess_exec(*command, stderr=PIPE)


async def last_line(process: Process) -> str:
    return (await process.communicate())[1].decode().splitlines()[-1]


async def test_traffic_holds_chats_and_reports_their_cached_share() -> None:
    async with sending("--think", "0.01", "--chats", "3") as (worker, process):
        await until(lambda: has_begun_to_repeat(worker))
        process.terminate()
        said = await last_line(process)
    assert process.returncode == 0
    told = re.search(r"([\d,]+) answered, 0 failed, +(\d+)% of prompt tokens cached", said)
    assert told, said
    assert int(told[2]) > 40, said


async def test_traffic_reports_refusals() -> None:
    async with sending("--model", "none", "--seconds", "1") as (_, process):
        assert "last failure: 404" in await last_line(process)
    assert process.returncode == 1
