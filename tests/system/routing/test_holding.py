"""More conversations than the caches hold: some wait in the router, behind a real Envoy."""

import asyncio
import contextlib
import itertools
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.system.system import System, chat, long_text, running
from tests.waiting import until

pytestmark = [pytest.mark.slow]

BOUND_SECONDS = 2
AGENTS = 10

# So long that what a worker evicted is known by then: it is expected to hold what was just sent.
PAUSE_SECONDS = 1.5
HOLD = {"policy": {"hold": {"enabled": True, "bound_seconds": BOUND_SECONDS}}}


class Agents:
    """Agents that ask all the time, each in a conversation of its own. answers: by status."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.answers: Counter[int] = Counter()
        self.odd: list[str] = []

    async def ask(self, number: int) -> None:
        for conversation in itertools.count():
            body = chat(" ".join(long_text(f"{number} {conversation} {part}") for part in range(8)))
            for _ in range(6):
                body["messages"] += [{"role": "user", "content": "go on"}]
                await self._answered(body)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _answered(self, body: dict[str, Any]) -> None:
        status = 429
        while status == 429:
            status, _, answer = await self._system.send(body)
            self.answers[status] += 1
            if status not in (200, 429):
                self.odd.append(str(answer))
            elif status == 429:
                assert "keeps its place" in str(answer)


@contextlib.asynccontextmanager
async def asking(system: System) -> AsyncIterator[Agents]:
    """Agents that fill the caches of the workers several times."""
    agents = Agents(system)
    tasks = [asyncio.create_task(agents.ask(number)) for number in range(AGENTS)]
    try:
        yield agents
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ended(system: System) -> Counter[str]:
    """How the waits ended so far."""
    async with system.session.get(f"{system.metrics}/metrics") as response:
        text = await response.text()
    found = re.findall(r'^kvsteer_holds_total\{.*outcome="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return Counter({outcome: int(float(count)) for outcome, count in found})


async def test_conversations_that_evict_each_other_wait_in_turn_and_none_is_lost() -> None:
    async with running(workers=2, blocks=320, changes=HOLD) as system, asking(system) as agents:

        async def some_waited() -> bool:
            waits = await ended(system)
            return waits["let_in"] + waits["placed"] > 0 and waits["refused"] > 0

        await until(some_waited, "some waited, and some in vain", seconds=120)
        assert agents.answers[200] > agents.answers[429]
        assert not agents.odd


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_requests_that_wait_go_on_when_the_router_ends(end: signal.Signals) -> None:
    async with running(workers=2, blocks=320, changes=HOLD) as system, asking(system) as agents:

        async def some_wait() -> bool:
            return await system.metric('kvsteer_held_requests{model="tiny"}') > 0

        await until(some_wait, "some wait", seconds=120)
        await system.stop_router(end)
        before = agents.answers[200]
        await until(lambda: agents.answers[200] > before + 2 * AGENTS, "all go on", seconds=60)
        assert not agents.odd
