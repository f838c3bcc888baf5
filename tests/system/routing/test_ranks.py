"""Data-parallel ranks behind one HTTP port: the rank that holds a prompt is named to the engine."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml

from tests.ports import free_ports_apart
from tests.system.system import System, chat, long_text, running
from tests.waiting import until

RANKS = 3
HEADER = "X-data-parallel-rank"
# so slow that requests are under way when their prompts are looked up
PREFILL = {"prefill_tokens_per_second": 5_000.0, "decode_tokens_per_second": 20.0}


@contextlib.asynccontextmanager
async def a_worker_of_ranks(changes: dict[str, Any], **settings: Any) -> AsyncIterator[System]:
    first = free_ports_apart(2 * RANKS, step=1)
    async with running(
        1,
        changes=changes,
        ranks=RANKS,
        **settings,
        events_endpoint=f"tcp://127.0.0.1:{first}",
        replay_endpoint=f"tcp://127.0.0.1:{first + RANKS}",
    ) as system:
        yield system


async def ask_rank(system: System, body: dict[str, Any], rank: int) -> None:
    """Sends a request to a rank directly: the proxy's clients cannot name one."""
    url = f"{system.workers[0].url}/v1/chat/completions"
    async with system.session.post(url, json=body, headers={HEADER: str(rank)}) as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize(("name", "answer"), [("auto", 200), (HEADER, 200), (None, 400)])
async def test_rank_named_by_a_client_does_not_reach_the_engine(
    name: str | None, answer: int
) -> None:
    """The engine has no such rank, and refuses what names it."""
    async with a_worker_of_ranks({"policy": {"rank_header": name}}) as system:
        status, _, _ = await system.send(chat("hello"), headers={HEADER: str(RANKS)})
        assert status == answer


async def test_follow_up_reaches_the_rank_that_holds_its_prefix() -> None:
    async with a_worker_of_ranks({"policy": {"rank_header": HEADER}}) as system:
        endpoint = system.workers[0].endpoint
        for rank in range(RANKS):
            first = chat(long_text(f"seed {rank}"))
            await ask_rank(system, first, rank)
            await system.learned(first, endpoint)
            follow_up = chat(long_text(f"seed {rank}") + " And then?")
            decision = await system.explain(follow_up)
            _, _, answer = await system.send(follow_up, headers={HEADER: str((rank + 1) % RANKS)})
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert decision["rank"] == rank
            assert cached == decision["candidates"][0]["overlap_tokens"] > 0


async def test_overlap_is_what_all_ranks_hold_where_the_engine_picks_the_rank() -> None:
    async with a_worker_of_ranks({"policy": {"rank_header": None}}) as system:
        first = chat(long_text("seed"))
        for rank in range(RANKS):
            assert (await system.explain(first))["candidates"][0]["overlap_tokens"] == 0
            await ask_rank(system, first, rank)
            if rank < RANKS - 1:
                await until(lambda: _uncertain(system, first), "one rank is known to hold it")
        await system.learned(first, system.workers[0].endpoint)
        decision = await system.explain(first)
        _, _, answer = await system.send(first)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert decision["rank"] is None
        assert cached == decision["candidates"][0]["overlap_tokens"] > 0


async def _uncertain(system: System, body: dict[str, Any]) -> bool:
    return bool((await system.explain(body))["candidates"][0]["uncertain_tokens"])


async def test_pins_that_the_worker_ignores_end_and_are_not_certain() -> None:
    async with a_worker_of_ranks({}, ignores_ranks=True, **PREFILL) as system:
        texts = [long_text(f"seed {number}") for number in range(6)]
        for turn in range(20):
            # all at once, so that the engine spreads them over its ranks
            await asyncio.gather(*(system.send(chat(text)) for text in texts))
            for text in texts:
                await until(functools.partial(_is_known, system, chat(text)), "it is stored")
            if await _is_refuted(system):
                break
            texts = [text + long_text(f"turn {turn}") for text in texts]
        decision = await system.explain(chat(texts[0] + " And then?"))
        (candidate,) = decision["candidates"]
        assert decision["rank"] is None
        assert candidate["overlap_tokens"] == 0 < candidate["uncertain_tokens"]


async def _is_known(system: System, body: dict[str, Any]) -> bool:
    decision = await system.explain(body)
    (candidate,) = decision["candidates"]
    held = candidate["overlap_tokens"] + candidate["uncertain_tokens"]
    return bool(held > 0.9 * decision["prompt_tokens"])


async def _is_refuted(system: System) -> bool:
    (worker,) = await system.status()
    return any(not pin["named"] for pin in worker["pins"])


async def test_pins_that_the_worker_obeys_are_counted() -> None:
    async with a_worker_of_ranks({}, **PREFILL) as system:
        text = long_text("seed")
        for turn in range(3):
            text += long_text(f"turn {turn}")
            await system.send(chat(text))
            await system.learned(chat(text), system.workers[0].endpoint)

        async def has_obeyed() -> bool:
            (worker,) = await system.status()
            (pin,) = worker["pins"] or [{"obeyed": 0}]
            return bool(pin["obeyed"] and not pin["ignored"] and pin["named"])

        await until(has_obeyed, "the worker computed requests on the ranks that they name")


@pytest.mark.parametrize("is_told", [False, True], ids=["ports configured", "events: auto"])
async def test_prediction_never_exceeds_what_the_ranks_report(is_told: bool) -> None:
    changes: dict[str, Any] = {"accounting": {"responses": "usage"}}
    async with a_worker_of_ranks(changes) as system:
        if is_told:
            tree = yaml.safe_load(system.config_file.read_text())
            tree["workers"][0]["events"] = "auto"
            system.config_file.write_text(yaml.safe_dump(tree))
            await system.stop_router()
            await system.start_router()
            await until(lambda: _is_followed(system), "the worker's feeds are followed")
        texts = [long_text(f"seed {number}") for number in range(9)]
        for turn in range(4):
            bodies = [chat(text + " And then?" * turn) for text in texts[turn:] + texts[:turn]]
            # all at once, so that the engine spreads them over its ranks
            await asyncio.gather(*(system.send(body) for body in bodies))
        compared = 'kvsteer_prediction_error_tokens_count{model="tiny",sign="%s"}'
        assert await system.metric(compared % "exact") > 0
        assert await system.metric(compared % "over") == 0


async def _is_followed(system: System) -> bool:
    (worker,) = await system.status()
    return [feed["state"] for feed in worker["feeds"]] == ["live"] * RANKS
