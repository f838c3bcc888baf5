"""How fast each worker is, and what it has to do, learned from real feeds in real time."""

import asyncio
import itertools
from collections import Counter
from typing import Any

from tests.e2e.system import CHAT, System, chat, long_text, running, until

RATE = 1_000  # configured prompt tokens a second, right for one of the two workers


async def test_a_worker_at_half_the_speed_is_found_out_and_gets_fewer_prompts() -> None:
    policy = {"cost": {"prefill_tokens_per_second": RATE}}
    speeds = [{"prefill_tokens_per_second": rate} for rate in (RATE / 2, RATE)]
    async with running(each=speeds, changes={"policy": policy}) as system:
        slow, fast = (worker.endpoint for worker in system.workers)
        prompts = (chat(long_text(f"question {number}")) for number in itertools.count())
        senders = [asyncio.create_task(keep_sending(system, prompts)) for _ in range(4)]

        async def learned() -> bool:
            shown = {one["endpoint"]: one["speed"] for one in await system.status()}
            ratio = shown[fast]["tokens_per_second"] / shown[slow]["tokens_per_second"]
            return bool(min(one["confidence"] for one in shown.values()) > 0.5 and 1.4 < ratio < 4)

        await until(learned, "both speeds are learned, one about twice the other")
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        await until(lambda: system.in_flight(0), "nothing is under way")
        answers = Counter([(await system.send(next(prompts)))[1] for _ in range(16)])
        assert answers[slow] <= 3, answers


async def keep_sending(system: System, prompts: Any) -> None:
    for prompt in prompts:
        await system.send(prompt)


async def test_what_others_send_to_a_worker_is_known_from_the_load_that_it_publishes() -> None:
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
