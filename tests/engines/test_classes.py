"""A real vLLM engine that schedules by priority: interactive requests overtake a queue of batch.

tests/engines/test_vllm.py says what is needed.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from statistics import quantiles

import pytest
import pytest_asyncio

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
LONG, SHORT = 200, 4  # tokens of answers
CLASSES = {
    "header": "x-class",
    "default": "interactive",
    "of": [{"name": "interactive", "priority": 0}, {"name": "batch", "priority": 10}],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    directory = tmp_path_factory.mktemp("classes")
    model = Model(options={"--scheduling-policy": "priority", "--max-num-seqs": str(SLOTS)})
    engine = Engine(directory, BLOCKS, buffer_batches=10_000, model=model)
    try:
        await engine.start()
        policy = {"classes": CLASSES}
        async with router_before([engine], directory, policy=policy) as one:
            await until(lambda: knows_engine(one), "the router knows the engine")
            yield one
    finally:
        await engine.kill()


async def has_queue(system: System) -> bool:
    """Whether most of the queue has arrived."""
    (worker,) = await system.status()
    return int(worker["in_flight"]) >= QUEUED - SLOTS


async def knows_engine(system: System) -> bool:
    (worker,) = await system.status()
    return bool(worker["engine"])


class Load:
    """Sends requests, and notes in which order they were answered."""

    def __init__(self, system: System, path: str) -> None:
        self._system = system
        self._path = path
        self.answered: list[str] = []

    async def ask(self, name: str, tokens: int) -> float:
        """Sends a request of a class; returns the seconds to its answer."""
        chances = random.Random(time.monotonic_ns())
        turn = {"role": "user", "content": f"{chances.random()} " * 20}
        body = {"model": "tiny", "messages": [turn], "max_tokens": tokens, "ignore_eos": True}
        if self._path == "/v1/completions":
            body["prompt"] = body.pop("messages")[0]["content"]  # type: ignore[index]
        body["priority"] = -100  # a client's own counts for nothing
        headers = {"x-class": name, "x-vllm-priority": "-100"}
        began, url = time.monotonic(), f"{self._system.envoy}{self._path}"
        async with self._system.session.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        self.answered.append(name)
        return time.monotonic() - began

    async def ask_at_once(self, name: str) -> list[float]:
        return await asyncio.gather(*(self.ask(name, SHORT) for _ in range(ASKED)))


def p90(seconds: list[float]) -> float:
    return quantiles(seconds, n=10)[-1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
async def test_interactive_requests_overtake_a_queue_of_batch(system: System, path: str) -> None:
    alone = await Load(system, path).ask_at_once("interactive")
    overtaken = {}
    for name in ("interactive", "batch"):
        load = Load(system, path)
        queue = [asyncio.create_task(load.ask("batch", LONG)) for _ in range(QUEUED)]
        await until(lambda: has_queue(system), "the queue is there")
        seconds = await load.ask_at_once(name)
        before = len(load.answered) - ASKED
        await asyncio.gather(*queue)
        overtaken[name] = QUEUED - before
        report(f"{path}: p90 of {name} behind {QUEUED} of batch, s", round(p90(seconds), 2))
        report("queued requests that were answered later", overtaken[name])
    report("p90 alone, s", round(p90(alone), 2))
    assert overtaken["interactive"] >= QUEUED / 3
    assert overtaken["batch"] < QUEUED / 3
