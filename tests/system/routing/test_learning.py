"""How fast each worker is, and what it has to do, learned from real feeds in real time."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.system.system import CHAT, System, chat, long_text, running
from tests.waiting import until

RATE = 2_000  # configured prompt tokens a second, right for one of the two workers


@pytest.mark.slow
async def test_speed_of_a_slow_worker_is_learned_and_keeps_idle_fleets_off_it() -> None:
    policy = {"cost": {"prefill_tokens_per_second": RATE}}
    speeds = [{"prefill_tokens_per_second": rate} for rate in (RATE / 2, RATE)]
    async with running(each=speeds, changes={"policy": policy}) as system:
        slow, fast = (worker.endpoint for worker in system.workers)
        prompts = (chat(long_text(f"question {number}")) for number in itertools.count())

        async def is_learned() -> bool:
            shown = {one["endpoint"]: one["speed"] for one in await system.status()}
            ratio = shown[fast]["tokens_per_second"] / shown[slow]["tokens_per_second"]
            return bool(min(one["confidence"] for one in shown.values()) > 0.5 and 1.4 < ratio < 4)

        async def is_learned_at_rest() -> bool:
            """What the last prompts took on a busy machine may have changed what was learned."""
            async with sending(system, prompts):
                await until(
                    is_learned, "both speeds are learned, one about twice the other", seconds=120
                )
            await until(is_at_rest, "only its uncached tokens make a worker's cost")
            # after so many that do not return, none is placed as one that will
            shown = (await system.explain(next(prompts)))["candidates"]
            return await is_learned() and all(
                one["cost_terms"]["conversations"] < 50 for one in shown
            )

        async def is_at_rest() -> bool:
            """An abandoned prompt may be in a report, or queued by estimate, for some seconds."""
            terms = [
                one["cost_terms"] for one in (await system.explain(next(prompts)))["candidates"]
            ]
            return not any(one["queued"] or one["running"] for one in terms)

        await until(
            is_learned_at_rest, "both speeds are learned, and nothing is under way", seconds=120
        )
        # explaining changes nothing: what was learned decides, whatever the machine does meanwhile
        picks = Counter([(await system.explain(next(prompts)))["pick"][0] for _ in range(16)])
        assert picks == {fast: 16}


@contextlib.asynccontextmanager
async def sending(system: System, prompts: Iterator[dict[str, Any]]) -> AsyncIterator[None]:
    """Four clients that each send a prompt after the other."""

    async def keep_sending() -> None:
        for prompt in prompts:
            await system.send(prompt)

    senders = [asyncio.create_task(keep_sending()) for _ in range(4)]
    try:
        yield
    finally:
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)


async def test_published_load_counts_requests_that_came_past_envoy() -> None:
    async with running(
        workers=2,
        dialect="sglang-0.5.22",
        load_endpoint="tcp://127.0.0.1:0",
        decode_tokens_per_second=10.0,
    ) as system:
        busy, idle = system.workers
        body = {**chat("a question that came past Envoy", max_tokens=2_000), "stream": True}
        async with system.session.post(f"{busy.url}{CHAT}", json=body):

            async def told() -> bool:
                decision = await system.explain(chat("another one"))
                shown = {one["endpoint"]: one["reported"] for one in decision["candidates"]}
                running_there = {name: one and one["running"] for name, one in shown.items()}
                return bool(running_there == {busy.endpoint: 1, idle.endpoint: 0})

            await until(told, "the load of both workers is told")
            decision = await system.explain(chat("another one"))
            assert decision["pick"][0] == idle.endpoint
        (feed,) = (await system.status())[0]["feeds"]
        assert feed["counts"]["loads"] > 0
        assert "malformed_message" not in feed["counts"]
