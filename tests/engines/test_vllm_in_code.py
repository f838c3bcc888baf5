"""Real engines that write conversations in code, behind the router and a real Envoy.

`test_vllm` says what they need. Each starts an engine of its own, which takes a minute or more.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engines import vllm_engine
from tests.engines.code_models import Written, deepseek, gpt_oss, mistral
from tests.engines.test_vllm import router_before, text
from tests.engines.vllm_engine import BLOCK_TOKENS, Engine
from tests.system.system import System
from tests.waiting import until

MISSING = vllm_engine.missing()

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

Body = dict[str, Any]

MODELS: dict[str, Callable[[Path], Written]] = {
    "gpt-oss": gpt_oss,
    "mistral": mistral,
    "deepseek v3.2": partial(
        deepseek, architecture="DeepseekV32ForCausalLM", tokenizer_mode="deepseek_v32"
    ),
    "deepseek v4": partial(
        deepseek, architecture="DeepseekV4ForCausalLM", tokenizer_mode="deepseek_v4"
    ),
}

REQUESTS = 60
LEAST_COMPARED = 50
BLOCKS = 400
IN_CODE = "conversations that the engine renders in code"

SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
FUNCTION = {"name": "look_up", "description": "Looks a word up.", "parameters": SCHEMA}
CALL = {"id": "abcdefghi", "type": "function"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def turns(chances: random.Random, has_images: bool) -> Iterator[list[Body]]:
    """Conversations, each with its next question; some call a tool, some show an image."""
    open_ones: list[list[Body]] = []
    for number in itertools.count():
        if not open_ones or chances.random() < 0.3:
            system = {"role": "system", "content": text(number % 3, 60)}
            open_ones = [*open_ones, [system]][-5:]
        chat = chances.choice(open_ones)
        question: Any = text(chances.random(), 40)
        if has_images and chances.random() < 0.3:
            question = [{"type": "text", "text": question}, IMAGE]
        chat.append({"role": "user", "content": question})
        if chances.random() < 0.3:
            arguments = f'{{"word": "{text(chances.random(), 1)}"}}'
            function = {"name": "look_up", "arguments": arguments}
            chat.append(
                {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": function}]}
            )
            chat.append({"role": "tool", "tool_call_id": CALL["id"], "content": text(number, 30)})
        yield chat


async def form_of(system: System) -> str:
    """Whether the worker has proved that conversations are written as here."""
    (worker,) = await system.status()
    return str(worker["tokens"]["forms"].get(IN_CODE, {}).get("state"))


def asked(chat: list[Body], *, has_tools: bool) -> Body:
    body: Body = {"model": "tiny", "messages": list(chat), "max_tokens": 4, "temperature": 0}
    return {**body, "tools": [{"type": "function", "function": FUNCTION}]} if has_tools else body


async def answer_to(system: System, body: Body) -> tuple[str, int]:
    """Sends a conversation; returns the answer and the engine's count of cached tokens."""
    status, _, answer = await system.send(body)
    assert status == 200, answer
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0
    return answer["choices"][0]["message"]["content"] or "ok", cached


async def stored(system: System, body: Body) -> None:
    """Waits until the router knows that the worker holds all of a conversation."""

    async def is_stored() -> bool:
        told = await system.explain(body)
        whole = (told["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return bool(told["candidates"][0]["overlap_tokens"] == whole > 0)

    await until(is_stored, "the worker holds what was asked")


async def latest(system: System) -> Body:
    """The last decision."""
    async with system.session.get(f"{system.admin}/decisions") as shown:
        found: Body = max((await shown.json())["decisions"], key=lambda one: one["id"])
        return found


@pytest.mark.parametrize("name", MODELS)
async def test_conversations_in_code_are_proved_and_predicted(name: str, tmp_path: Path) -> None:
    written, found = MODELS[name](tmp_path / "model"), list[tuple[int, int]]()
    mode = {"tokenizer_mode": "mistral"} if name == "mistral" else {}
    models = [{"name": "tiny", "tokenizer": str(written.directory), **mode}]
    engine = Engine(tmp_path, BLOCKS, 1_000, model=written.served)
    try:
        await engine.start()
        async with router_before([engine], tmp_path, models=models) as system:

            async def is_proved() -> bool:
                return await form_of(system) == "proved"

            await until(is_proved, "golden requests prove the form")
            chats = turns(random.Random(34), has_images=name == "gpt-oss")
            for _, chat in zip(range(REQUESTS), chats, strict=False):
                body = asked(chat, has_tools=len(chat[0]["content"]) % 2 == 0)
                said, cached = await answer_to(system, body)
                chat.append({"role": "assistant", "content": said})
                decision = await latest(system)
                if decision["reason"] != "deadline":  # the engine takes all of the processor
                    found.append((decision["predicted_tokens"], cached))
                await stored(system, body)
            assert await is_proved()
    finally:
        await engine.kill()
    equal = sum(predicted == cached for predicted, cached in found)
    tokens = sum(cached for _, cached in found)
    print(f"{name}: {equal} of {len(found)} equal, {tokens} cached tokens")
    assert equal == len(found) >= LEAST_COMPARED
    assert tokens > 0
