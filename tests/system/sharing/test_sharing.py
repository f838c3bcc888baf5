"""Two router processes before the same workers, which share through a real engine."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents import claude_code, prose
from tests.clients.front import fronted
from tests.clients.scripted_model import CHAT, MESSAGES, RESPONSES
from tests.extproc.sharing.engine_process import EngineProcess, needs_engine, running_engine
from tests.system.ingresses.other_router import OtherRouter, other_router
from tests.system.system import System, chat, long_text, running
from tests.waiting import until


@contextlib.asynccontextmanager
async def two(
    engine: EngineProcess, policy: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[System, OtherRouter]]:
    """A system, and a second router with the same configuration at other ports."""
    changes = {"sharing": {"url": engine.url}, "policy": policy or {}}
    async with (
        running(changes=changes, **settings) as system,
        other_router(system) as second,
    ):
        await until(second.hears, "the routers hear each other")
        yield system, second


@pytest.mark.slow
@needs_engine
async def test_request_of_one_router_is_load_and_a_claim_in_the_other(tmp_path: Path) -> None:
    text = " ".join(long_text(word) for word in ("shared", "long", "prompt"))
    # Nothing computed is published before the other router is asked, which may take long. The
    # routers know this speed: at the assumed one, the queue would be over after 70 ms.
    speed = {"prefill_tokens_per_second": 80}
    policy = {"learn": False, "cost": speed}
    async with running_engine(tmp_path) as engine, two(engine, policy, **speed) as (system, second):
        assert await second.running(text) == 0
        request = asyncio.create_task(system.send(chat(text)))

        claims: list[dict[str, Any]] = []
        seen: list[Any] = []  # what a failure shows

        async def is_seen() -> bool:
            candidates = (await second.explain(text))["candidates"]
            claims[:] = (one for one in candidates if one["speculative_tokens"])
            seen[:] = [request.done(), *(one["cost_terms"] for one in claims)]
            return [bool(one["running"] and one["queued"]) for one in seen[1:]] == [True]

        await until(is_seen, "the other router counts the request, and its prompt")
        (claimed,) = claims
        status, worker, _ = await request
        assert (status, worker) == (200, claimed["endpoint"])

        async def is_over() -> bool:
            return await second.running(text) == 0

        await until(is_over, "the other router knows that it is over")


@contextlib.asynccontextmanager
async def carrier(kind: str, folder: Path) -> AsyncIterator[str]:
    """The URL at which routers share: of an engine, or of a directory with a short name."""
    if kind == "directory":
        with tempfile.TemporaryDirectory(prefix="kvsteer-") as short:
            yield f"directory:{short}/routers"
        return
    async with running_engine(folder) as engine:
        yield engine.url


async def worker_of(system: System, path: str, body: dict[str, Any]) -> tuple[str, Any]:
    """The worker that answers, and its answer."""
    async with system.session.post(f"{system.envoy}{path}", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return answer.headers["x-worker"], await answer.json()


@pytest.mark.parametrize(
    "kind", [pytest.param("engine", marks=needs_engine), pytest.param("directory")]
)
async def test_conversation_goes_on_where_it_was_through_another_router(
    kind: str, tmp_path: Path
) -> None:
    async with (
        carrier(kind, tmp_path) as url,
        fronted(
            {
                "models": [{"name": "tiny"}],
                "sharing": {"url": url},
                "accounting": {"responses": "usage"},
            }
        ) as (system, _),
        other_router(system) as second,
    ):
        await until(second.hears, "the routers hear each other")
        turns = [list(claude_code(number, 2)) for number in range(4)]
        workers = [(await worker_of(system, MESSAGES, first))[0] for first, _ in turns]
        assert len(set(workers)) > 1  # conversations are spread
        named = {"model": "tiny", "conversation": "conv_1"}
        first = {**named, "messages": [{"role": "user", "content": prose(50, 1)}]}
        of_session, _ = await worker_of(system, CHAT, first)
        of_response, kept = await worker_of(
            system, RESPONSES, {"model": "tiny", "input": prose(60, 2)}
        )
        again = {**named, "messages": [{"role": "user", "content": prose(50, 3)}]}
        continued = {"model": "tiny", "input": "go on", "previous_response_id": kept["id"]}
        asked = [
            *((MESSAGES, later, worker) for (_, later), worker in zip(turns, workers, strict=True)),
            (CHAT, again, of_session),
            (RESPONSES, continued, of_response),
        ]
        for path, body, worker in asked:

            async def is_known(path: str = path, body: Any = body, worker: str = worker) -> bool:
                return bool((await second.explain_body(body, path))["session"] == worker)

            await until(is_known, f"the other router knows the worker of {path}")
        told = await second.explain_body(continued, RESPONSES)
        assert (told["pick"], told["decided_by"]) == ([of_response], "response")
