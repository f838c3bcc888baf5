"""Coding agents' conversations at once, on workers whose tokens are not known."""

import asyncio

from tests.agents import claude_code
from tests.system.system import System, running
from tests.waiting import until

BLIND = {"models": [{"name": "tiny"}]}
CONVERSATIONS, TURNS = 8, 4


async def worker_of(system: System, body: dict[str, object]) -> str:
    """The worker that answers."""
    async with system.session.post(f"{system.envoy}/v1/messages", json=body) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
        return answer.headers["x-worker"]


async def test_every_turn_reaches_its_conversations_worker_without_known_tokens() -> None:
    asked = [claude_code(number, TURNS) for number in range(CONVERSATIONS)]
    found = []
    async with running(workers=3, changes=BLIND) as system:
        for _ in range(TURNS):
            bodies = [next(each) for each in asked]
            found.append(await asyncio.gather(*[worker_of(system, one) for one in bodies]))
            await until(lambda: system.in_flight(0), "no request in flight")
        async with system.session.get(f"{system.admin}/decisions") as answer:
            told = (await answer.json())["decisions"]
    assert all(turn == found[0] for turn in found)
    assert len(set(found[0])) > 1
    later = [one for one in told if one["decided_by"] == "texts"]
    assert len(later) >= CONVERSATIONS * (TURNS - 1)
    assert all("the record of texts decided" in one["why"] for one in later)
