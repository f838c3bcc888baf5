import argparse
import asyncio
import contextlib
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from kvtools.simulator.server import running
from kvtools.simulator.settings import Settings
from kvtools.simulator.traffic import add_arguments
from kvtools.simulator.worker import SimulatedWorker
from tests.ports import free_port
from tests.system.gateway import served
from tests.waiting import until

MAIN = (
    "import argparse, sys; from kvtools.simulator.traffic import add_arguments, run;"
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
    answer = re.search(r"([\d,]+) answered, 0 failed, +(\d+)% of prompt tokens cached", said)
    assert answer, said
    assert int(answer[2]) > 40, said


@pytest.mark.slow
async def test_traffic_reports_refusals() -> None:
    async with sending("--model", "none") as (_, process):
        assert process.stderr is not None
        answer = ""
        while "last failure: 404" not in answer:
            answer = (await process.stderr.readline()).decode()
            assert answer  # it goes on
        process.terminate()
        assert "last failure: 404" in await last_line(process)
    assert process.returncode == 1


async def test_traffic_names_each_chat_in_the_header_that_is_asked_for() -> None:
    named: list[tuple[str | None, str]] = []

    async def refuse(request: web.Request) -> web.Response:
        first = (await request.json())["messages"][1]["content"]
        named.append((request.headers.get("x-my-chat"), first))
        return web.Response(status=503)

    app = web.Application()
    app.router.add_post("/{path:.*}", refuse)
    port = free_port()
    async with served(app, port):
        options = (
            "--think",
            "0.01",
            "--chats",
            "2",
            "--turns",
            "3",
            "--session-header",
            "x-my-chat",
        )
        command = (sys.executable, "-c", MAIN, "--url", f"http://127.0.0.1:{port}", *options)
        process = await asyncio.create_subprocess_exec(*command, stderr=PIPE)
        await until(lambda: len(named) > 12)
        process.terminate()
        await process.communicate()
    names = {name for name, _ in named}
    assert None not in names
    assert len(names) == len(set(named)) == len({first for _, first in named}) > 3


async def test_traffic_ends_after_its_seconds() -> None:
    async with sending("--seconds", "0.5") as (_, process):
        assert "answered, 0 failed" in await last_line(process)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--turns=-1", "must be a number from 1 to 1000, is '-1'"),
        ("--chats=1001", "must be a number from 1 to 1000, is '1001'"),
        ("--words=many", "must be a number from 1 to 1000000, is 'many'"),
        ("--think=nan", "must be a number of seconds from 0 on, is 'nan'"),
        ("--seconds=soon", "must be a number of seconds from 0 on, is 'soon'"),
    ],
)
def test_number_that_cannot_be_used_is_refused_with_what_is_wanted(
    option: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([option])
    assert says in capsys.readouterr().err
