"""A simulated worker is credited with exactly what it holds, in every dialect; real sockets."""

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import pytest

from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_sources import DrainSource, ZmqSource
from kvstate.feeds.feed_times import USUAL, FeedTimes
from kvstate.feeds.transport import FeedTransport
from kvstate.feeds.trtllm_transport import drain_transports
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Prompt, Tokens
from kvtools.simulator.dialects import DIALECTS
from kvtools.simulator.server import SimulatedWorker, running
from kvtools.simulator.settings import Settings
from tests.waiting import until

BLOCK_SIZE = 8
BLOCKS = 24
NAMES_SALTS = [name for name in DIALECTS if name not in (
    "vllm-0.9", "vllm-0.10", "vllm-0.14", "sglang-0.4", "sglang-0.5.9", "trtllm",
)]  # fmt: skip


@dataclass
class Followed:
    """A worker, and the router's view of it."""

    worker: SimulatedWorker
    fleet: FollowedWorkers
    client: aiohttp.ClientSession

    async def ask(self, tokens: Sequence[int], rank: int = 0, **fields: object) -> None:
        """Sends a prompt of token ids to a rank of the worker."""
        body = {"model": "tiny", "prompt": list(tokens), "max_tokens": 3, **fields}
        url, headers = f"{self.worker.url}/v1/completions", {"X-data-parallel-rank": str(rank)}
        async with self.client.post(url, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()

    async def exact(self, prompts: Sequence[Sequence[int]], salt: str | None = None) -> list[int]:
        """Waits until each prompt's certain tokens are those held; returns their numbers."""
        await until(lambda: self.certain(prompts, salt) == self.held(prompts, salt))
        return self.held(prompts, salt)

    async def live(self) -> None:
        """Waits until the feed is live: a replay may have brought all batches, and not its end."""
        await until(lambda: self.fleet.feeds.state("w") is FeedState.LIVE)

    def certain(self, prompts: Sequence[Sequence[int]], salt: str | None) -> list[int]:
        asked = [Prompt("m", Tokens("I", prompt), salt=salt) for prompt in prompts]
        held = [self.fleet.blocks.overlaps(prompt).get("w") for prompt in asked]
        return [overlap.certain_tokens if overlap else 0 for overlap in held]

    def held(self, prompts: Sequence[Sequence[int]], salt: str | None) -> list[int]:
        ranks = range(len(self.worker.ranks))
        return [
            max(self.worker.held_prefix_tokens(prompt, salt=salt, rank=rank) for rank in ranks)
            for prompt in prompts
        ]


@asynccontextmanager
async def followed(
    settings: Settings, *, drains: bool = False, times: FeedTimes = USUAL
) -> AsyncIterator[Followed]:
    async with running(settings) as worker, aiohttp.ClientSession() as client:
        transports: Sequence[FeedTransport]
        if drains:
            transports = drain_transports(DrainSource(worker.url), lambda: 0.5)
        else:
            pairs = zip(worker.events_endpoints, worker.replay_endpoints, strict=True)
            transports = [ZmqTransport(ZmqSource(events, replay, "")) for events, replay in pairs]
        fleet = FollowedWorkers(0xC0FFEE, lambda: 0.0, times=times)
        fleet.add("w", "m", transports)
        try:
            yield Followed(worker, fleet, client)
        finally:
            await fleet.close()


def conversations(seed: int) -> list[list[int]]:
    """Prompts that share prefixes; together they are more than the cache holds."""
    chance = random.Random(seed)
    systems = [[chance.randrange(8000) for _ in range(20)] for _ in range(3)]
    return [
        chance.choice(systems) + [chance.randrange(8000) for _ in range(chance.randrange(5, 40))]
        for _ in range(12)
    ]


async def follow_all(one: Followed) -> None:
    prompts = conversations(7)
    most = 0
    for prompt in (*prompts, *prompts[:4]):
        await one.ask(prompt)
        most = max(most, *await one.exact(prompts))
    assert most >= 2 * BLOCK_SIZE
    assert one.fleet.blocks.block_size("w") == BLOCK_SIZE


def settings(dialect: str, **fields: Any) -> Settings:
    return Settings(
        dialect=dialect, block_size_tokens=BLOCK_SIZE, blocks=BLOCKS, misbehave=True, **fields
    )


@pytest.mark.parametrize("dialect", list(DIALECTS))
async def test_index_equals_the_cache_of_a_worker_in_every_dialect(dialect: str) -> None:
    async with followed(settings(dialect)) as one:
        await follow_all(one)
        await one.live()


@pytest.mark.parametrize("dialect", ["sglang-0.5.9", "sglang-0.5.22"])
async def test_index_equals_the_cache_of_a_worker_with_bigrams(dialect: str) -> None:
    async with followed(settings(dialect, bigrams=True)) as one:
        await follow_all(one)


async def test_index_equals_the_cache_of_a_drained_worker() -> None:
    async with followed(settings("trtllm"), drains=True) as one:
        await follow_all(one)


@pytest.mark.parametrize("dialect", NAMES_SALTS)
async def test_salted_prompt_overlaps_only_blocks_of_its_salt(dialect: str) -> None:
    async with followed(settings(dialect)) as one:
        prompt = list(range(40))
        await one.ask(prompt, cache_salt="tenant")
        assert await one.exact([prompt], "tenant") == [32]
        assert await one.exact([prompt]) == [0]
        await one.ask(prompt)
        assert await one.exact([prompt]) == [32]


async def test_index_equals_the_caches_of_both_ranks() -> None:
    async with followed(settings("vllm-0.32", ranks=2)) as one:
        one.fleet.blocks.names_ranks = True  # as these requests name one
        prompts = [list(range(start, start + 30)) for start in range(0, 600, 100)]
        for number, prompt in enumerate(prompts):
            await one.ask(prompt, rank=number % 2)
            await one.exact(prompts)
        assert all(feed.blocks for feed in one.fleet.feeds.statuses("w"))


async def test_host_blocks_with_tokens_are_certain_after_the_first_removal() -> None:
    async with followed(settings("vllm-0.32", host_blocks=8, placeholders=False)) as one:
        prompts = conversations(3)
        for prompt in prompts:
            await one.ask(prompt)
        await one.exact(prompts)
        assert one.fleet.blocks.by_tier("w")[1] > 0


async def test_blocks_offloaded_to_the_host_are_still_credited() -> None:
    offloading = settings("vllm-0.32", host_blocks=64, placeholders=True)
    async with followed(offloading) as one:
        prompts = conversations(3)
        for prompt in prompts:
            await one.ask(prompt)
            await one.exact(prompts)
        assert one.fleet.blocks.by_tier("w")[1] > 0


@pytest.mark.parametrize("dialect", ["vllm-0.32", "vllm-0.20", "sglang-0.5.22", "trtllm"])
async def test_publisher_faults_never_leave_wrong_credit(dialect: str) -> None:
    times = FeedTimes(quiet_seconds=0.02, quiet_for_long_seconds=0.05)
    async with followed(settings(dialect), times=times) as one:
        prompts = conversations(11)
        faults = one.worker.faults
        misdeeds: list[Callable[[], None]] = [
            partial(faults.drop, 2), faults.reorder, partial(faults.duplicate, 2), faults.restart,
            partial(faults.drop, 1), faults.restart,
        ]  # fmt: skip
        for prompt, misbehave in zip(prompts, misdeeds, strict=False):
            misbehave()
            await one.ask(prompt)
            await one.ask(prompts[-1])
            await one.exact(prompts)
        await one.exact(prompts)
        await one.live()
