"""Real coding agents whose requests wait in the router for two minutes, or that it refuses."""

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from extproc.requests.refusals import NO_ROOM_SECONDS
from tests.clients.front import RELEASE, Front
from tests.clients.install import MissingError, pinned
from tests.clients.reluctant_model import Attempt, reluctant
from tests.clients.sessions import Session, converse
from tests.clients.starts import CONTEXT_TOKENS, MODEL, STARTS
from tests.clients.tools_model import write_tools_model
from tests.system.gateway import served
from tests.system.system import System, long_text, running
from tests.tables import Table, add_row
from tests.waiting import until

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(900)]

# Two minutes and a little, to see who waits for two minutes exactly.
HELD_SECONDS = 125.0

# Longer, since clients do not start at the same moment.
BOUND_SECONDS = 180

# Clients that cut a request after two minutes, and the variables with which they wait on.
IMPATIENT = {"qwen-code": {"QWEN_CODE_API_TIMEOUT_MS": "600000"}}

# How long a client may go on trying, and how often each of them tries at least.
TRYING_SECONDS = 180.0
LEAST_TRIES = 4

# Clients that come again when they themselves think fit, whatever `Retry-After` says.
HASTY = {"pi"}

NO_VARIABLES: Mapping[str, Mapping[str, str]] = {}

CHATS = "chats"
HOLD = {
    "classes": {
        "header": "x-class",
        "default": "agents",
        "of": [{"name": CHATS, "priority": 0}, {"name": "agents", "priority": 10}],
    },
    "hold": {"enabled": True, "bound_seconds": BOUND_SECONDS, "classes": ["agents"]},
}

# A chat fills most of a cache of so many blocks, two do not fit.
BLOCKS = 2_560
CHAT_TOKENS = 36_000
CHAT_TURNS = 60
PAUSE_SECONDS = 1.0

REFUSED = Table("refused with 429", "client", ())


@pytest.fixture(autouse=True)
def installed() -> None:
    """Skips the test where a client is missing."""
    try:
        for name in STARTS:
            pinned().program(name)
    except MissingError as error:
        pytest.skip(str(error))


