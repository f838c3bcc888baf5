"""Everything that can go wrong with one ZMQ feed; real sockets, and an engine whose cache is known.

After each fault, the credit is compared with what the engine holds.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from kvstate.events import Batch
from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_sources import ZmqSource
from kvstate.feeds.feed_times import USUAL, FeedTimes
from kvstate.feeds.transport import Connected, Disconnected, Signal
from kvstate.feeds.zmq_limits import USUAL as ZMQ_USUAL
from kvstate.feeds.zmq_limits import ZmqLimits
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.fleet import FollowedWorkers
from tests.system.feeds.engine import MODEL, Engine
from tests.system.feeds.watch import WORKER, Row, Watch, Watched
from tests.waiting import until

A, B, C = (1, 2, 3, 4), (1, 2, 9), (20, 21)
PROBES = (A, B, C, (5000,), (1, 2))

Watching = Callable[..., AbstractAsyncContextManager[Watch]]


@asynccontextmanager
async def following(
    fault: str, engine: Engine, times: FeedTimes = USUAL, limits: ZmqLimits = ZMQ_USUAL
) -> AsyncIterator[Watch]:
    """A router that follows an engine from now on."""
    source = ZmqSource(engine.events, engine.replay, "kv")
    transport = Watched(ZmqTransport(source, limits=limits))
    fleet = FollowedWorkers(0xC0FFEE, lambda: engine.clock, times=times)
    fleet.add(WORKER, MODEL, [transport])
    kind = "zmq" if engine.replay else "zmq, no replay"
    watch = Watch(fault, kind, engine, transport, fleet, PROBES)
    try:
        yield watch
    finally:
        await watch.close()


@asynccontextmanager
async def warm(
    fault: str, engine: Engine, times: FeedTimes = USUAL, limits: ZmqLimits = ZMQ_USUAL
) -> AsyncIterator[Watch]:
    """The same, followed from the engine's first batch on, with something cached."""
    async with following(fault, engine, times, limits) as watch:
        await connected(watch)
        engine.publish(engine.store(A))
        engine.publish(engine.store(B, known=2))
        await watch.settled()
        assert watch.is_exact()
        yield watch


async def connected(watch: Watch) -> None:
    def is_connected() -> bool:
        return watch.engine.is_subscribed and watch.state in (FeedState.LIVE, FeedState.DEGRADED)

    await until(is_connected, pause=0.001)


def batch(number: int) -> Callable[[Signal], bool]:
    """Evidence: a batch with this number or a later one."""
    return lambda signal: isinstance(signal, Batch) and signal.sequence >= number


def lost_connection(signal: Signal) -> bool:
    """Evidence: the connection is gone."""
    return isinstance(signal, Disconnected)


def new_connection(signal: Signal) -> bool:
    """Evidence: there is another connection."""
    return isinstance(signal, Connected)


async def test_lost_batch_is_replayed(table: list[Row]) -> None:
    async with warm("lost batch", Engine()) as watch:
        engine = watch.engine
        watch.happens(batch(3))
        engine.lose(engine.remove(A))
        engine.publish(engine.store(C))
        await watch.settled()
        table.append(await watch.row("replay of the gap"))
        assert watch.is_exact()


async def test_lost_batch_without_replay_degrades_the_feed_until_turnover(table: list[Row]) -> None:
    async with warm("lost batch", Engine(replays=False)) as watch:
        engine = watch.engine
        watch.happens(batch(3))
        engine.lose(engine.remove(A))
        engine.publish(engine.store(C))
        await watch.settled(FeedState.DEGRADED)
        assert watch.certain() == [0, 0, 2, 0, 0]
        table.append(await watch.row("says so; turnover heals"))
        for chain in (A[:3], A[:2], A[:1], B):
            engine.publish(engine.remove(chain))
        engine.publish(engine.clear())
        await watch.settled()
        assert watch.is_exact()


async def test_last_batch_lost_before_silence_is_recovered_by_a_probe() -> None:
    times = FeedTimes(quiet_seconds=0.05)
    async with warm("last batch lost, then silence", Engine(), times) as watch:
        engine = watch.engine
        engine.lose(engine.remove(A))
        await watch.settled()  # no signal shows it: only our own request does
        assert watch.is_exact()


