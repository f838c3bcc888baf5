"""What one broken publisher, or very many at once, do to the rest; processes of their own."""

import asyncio
import json
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_sources import ZmqSource
from kvstate.feeds.zmq_limits import ZmqLimits
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.fleet import FollowedWorkers
from tests.system.feeds.crowd import BLOCKS_A_BATCH
from tests.system.feeds.engine import MODEL, Engine, prompt
from tests.system.feeds.watch import Row
from tests.waiting import until

A, B = (1, 2, 3, 4), (20, 21)
WORKERS, BATCHES = 200, 20


@asynccontextmanager
async def process(
    *arguments: str,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[ZmqSource]]]:
    """Runs engines in their own process; yields it, and where they publish."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.system.feeds.crowd", *arguments,
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
async def fleet() -> AsyncIterator[FollowedWorkers]:
    """A router's fleet, without workers yet."""
    made = FollowedWorkers(0xC0FFEE, lambda: 0.0)
    yield made
    await made.close()


def certain(fleet: FollowedWorkers, worker: str, chain: tuple[int, ...]) -> int:
    """Blocks of a chain that are credited to a worker as certain."""
    overlap = fleet.blocks.overlaps(prompt(chain)).get(worker)
    return sum(overlap.tiers) if overlap else 0


async def state(fleet: FollowedWorkers, worker: str, *states: FeedState) -> None:
    """Waits until a worker's feeds are in one of these states."""
    await until(
        lambda: fleet.feeds.state(worker) in states, f"{worker} is in {states}", pause=0.002
    )


def since(start: float) -> float:
    return 1000 * (asyncio.get_running_loop().time() - start)


async def test_killed_publisher_loses_its_certain_blocks(table: list[Row]) -> None:
    async with fleet() as router, process("1", "1") as (engine, (source,)):
        router.add("w", MODEL, [ZmqTransport(source)])
        await state(router, "w", FeedState.LIVE)
        chain = (0, *range(BLOCKS_A_BATCH - 1))
        assert certain(router, "w", chain) == BLOCKS_A_BATCH
        killed_at = asyncio.get_running_loop().time()
        engine.kill()
        await state(router, "w", FeedState.STALE)
        known = since(killed_at)
        assert certain(router, "w", chain) == 0
        how = "connection lost; its successor is asked"
        table.append(Row("SIGKILL of the publisher", "zmq", known, known, None, how))


async def test_hanging_publisher_is_detected_by_heartbeats(
    table: list[Row],
) -> None:
    limits = ZmqLimits(heartbeat_seconds=0.05)
    async with fleet() as router, process("1", "1") as (engine, (source,)):
        router.add("w", MODEL, [ZmqTransport(source, limits=limits)])
        await state(router, "w", FeedState.LIVE)
        stopped_at = asyncio.get_running_loop().time()
        engine.send_signal(signal.SIGSTOP)
        await state(router, "w", FeedState.STALE)
        known = since(stopped_at)
        assert "no answer to heartbeats" in router.feeds.statuses("w")[0].reason
        engine.send_signal(signal.SIGCONT)
        await state(router, "w", FeedState.LIVE)
        exact = since(stopped_at)
        how = "heartbeats (here 0.15 s, else 6 s), replay"
        table.append(Row("publisher hangs", "zmq", known, known, exact, how))


async def test_dead_rank_leaves_the_certain_blocks_of_the_other(table: list[Row]) -> None:
    first, second = Engine(), Engine()
    first.lose(first.store(A))
    second.lose(second.store(B))
    async with fleet() as router:
        router.blocks.names_ranks = True  # requests may choose the living one
        sources = [ZmqSource(each.events, each.replay, "") for each in (first, second)]
        router.add("w", MODEL, [ZmqTransport(source) for source in sources])
        await state(router, "w", FeedState.LIVE)
        assert (certain(router, "w", A), certain(router, "w", B)) == (4, 2)
        died_at = asyncio.get_running_loop().time()
        await second.end()
        await state(router, "w", FeedState.STALE)
        known = since(died_at)
        assert [feed.state for feed in router.feeds.statuses("w")] == [
            FeedState.LIVE,
            FeedState.STALE,
        ]
        assert (certain(router, "w", A), certain(router, "w", B)) == (4, 0)
        how = "the living rank stays certain"
        table.append(Row("two ranks, one of them dead", "zmq", known, known, None, how))
    await first.end()


async def test_garbage_at_full_speed_leaves_other_feeds_live(table: list[Row]) -> None:
    sound = Engine()
    async with fleet() as router, process("garbage") as (_, (source,)):
        router.add("sound", MODEL, [ZmqTransport(ZmqSource(sound.events, sound.replay, ""))])
        await state(router, "sound", FeedState.LIVE)
        before_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        router.add("broken", MODEL, [ZmqTransport(source)])
        await state(router, "broken", FeedState.DEGRADED)
        started_at = asyncio.get_running_loop().time()
        slowest = 0.0

        def has_refused(more_than: int) -> bool:
            (broken,) = router.feeds.statuses("broken")
            return broken.counts.get("undecodable_batch", 0) > more_than

        for number in range(51):
            await until(partial(has_refused, number), "its sender is not held up", pause=0)
            sent_at = asyncio.get_running_loop().time()
            sound.publish(sound.store((number,)))
            await until(partial(certain, router, "sound", (number,)), pause=0)
            slowest = max(slowest, since(sent_at))
        (broken,) = router.feeds.statuses("broken")
        assert (broken.blocks, certain(router, "broken", (0,))) == (0, 0)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kilobytes
        assert grown < 128 * 1024
        rate = broken.counts["batches"] / since(started_at)
        how = f"{rate:.0f} k/s refused, +{grown / 1024:.0f} MB, a sound batch took {slowest:.0f} ms"
        table.append(Row("garbage at full speed", "zmq", None, None, None, how))
    await sound.end()


async def test_feeds_of_very_many_workers_become_live_while_overlaps_are_asked_for(
    table: list[Row],
) -> None:
    arguments = str(WORKERS), str(BATCHES)
    async with fleet() as router, process(*arguments) as (_, sources):
        started_at = asyncio.get_running_loop().time()
        for number, source in enumerate(sources):
            router.add(f"w{number}", MODEL, [ZmqTransport(source)])
        chains = [(number, *range(BLOCKS_A_BATCH - 1)) for number in range(WORKERS)]
        picks, slowest = 0, 0.0
        async with asyncio.timeout(90):
            while any(
                router.feeds.state(f"w{number}") is not FeedState.LIVE for number in range(WORKERS)
            ):
                asked_at = asyncio.get_running_loop().time()
                await asyncio.sleep(0)
                held = router.blocks.overlaps(prompt(chains[picks % WORKERS]))
                assert set(held) <= {f"w{picks % WORKERS}"}
                slowest = max(slowest, since(asked_at))
                picks += 1
        took = since(started_at)
        for number, chain in enumerate(chains):
            assert certain(router, f"w{number}", chain) == BLOCKS_A_BATCH
        assert picks > WORKERS
        how = f"{picks} picks meanwhile, the slowest {slowest:.1f} ms"
        table.append(Row(f"{WORKERS} workers replay at once", "zmq", None, took, took, how))