async def complete(system: System, ids: list[int], **headers: str) -> None:
    """Sends a prompt through Envoy."""
    body = {"model": MODEL, "prompt": ids, "max_tokens": 1}
    url = f"{system.envoy}/v1/completions"
    async with system.session.post(url, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()


async def chat(system: System) -> None:
    """Has two chats take turns for ever; their requests never wait."""
    random = Random(1)
    while True:
        prompts = [random.choices(range(1, 400), k=CHAT_TOKENS) for _ in range(2)]
        for _ in range(CHAT_TURNS):
            for ids in prompts:
                await complete(system, ids, **{"x-class": CHATS})
                ids.extend(random.choices(range(1, 400), k=16))
                await asyncio.sleep(PAUSE_SECONDS)


async def begin(system: System) -> None:
    """Begins one conversation after the other."""
    random = Random(0)
    while True:
        await complete(system, random.choices(range(1, 400), k=2_000))
        await asyncio.sleep(PAUSE_SECONDS)


async def held(system: System) -> float:
    """How many requests wait in the router."""
    return await system.metric(f'kvsteer_held_requests{{model="{MODEL}"}}')


async def ended(system: System, outcome: str) -> float:
    """How many waits have ended so."""
    return await system.metric(f'kvsteer_holds_total{{model="{MODEL}",outcome="{outcome}"}}')


@contextlib.asynccontextmanager
async def crowded(system: System) -> AsyncIterator[None]:
    """Has chats fill a cache several times, so that who begins must wait."""
    chats, beginner = (asyncio.create_task(run(system)) for run in (chat, begin))
    try:
        await until(lambda: held(system), "one who begins is held")
        beginner.cancel()
        await until(lambda: ended(system, "left"), "it is given up")
        yield
    finally:
        for task in (chats, beginner):
            task.cancel()
        await asyncio.gather(chats, beginner, return_exceptions=True)


async def leave_only(system: System, endpoint: str) -> None:
    """Has one worker get all that comes."""
    for one in await system.status():
        asked = {"endpoint": one["endpoint"], "draining": one["endpoint"] != endpoint}
        async with system.session.post(f"{system.admin}/draining", json=asked) as answer:
            assert answer.status == 200, await answer.text()


async def lose_cache(system: System, front: Front) -> None:
    """Has the worker behind a front lose its cache, and waits until the router knows."""
    assert front.worker is not None
    live = f'kvsteer_live_context_tokens{{model="{MODEL}",worker="{front.endpoint}"}}'
    assert await system.metric(live) > 0
    async with system.session.post(f"{front.worker.url}/reset_prefix_cache") as answer:
        assert answer.status == 200
    await system.serve(front.worker, long_text("tells it"))  # events come with the next prompt
    await until(lambda: _is_zero(system, live), "the router knows that the cache is lost")


async def _is_zero(system: System, line: str) -> bool:
    return await system.metric(line) == 0


@contextlib.asynccontextmanager
async def two_workers(folder: Path) -> AsyncIterator[tuple[System, str, Front]]:
    """A worker whose cache chats fill, its endpoint, and the front of one that answers agents."""
    front = Front(0.0, None, names_engine=True)
    waiting = itertools.count()

    def proxied(worker: Any) -> str:
        if next(waiting) == 0:
            return str(worker.endpoint)
        front.worker = worker
        return front.endpoint

    model = write_tools_model(folder / "model")
    changes = {"models": [{"name": MODEL, "tokenizer": str(model)}], "policy": HOLD}
    each = [{"blocks": BLOCKS}, {}]
    most: dict[str, Any] = {
        "max_model_len_tokens": CONTEXT_TOKENS,
        "model_dir": model,
        "engine_version": RELEASE,
    }
    async with (
        served(front.app(), front.port),
        running(changes=changes, proxied=proxied, each=each, **most) as system,
    ):
        yield system, system.workers[0].endpoint, front


@contextlib.asynccontextmanager
async def conversing(
    url: str, folder: Path, variables: Mapping[str, Mapping[str, str]] = NO_VARIABLES
) -> AsyncIterator[list[asyncio.Task[Session]]]:
    """Runs a conversation of each client, all at once. variables: more of them, by client."""
    tasks = [
        asyncio.create_task(converse(name, 0, url, folder / "homes", variables.get(name, {})))
        for name in STARTS
    ]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def stay_held(system: System) -> float:
    """Waits until all clients are held, and then for two minutes; returns how many have left."""
    before = await ended(system, "left")
    await until(lambda: _all_held(system), "all clients are held")
    await asyncio.sleep(HELD_SECONDS)
    await until(lambda: _all_held(system), "all clients are held again")
    return await ended(system, "left") - before


async def _all_held(system: System) -> bool:
    return await held(system) >= len(STARTS)


async def finish(tasks: list[asyncio.Task[Session]]) -> None:
    """Waits until all conversations have ended well."""
    sessions = await asyncio.gather(*tasks)
    assert [(one.name, one.code, one.printed[-2_000:]) for one in sessions if not one.is_done] == []


async def test_agents_whose_first_turn_is_held_for_two_minutes_finish(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (system, full, front):
        await leave_only(system, full)
        async with crowded(system), conversing(system.envoy, tmp_path) as tasks:
            assert await stay_held(system) == len(IMPATIENT)  # they have come again
            assert not [one for one in front.turns if one.is_agent]
            await leave_only(system, front.endpoint)
            await finish(tasks)


async def test_agents_whose_second_turn_is_held_for_two_minutes_finish(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (system, full, front):
        await leave_only(system, front.endpoint)
        front.may_answer.clear()
        async with conversing(system.envoy, tmp_path, IMPATIENT) as tasks:

            def have_asked() -> set[str]:
                return {one.client for one in front.turns if one.is_agent}

            await until(lambda: have_asked() == set(STARTS), "all clients have asked", seconds=120)
            await leave_only(system, full)
            async with crowded(system):
                await lose_cache(system, front)
                front.may_answer.set()
                assert await stay_held(system) == 0
                await leave_only(system, front.endpoint)
                await finish(tasks)


class Refused(NamedTuple):
    """A client that was refused. session: None if it still tried when it was ended."""

    client: str
    session: Session | None
    attempts: Sequence[Attempt]
    seconds: float

    def __str__(self) -> str:
        asked = [f"{one.began_at - self.attempts[0].began_at:.0f}" for one in self.attempts]
        how = "still tries" if self.session is None else f"ends with {self.session.code}"
        if self.session is not None and self.session.is_done:
            how = "is done"
        return f"{self.client:<14}{how} after {self.seconds:.0f} s; asked at {', '.join(asked)} s"


async def refused(client: str, folder: Path, refusals: float) -> Refused:
    """Runs a conversation of a client with a model that refuses its first turns."""
    session = None
    async with reluctant(refusals=refusals) as model:
        with contextlib.suppress(TimeoutError):
            talk = converse(client, 0, model.url, folder)
            session = await asyncio.wait_for(talk, TRYING_SECONDS)
        turns = [one for one in model.attempts if one.is_agent]
        return Refused(client, session, turns, time.monotonic() - turns[0].began_at)


async def all_refused(
    folder: Path, refusals: float, request: pytest.FixtureRequest
) -> list[Refused]:
    """Runs a conversation of each client, all at once, and shows what they did."""
    found = await asyncio.gather(*(refused(name, folder, refusals) for name in STARTS))
    for one in found:
        add_row(request.node, REFUSED, str(one))
    return found


async def test_agents_that_are_refused_once_come_again_and_finish(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    for one in await all_refused(tmp_path, 1, request):
        assert one.session is not None
        assert one.session.is_done, one.session.printed[-2_000:]
        first, second = one.attempts[:2]
        has_waited = second.began_at - first.began_at >= NO_ROOM_SECONDS
        assert has_waited is (one.client not in HASTY), one


async def test_agents_that_are_always_refused_try_several_times(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    for one in await all_refused(tmp_path, math.inf, request):
        assert len(one.attempts) >= LEAST_TRIES, one
