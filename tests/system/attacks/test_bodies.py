"""Bodies that are costly to read: meanwhile, others get their decisions."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtools.simulator.settings import TINY_MODEL
from tests.system.attacks.bodies import (
    BODIES,
    CHAT,
    FIELD_BODIES,
    LARGE_FIELD_BODIES,
    MEDIA_BODIES,
    Body,
)
from tests.system.attacks.victim import (
    MIB,
    Harm,
    Victim,
    assert_undelayed,
    running_victim,
)

# As costly as a template with reasoning, tools and macros; and a conversation of 64 KiB of turns.
TEMPLATE = """{% for m in messages %}{% for i in range(60) %}{% set x = i %}{% endfor %}\
{{ m.role }}: {{ m.content | trim }}
{% endfor %}"""
TURNS = [{"role": role, "content": "a"} for _ in range(750) for role in ("user", "assistant")]
SHORT_TURNS = Body("short turns", CHAT, json.dumps({"messages": TURNS}).encode(), "")


@pytest.fixture
async def rendering(tmp_path: Path) -> AsyncIterator[Victim]:
    """A router with a tokenizer and a slow template."""
    (tmp_path / "slow.jinja").write_text(TEMPLATE)
    keys = f"tokenizer: '{TINY_MODEL}', chat_template: '{tmp_path}/slow.jinja'"
    with running_victim(tmp_path, model_keys=keys) as victim:
        yield victim
        victim.leave()


# How a router changes bodies, and the keys of its worker.
MODES = {
    "pulling": ("{connector: offloading, min_pulled_tokens: 64}", "transfer_port: 5710"),
    "mirror": ("{mode: mirror, connector: offloading}", ""),
    "header": ("{mode: header}", ""),
    "none": ("{}", ""),
}


# The same code takes the fields out in every mode: all bodies in one mode, one body in all modes.
CHANGES = [
    *[("pulling", body) for body in FIELD_BODIES],
    *[(mode, FIELD_BODIES[0]) for mode in MODES if mode not in ("pulling", "none")],
]
LARGE_CHANGES = [(mode, body) for mode in MODES for body in LARGE_FIELD_BODIES]


@pytest.fixture
async def changing(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Victim]:
    """A router that takes its own fields out of bodies."""
    rules, keys = MODES[request.param]
    sections = f"disaggregation: {rules}"
    with running_victim(tmp_path, worker_keys=keys, sections=sections) as victim:
        victim.takes_fields = request.param != "none"
        yield victim
        victim.leave()


@pytest.fixture
async def isolating(tmp_path: Path) -> AsyncIterator[Victim]:
    """A router that keeps tenants apart; requests without one have a salt of their own."""
    (tmp_path / "secret").write_bytes(bytes(range(16)))
    rules = f"header: x-tenant, secret_file: '{tmp_path}/secret', without_tenant: common"
    with running_victim(tmp_path, sections=f"isolation: {{{rules}}}") as victim:
        victim.takes_fields = False
        yield victim
        victim.leave()


async def offered(victim: Victim, bodies: list[Body], interval_seconds: float) -> None:
    """Sends bodies that the router may place or refuse, but does not pass with its own fields.

    One that is too long to be read with certainty is refused with 413.
    """
    async with victim.channel() as channel:
        for one in bodies:
            rest = asyncio.create_task(asyncio.sleep(interval_seconds))
            answer = await victim.answered(channel, one.path, one.content)
            if answer.HasField("immediate_response"):
                assert answer.immediate_response.status.code in (400, 413)
            elif one.has_field and victim.takes_fields:
                new = answer.request_body.response.body_mutation.body
                assert new
                assert b"kv_transfer_params" not in new
                assert rb"bootstrap\u005froom" not in new
            await rest


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
@pytest.mark.alone
async def test_costly_bodies_are_placed_by_load_and_do_not_block_the_loop(victim: Victim) -> None:
    before = await victim.decisions("too_many_parts")
    await sent(victim, BODIES)
    costly = sum(body.reason == "too_many_parts" for body in BODIES)
    assert await victim.decisions("too_many_parts") == before + costly
    harm = await harm_of(victim, BODIES)
    assert harm.worst_held < 0.05, harm


@pytest.mark.slow
@pytest.mark.alone
async def test_conversations_of_many_short_turns_do_not_block_the_loop(rendering: Victim) -> None:
    harm = await harm_of(rendering, [SHORT_TURNS] * 40)
    assert harm.worst_held < 0.05, harm


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("body", BODIES, ids=str)
async def test_costly_bodies_at_three_a_second_delay_no_decision(
    victim: Victim, body: Body
) -> None:
    await assert_undelayed(victim, lambda: sent(victim, [body] * 12, 0.33))


@pytest.mark.slow
@pytest.mark.alone
async def test_conversations_of_short_turns_at_twenty_a_second_delay_no_decision(
    rendering: Victim,
) -> None:
    await assert_undelayed(rendering, lambda: sent(rendering, [SHORT_TURNS] * 80, 0.05))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(("changing", "body"), CHANGES, indirect=["changing"], ids=str)
async def test_edited_bodies_delay_no_decision(changing: Victim, body: Body) -> None:
    await assert_undelayed(changing, lambda: offered(changing, [body] * 8, 0.5))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(("changing", "body"), LARGE_CHANGES, indirect=["changing"], ids=str)
async def test_large_bodies_at_two_a_second_delay_no_decision_in_any_mode(
    changing: Victim, body: Body
) -> None:
    await assert_undelayed(changing, lambda: offered(changing, [body] * 8, 0.5))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("body", MEDIA_BODIES, ids=str)
async def test_large_bodies_of_one_tenant_delay_no_decision_of_others(
    isolating: Victim, body: Body
) -> None:
    await assert_undelayed(isolating, lambda: offered(isolating, [body] * 8, 0.5))
