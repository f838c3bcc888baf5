"""Measures when requests go again to the worker that holds their prefix."""

import asyncio
import itertools
from typing import Any

import aiohttp

from tests.system.load import OK, post
from tests.system.stage import Stage
from tests.system.system import CHAT, chat
from tests.waiting import until

# Chance sends one in four to the right worker: one in 256 streaks is luck.
STREAK = 4
PROBES = 120
# After a miss; the pause grows each time, so that the probes last for most of a minute.
PAUSE_SECONDS = 0.02
PAUSE_GROWS = 1.1
LONGEST_PAUSE_SECONDS = 0.5

_numbers = itertools.count()


class Probes:
    """Prompts that are each held by one worker, and each sent once."""

    def __init__(self, session: aiohttp.ClientSession, stage: Stage, url: str) -> None:
        self._session = session
        self._stage = stage
        self._url = url
        self._left: list[tuple[dict[str, Any], str]] = []

    async def prepare(self, count: int = PROBES) -> None:
        """Has sound workers compute them, past the router; waits until it knows, if it is sound."""
        sound = [
            endpoint
            for endpoint, worker in zip(self._stage.endpoints, self._stage.workers, strict=True)
            if worker.is_sound
        ]
        self._left = [(_prompt(), sound[number % len(sound)]) for number in range(count)]
        outcomes = await asyncio.gather(
            *(post(self._session, f"http://{holder}", prompt) for prompt, holder in self._left)
        )
        assert {one.status for one in outcomes} == {OK}

        async def known() -> bool:
            return all([await self._is_known(*one) for one in self._left[-len(sound) :]])

        if self._stage.routers[0].is_sound:
            await until(known, "the router has heard of the probes")

    async def steered_after(self, since: float) -> float:
        """Seconds from that moment until a request that began a streak of hits was sent."""
        streak, began, pause = 0, 0.0, PAUSE_SECONDS
        while self._left:
            prompt, holder = self._left.pop()
            outcome = await post(self._session, self._url, prompt)
            if outcome.worker != holder:
                streak, pause = 0, min(LONGEST_PAUSE_SECONDS, PAUSE_GROWS * pause)
                await asyncio.sleep(pause)
                continue
            began = began if streak else outcome.started
            streak += 1
            if streak == STREAK:
                return began - since
        raise AssertionError("requests were not steered again")

    async def _is_known(self, prompt: dict[str, Any], holder: str) -> bool:
        envelope = {"path": CHAT, "headers": {}, "body": prompt}
        async with self._session.post(f"{self._stage.admin}/explain", json=envelope) as response:
            candidates = (await response.json())["candidates"]
        return any(one["endpoint"] == holder and one["overlap_tokens"] for one in candidates)


def _prompt() -> dict[str, Any]:
    """A prompt long enough that no difference in load outweighs it."""
    seed = f"probe {next(_numbers)}"
    return chat(" ".join(f"{seed} argument {number} of the parser" for number in range(150)))
