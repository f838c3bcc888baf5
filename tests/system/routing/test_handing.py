"""Token ids that go with requests, through a real Envoy to simulated engines."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from aiohttp import web

from extproc.config.schema import Config
from extproc.envoy.envoy_config import render
from extproc.requests.prompt import CONVERSATION, FORM_NAMES, GIVEN
from kvtools.simulator.generation import Generator
from kvtools.simulator.requests import ChatRequest
from kvtools.simulator.tokens import ModelTokens
from tests.system.gateway import BUFFERED, DUPLEX, envoy_tree
from tests.system.system import CHAT, System, chat, long_text, running
from tests.waiting import until

EVERY = 5
PATHS = {
    CHAT: "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
    "/v1/completions": "prompt",
}
HANDING = {
    "accounting": {"responses": "usage"},
    "policy": {"hand_tokens": {"enabled": True, "min_tokens": 100, "sample_every": EVERY}},
}
MODEL = "tiny"
ENGINE: dict[str, Any] = {"engine_version": "0.33.0", "shows_token_ids": True}
METRIC = 'kvsteer_token_handovers_total{model="tiny",outcome="%s"}'


@contextlib.asynccontextmanager
async def handing(dialect: str = BUFFERED) -> AsyncIterator[System]:
    """A simulated vLLM 0.33 whose tokens are proved, and that is known to take ids."""

    def speaking(config: Config) -> str:
        return yaml.safe_dump(envoy_tree(render(config), dialect))

    async with running(1, (MODEL,), HANDING, speaking, **ENGINE) as system:
        await until(lambda: _may_sample(system), "the tokens of all workers are proved")
        yield system


async def _may_sample(system: System) -> bool:
    explained = await system.explain(chat(long_text("proved")))
    return bool(explained["token_ids"]["outcome"] == "sample")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[list[int] | None]:
    """The ids with which chats reach engines from Envoy, None for those without."""
    seen: list[list[int] | None] = []
    answer = Generator._answer

    async def noted(
        engine: Generator, request: web.Request, body: Any, *more: Any
    ) -> web.StreamResponse:
        if "x-request-id" in request.headers and isinstance(body, ChatRequest):
            seen.append((body.kv_transfer_params or {}).get("prompt_token_ids"))
        return await answer(engine, request, body, *more)

    monkeypatch.setattr(Generator, "_answer", noted)
    return seen


async def asked(system: System, number: int) -> dict[str, Any]:
    status, _, answer = await system.send(chat(long_text(f"chat {number}")))
    assert status == 200
    return answer


@pytest.mark.parametrize("dialect", [BUFFERED, DUPLEX])
async def test_one_of_so_many_goes_without_ids_and_answers_are_the_same(
    given: list[list[int] | None], dialect: str
) -> None:
    async with handing(dialect) as system:
        given.clear()
        handed = [await asked(system, number) for number in range(2 * EVERY)]
        assert [ids is not None for ids in given] == [number % EVERY > 0 for number in range(10)]
        assert [len(ids) for ids in given if ids] == [
            one["usage"]["prompt_tokens"] for at, one in enumerate(handed) if at % EVERY
        ]
        worker = system.workers[0]
        for number, answer in enumerate(handed):
            url, body = f"{worker.url}{CHAT}", chat(long_text(f"chat {number}"))
            async with system.session.post(url, json=body) as response:
                plain = await response.json()
            assert plain["choices"] == answer["choices"]
        assert await system.metric(METRIC % "handed") == 2 * (EVERY - 1)
        assert await system.metric(METRIC % "sample") == 2


@pytest.mark.parametrize("path", PATHS)
async def test_every_api_gives_the_answer_that_it_gives_without_ids(
    given: list[list[int] | None], path: str
) -> None:
    text = long_text("an api")
    body = {"model": MODEL, PATHS[path]: text, "max_tokens": 4, "max_output_tokens": 4}
    if PATHS[path] == "messages":
        body["messages"] = [{"role": "user", "content": text}]
    async with handing() as system:
        given.clear()
        answers: list[dict[str, Any]] = []
        for url in (system.envoy, system.envoy, system.workers[0].url):
            async with system.session.post(f"{url}{path}", json=body) as response:
                assert response.status == 200, await response.text()
                answers.append(await response.json())
        _, handed, plain = map(_without_names, answers)
        assert handed == plain
        if path != "/v1/completions":
            assert [ids is not None for ids in given] == [False, True]
        assert await system.metric(METRIC % "handed") == 1


def _without_names(answer: Any) -> Any:
    """An answer without its ids and times."""
    if isinstance(answer, list):
        return [_without_names(one) for one in answer]
    if not isinstance(answer, dict):
        return answer
    return {
        name: _without_names(value)
        for name, value in answer.items()
        if name != "id" and not name.startswith("created") and not name.startswith("completed")
    }


async def test_engine_that_tokenizes_otherwise_is_noticed_by_the_next_sample(
    given: list[list[int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with handing() as system:
        for number in range(2):
            await asked(system, number)
        of_chat = ModelTokens.of_chat

        def upgraded(*given: Any, **named: Any) -> list[int]:
            return [*of_chat(*given, **named), 7]

        monkeypatch.setattr(ModelTokens, "of_chat", upgraded)
        given.clear()
        for number in range(2, 20):
            await asked(system, number)
        assert sum(ids is not None for ids in given) == EVERY - 2
        assert given[EVERY - 2 :] == [None] * (18 - EVERY + 2)
        (worker,) = await system.status()
        assert "counted" in worker["tokens"]["samples"]["refuted"]
        await until(lambda: _is_told(system), "a fault tells of it")


async def test_other_ids_of_equal_number_are_noticed_by_the_next_sample(
    given: list[list[int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with handing() as system:
        for _ in range(2):
            await asked(system, 0)
        of_chat = ModelTokens.of_chat

        def upgraded(*given: Any, **named: Any) -> list[int]:
            first, *rest = of_chat(*given, **named)
            return [first + 1, *rest]

        monkeypatch.setattr(ModelTokens, "of_chat", upgraded)
        given.clear()
        for _ in range(EVERY):
            await asked(system, 0)
        assert [ids is not None for ids in given] == [True] * (EVERY - 2) + [False] * 2
        (worker,) = await system.status()
        assert worker["tokens"]["samples"]["found_fewer"] == 1
        await until(lambda: _is_refuted(system), "golden requests show the other ids")
        given.clear()
        for number in range(10):
            await asked(system, number)
        assert given == [None] * 10


async def _is_refuted(system: System) -> bool:
    (worker,) = await system.status()
    return bool(worker["tokens"]["state"] == "refuted")


async def _is_told(system: System) -> bool:
    async with system.session.get(f"{system.admin}/faults") as response:
        return "handover-refuted" in await response.text()


async def test_worker_that_ignores_ids_gets_none_and_neither_do_others(
    given: list[list[int] | None],
) -> None:
    each = [{}, {"ignores_token_ids": True}]
    async with running(changes=HANDING, **ENGINE, each=each) as system:

        async def is_known() -> bool:
            forms = [one["tokens"]["forms"] for one in await system.status()]
            given_ids = [one[FORM_NAMES[GIVEN]]["state"] for one in forms]
            texts = {one[FORM_NAMES[CONVERSATION]]["state"] for one in forms}
            return given_ids == ["proved", "refuted"] and texts == {"proved"}

        await until(is_known, "the tokens of both are proved, but not that both take ids")
        given.clear()
        for number in range(6):
            await asked(system, number)
        assert given == [None] * 6
        assert [one["tokens"]["state"] for one in await system.status()] == ["proved"] * 2
        explained = await system.explain(chat(long_text("explained")))
        assert explained["token_ids"]["outcome"] == "unproved"
        assert system.workers[1].endpoint in explained["token_ids"]["why"]


APART = {
    "mode": "mirror",
    "connector": "offloading",
    "min_uncached_tokens": 32,
    "interference_percent": 100_000,
}


async def test_both_legs_of_a_request_get_the_ids(given: list[list[int] | None]) -> None:
    changes = HANDING | {"disaggregation": APART}
    async with running(
        roles=("prefill", "decode"),
        changes=changes,
        **ENGINE,
        decode_tokens_per_second=20.0,
    ) as system:
        await until(lambda: _may_sample(system), "the tokens of both workers are proved")
        given.clear()
        other = asyncio.create_task(system.send(chat("short") | {"max_tokens": 10_000}))
        await until(lambda: given == [None], "the decode worker is busy")
        given.clear()
        answers: list[dict[str, Any]] = []

        async def is_handed() -> bool:
            answers.append(await asked(system, len(answers)))
            return any(given)

        await until(is_handed, "ids go with a request")
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        assert given[:2] == [None, None]
        *_, first, second = given
        assert first == second
        assert len(first or ()) == answers[-1]["usage"]["prompt_tokens"]
        assert sum(worker.transfer.finished for worker in system.workers) == len(given)


async def test_engine_that_was_away_gets_a_sample_first(given: list[list[int] | None]) -> None:
    async with handing() as system:
        for number in range(2):
            await asked(system, number)
        endpoint = system.workers[0].endpoint
        await system.kill_worker(endpoint)

        async def is_away() -> bool:
            explained = await system.explain(chat(long_text("away")))
            return bool(explained["token_ids"]["outcome"] not in ("handed", "sample"))

        await until(is_away, "the router knows that the engine is away")
        await system.start_worker(endpoint)
        await until(lambda: _may_sample(system), "its tokens are proved anew")
        given.clear()
        for number in range(2, 4):
            await asked(system, number)
        assert [ids is not None for ids in given] == [False, True]
