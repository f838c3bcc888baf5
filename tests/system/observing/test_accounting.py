"""Predicted against reported cached tokens, read off responses behind a real Envoy."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest
import yaml

from tests.system.system import CHAT, System, chat, long_text, running
from tests.waiting import until

USAGE = {"accounting": {"responses": "usage"}}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("extra", [{}, STREAMED], ids=["json", "events"])
async def test_prediction_equals_the_reported_cached_tokens(extra: dict[str, Any]) -> None:
    async with running(changes=USAGE) as system:
        exact = 'kvsteer_prediction_error_tokens_count{model="tiny",sign="exact"}'
        body = chat(long_text("alpha"), **extra)
        _, holder, _ = await system.send(body)
        await system.learned(chat(long_text("alpha")), holder)
        _, worker, _ = await system.send(body)
        assert worker == holder

        async def both() -> bool:
            return await system.metric(exact) == 2

        await until(both, "both predictions came true")
        reported = await system.metric('kvsteer_reported_cached_tokens_total{model="tiny"}')
        predicted = await system.metric('kvsteer_predicted_cached_tokens_total{model="tiny"}')
        assert reported == predicted > 0
        name = f'kvsteer_responses_total{{status="2xx",worker="{holder}"}}'
        assert await system.metric(name) == 2


async def test_retried_request_is_counted_on_the_worker_that_answered() -> None:
    async with running(workers=2, changes={"accounting": {"responses": "headers"}}) as system:
        body = chat(long_text("alpha"))
        _, holder, _ = await system.send(body)
        await system.learned(body, holder)
        await system.stop_worker(holder)
        status, worker, _ = await system.send(body)
        assert (status, worker != holder) == (200, True)

        async def moved() -> bool:
            return await system.metric('kvsteer_answered_elsewhere_total{model="tiny"}') == 1

        await until(moved, "the request was seen on the other worker")
        assert await system.metric(f'kvsteer_responses_total{{status="2xx",worker="{worker}"}}')
        await until(lambda: system.in_flight(0), "nothing is in flight")


async def compared(system: System, count: int) -> Counter[str]:
    """Waits until this many predictions were compared; returns the causes of all drifts."""
    causes: Counter[str] = Counter()

    async def all_over() -> bool:
        predictions = [worker["predictions"] for worker in await system.status()]
        causes.clear()
        for one in predictions:
            causes.update(one["causes"])
        return bool(sum(one["requests"] for one in predictions) == count)

    await until(all_over, f"{count} predictions are compared")
    return causes


async def test_misses_by_swapped_feeds_are_attributed_to_the_feed_of_another() -> None:
    async with running(workers=2, changes=USAGE) as system:
        config = yaml.safe_load(system.config_file.read_text())
        first, second = config["workers"]
        # with the replays: the first batch may be lost until the subscription has arrived
        first["events"], second["events"] = second["events"], first["events"]
        system.config_file.write_text(yaml.safe_dump(config))
        await system.stop_router()
        await system.start_router()
        bodies = [chat(long_text(str(number))) for number in range(4)]
        for body in bodies * 2:
            _, worker, _ = await system.send(body)
            (other,) = {one.endpoint for one in system.workers} - {worker}
            await system.learned(body, other)
        causes = await compared(system, 8)
        # on a busy machine any of the answers may end before the event of its prompt was seen
        assert causes["feed_of_another"] > 0


async def queued(
    system: System,
    paths_and_bodies: Sequence[tuple[str, Any]],
    before_the_last: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Has the only worker get these in this order, each placed before any of them is computed."""
    (worker,) = system.workers
    engine = worker.ranks[0].engine

    async def send(path: str, body: Any) -> None:
        async with system.session.post(f"{system.envoy}{path}", json=body) as response:
            assert response.status == 200, await response.text()

    async def pause() -> None:
        async with engine.prefilling:
            if before_the_last is not None:
                await before_the_last()

    # waiters get the lock in the order in which they asked for it
    async with asyncio.TaskGroup() as tasks, engine.prefilling:
        for place, (path, body) in enumerate(paths_and_bodies, 1):
            if place == len(paths_and_bodies):
                tasks.create_task(pause())
            tasks.create_task(send(path, body))
            await until(partial(waits, system, place), "the request waits")


async def waits(system: System, count: int) -> bool:
    """Whether this many requests are placed, and the only worker has them."""
    (worker,) = system.workers
    return worker.ranks[0].engine.counters.in_flight == count and await system.in_flight(count)


@pytest.mark.slow
async def test_blocks_removed_before_the_prefill_are_counted_as_evicted() -> None:
    async with running(workers=1, changes=USAGE, blocks=64) as system:
        wanted, others = long_text("wanted"), [long_text(str(number)) for number in range(8)]
        await system.send(chat(wanted))
        await system.learned(chat(wanted), system.workers[0].endpoint)
        # the requests before it take the whole cache
        await queued(system, [(CHAT, chat(text)) for text in [*others, wanted]])
        assert await compared(system, 10) == {"evicted": 1}


async def test_request_for_several_answers_is_not_compared() -> None:
    async with running(workers=1, changes=USAGE) as system:
        await system.send(chat(long_text("alpha"), n=3))
        await system.send(chat(long_text("beta")))
        assert await compared(system, 1) == {}


async def test_message_with_cached_tokens_is_no_token_mismatch() -> None:
    """The `input_tokens` of a message exclude the cached ones."""
    async with running(workers=1, changes=USAGE) as system:
        (worker,) = system.workers
        alpha = chat(long_text("alpha"))
        body = {"messages": alpha["messages"], "max_tokens": 2}

        async def first_is_told() -> None:
            await system.learned(alpha, worker.endpoint)

        await queued(system, [("/v1/messages", body)] * 2, before_the_last=first_is_told)
        assert await compared(system, 2) == {"stored_meanwhile": 1}


async def test_engine_that_omits_0_cached_tokens_is_compared_there_too() -> None:
    async with running(workers=1, changes=USAGE, dialect="vllm-0.26") as system:
        (worker,) = system.workers
        alpha = chat(long_text("alpha"))
        await system.send(alpha)  # it is not yet known how it reports
        await system.learned(alpha, worker.endpoint)
        await system.send(alpha)
        await compared(system, 1)
        await system.send(chat(long_text("beta")))
        assert await compared(system, 2) == {}
