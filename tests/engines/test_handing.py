"""A real vLLM that gets token ids from the router: it answers as it does without them.

tests/engines/test_vllm.py says what is needed; ids are taken from vLLM 0.27 on.
"""

import json
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvtools.simulator.settings import TINY_MODEL
from tests.engines.test_vllm import MISSING, Body, report, router_before, text
from tests.engines.vllm_engine import CONTEXT_TOKENS, Engine, Model
from tests.system.system import CHAT, System
from tests.waiting import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

BLOCKS, EVERY, REQUESTS = 600, 16, 1_000
HANDING = {"hand_tokens": {"enabled": True, "min_tokens": 32, "sample_every": EVERY}}
METRIC = 'kvsteer_token_handovers_total{model="tiny",outcome="%s"}'
OPTIONS = {
    "--enable-auto-tool-choice": "",
    "--tool-call-parser": "hermes",
    "--reasoning-parser": "qwen3",
}

_SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
_FUNCTION = {"name": "look_up", "description": "Looks a word up.", "parameters": _SCHEMA}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_OWN = [{"name": "look_up", "description": "Looks a word up.", "input_schema": _SCHEMA}]

# What requests of an API may say besides their turns.
CHATS: tuple[Body, ...] = (
    {},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"tools": _TOOLS},
    {"tools": _TOOLS, "tool_choice": "required", "max_tokens": 24},
    {"tools": _TOOLS, "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
    {"tools": _TOOLS, "tool_choice": "none"},
    {"logprobs": True, "top_logprobs": 3},
    {"response_format": {"type": "json_object"}},
    {"return_token_ids": True},
    {"stop": ["a"], "min_tokens": 2},
    {"reasoning_effort": "low"},
    {"include_reasoning": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
)
MESSAGES: tuple[Body, ...] = ({}, {"tools": _OWN}, {"system": "Be brief.", "stop_sequences": ["a"]})
RESPONSES: tuple[Body, ...] = ({}, {"tools": [{"type": "function", **_FUNCTION}]})
COMPLETIONS: tuple[Body, ...] = ({}, {"logprobs": 3}, {"stream": True})


def requests(count: int) -> list[tuple[str, Body]]:
    """Paths and bodies of requests over all APIs; some go on from others."""
    chance, made = random.Random(7), []
    for number in range(count):
        seed = chance.randrange(1 + number)
        turns = [{"role": "user", "content": text(seed, 40)}]
        if chance.random() < 0.5:
            turns += [{"role": "assistant", "content": text(seed + 1, 10)}]
            turns += [{"role": "user", "content": text((seed, number), 20)}]
        common = {"model": "tiny", "temperature": 0}
        kind = chance.choice((CHATS, CHATS, CHATS, MESSAGES, RESPONSES, COMPLETIONS))
        own: dict[str, Any] = {**common, "max_tokens": 8, **chance.choice(kind)}
        if kind is RESPONSES:
            made.append(("/v1/responses", {**own, "input": turns, "max_output_tokens": 8}))
        elif kind is COMPLETIONS:
            made.append(("/v1/completions", {**own, "prompt": text(seed, 60)}))
        else:
            path = CHAT if kind is CHATS else "/v1/messages"
            made.append((path, {**own, "messages": turns}))
    return made


@dataclass
class Handed:
    """An engine, and the router in front of it. model: its directory."""

    engine: Engine
    system: System
    model: Path

    async def answer(self, base: str, path: str, body: Body) -> Any:
        """The whole answer, without its ids and times."""
        async with self.system.session.post(f"{base}{path}", json=body) as response:
            status, said = response.status, await response.text()
            if response.content_type == "application/json":
                return status, without_names(await response.json())
        events = [line for line in said.splitlines() if line.startswith("data: {")]
        return status, joined([json.loads(line.removeprefix("data: ")) for line in events])

    async def compared(self, path: str, body: Body) -> tuple[Any, Any]:
        """What the engine answers by itself, and through the router, from the same cache."""
        alone = f"http://{self.engine.ports.endpoint}"
        await self.answer(alone, path, body)
        return await self.answer(alone, path, body), await self.answer(
            self.system.envoy, path, body
        )

    async def outcomes(self) -> Counter[str]:
        """How many requests were handed over, and samples."""
        found = {one: await self.system.metric(METRIC % one) for one in ("handed", "sample")}
        return Counter({name: int(count) for name, count in found.items()})

    async def proved(self) -> None:
        """Waits until ids may go along, but for samples."""

        async def is_proved() -> bool:
            turns = [{"role": "user", "content": text("proved", 60)}]
            explained = await self.system.explain({"model": "tiny", "messages": turns})
            return explained["token_ids"]["outcome"] in ("sample", "handed")

        await until(is_proved, "the tokens are proved", seconds=120)


def joined(events: list[Any]) -> Any:
    """A streamed answer, whose tokens come in one event or another as the engine finds time."""
    choices = [choice for event in events for choice in event["choices"]]
    said = [one.get("delta", one) for one in choices]
    texts = [
        "".join(one.get(key) or "" for one in said)
        for key in ("text", "content", "reasoning", "reasoning_content")
    ]
    ends = [one["finish_reason"] for one in choices if one["finish_reason"]]
    return texts, ends, events[-1].get("usage")


def without_names(answer: Any) -> Any:
    """An answer without its ids and times; the signature of what a model thought is random, too."""
    if isinstance(answer, list):
        return [without_names(one) for one in answer]
    if not isinstance(answer, Mapping):
        return answer
    names = ("id", "call_id", "item_id", "request_id", "signature")
    return {
        name: without_names(value)
        for name, value in answer.items()
        if name not in names and not name.endswith("_at") and name != "created"
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def handed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Handed]:
    directory = tmp_path_factory.mktemp("handing")
    model = directory / "model"
    shutil.copytree(TINY_MODEL, model)
    engine = Engine(directory, BLOCKS, 10_000, model=Model(model, CONTEXT_TOKENS, OPTIONS))
    try:
        await engine.start()
        async with router_before(
            [engine], directory, TINY_MODEL, waits=True, policy=HANDING
        ) as one:
            yield Handed(engine, one, model)
    finally:
        await engine.kill()


async def check_same(handed: Handed, wanted: Sequence[tuple[str, Body]]) -> None:
    """Checks that all answers are the same with ids and without, and that most have ids."""
    await handed.proved()
    different: list[Any] = []
    counts = Counter[tuple[str, int]]()
    for path, body in wanted:
        plain, through = await handed.compared(path, body)
        counts[path, plain[0]] += 1
        if plain != through:
            different.append((path, body, plain, through))
    outcomes = await handed.outcomes()
    report("paths and statuses; outcomes", (dict(counts), dict(outcomes)))
    assert not different, different[:3]
    assert outcomes["handed"] > len(wanted) / 2


async def test_answers_are_the_same_with_ids_and_without(handed: Handed) -> None:
    await check_same(handed, list(requests(REQUESTS)))


async def test_engine_that_starts_anew_with_another_template_answers_by_its_own(
    handed: Handed,
) -> None:
    await handed.engine.kill()
    template = handed.model / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "\nthe end<|im_end|>"))
    await handed.engine.start()
    before = await handed.outcomes()
    for path, body in requests(60):
        if "prompt" in body:
            continue
        plain, through = await handed.compared(path, body)
        assert plain == through
    assert (await handed.outcomes())["handed"] == before["handed"]

    async def is_refuted() -> bool:
        (worker,) = await handed.system.status()
        return bool(worker["tokens"]["state"] == "refuted")

    await until(is_refuted, "golden requests show the other template", seconds=120)
