"""Workers of either half that are killed at once, against plain workers killed in the same way.

pytest -m slow -s tests/system/disaggregation/test_disaggregation_losses.py prints what was lost.
"""

import asyncio
import itertools
import random
import time
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.system.disaggregation.test_disaggregation import SGLANG
from tests.system.system import PROBED, System, chat, long_text, running

pytestmark = pytest.mark.slow

REQUESTS, CLIENTS = 2_000, 12

# After how many requests a worker is killed, and after how many more it is back.
UP, DOWN = (30, 60), (120, 150)
SPLIT = ("prefill", "prefill", "decode", "decode", "both")
PLAIN = ("both",) * len(SPLIT)


class Lost(NamedTuple):
    """Failed requests: those under way when a worker was killed, and those that came later."""

    under_way: int
    later: int
    kills: int


async def lost_of(roles: tuple[str, ...], changes: dict[str, Any]) -> Lost:
    """Sends all requests while the first four workers are killed and brought back, twice each."""
    numbers = itertools.count()
    ended = asyncio.Semaphore(0)
    failed: list[tuple[float, float]] = []
    killed: list[tuple[float, float]] = []
    chance = random.Random(1)
    async with running(
        roles=roles,
        changes=changes | PROBED,
        dialect="sglang-0.5.22",
        transfer_timeout_seconds=3.0,
        decode_tokens_per_second=50.0,
        shutdown_seconds=0.001,  # a kill cuts off whatever they are doing
    ) as system:

        async def client() -> None:
            while (number := next(numbers)) < REQUESTS:
                began = time.monotonic()
                if not await _is_whole(system, number):
                    failed.append((began, time.monotonic()))
                ended.release()

        async def requests(count: int) -> None:
            for _ in range(count):
                await ended.acquire()

        async def killer() -> None:
            endpoints = [one.endpoint for one in system.workers[:4]] * 2
            chance.shuffle(endpoints)
            for endpoint in endpoints:
                await requests(chance.randint(*UP))
                asked = time.monotonic()
                await system.kill_worker(endpoint)
                killed.append((asked, time.monotonic()))
                await requests(chance.randint(*DOWN))
                await system.start_worker(endpoint)

        killing = asyncio.create_task(killer())
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
    # a kill takes a moment, in which the worker still begins requests
    under_way = sum(
        any(began <= gone and asked <= ended for asked, gone in killed) for began, ended in failed
    )
    return Lost(under_way, len(failed) - under_way, len(killed))


async def _is_whole(system: System, number: int) -> bool:
    """Whether a request is answered to its end; every other one is streamed."""
    is_streamed = bool(number % 2)
    body = chat(long_text(f"number {number % 100}"), stream=is_streamed) | {"max_tokens": 16}
    try:
        status, _, answer = await system.send(body)
    except (aiohttp.ClientError, TimeoutError):
        return False
    return status == 200 and (not is_streamed or answer["text"].rstrip().endswith("[DONE]"))


async def test_split_workers_lose_at_most_one_later_request_for_each_kill() -> None:
    split = await lost_of(SPLIT, {"disaggregation": SGLANG})
    plain = await lost_of(PLAIN, {})
    print(f"\nof {REQUESTS:,} requests each: split {split}, plain {plain}")
    assert plain.later == 0
    # requests that name a prefill worker before the first of them has failed
    assert split.later <= split.kills
