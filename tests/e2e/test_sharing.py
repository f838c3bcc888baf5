"""Two router processes before the same workers, which share through a real engine."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.other_router import OtherRouter, other_router
from tests.e2e.system import System, chat, long_text, running, until
from tests.extproc.sharing.engine_process import EngineProcess, needs_engine, running_engine


@contextlib.asynccontextmanager
async def two(engine: EngineProcess, **settings: Any) -> AsyncIterator[tuple[System, OtherRouter]]:
    """A system, and a second router with the same configuration at other ports."""
    sharing = {"url": engine.url}
    async with (
        running(changes={"sharing": sharing}, **settings) as system,
        other_router(system) as second,
    ):
        await until(second.hears, "the routers hear each other")
        yield system, second


@needs_engine
async def test_a_request_of_one_router_is_load_and_a_claim_for_the_other(tmp_path: Path) -> None:
    text = " ".join(long_text(word) for word in ("shared", "long", "prompt"))
    # nothing computed is published before the other router is asked, which may take long
    slow = {"prefill_tokens_per_second": 80.0}
    async with running_engine(tmp_path) as engine, two(engine, **slow) as (system, second):
        assert await second.running(text) == 0
        request = asyncio.create_task(system.send(chat(text)))

        claims: list[dict[str, Any]] = []

        async def is_seen() -> bool:
            candidates = (await second.explain(text))["candidates"]
            claims[:] = (one for one in candidates if one["speculative_tokens"])
            terms = [one["cost_terms"] for one in claims]
            return len(terms) == 1 and terms[0]["queued"] > 0 and terms[0]["running"] > 0

        await until(is_seen, "the other router counts the request, and its prompt")
        (claimed,) = claims
        status, worker, _ = await request
        assert (status, worker) == (200, claimed["endpoint"])

        async def is_over() -> bool:
            return await second.running(text) == 0

        await until(is_over, "the other router knows that it is over")


@needs_engine
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stopped", "killed"])
async def test_no_request_is_lost_while_the_engine_is_away(fault: str, tmp_path: Path) -> None:
    async with running_engine(tmp_path) as engine, two(engine) as (system, second):

        async def send(count: int) -> None:
            for number in range(count):
                status, worker, _ = await system.send(chat(long_text(f"{fault} {number}")))
                assert status == 200
                assert worker

        async def is_alone() -> bool:
            return "not sharing with other routers" in (await second.readiness())[1]

        async def is_forgotten() -> bool:
            return not await second.hears()

        async def is_shared() -> bool:
            return (await second.readiness())[1] == "ready\n" and await second.hears()

        await send(5)
        if fault == "stopped":
            engine.process.send_signal(signal.SIGSTOP)
        else:
            await engine.end()
        await send(20)
        await until(is_alone, "it says that it decides alone")
        assert (await second.readiness())[0] == 200
        await until(is_forgotten, "the other router is not counted any more")
        steered = 'kvsteer_decisions_total{model="tiny",reason="overlap"}'
        before = await system.metric(steered)
        await send(5)
        assert await system.metric(steered) == before + 5
        if fault == "stopped":
            engine.process.send_signal(signal.SIGCONT)
        else:
            await engine.start()
        await until(is_shared, "they share again")
        await send(5)