async def test_gap_older_than_the_buffer_degrades_the_feed(table: list[Row]) -> None:
    async with warm("gap older than the buffer", Engine(buffer=2)) as watch:
        engine = watch.engine
        watch.happens(batch(5))
        engine.lose(engine.remove(A))
        for number in range(3):
            engine.lose(engine.store([30 + number]))
        engine.publish(engine.store(C))
        await watch.settled(FeedState.DEGRADED)
        assert watch.is_honest()
        assert "no longer in the publisher's buffer" in watch.reason
        table.append(await watch.row("says so; turnover heals"))


@pytest.mark.parametrize(("hashes", "seed"), [("the same hashes", 0), ("other hashes", 1)])
async def test_restarted_publisher_is_replayed_from_0(
    table: list[Row], hashes: str, seed: int
) -> None:
    async with warm(f"restart at 0 with {hashes}", Engine()) as watch:
        engine = watch.engine
        watch.happens(lost_connection)
        await engine.restart(seed)
        await watch.settled()
        engine.publish(engine.store(A[:2]))
        await watch.settled()
        table.append(await watch.row("new connection, replay from 0"))
        assert watch.is_exact()


async def test_restart_without_replay_keeps_no_old_credit(table: list[Row]) -> None:
    async with warm("restart at 0", Engine(replays=False)) as watch:
        engine = watch.engine
        watch.happens(lost_connection)
        await engine.restart()
        await until(watch.transport.handled.is_set, pause=0.001)
        await connected(watch)
        assert watch.certain() == [0] * len(PROBES)

        def is_heard() -> bool:
            if watch.state in (FeedState.LIVE, FeedState.DEGRADED) and watch.has_all():
                return True
            # the first may be sent before the subscription
            engine.publish(engine.store((engine.sequence + 60,)))
            return False

        await until(is_heard, "a batch comes", pause=0.02)
        table.append(await watch.row("new connection, first batch"))
        assert watch.is_honest()


async def test_restart_that_passed_the_old_number_is_detected_by_its_stamps(
    table: list[Row],
) -> None:
    async with warm("restart beyond the old number, unseen", Engine()) as watch:
        engine = watch.engine
        watch.happens(lost_connection)
        await engine.restart(batches=engine.sequence + 3)
        await watch.settled()
        table.append(await watch.row("time stamps, replay from 0"))
        assert watch.is_exact()


@pytest.mark.parametrize("replays", [True, False])
async def test_restarted_router_credits_a_warm_worker_by_replay_or_turnover(
    table: list[Row], *, replays: bool
) -> None:
    engine = Engine(replays=replays)
    engine.lose(engine.store(A))
    engine.lose(engine.store(B, known=2), engine.remove(A))
    async with following("router restart, warm worker", engine) as watch:
        watch.happens(new_connection)
        await connected(watch)
        if replays:
            await watch.settled()
        else:
            engine.publish(engine.store([1, 2, 9, 10], known=3), engine.store(C))
            await watch.settled(FeedState.DEGRADED)
            assert watch.certain() == [0, 0, 2, 0, 0]
        table.append(await watch.row("replay" if replays else "turnover; old blocks unknown"))
        assert watch.is_exact() if replays else watch.is_honest()


async def test_late_join_is_degraded_and_certain_of_replayed_blocks(table: list[Row]) -> None:
    engine = Engine(buffer=2)
    engine.lose(engine.store([77]))
    engine.lose(engine.store(A))
    engine.lose(engine.store(B, known=2))
    async with following("late join, buffer rolled over", engine) as watch:
        watch.happens(new_connection)
        await watch.settled(FeedState.DEGRADED)
        assert watch.is_exact()
        assert watch.reason == "batches before 1 are no longer available"
        table.append(await watch.row("replay of what there is"))


async def test_silent_replay_socket_is_asked_again(table: list[Row]) -> None:
    limits = ZmqLimits(replay_seconds=0.05)
    times = FeedTimes(quiet_seconds=0.02, retry_seconds=(0.05, 0.2))
    async with warm("replay socket never answers", Engine(), times, limits) as watch:
        engine = watch.engine
        engine.answers_replays = False
        watch.happens(batch(3))
        engine.lose(engine.remove(A))
        engine.publish(engine.store(C))
        await watch.settled(FeedState.DEGRADED)
        assert watch.is_honest()
        table.append(await watch.row("says so; asks again, later"))
        engine.answers_replays = True
        await watch.settled()
        assert watch.is_exact()


