"""Bodies that are costly to read: meanwhile, others get their decisions."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from simulator.settings import TINY_MODEL
from tests.hostile.bodies import BODIES, CHAT, Body
from tests.hostile.victim import MIB, Harm, Victim, assert_undelayed, running_victim

# As costly as a template with reasoning, tools and macros; and a conversation of 64 KiB of turns.
TEMPLATE = """{% for m in messages %}{% for i in range(60) %}{% set x = i %}{% endfor %}\
{{ m.role }}: {{ m.content | trim }}
{% endfor %}"""
TURNS = [{"role": role, "content": "a"} for _ in range(750) for role in ("user", "assistant")]
SHORT_TURNS = Body("short turns", CHAT, json.dumps({"messages": TURNS}).encode(), "")


@pytest.fixture(params=["lean", "grpcio"])
async def rendering(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Victim]:
    """A router with a tokenizer and a slow template."""
    (tmp_path / "slow.jinja").write_text(TEMPLATE)
    keys = f"tokenizer: '{TINY_MODEL}', chat_template: '{tmp_path}/slow.jinja'"
    with running_victim(request.param, tmp_path, model_keys=keys) as victim:
        yield victim
        victim.leave()


async def sent(victim: Victim, bodies: list[Body], interval_seconds: float = 0.0) -> None:
    """Sends bodies one after the other, no faster than one per interval."""
    async with victim.channel() as channel:
        for one in bodies:
            rest = asyncio.create_task(asyncio.sleep(interval_seconds))
            await victim.places(channel, one.path, one.content)
            await rest


async def harm_of(victim: Victim, bodies: list[Body], tries: int = 3) -> Harm:
    """The effects of bodies, in the try in which they held up the loop least.

    The same work takes more CPU time on a core that also runs other work.
    """
    harms: list[Harm] = []
    while len(harms) < tries and not any(harm.worst_held < 0.05 for harm in harms):
        async with victim.probed() as harm:
            await sent(victim, bodies)
        assert harm.quantile(1.0) < 2, harm
        assert harm.grown_bytes < 256 * MIB, harm
        harms.append(harm)
    return min(harms, key=lambda harm: harm.worst_held)


@pytest.mark.slow
async def test_costly_bodies_are_placed_by_load_and_hold_up_nobody(either: Victim) -> None:
    before = await either.decisions("too_many_parts")
    await sent(either, BODIES)
    costly = sum(body.reason == "too_many_parts" for body in BODIES)
    assert await either.decisions("too_many_parts") == before + costly
    harm = await harm_of(either, BODIES)
    assert harm.worst_held < 0.05, harm


@pytest.mark.slow
async def test_conversations_of_many_short_turns_hold_up_nobody(rendering: Victim) -> None:
    harm = await harm_of(rendering, [SHORT_TURNS] * 40)
    assert harm.worst_held < 0.05, harm


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES, ids=str)
async def test_three_costly_bodies_a_second_delay_no_decision(either: Victim, body: Body) -> None:
    await assert_undelayed(either, lambda: sent(either, [body] * 12, 0.33))


@pytest.mark.slow
async def test_twenty_conversations_of_short_turns_a_second_delay_no_decision(
    rendering: Victim,
) -> None:
    await assert_undelayed(rendering, lambda: sent(rendering, [SHORT_TURNS] * 80, 0.05))
