"""A router that restarts, or is replaced, beside workers whose replay buffers are short."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests import copies
from tests.ports import free_port
from tests.system.system import System, chat, long_text, running
from tests.waiting import until

# A simulated worker publishes a batch for each request; a restart takes as long as this many while
# one is sent every PAUSE_SECONDS.
BUFFER_BATCHES = 100
PAUSE_SECONDS = 0.1
CONVERSATIONS = 8
WORDS = "2 workers are known again, 0 are not, 0 have not answered yet"
# A router that starts waits a second for publishers, and half a second for another router. They may
# be held up for longer on a busy machine, but hardly at so many starts.
STARTS = 5


@contextlib.asynccontextmanager
async def warm(directory: Path, **extproc: str) -> AsyncIterator[System]:
    """Two workers that replay next to nothing, and a router that keeps a state file."""
    changes: dict[str, Any] = {"state": {"file": str(directory / "state"), "interval_ms": 1_000}}
    listen = extproc.get("listen", f"127.0.0.1:{free_port()}")
    changes["extproc"] = {**extproc, "listen": listen}
    async with running(2, changes=changes, buffer_batches=BUFFER_BATCHES) as system:
        yield system


async def fill(system: System) -> None:
    """Has the workers hold conversations, of which they can replay only the last ones."""
    for number in range(CONVERSATIONS):
        body = chat(long_text(f"conversation {number}"))
        status, worker, _ = await system.send(body)
        assert status == 200
        await system.learned(body, worker)
    while min(await last_sequences(system)) < 2 * BUFFER_BATCHES:
        await asyncio.gather(*(system.send(chat("Hello.")) for _ in range(20)))


async def last_sequences(system: System) -> list[int]:
    """The number of each worker's last batch."""
    return [feed["last_sequence"] or 0 for one in await system.status() for feed in one["feeds"]]


async def held(system: System) -> list[list[int]]:
    """The tokens that each worker certainly holds of each conversation."""
    found = []
    for number in range(CONVERSATIONS):
        decision = await system.explain(chat(long_text(f"conversation {number}")))
        found.append([one["overlap_tokens"] for one in decision["candidates"]])
    return found


def restored(system: System) -> str:
    """What the last router said of its state file before it served."""
    lines = system.log.read_text().splitlines()
    said = [line for line in lines if "serving ext_proc" in line or "kvsteer.state" in line]
    last = max(n for n, line in enumerate(said) if "serving ext_proc" in line)
    return "\n".join(said[max(0, last - 4) : last])


@contextlib.asynccontextmanager
async def talking(system: System) -> AsyncIterator[list[int]]:
    """Sends requests all the time; yields their statuses."""
    statuses: list[int] = []
    is_over = asyncio.Event()

    async def client() -> None:
        while not is_over.is_set():
            status, _, _ = await system.send(chat("Hello."))
            statuses.append(status)
            await asyncio.sleep(PAUSE_SECONDS)

    sending = asyncio.create_task(client())
    yield statuses
    is_over.set()
    await sending


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
async def test_restarted_router_knows_what_no_worker_can_replay(
    number: signal.Signals, tmp_path: Path
) -> None:
    async with warm(tmp_path) as system:
        await fill(system)
        before = await held(system)
        for _ in range(STARTS):
            await written_again(system)
            async with talking(system) as statuses:
                await system.stop_router(number)
                await system.start_router()
            assert set(statuses) == {200}
            if WORDS in restored(system):
                break
            await until(lambda: are_held(system, before), "the publishers have answered, too late")
        assert WORDS in restored(system)
        assert await held(system) == before


def are_more(statuses: list[int], than: int) -> bool:
    return len(statuses) > than + 5


async def are_held(system: System, conversations: list[list[int]]) -> bool:
    return await held(system) == conversations


async def written_again(system: System) -> None:
    """Waits until the router has written its state file once more."""
    written = "kvsteer_state_file_written_timestamp_seconds"
    before = await system.metric(written)

    async def is_later() -> bool:
        return await system.metric(written) > before

    await until(is_later, "the file is written again")


@pytest.mark.slow
@pytest.mark.parametrize("listens", ["tcp", "unix"])
async def test_router_that_takes_over_refuses_no_connection(listens: str, tmp_path: Path) -> None:
    extproc = {} if listens == "tcp" else {"listen": f"unix:{tmp_path}/extproc.sock"}
    async with warm(tmp_path, **extproc) as system:
        await fill(system)
        before = await held(system)
        for _ in range(2):
            old = system.router
            assert old is not None
            async with talking(system) as statuses:
                with system.log.open("ab") as log:
                    command = ["serve", "--config", str(system.config_file), "--take-over"]
                    system.router = await copies.started(command, log)
                assert await asyncio.wait_for(old.wait(), 60) == 0
                ended_at = len(statuses)
                await until(partial(are_more, statuses, ended_at), "requests are answered after it")
            assert WORDS in restored(system)
            assert await held(system) == before
            assert set(statuses) == {200}
        assert await system.metric('kvsteer_unsteered_streams_total{reason="deadline"}') == 0


@pytest.mark.slow
async def test_router_without_a_predecessor_starts_as_usual(tmp_path: Path) -> None:
    async with warm(tmp_path) as system:
        await system.stop_router(signal.SIGTERM)
        with system.log.open("ab") as log:
            command = ["serve", "--config", str(system.config_file), "--take-over"]
            system.router = await copies.started(command, log)
        await until(lambda: answers(system), "it serves")
        assert "no router listens at" in system.log.read_text()


async def answers(system: System) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        return bool(await system.status())
    return False
