"""Faults of a feed that is drained over HTTP; a simulated TensorRT-LLM worker, real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_sources import DrainSource
from kvstate.feeds.trtllm_transport import drain_transports
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Prompt, Tokens
from kvtools.simulator.server import SimulatedWorker, running
from kvtools.simulator.settings import Settings
from tests.system.feeds.watch import Row
from tests.waiting import WAIT_SECONDS, until

BLOCK_SIZE = 8
PROMPTS = [list(range(start, start + 33)) for start in (0, 100, 200)]


@dataclass
class Drained:
    """A worker, and a router that drains it."""

    worker: SimulatedWorker
    fleet: FollowedWorkers
    client: aiohttp.ClientSession

    async def ask(self, prompt: Sequence[int]) -> None:
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 1}
        async with self.client.post(f"{self.worker.url}/v1/completions", json=body) as response:
            assert response.status == 200

    async def steal(self) -> int:
        """Drains as another consumer; returns how many events it got."""
        async with self.client.post(f"{self.worker.url}/kv_cache_events") as response:
            return len(await response.json())

    def certain(self) -> list[int]:
        asked = [Prompt("m", Tokens("I", prompt)) for prompt in PROMPTS]
        held = [self.fleet.blocks.overlaps(prompt).get("w") for prompt in asked]
        return [overlap.certain_tokens if overlap else 0 for overlap in held]

    def held(self) -> list[int]:
        return [self.worker.held_prefix_tokens(prompt) for prompt in PROMPTS]

    async def until(self, condition: Callable[[], bool]) -> float:
        """Waits for a condition; returns how long that took, in milliseconds."""
        started_at = asyncio.get_running_loop().time()
        await until(condition, pause=0.002)
        return 1000 * (asyncio.get_running_loop().time() - started_at)

    def is_exact(self) -> bool:
        return self.fleet.feeds.state("w") is FeedState.LIVE and self.certain() == self.held()


@asynccontextmanager
async def drained() -> AsyncIterator[Drained]:
    settings = Settings(
        dialect="trtllm", block_size_tokens=BLOCK_SIZE, events_endpoint=None, replay_endpoint=None,
        misbehave=True,
    )  # fmt: skip
    async with running(settings) as worker, aiohttp.ClientSession() as client:
        fleet = FollowedWorkers(0xC0FFEE, lambda: 0.0)
        fleet.add("w", "m", drain_transports(DrainSource(worker.url), lambda: 0.5))
        one = Drained(worker, fleet, client)
        try:
            await one.ask(PROMPTS[0])
            await one.until(one.is_exact)
            yield one
        finally:
            await fleet.close()


async def test_events_taken_by_another_consumer_degrade_the_feed(table: list[Row]) -> None:
    async with drained() as one:
        stolen = number = 0
        async with asyncio.timeout(WAIT_SECONDS):
            while not stolen:  # our own drain may be faster
                number += 100
                await one.ask(range(1000 + number, 1020 + number))
                stolen = await one.steal()
        await one.ask(PROMPTS[1])
        known = await one.until(lambda: one.fleet.feeds.state("w") is FeedState.DEGRADED)
        assert "another consumer drains this worker" in one.fleet.feeds.statuses("w")[0].reason
        assert one.certain()[0] == 0
        how = "event ids are missing: says so"
        table.append(Row("another consumer drains", "http drain", known, known, None, how))


async def test_restarted_worker_is_detected_by_its_first_event(table: list[Row]) -> None:
    async with drained() as one:
        one.worker.faults.restart()
        took = await one.until(lambda: one.certain() == one.held() == [0, 0, 0])
        await one.ask(PROMPTS[1])
        exact = took + await one.until(one.is_exact)
        how = "event 0 again: everything is forgotten"
        assert one.fleet.feeds.statuses("w")[0].restarts == 1
        table.append(Row("engine restarts at 0", "http drain", took, took, exact, how))
