"""Two router processes before the same workers, which share through a real engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.extproc.sharing.engine_process import EngineProcess, needs_engine, running_engine
from tests.system.ingresses.other_router import OtherRouter, other_router
from tests.system.system import System, chat, long_text, running
from tests.waiting import until


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
async def test_request_of_one_router_is_load_and_a_claim_in_the_other(tmp_path: Path) -> None:
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
