"""Bodies that are costly to read: others get their decisions meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from simulator.settings import TINY_MODEL
from tests.hostile.bodies import BODIES, CHAT, Body
from tests.hostile.victim import MIB, Harm, Victim, running_victim

# What a template with reasoning, tools and macros costs, and a conversation of 64 KiB of turns.
TEMPLATE = """{% for m in messages %}{% for i in range(60) %}{% set x = i %}{% endfor %}\
{{ m.role }}: {{ m.content | trim }}
{% endfor %}"""
TURNS = [{"role": role, "content": "a"} for _ in range(750) for role in ("user", "assistant")]
SHORT_TURNS = Body("short turns", CHAT, json.dumps({"messages": TURNS}).encode(), "")


@pytest.fixture(params=["lean", "grpcio"])
async def rendering(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Victim]:
    """A router with a tokenizer and a template that takes its time."""
    (tmp_path / "slow.jinja").write_text(TEMPLATE)
    keys = f"tokenizer: '{TINY_MODEL}', chat_template: '{tmp_path}/slow.jinja'"
    with running_victim(request.param, tmp_path, model_keys=keys) as victim:
        yield victim
        victim.leave()


async def sent(victim: Victim, bodies: list[Body], interval_seconds: float = 0.0) -> None:
    """Sends bodies one after the other, at most so often."""
    async with victim.channel() as channel:
        for one in bodies:
            rest = asyncio.create_task(asyncio.sleep(interval_seconds))
            await victim.places(channel, one.path, one.content)
            await rest


def assert_undelayed(harm: Harm, calm: Harm) -> None:
    """Decisions come in time, where this machine has them come in time without an attack."""
    assert harm.quantile(0.99) <= max(0.05, 2 * calm.quantile(1.0)), f"{harm}; calm: {calm}"
    assert harm.quantile(1.0) <= max(0.25, 4 * calm.quantile(1.0)), f"{harm}; calm: {calm}"
    assert harm.grown_bytes <= 256 * MIB, str(harm)


async def test_costly_bodies_are_placed_by_load_and_hold_up_nobody(either: Victim) -> None:
    before = await either.decisions("too_many_parts")
    async with either.probed() as harm:
        await sent(either, BODIES)
    costly = sum(body.reason == "too_many_parts" for body in BODIES)
    assert await either.decisions("too_many_parts") == before + costly
    assert harm.worst_held < 0.05, harm
    assert harm.quantile(1.0) < 2, harm
    assert harm.grown_bytes < 256 * MIB, harm


async def test_conversations_of_many_short_turns_hold_up_nobody(rendering: Victim) -> None:
    async with rendering.probed() as harm:
        await sent(rendering, [SHORT_TURNS] * 40)
    assert harm.worst_held < 0.05, harm
    assert harm.quantile(1.0) < 2, harm


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES, ids=str)
async def test_three_costly_bodies_a_second_delay_no_decision(either: Victim, body: Body) -> None:
    async with either.probed(at_least=30) as calm:
        pass
    async with either.probed(at_least=100) as harm:
        await sent(either, [body] * 30, 0.33)
    assert_undelayed(harm, calm)


@pytest.mark.slow
async def test_twenty_conversations_of_short_turns_a_second_delay_no_decision(
    rendering: Victim,
) -> None:
    async with rendering.probed(at_least=30) as calm:
        pass
    async with rendering.probed(at_least=100) as harm:
        await sent(rendering, [SHORT_TURNS] * 200, 0.05)
    assert_undelayed(harm, calm)
