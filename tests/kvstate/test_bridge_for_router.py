"""The bridge as another KVSteer follows it: a second router, or one that is far from the engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstate.feeds.feed import Feed, FeedState
from kvstate.feeds.feed_sources import GrpcSource
from kvstate.feeds.grpc_transport import grpc_transports
from kvstate.feeds.replays import ReplaySlots
from kvstate.feeds.subscriber import SharedByFeeds, Subscriber
from kvstate.feeds.transport import Connected, Disconnected, RankName
from kvstate.feeds.turns import Turns
from kvstate.index.index import Index
from tests.kvstate.bridging import Engine, engine
from tests.kvstate.publishing import block, chain
from tests.waiting import until


class Router:
    """One router's subscription to the bridge, and the index that it fills."""

    def __init__(self, running: Engine) -> None:
        self._index = Index(12345678)
        owner = self._index.add("w", 0, "m")
        source = GrpcSource(f"127.0.0.1:{running.server.port}", "vllm")
        (transport,) = grpc_transports(source, lambda: 0.0)
        self.subscriber = Subscriber(
            RankName("w", 0),
            Feed(transport.recovery),
            owner,
            transport,
            SharedByFeeds(Turns(), ReplaySlots(), lambda: 0.0, lambda: 0.0),
        )
        self.feed = self.subscriber.feed

    def certain_blocks(self) -> int:
        overlap = self._index.overlaps(chain(9)).get("w")
        return 0 if overlap is None else sum(overlap.tiers)

    async def holds(self, blocks: int) -> None:
        await until(lambda: self.certain_blocks() == blocks)


@asynccontextmanager
async def router(running: Engine) -> AsyncIterator[Router]:
    made = Router(running)
    task = asyncio.create_task(made.subscriber.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])
        await made.subscriber.close()


async def test_late_router_gets_the_whole_state_at_once() -> None:
    async with engine() as running:
        running.publish(block(1), block(2, 1))
        await running.follows()
        async with router(running) as late:
            await late.holds(2)
            assert late.feed.state is FeedState.LIVE
            running.publish(block(3, 2))
            await late.holds(3)


async def test_router_resumes_without_a_second_snapshot_after_an_engine_outage() -> None:
    async with engine() as running, router(running) as follower:
        await until(lambda: follower.feed.state is FeedState.LIVE)
        running.publish(block(1))
        await follower.holds(1)
        running.transports[0].put(Disconnected())
        await until(lambda: follower.feed.state is FeedState.STALE)
        running.transports[0].put(Connected())
        running.publish(block(2, 1))
        await follower.holds(2)
        assert follower.feed.state is FeedState.LIVE
        # an empty snapshot, the first batch, the first again as a proof, the second
        assert follower.subscriber.counts["batches"] == 4


async def test_hole_behind_the_bridge_degrades_the_feed_of_the_router() -> None:
    async with engine() as running, router(running) as follower:
        running.publish(block(1))
        await follower.holds(1)
        running.lose()
        running.publish(block(2))
        await until(lambda: follower.feed.state is FeedState.DEGRADED)
        assert follower.feed.reason == "1 batches were never received"
        assert follower.certain_blocks() == 0
        running.publish(["AllBlocksCleared"], block(1))
        await follower.holds(1)
        await until(lambda: follower.feed.state is FeedState.LIVE)


async def test_restarted_engine_keeps_no_credit_in_the_router() -> None:
    async with engine() as running, router(running) as follower:
        running.publish(block(1), block(2, 1))
        await follower.holds(2)
        running.restart()
        running.publish(block(1), life=1)
        running.publish(block(9), life=1)
        await follower.holds(1)
        assert follower.feed.state is FeedState.LIVE


async def test_large_state_arrives_in_pieces() -> None:
    async with engine() as running:
        for first in range(0, 5000, 1000):
            running.publish(*(block(first + number, None) for number in range(10, 1010)))
        running.publish(*(block(number, number - 1 or None) for number in range(1, 9)))
        await running.follows()
        async with router(running) as late:
            await late.holds(8)
            assert late.feed.state is FeedState.LIVE
            assert late.subscriber.counts["batches"] >= 5
