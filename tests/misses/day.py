"""A day of chats with a fleet in which things happen: every prompt token has one cause.

The day's hours are left out: requests are sent as fast as they are answered, a few at a time, in
the order in which they would have come.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from tests.clients.starts import CONTEXT_TOKENS
from tests.system.system import System, running
from tests.waiting import until

CHANGES: dict[str, Any] = {"accounting": {"responses": "usage"}, "misses": {"enabled": True}}

BLOCK_TOKENS = 16
WORKERS = 3

# Of each worker: less than the chats of a day need, so that blocks are evicted.
BLOCKS = 1_500

AT_ONCE = 8
_SYSTEM_TOKENS, _LEAST, _MOST = 600, 40, 900
_MOST_TURNS = 12

# So many requests pass between two things that happen.
_EVERY = 40


class Request(NamedTuple):
    """A turn of a chat. words: of its prompt, as token ids."""

    chat: int
    ids: Sequence[int]


class Counted(NamedTuple):
    """What engines reported of a day, and what verdicts say of it.

    prompt_tokens, cached_tokens: as engines reported them. tokens: of the verdicts, by cause.
    short: verdicts whose tokens are not their prompt's.
    """

    requests: int
    prompt_tokens: int
    cached_tokens: int
    tokens: Counter[str]
    verdicts: int
    short: int


def day_of(rng: Random, chats: int) -> Iterator[Request]:
    """Yields the turns of a day's chats, mixed; some chats change what they said before."""
    systems = [_ids(rng, _SYSTEM_TOKENS) for _ in range(4)]
    open_chats = {chat: list(rng.choice(systems)) for chat in range(chats)}
    left = {chat: rng.randint(1, _MOST_TURNS) for chat in open_chats}
    begun: list[int] = []
    waiting = list(open_chats)
    while begun or waiting:
        if waiting and (len(begun) < AT_ONCE * 3 or rng.random() < 0.1):
            begun.append(waiting.pop())
        chat = rng.choice(begun)
        ids = open_chats[chat]
        if rng.random() < 0.05 and len(ids) > _SYSTEM_TOKENS:
            at = rng.randrange(len(ids))
            ids[at : at + rng.randint(1, 40)] = _ids(rng, rng.randint(0, 40))
        ids += _ids(rng, rng.randint(_LEAST, _MOST))
        yield Request(chat, tuple(ids))
        left[chat] -= 1
        if not left[chat]:
            begun.remove(chat)


def _ids(rng: Random, count: int) -> list[int]:
    return rng.choices(range(300, 3_000), k=count)


async def counted(requests: Sequence[Request], seed: int = 60) -> Counted:
    """Plays a day through a router and Envoy, and returns what was counted."""
    async with running(
        WORKERS,
        changes=CHANGES,
        blocks=BLOCKS,
        block_size_tokens=BLOCK_TOKENS,
        max_model_len_tokens=CONTEXT_TOKENS,
    ) as system:
        day = _Day(system, Random(seed))
        for start in range(0, len(requests), _EVERY):
            await day.send_all(requests[start : start + _EVERY])
            await day.happens()
        await day.collect()
        return day.counted()


class _Day:
    """One day with a running system."""

    def __init__(self, system: System, rng: Random) -> None:
        self._system = system
        self._rng = rng
        self._sent = 0
        self._usages: list[dict[str, Any]] = []
        self._verdicts: dict[int, dict[str, Any]] = {}
        self._drained = ""

    async def send_all(self, requests: Sequence[Request]) -> None:
        """Sends requests, a few at a time; those of one chat one after the other."""
        chats: dict[int, list[Request]] = {}
        for one in requests:
            chats.setdefault(one.chat, []).append(one)
        at_once = asyncio.Semaphore(AT_ONCE)

        async def send_chat(turns: Sequence[Request]) -> None:
            for one in turns:
                async with at_once:
                    await self._send(one)

        async with asyncio.TaskGroup() as group:
            for turns in chats.values():
                group.create_task(send_chat(turns))
        await self.collect()

    async def _send(self, one: Request) -> None:
        body = {"model": "tiny", "prompt": list(one.ids), "max_tokens": 2}
        headers = {"user-agent": f"client-{one.chat % 5}/1.0", "x-session-id": f"chat-{one.chat}"}
        url = f"{self._system.envoy}/v1/completions"
        async with self._system.session.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            self._usages.append((await answer.json())["usage"])
        self._sent += 1

    async def collect(self) -> None:
        """Waits until all that was sent has a verdict, and keeps these."""

        async def are_told() -> bool:
            url = f"{self._system.admin}/misses"
            async with self._system.session.get(url) as answer:
                told = await answer.json()
            self._verdicts |= {one["number"]: one for one in told["turns"]}
            return len(self._verdicts) == self._sent

        await until(are_told, f"{self._sent} verdicts")

    async def happens(self) -> None:
        """A worker restarts, or loses its cache, or is drained for a while; or nothing happens."""
        worker = self._rng.choice(self._system.workers)
        match self._rng.randrange(6):
            case 0:
                worker.faults.restart()
            case 1:
                worker.reset_prefix_cache()
            case 2 if not self._drained:
                await self._drain(worker.endpoint, draining=True)
            case 3 if self._drained:
                await self._drain(self._drained, draining=False)

    async def _drain(self, endpoint: str, *, draining: bool) -> None:
        told = {"endpoint": endpoint, "draining": draining}
        async with self._system.session.post(f"{self._system.admin}/draining", json=told) as answer:
            assert answer.status == 200, await answer.text()
        self._drained = endpoint if draining else ""

    def counted(self) -> Counted:
        """Returns what was counted."""
        tokens: Counter[str] = Counter()
        for one in self._verdicts.values():
            tokens.update(one["tokens"])
        short = [
            one
            for one in self._verdicts.values()
            if sum(one["tokens"].values()) != one["prompt_tokens"]
        ]
        details = [one.get("prompt_tokens_details") or {} for one in self._usages]
        return Counted(
            self._sent,
            sum(one["prompt_tokens"] for one in self._usages),
            sum(one.get("cached_tokens") or 0 for one in details),
            tokens,
            len(self._verdicts),
            len(short),
        )
