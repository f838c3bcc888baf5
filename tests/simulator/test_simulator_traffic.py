import asyncio
import re
import sys
from asyncio.subprocess import PIPE

from simulator.server import running
from simulator.settings import Settings

MAIN = (
    "import argparse, sys; from simulator.traffic import add_arguments, run;"
    "parser = argparse.ArgumentParser(); add_arguments(parser);"
    "sys.exit(run(parser.parse_args()))"
)


async def sent(*options: str) -> tuple[int | None, str]:
    """Sends chats to a worker for a second; returns the exit status and the last line."""
    settings = Settings(listen="127.0.0.1:0", events_endpoint=None, replay_endpoint=None)
    async with running(settings) as worker:
        command = (sys.executable, "-c", MAIN, "--url", worker.url, "--seconds", "1", *options)
        process = await asyncio.create_subprocess_exec(*command, stderr=PIPE)
        _, errors = await process.communicate()
    return process.returncode, errors.decode().splitlines()[-1]


async def test_traffic_holds_chats_and_reports_their_cached_share() -> None:
    status, said = await sent("--think", "0.01", "--chats", "3")
    assert status == 0
    told = re.search(r"([\d,]+) answered, 0 failed, +(\d+)% of prompt tokens cached", said)
    assert told, said
    assert int(told[2]) > 40, said


async def test_traffic_reports_refusals() -> None:
    status, said = await sent("--model", "none")
    assert status == 1
    assert "last failure: 404" in said
