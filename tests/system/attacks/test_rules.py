"""Every rule, broken over a real socket: the code is right, and nothing else is affected."""

import asyncio

import pytest

from tests.system.attacks.peer import GREETING, Peer
from tests.system.attacks.rules import PREFACES, RULES, Rule
from tests.system.attacks.victim import Victim


async def broken(peer: Peer, rule: Rule, greeting: bytes) -> None:
    """Breaks the rule, and checks the reaction."""
    peer.send(greeting, rule.before)
    if rule.before:
        await peer.seen()
        peer.frames.clear()
    peer.send(rule.sent)
    await peer.seen()
    if rule.goaway is not None:
        assert not peer.is_answered()
        await peer.ended()
        assert peer.goaway == rule.goaway
        return
    assert peer.goaway is None
    assert peer.is_answered()
    assert [code for stream, code in peer.resets if stream == 1] == (
        [] if rule.reset is None else [rule.reset]
    )


@pytest.mark.parametrize("rule", RULES, ids=str)
async def test_broken_rule_is_answered_with_its_error_code(victim: Victim, rule: Rule) -> None:
    await broken(await victim.connect(), rule, GREETING)


@pytest.mark.parametrize("rule", PREFACES, ids=str)
async def test_wrong_greeting_ends_the_connection(victim: Victim, rule: Rule) -> None:
    await broken(await victim.connect(), rule, b"")


async def test_broken_rules_all_at_once_affect_no_other_peer(victim: Victim) -> None:
    async with victim.unharmed():
        peers = [await victim.connect() for _ in RULES]
        for peer, rule in zip(peers, RULES, strict=True):
            peer.send(GREETING, rule.before, rule.sent)
            peer.half_close()
        await asyncio.gather(*(peer.ended() for peer in peers))
