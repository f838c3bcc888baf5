"""Faults of real vLLM engines while token ids go along: no answer changes once one is noticed.

tests/engines/test_vllm.py says what is needed.
"""

import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.requests.prompt import CONVERSATION, FORM_NAMES, GIVEN
from kvtools.simulator.settings import TINY_MODEL
from tests.engines.front_proxy import before
from tests.engines.test_handing import BLOCKS, EVERY, HANDING, Handed, without_names
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

# What another release of the model writes at each turn's end: more tokens, or another token.
ENDS = {"more": "\nthe end<|im_end|>", "another": "<|endoftext|>"}


@dataclass
class Engines:
    """An engine, and others with the same weights whose template differs, by how it differs."""

    plain: Engine
    others: dict[str, Engine]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    directory = tmp_path_factory.mktemp("faults")
    made = [Engine(directory, BLOCKS, 10_000)]
    for name, end in ENDS.items():
        model = directory / name
        shutil.copytree(TINY_MODEL, model)
        template = model / "chat_template.jinja"
        template.write_text(template.read_text().replace("<|im_end|>", end))
        made.append(Engine(directory, BLOCKS, 10_000, model=Model(model, CONTEXT_TOKENS)))
    try:
        for engine in made:  # one after the other: each takes the whole machine
            await engine.start()
        yield Engines(made[0], dict(zip(ENDS, made[1:], strict=True)))
    finally:
        for engine in made:
            await engine.kill()


def chat(number: int) -> Body:
    """One of eight conversations with as many turns as they were asked before.

    The answer shows the ids of its prompt, by which a changed one is known: a model of random
    weights may say the same of other prompts.
    """
    at, turns = number % 8, number // 8
    said = [{"role": "user", "content": text(at, 40)}]
    for turn in range(turns):
        said += [{"role": "assistant", "content": text((at, turn), 8)}]
        said += [{"role": "user", "content": text((turn, at), 8)}]
    shown = {"return_token_ids": True}
    return {"model": "tiny", "messages": said, "temperature": 0, "max_tokens": 12, **shown}


async def said_by(system: System, base: str, number: int) -> object:
    async with system.session.post(f"{base}{CHAT}", json=chat(number)) as answer:
        assert answer.status == 200, await answer.text()
        found = await answer.json()
        return found["prompt_token_ids"], without_names(found["choices"])


@pytest.mark.parametrize("ends", ENDS)
async def test_engine_that_another_one_replaces_unseen_is_noticed_by_the_next_sample(
    engines: Engines, tmp_path: Path, ends: str
) -> None:
    """Its feed stays, and so does its address: no restart is seen."""
    other = engines.others[ends]
    async with (
        before(engines.plain) as proxy,
        router_before([proxy], tmp_path, TINY_MODEL, waits=True, policy=HANDING) as system,
    ):
        one = Handed(engines.plain, system, TINY_MODEL)
        await one.proved()
        for number in range(40):
            alone = f"http://{engines.plain.ports.endpoint}"
            assert await said_by(system, alone, number) == await said_by(
                system, system.envoy, number
            )
        assert (await one.outcomes())["handed"] > 20
        proxy.engine = other
        said, handed = {}, [(await one.outcomes())["handed"]]
        for number in range(40, 100):
            said[number] = await said_by(system, system.envoy, number)
            handed.append((await one.outcomes())["handed"])
        last = 40 + handed.index(handed[-1])  # the first request after the last one with ids
        changed = [
            number
            for number, answer in said.items()
            if answer != await _from_its_cache(system, other, number)
        ]
        report("changed answers; the first without ids for good", (ends, changed, last))
        assert changed
        assert max(changed) < last < 40 + EVERY


async def _from_its_cache(system: System, engine: Engine, number: int) -> object:
    alone = f"http://{engine.ports.endpoint}"
    await said_by(system, alone, number)
    return await said_by(system, alone, number)


async def test_engine_behind_a_proxy_that_takes_the_field_out_gets_no_ids(
    engines: Engines, tmp_path: Path
) -> None:
    async with before(engines.plain) as proxy:
        proxy.strips = "kv_transfer_params"
        async with router_before(
            [proxy], tmp_path, TINY_MODEL, waits=True, policy=HANDING
        ) as system:
            await until(lambda: _are(system, {CONVERSATION: "proved", GIVEN: "refuted"}), "known")
            for number in range(20):
                alone = f"http://{engines.plain.ports.endpoint}"
                own = await said_by(system, alone, number)
                assert own == await said_by(system, system.envoy, number)
            assert not (await Handed(engines.plain, system, TINY_MODEL).outcomes()).total()
            (worker,) = await system.status()
            assert worker["tokens"]["state"] == "proved"


async def _are(system: System, states: dict[int, str], at: int = 0) -> bool:
    forms = (await system.status())[at]["tokens"]["forms"]
    return all(forms[FORM_NAMES[form]]["state"] == state for form, state in states.items())


@pytest.mark.parametrize("ends", ENDS)
async def test_worker_of_two_with_another_template_keeps_ids_from_both(
    engines: Engines, tmp_path: Path, ends: str
) -> None:
    both = [engines.plain, engines.others[ends]]
    async with router_before(both, tmp_path, TINY_MODEL, waits=True, policy=HANDING) as system:
        await until(lambda: _are(system, {CONVERSATION: "refuted"}, 1), "one differs")
        for number in range(20):
            answers = [
                await said_by(system, f"http://{one.ports.endpoint}", number) for one in both
            ]
            assert await said_by(system, system.envoy, number) in answers
        outcomes = await Handed(engines.plain, system, TINY_MODEL).outcomes()
        assert not outcomes.total()