async def test_corrupt_event_leaves_the_rest_of_its_batch(table: list[Row]) -> None:
    async with warm("one corrupt event", Engine()) as watch:
        engine = watch.engine
        watch.happens(batch(2))
        corrupt = {**engine.store([40]), "block_hashes": "no hashes"}
        engine.publish(corrupt, engine.store(C))
        await watch.settled(FeedState.LIVE, FeedState.DEGRADED)
        table.append(await watch.row("the rest of the batch is taken"))
        assert watch.is_exact()


async def test_corrupt_removal_makes_the_past_uncertain(table: list[Row]) -> None:
    async with warm("one corrupt removal", Engine()) as watch:
        engine = watch.engine
        watch.happens(batch(2))
        engine.publish({**engine.remove(A), "block_hashes": None})
        await watch.settled(FeedState.DEGRADED)
        table.append(await watch.row("says so; turnover heals"))
        assert watch.is_honest()


async def test_corrupt_batch_is_a_hole(table: list[Row]) -> None:
    async with warm("one corrupt batch", Engine()) as watch:
        engine = watch.engine
        watch.happens(batch(2))
        engine.remove(A)
        engine.publish_payload(b"\xc1 no msgpack")
        engine.publish(engine.store(C))
        await watch.settled(FeedState.DEGRADED)
        table.append(await watch.row("says so; turnover heals"))
        assert watch.is_honest()
        assert watch.certain()[2] == 2


async def test_copies_are_removed_one_by_one(table: list[Row]) -> None:
    async with warm("duplicate stores, removal of each copy", Engine()) as watch:
        engine = watch.engine
        # shows that the removal of each copy is announced
        twice = [engine.store(C), engine.store(C), engine.remove(C), engine.remove(C)]
        engine.publish(*twice)
        watch.happens(batch(3))
        engine.publish(engine.store(A), engine.store(A))
        engine.publish(engine.remove(A))
        await watch.settled()
        # as far as events show, the engine only announced the block again
        assert (watch.is_honest(), watch.certain()[0]) == (True, 3)
        engine.publish(engine.remove(A), engine.remove(A))
        await watch.settled()
        table.append(await watch.row("uncertain from the first removal on"))
        assert (watch.is_exact(), watch.certain()[0]) == (True, 3)


async def test_repeated_batch_is_applied_once(table: list[Row]) -> None:
    async with warm("batch delivered twice", Engine()) as watch:
        engine = watch.engine
        engine.publish(engine.store(A))
        watch.happens(batch(2))
        engine.repeat()
        engine.publish(engine.remove(A), engine.remove(A))
        await watch.settled()
        table.append(await watch.row("time stamps: a duplicate is dropped"))
        assert watch.is_exact()


async def test_reset_while_idle_is_applied_with_the_next_batch(table: list[Row]) -> None:
    async with warm("reset while idle", Engine()) as watch:
        engine = watch.engine
        reset = engine.clear()  # vLLM announces it only with the next request
        watch.happens(batch(2))
        engine.publish(reset, engine.store(C))
        await watch.settled()
        table.append(await watch.row("the engine's own word"))
        assert watch.is_exact()


async def test_slow_consumer_at_the_high_water_mark_replays_the_gap(
    table: list[Row],
) -> None:
    limits = ZmqLimits(queue_bytes=100_000)
    async with warm("slow consumer at the high-water mark", Engine(hwm=10), limits=limits) as watch:
        engine = watch.engine
        watch.happens(batch(2))
        filler: dict[str, Any] = {"type": "Filler", "text": "x" * 50_000}
        engine.publish(engine.remove(A), filler)
        for number in range(600):  # 30 MB, while the subscriber cannot run
            engine.publish(engine.store([100 + number]), filler)
        await asyncio.sleep(0)
        engine.publish(engine.store(C))
        await watch.settled()
        table.append(await watch.row("replay of the gap"))
        assert watch.is_exact()
        assert watch.fleet.feeds.statuses(WORKER)[0].gaps > 0
