"""A real vLLM engine that schedules by priority: interactive requests overtake a queue of batch.

What is measured is what the engine's own scheduler got and did, by its clock: on a busy machine,
answers of such a fast model wait for seconds on their way back. tests/engines/test_vllm.py says
what is needed.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from statistics import quantiles

import pytest
import pytest_asyncio

from tests.engines.scheduler_trace import Scheduled, SchedulerTrace
from tests.engines.test_vllm import MISSING, report, router_before
from tests.engines.vllm_engine import Engine, Model
from tests.system.system import System
from tests.waiting import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

# The engine computes SLOTS requests at once.
BLOCKS, QUEUED, ASKED, SLOTS = 800, 24, 6, 2
ROUNDS = 10
LONG, SHORT, GOLDEN = 200, 4, 1  # tokens of answers; the last of the router's own questions
# The engine may close a connection at the moment in which Envoy uses it again.
ATTEMPTS = 3
PRIORITIES = {"interactive": 0, "batch": 10}
CLASSES = {
    "header": "x-class",
    "default": "interactive",
    "of": [{"name": name, "priority": priority} for name, priority in PRIORITIES.items()],
}


@dataclass(frozen=True, slots=True)
class Prioritizing:
    """An engine behind the router, and what its scheduler does."""

    system: System
    trace: SchedulerTrace


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prioritizing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prioritizing]:
    directory = tmp_path_factory.mktemp("classes")
    trace = SchedulerTrace(directory)
    options = {"--scheduling-policy": "priority", "--max-num-seqs": str(SLOTS)}
    model = Model(options=options, environment=trace.environment)
    engine = Engine(directory, BLOCKS, buffer_batches=10_000, model=model)
    try:
        await engine.start()
        policy = {"classes": CLASSES}
        async with router_before([engine], directory, waits=True, policy=policy) as system:
            await until(lambda: knows_engine(system), "the router knows the engine")
            yield Prioritizing(system, trace)
    finally:
        await engine.kill()


async def knows_engine(system: System) -> bool:
    (worker,) = await system.status()
    return bool(worker["engine"])


async def ask(system: System, path: str, name: str, tokens: int) -> None:
    """Sends a request of a class, with priorities of the client's own, which count for nothing."""
    chances = random.Random(time.monotonic_ns())
    turn = {"role": "user", "content": f"{chances.random()} " * 20}
    body = {"model": "tiny", "messages": [turn], "max_tokens": tokens, "ignore_eos": True}
    if path == "/v1/completions":
        body["prompt"] = body.pop("messages")[0]["content"]  # type: ignore[index]
    if path == "/v1/responses":
        body["input"] = body.pop("messages")
        body["max_output_tokens"] = body.pop("max_tokens")
    body["priority"] = -100
    headers = {"x-class": name, "x-vllm-priority": "-100"}
    url = f"{system.envoy}{path}"
    for _ in range(ATTEMPTS):
        async with system.session.post(url, json=body, headers=headers) as answer:
            text = await answer.text()
            if answer.status == 200:
                return
    raise AssertionError(text)


async def ask_at_once(system: System, path: str, name: str) -> None:
    await asyncio.gather(*(ask(system, path, name, SHORT) for _ in range(ASKED)))


async def ask_behind_a_queue(
    one: Prioritizing, path: str, name: str
) -> tuple[list[Scheduled], list[Scheduled]]:
    """What the scheduler did with requests of a class behind a queue of batch, and with the queue.

    On a busy machine the engine's own API server may get no CPU until the queue is over. So clients
    ask again and again, and those requests count that the scheduler got while it had a queue.
    """
    found: list[Scheduled] = []
    is_over = asyncio.Event()

    async def keep_asking() -> None:
        while not is_over.is_set():
            await ask(one.system, path, "batch", LONG)

    def has_queue() -> bool:
        return one.trace.held() >= QUEUED

    clients = [asyncio.create_task(keep_asking()) for _ in range(2 * QUEUED)]
    for _ in range(ROUNDS):
        await until(has_queue, "the queue is there")
        await ask_at_once(one.system, path, name)
        found += answers_in(one.trace)
        if len(behind_queue(found)) >= ASKED:
            break
    is_over.set()
    await asyncio.gather(*clients)
    found += answers_in(one.trace)
    return behind_queue(found), of_queue(found)


def of_queue(found: list[Scheduled]) -> list[Scheduled]:
    return [one for one in found if one.answer_tokens > SHORT]


def behind_queue(found: list[Scheduled]) -> list[Scheduled]:
    """The requests with short answers that the scheduler got while it had many of the others."""
    queue = of_queue(found)
    return [
        one
        for one in found
        if one.answer_tokens <= SHORT
        and sum(each.begun_at < one.begun_at < each.ended_at for each in queue) > QUEUED / 2
    ]


def answers_in(trace: SchedulerTrace) -> list[Scheduled]:
    """The clients' requests that ended since the last time."""
    return [one for one in trace.news() if one.answer_tokens > GOLDEN]


def p90(requests: list[Scheduled]) -> float:
    return round(quantiles([one.seconds for one in requests], n=10, method="inclusive")[-1], 2)


def seconds_of_running(asked: list[Scheduled], queue: list[Scheduled]) -> float:
    """The longest time from which a request came until an answer of those that ran then ended."""
    seconds = [
        sorted(each.ended_at - one.begun_at for each in queue if each.ended_at > one.begun_at)
        for one in asked
    ]
    return round(max(some[SLOTS - 1] for some in seconds), 2)


def passed_by(one: Scheduled, queue: list[Scheduled]) -> int:
    """How many of a queue ended while a request waited or ran."""
    return sum(one.begun_at < each.ended_at < one.ended_at for each in queue)


PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")


@pytest.mark.parametrize("path", PATHS)
async def test_interactive_requests_overtake_a_queue_of_batch(
    prioritizing: Prioritizing, path: str
) -> None:
    await ask_at_once(prioritizing.system, path, "interactive")
    alone, passed = answers_in(prioritizing.trace), {}
    report(f"{path}: p90 of {ASKED} alone, s", p90(alone))
    for name, priority in PRIORITIES.items():
        asked, queue = await ask_behind_a_queue(prioritizing, path, name)
        assert {one.priority for one in asked} == {priority}
        assert {one.priority for one in queue} == {PRIORITIES["batch"]}
        passed[name] = [passed_by(one, queue) for one in asked]
        report(f"the same of {name}, behind {QUEUED} of batch", p90(asked))
        report("the running answers before them take", seconds_of_running(asked, queue))
        report("of the queue so many end before them", passed[name])
    # no more than those that run as it comes
    assert max(passed["interactive"]) <= SLOTS
    assert max(passed["batch"]) > QUEUED / 2
