"""Real engines of hybrid and drafting models, under eviction: they report what was predicted from
their events.

`test_vllm` says what they need. Each starts an engine of its own, which takes a minute or more.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from extproc.base.engine import Engine as Release
from extproc.base.engine import release_of
from extproc.fleet.feeds.reuse import rules_by_release
from kvstate.feeds.feed import FeedState
from kvstate.feeds.feed_sources import ZmqSource
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Overlap, Prompt, Tokens, usable_tokens
from kvtools.simulator.settings import TINY_MODEL
from tests.engines import vllm_engine
from tests.engines.hybrid_models import EAGLE, GEMMA, QWEN, make_model
from tests.engines.vllm_engine import Engine, Model
from tests.waiting import until

MISSING = vllm_engine.missing()

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

REQUESTS = 150
LEAST_EQUAL = 0.98
MOST_BLOCK_TOKENS = 700
WORKER = "w"


class Case(NamedTuple):
    """blocks: of the cache, few enough that it turns over. piece: tokens of a piece of a prompt."""

    config: Mapping[str, Any]
    blocks: int
    context_tokens: int
    piece: int
    has_draft: bool = False


CASES = {
    "gemma 3": Case(GEMMA, 420, 1536, 200),
    "qwen 3 next": Case(QWEN, 60, 4096, 640),
    "eagle": Case(EAGLE, 120, 1024, 150, has_draft=True),
}


def model_of(case: Case, directory: Path) -> Model:
    made = make_model(directory, case.config)
    if not case.has_draft:
        return Model(made, case.context_tokens)
    draft = {"method": "eagle", "model": str(made), "num_speculative_tokens": 2}
    given = {**draft, "draft_load_config": {"load_format": "dummy"}}
    options = {"--speculative-config": json.dumps(given)}
    return Model(TINY_MODEL, case.context_tokens, options)


def prompts(case: Case, chances: random.Random) -> Iterator[list[int]]:
    """Conversations with a few shared beginnings, their turns, and branches of them."""

    def piece(length: int) -> list[int]:
        return [chances.randrange(10, 8000) for _ in range(length)]

    beginnings = [piece(case.piece) for _ in range(3)]
    open_ones: list[list[int]] = []
    for _ in range(REQUESTS):
        if not open_ones or chances.random() < 0.3:
            open_ones = [*open_ones, chances.choice(beginnings)][-6:]
        at = chances.randrange(len(open_ones))
        if chances.random() < 0.2:
            kept = chances.randrange(1, len(open_ones[at]) + 1)
            open_ones[at] = open_ones[at][:kept]
        prompt = open_ones[at] + piece(chances.randrange(5, case.piece))
        if len(prompt) > case.context_tokens - 16:
            prompt = chances.choice(beginnings) + piece(20)
        open_ones[at] = prompt
        yield prompt


async def cached_tokens(session: aiohttp.ClientSession, engine: Engine, ids: Sequence[int]) -> int:
    body = {"model": "tiny", "prompt": ids, "max_tokens": 1, "temperature": 0}
    url = f"http://{engine.ports.endpoint}/v1/completions"
    async with session.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        details = (await answer.json())["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"] or 0)


async def follow(
    session: aiohttp.ClientSession, engine: Engine, draft_drop: int
) -> FollowedWorkers:
    """Follows an engine's feed by the rules of its release."""
    async with session.get(f"http://{engine.ports.endpoint}/version") as answer:
        release = release_of((await answer.json())["version"])
    assert release is not None
    events, replay = (
        f"tcp://127.0.0.1:{port}" for port in (engine.ports.events, engine.ports.replay)
    )
    fleet = FollowedWorkers(12345678, lambda: 0.0)
    fleet.add(WORKER, "tiny", [ZmqTransport(ZmqSource(events, replay, ""))])
    rules = rules_by_release(Release("vllm", release))
    fleet.blocks.note_rules(WORKER, rules._replace(draft_drop=draft_drop))
    await until(lambda: fleet.feeds.state(WORKER) is FeedState.LIVE)
    return fleet


async def settle(session: aiohttp.ClientSession, engine: Engine, fleet: FollowedWorkers) -> None:
    """Waits until all events are applied: until those of a prompt that nobody else sends are.

    The prompt is one block, so that the engine computes it in one step and announces all that this
    removes and stores in one message: for a token more, Mamba's aligned states take a second step,
    which removes other prompts' blocks in a later message that stores nothing.
    """
    length = fleet.blocks.block_size(WORKER) or MOST_BLOCK_TOKENS
    ids = random.choices(range(10, 8000), k=length)
    await cached_tokens(session, engine, ids)
    prompt = Prompt("tiny", Tokens("I", [*ids, 10]))

    def is_stored() -> bool:
        held = fleet.blocks.overlaps(prompt).get(WORKER)
        return held is not None and held.held_tokens >= usable_tokens(
            prompt.tokens, held.block_size
        )

    await until(is_stored)


@pytest.mark.parametrize("name", CASES)
async def test_predictions_equal_what_is_reported(name: str, tmp_path: Path) -> None:
    case, errors, removals = CASES[name], list[int](), 0
    engine = Engine(tmp_path, case.blocks, 10_000, model=model_of(case, tmp_path / "model"))
    try:
        await engine.start()
        async with aiohttp.ClientSession() as session:
            fleet = await follow(session, engine, int(case.has_draft))
            for ids in prompts(case, random.Random(35)):
                prompt = Prompt("tiny", Tokens("I", ids))

                predicted = fleet.blocks.overlaps(prompt).get(WORKER, Overlap(1)).certain_tokens
                errors.append(predicted - await cached_tokens(session, engine, ids))
                await settle(session, engine, fleet)
            removals = sum(
                feed.counts.get("removed_unknown", 0) for feed in fleet.feeds.statuses(WORKER)
            )
            await fleet.close()
    finally:
        await engine.kill()
    print(f"{name}: {errors.count(0)} of {len(errors)} equal; {[one for one in errors if one]}")
    assert max(errors) == 0, "nothing that is certain is too high"
    assert errors.count(0) >= LEAST_EQUAL * len(errors)
    assert removals == 0
