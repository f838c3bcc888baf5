"""Real coding agents behind KVSteer and behind SMG: how many turns reach their worker.

The pinned agents from npm (`python -m tests.clients.install`), all at
once, with a scripted model behind three workers whose answers take two seconds. Nothing is known of
the model but its texts: SMG compares only these.
"""

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
from extproc_contestants import SMG
from extproc_parts import found_smg
from measure import CannotRunError, Figure, Goal, Result, Row, or_reason

from tests.clients.front import fronted
from tests.clients.install import MissingError, pinned
from tests.clients.starts import MODEL, STARTS
from tests.clients.turns import Stays, all_converse, conversations, stays_of
from tests.ports import free_port
from tests.waiting import until

ANSWER_SECONDS = 2.0
STAYS_GOAL = Goal(1.0, "all of ours", of_ratio=False, at_least=True)


def stays(count: int) -> list[Row]:
    """Returns a row for each client. count: how many conversations of each run at once."""
    ours = or_reason(lambda: _measured(count, is_smg=False))
    theirs = or_reason(lambda: _measured(count, is_smg=True))
    return [
        Row(
            f"{name}: turns on their worker, ours / {SMG}",
            _share(ours, name),
            _share(theirs, name),
            STAYS_GOAL,
        )
        for name in STARTS
    ]


def _share(found: dict[str, Stays] | str, client: str) -> Result:
    if isinstance(found, str):
        return found
    one = found[client]
    print(f"  {client}: {one.stayed} of {one.later} later turns; by worker {one.spread}")
    return Figure([one.stayed / one.later]) if one.stayed else "it answered no later turn there"


def _measured(count: int, *, is_smg: bool) -> dict[str, Stays]:
    try:
        for name in STARTS:
            pinned().program(name)
    except MissingError as error:
        raise CannotRunError(f"did not run: {error}") from None
    smg = found_smg() if is_smg else ""
    return asyncio.run(_run(count, smg))


async def _run(count: int, smg: str) -> dict[str, Stays]:
    changes = {"models": [{"name": MODEL}]}
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsteer-bench-"))
        system, fronts = await stack.enter_async_context(fronted(changes, ANSWER_SECONDS))
        url = system.envoy
        if smg:
            url = await _started(stack, smg, [front.endpoint for front in fronts])
        await all_converse(url, Path(folder), count)
        found = conversations(fronts)
        return {client: stays_of(client, found) for client in STARTS}


async def _started(stack: AsyncExitStack, smg: str, workers: list[str]) -> str:
    """Starts SMG before these workers; returns its URL."""
    port, metrics = free_port(), free_port()
    command = [smg, "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls"]
    command += [*(f"http://{one}" for one in workers), "--policy", "cache_aware"]
    command += ["--worker-startup-check-interval", "1", "--log-level", "error"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    process = await asyncio.create_subprocess_exec(*command)

    async def end() -> None:
        process.kill()
        await process.wait()

    stack.push_async_callback(end)
    url = f"http://127.0.0.1:{port}"

    async def is_ready() -> bool:
        assert process.returncode is None, "SMG ended"
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{url}/readiness") as told:
                return told.status == 200
        except aiohttp.ClientError:
            return False

    await until(is_ready, "SMG is ready")
    return url
