"""A real SGLang that gets token ids from the router: it answers as it does without them.

KVSTEER_SGLANG_SERVER names an interpreter with SGLang 0.5.23 or later that can serve here. On a CPU
without SGLang's own kernels, a module that stands in for `sgl_kernel` does, since none is called.
"""

import random
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.requests.prompt import CONVERSATION, FORM_NAMES, GIVEN
from kvtools.simulator.settings import TINY_MODEL
from tests.engines import sglang_engine
from tests.engines.sglang_engine import TINY, SglangEngine
from tests.engines.test_handing import BLOCKS, CHATS, HANDING, Handed, check_same
from tests.engines.test_vllm import Body, router_before, text
from tests.engines.vllm_engine import Model
from tests.system.system import CHAT
from tests.waiting import until

MISSING = sglang_engine.missing()
REQUESTS = 300

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

PARSERS = {"--reasoning-parser": "qwen3", "--tool-call-parser": "qwen25"}

# What its chat completions do not take while they are streamed.
OWN: tuple[Body, ...] = (
    {"return_prompt_token_ids": True},
    {"ignore_eos": True, "max_tokens": 12},
    {"separate_reasoning": False},
    {"skip_special_tokens": False},
    {"logit_bias": {"2": 100}},
    {"stop_token_ids": [5, 6]},
)
COMPLETIONS: tuple[Body, ...] = ({}, {"logprobs": 3}, {"stop": ["a"]}, {"ignore_eos": True})


def requests(count: int) -> list[tuple[str, Body]]:
    """Paths and bodies of requests, most of them chat completions; some go on from others."""
    chance, made = random.Random(7), []
    for number in range(count):
        seed = chance.randrange(1 + number)
        common = {"model": "tiny", "temperature": 0, "max_tokens": 8}
        turns = [{"role": "user", "content": text(seed, 40)}]
        if chance.random() < 0.5:
            turns += [{"role": "assistant", "content": text(seed + 1, 10)}]
            turns += [{"role": "user", "content": text((seed, number), 20)}]
        if chance.random() < 0.2:
            own = {**common, **chance.choice(COMPLETIONS), "prompt": text(seed, 60)}
            made.append(("/v1/completions", own))
        else:
            own = {**common, **chance.choice((*CHATS, *OWN)), "messages": turns}
            made.append((CHAT, own))
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def handed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Handed]:
    directory = tmp_path_factory.mktemp("handing")
    model = Model(TINY.directory, TINY.context_tokens, PARSERS, TINY.environment)
    engine = SglangEngine(directory, BLOCKS, model=model)
    try:
        await engine.start()
        async with router_before(
            [engine], directory, TINY_MODEL, waits=True, policy=HANDING
        ) as one:
            yield Handed(engine, one, TINY_MODEL)
    finally:
        await engine.kill()


async def test_answers_are_the_same_with_ids_and_without(handed: Handed) -> None:
    await check_same(handed, requests(REQUESTS))


# As SGLang's own "chatml" writes conversations without tools.
_CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant."
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant{{ '\\n' }}"
)


async def test_template_of_sglangs_own_keeps_ids_here(tmp_path: Path) -> None:
    """It ends answers by stop words, which are left out where ids come along."""
    template = tmp_path / "chatml.jinja"
    template.write_text(_CHATML)
    options = {"--chat-template": "chatml"}
    model = Model(TINY.directory, TINY.context_tokens, options, TINY.environment)
    engine = SglangEngine(tmp_path, BLOCKS, model=model)
    models = [{"name": "tiny", "tokenizer": str(TINY_MODEL), "chat_template": str(template)}]
    try:
        await engine.start()
        async with router_before(
            [engine], tmp_path, TINY_MODEL, waits=True, policy=HANDING, models=models
        ) as system:
            alone = Handed(engine, system, TINY_MODEL)
            for path, body in requests(40):
                plain, through = await alone.compared(path, body)
                assert plain == through
            news = count()
            await until(lambda: _knows(alone, next(news)), "its tokens are proved by its stores")
            turns = [{"role": "user", "content": text("own", 60)}]
            explained = await system.explain({"model": "tiny", "messages": turns})
            assert explained["token_ids"]["outcome"] == "unproved"
    finally:
        await engine.kill()


async def _knows(handed: Handed, new: int) -> bool:
    turns = [{"role": "user", "content": text(("new", new), 60)}]
    body = {"model": "tiny", "messages": turns, "max_tokens": 1}
    await handed.answer(handed.system.envoy, CHAT, body)
    (worker,) = await handed.system.status()
    forms = worker["tokens"]["forms"]
    proved = (CONVERSATION, GIVEN)
    return all(forms[FORM_NAMES[one]]["state"] == "proved" for one in proved)
