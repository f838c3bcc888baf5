"""Real coding agents from npm, many conversations at once, through Envoy and the router."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtools import top
from tests.clients.front import Front, Turn, fronted
from tests.clients.install import MissingError, pinned
from tests.clients.rendering import PythonFrontEnd, rendering
from tests.clients.scripted_model import CALLS
from tests.clients.sessions import Session
from tests.clients.starts import CONTEXT_TOKENS, MODEL, STARTS
from tests.clients.strays import decided, strays, unexplained
from tests.clients.tools_model import write_tools_model
from tests.clients.turns import Conversations, all_converse, conversations, stays_of
from tests.engines import vllm_engine
from tests.system.system import System
from tests.tables import Table, add_row
from tests.waiting import until

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1_800)]

CONVERSATIONS = int(os.environ.get("KVSTEER_CLIENTS_CONVERSATIONS", "8"))
ANSWER_SECONDS = 2.0
BLOCK_TOKENS = 16

# Of each worker: so many that nothing is evicted.
BLOCKS = 60_000

# Why a request was placed, if its tokens were known.
KEYED = {
    "overlap",
    "uncertain_overlap",
    "speculative_overlap",
    "approximate_overlap",
    "nothing_cached",
}

RAN = Table(
    "clients",
    f"{'client':<14}{'workers':<26}{'requests':>9}{'turns that stay':>17}  by worker",
    (),
)


def missing() -> str:
    """Which client is not installed, "" if all are."""
    try:
        for name in STARTS:
            pinned().program(name)
    except MissingError as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def installed() -> None:
    """Skips the test where a client is missing."""
    if why := missing():
        pytest.skip(why)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with tools and a long context, or the one that KVSTEER_CLIENTS_MODEL names."""
    named = os.environ.get("KVSTEER_CLIENTS_MODEL")
    return Path(named) if named else write_tools_model(tmp_path / "model")


async def reasons(system: System) -> Counter[str]:
    """How many requests were placed for each reason."""
    async with system.session.get(f"{system.metrics}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        if line.startswith("kvsteer_decisions_total{") and f'model="{MODEL}"' in line:
            named, _, value = line.rpartition(" ")
            found[named.partition('reason="')[2].partition('"')[0]] += int(float(value))
    return found


def show(test: pytest.Item, kind: str, found: Conversations) -> None:
    """Adds a row for each client to the summary."""
    for client in STARTS:
        one = stays_of(client, found)
        kept = f"{one.stayed} of {one.later}"
        add_row(test, RAN, f"{client:<14}{kind:<26}{one.requests:>9}{kept:>17}  {one.spread}")


def check(sessions: Sequence[Session], fronts: Sequence[Front]) -> Conversations:
    """Checks that every conversation ended well and kept its worker; returns their turns."""
    assert [fault for front in fronts for fault in front.faults] == []
    assert [(one.name, one.code, one.printed[-2_000:]) for one in sessions if not one.is_done] == []
    found = conversations(fronts)
    assert {key: len(turns) for key, turns in found.items()} == {
        (client, number): CALLS + 1 for client in STARTS for number in range(CONVERSATIONS)
    }
    return found


async def held(system: System, last: Turn) -> None:
    """Waits until the router knows that all of a turn's usable blocks are at its worker."""
    usable = (len(last.ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    seen: list[int] = []

    async def is_held() -> bool:
        told = await system.explain(last.body, last.path)
        (one,) = (each for each in told["candidates"] if each["endpoint"] == last.worker)
        seen[:] = (told["prompt_tokens"], one["overlap_tokens"], one["uncertain_tokens"])
        return seen[:2] == [len(last.ids), usable]

    prompt = f"{last.client}-{last.number}, {len(last.ids)} tokens"
    await until(is_held, f"{prompt}: {usable} of them are known to be held")


@asynccontextmanager
async def keyed(
    model: Path, changes: dict[str, Any]
) -> AsyncIterator[tuple[PythonFrontEnd, System, list[Front]]]:
    """Workers that compute what vLLM's own renderer makes of each request."""
    async with (
        rendering(vllm_engine.PYTHON, model) as renderer,
        fronted(
            changes,
            ANSWER_SECONDS,
            renderer,
            names_engine=True,
            blocks=BLOCKS,
            block_size_tokens=BLOCK_TOKENS,
            max_model_len_tokens=CONTEXT_TOKENS,
        ) as (system, fronts),
    ):
        yield renderer, system, fronts


async def test_agents_are_keyed_exactly_and_stay_with_their_workers(
    tmp_path: Path, model: Path, request: pytest.FixtureRequest
) -> None:
    why = vllm_engine.missing()
    if why:
        pytest.skip(f"no renderer to compare with: {why}")
    changes = {
        "models": [{"name": MODEL, "tokenizer": str(model)}],
        "accounting": {"responses": "usage"},
    }
    async with keyed(model, changes) as (renderer, system, fronts):
        sessions = await all_converse(system.envoy, tmp_path / "homes", CONVERSATIONS)
        found = conversations(fronts)
        show(request.node, f"vLLM {renderer.release.partition('+')[0]}'s prompts", found)
        check(sessions, fronts)
        await asyncio.to_thread(top.run, system.admin, once=True)
        counted = await reasons(system)
        assert set(counted) <= KEYED, counted
        # the fronts share one renderer: on a busy machine queues form that are worth leaving
        assert await unexplained(system, found) == [], await decided(system, found)
        for turns in found.values():
            await held(system, turns[-1])


@pytest.mark.parametrize("client", STARTS)
async def test_conversations_of_one_client_use_all_workers_and_keep_theirs(
    tmp_path: Path, model: Path, request: pytest.FixtureRequest, client: str
) -> None:
    why = vllm_engine.missing()
    if why:
        pytest.skip(f"no renderer of prompts: {why}")
    changes = {"models": [{"name": MODEL, "tokenizer": str(model)}]}
    async with keyed(model, changes) as (_, system, fronts):
        await all_converse(system.envoy, tmp_path / "homes", CONVERSATIONS, [client])
        found = conversations(fronts)
        stays = stays_of(client, found)
        kept = f"{stays.stayed} of {stays.later}"
        add_row(
            request.node,
            RAN,
            f"{client:<14}{'one client alone':<26}{stays.requests:>9}{kept:>17}  {stays.spread}",
        )
        assert len(stays.spread) == len(fronts)
        assert max(stays.spread) <= stays.requests / 2
        assert stays.later - stays.stayed <= stays.later / 60, await decided(system, found)


async def test_agents_stay_with_workers_whose_tokens_are_not_known(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    changes = {"models": [{"name": MODEL}]}
    async with fronted(changes, ANSWER_SECONDS) as (system, fronts):
        sessions = await all_converse(system.envoy, tmp_path / "homes", CONVERSATIONS)
        found = conversations(fronts)
        show(request.node, "unknown, by their texts", found)
        check(sessions, fronts)
        assert strays(found) == {}, await decided(system, found)
