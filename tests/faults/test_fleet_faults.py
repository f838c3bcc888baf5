"""What one broken publisher, or very many at once, do to the rest; processes of their own."""

import asyncio
import json
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvstate.feeds import zmtp_connection
from kvstate.feeds.feed import State
from kvstate.feeds.feed_sources import ZmqSource
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.fleet import Fleet
from tests.faults.crowd import BLOCKS_A_BATCH
from tests.faults.engine import MODEL, Engine, prompt
from tests.faults.watch import Row

A, B = (1, 2, 3, 4), (20, 21)
WORKERS, BATCHES = 200, 20


@asynccontextmanager
async def process(
    *arguments: str,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[ZmqSource]]]:
    """Runs engines in their own process; yields it, and where they publish."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.faults.crowd", *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1024 * 1024,
    )  # fmt: skip
    assert started.stdout
    try:
        published = json.loads(await asyncio.wait_for(started.stdout.readline(), 60))
        yield started, [ZmqSource(events, replay, "") for events, replay in published]
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


@asynccontextmanager
async def fleet() -> AsyncIterator[Fleet]:
    """A router's fleet, without workers yet."""
    made = Fleet(0xC0FFEE, lambda: 0.0)
    yield made
    await made.close()


def certain(fleet: Fleet, worker: str, chain: tuple[int, ...]) -> int:
    """Blocks of a chain that are credited to a worker as certain."""
    overlap = fleet.overlaps(prompt(chain)).get(worker)
    return sum(overlap.tiers) if overlap else 0


async def state(fleet: Fleet, worker: str, *states: State) -> None:
    """Waits until a worker's feeds are in one of these states."""
    async with asyncio.timeout(60):
        while fleet.state(worker) not in states:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.002)


def since(start: float) -> float:
    return 1000 * (asyncio.get_running_loop().time() - start)


async def test_killed_publisher_is_not_believed_any_more(table: list[Row]) -> None:
    async with fleet() as router, process("1", "1") as (engine, (source,)):
        router.add("w", MODEL, [ZmqTransport(source)])
        await state(router, "w", State.LIVE)
        chain = (0, *range(BLOCKS_A_BATCH - 1))
        assert certain(router, "w", chain) == BLOCKS_A_BATCH
        killed_at = asyncio.get_running_loop().time()
        engine.kill()
        await state(router, "w", State.STALE)
        known = since(killed_at)
        assert certain(router, "w", chain) == 0
        how = "connection lost; its successor is asked"
        table.append(Row("SIGKILL of the publisher", "zmq", known, known, None, how))


async def test_publisher_that_hangs_is_noticed_by_heartbeats(
    table: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmtp_connection, "HEARTBEAT_SECONDS", 0.05)
    async with fleet() as router, process("1", "1") as (engine, (source,)):
        router.add("w", MODEL, [ZmqTransport(source)])
        await state(router, "w", State.LIVE)
        stopped_at = asyncio.get_running_loop().time()
        engine.send_signal(signal.SIGSTOP)
        await state(router, "w", State.STALE)
        known = since(stopped_at)
        engine.send_signal(signal.SIGCONT)
        await state(router, "w", State.LIVE)
        exact = since(stopped_at)
        how = "heartbeats (here 0.15 s, else 6 s), replay"
        table.append(Row("publisher hangs", "zmq", known, known, exact, how))


async def test_dead_rank_takes_nothing_from_the_other(table: list[Row]) -> None:
    first, second = Engine(), Engine()
    first.lose(first.store(A))
    second.lose(second.store(B))
    async with fleet() as router:
        router.names_ranks = True  # requests may choose the living one
        sources = [ZmqSource(each.events, each.replay, "") for each in (first, second)]
        router.add("w", MODEL, [ZmqTransport(source) for source in sources])
        await state(router, "w", State.LIVE)
        assert (certain(router, "w", A), certain(router, "w", B)) == (4, 2)
        died_at = asyncio.get_running_loop().time()
        await second.end()
        await state(router, "w", State.STALE)
        known = since(died_at)
        assert [feed.state for feed in router.feeds("w")] == [State.LIVE, State.STALE]
        assert (certain(router, "w", A), certain(router, "w", B)) == (4, 0)
        how = "the living rank stays certain"
        table.append(Row("two ranks, one of them dead", "zmq", known, known, None, how))
    await first.end()


async def test_garbage_at_full_speed_disturbs_nobody(table: list[Row]) -> None:
    sound = Engine()
    async with fleet() as router, process("garbage") as (_, (source,)):
        router.add("sound", MODEL, [ZmqTransport(ZmqSource(sound.events, sound.replay, ""))])
        await state(router, "sound", State.LIVE)
        before_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        router.add("broken", MODEL, [ZmqTransport(source)])
        await state(router, "broken", State.DEGRADED)
        started_at = asyncio.get_running_loop().time()
        slowest = 0.0
        for number in range(50):
            sent_at = asyncio.get_running_loop().time()
            sound.publish(sound.store((number,)))
            async with asyncio.timeout(30):
                while certain(router, "sound", (number,)) == 0:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            slowest = max(slowest, since(sent_at))
        (broken,) = router.feeds("broken")
        assert broken.counts["undecodable_batch"] > 50
        assert (broken.blocks, certain(router, "broken", (0,))) == (0, 0)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kilobytes
        assert grown < 128 * 1024
        rate = broken.counts["batches"] / since(started_at)
        how = f"{rate:.0f} k/s refused, +{grown / 1024:.0f} MB, a sound batch took {slowest:.0f} ms"
        table.append(Row("garbage at full speed", "zmq", None, None, None, how))
    await sound.end()


async def test_very_many_workers_at_once_while_requests_are_picked(table: list[Row]) -> None:
    arguments = str(WORKERS), str(BATCHES)
    async with fleet() as router, process(*arguments) as (_, sources):
        started_at = asyncio.get_running_loop().time()
        for number, source in enumerate(sources):
            router.add(f"w{number}", MODEL, [ZmqTransport(source)])
        chains = [(number, *range(BLOCKS_A_BATCH - 1)) for number in range(WORKERS)]
        picks, slowest = 0, 0.0
        async with asyncio.timeout(90):
            while any(router.state(f"w{number}") is not State.LIVE for number in range(WORKERS)):
                asked_at = asyncio.get_running_loop().time()
                await asyncio.sleep(0)
                held = router.overlaps(prompt(chains[picks % WORKERS]))
                assert set(held) <= {f"w{picks % WORKERS}"}
                slowest = max(slowest, since(asked_at))
                picks += 1
        took = since(started_at)
        for number, chain in enumerate(chains):
            assert certain(router, f"w{number}", chain) == BLOCKS_A_BATCH
        assert picks > WORKERS
        how = f"{picks} picks meanwhile, the slowest {slowest:.1f} ms"
        table.append(Row(f"{WORKERS} workers replay at once", "zmq", None, took, took, how))
