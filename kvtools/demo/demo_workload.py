"""The sample conversations of the demo: judged, and sent with and without KVSteer."""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvstate.errors import ReplayError
from kvstate.feeds.feed_sources import ZmqSource
from kvstate.feeds.zmq_transport import ZmqTransport

CONVERSATIONS = 6
TURNS = 3
COMPARED = 12
COMPARE_SECONDS = 60.0
WORDS_IN_FIRST_PROMPT = 240
WORDS_IN_FOLLOW_UP = 30
CHAT = "/v1/chat/completions"

# The header with which the demo's requests may name another policy.
POLICY_HEADER = "x-kvsteer-policy"
CAUGHT_UP_SECONDS = 30.0

_TEXT = (
    "a request with the same prefix as one before it need not be computed again if it reaches the"
    " worker that still holds those blocks in its cache and every other worker would start over"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One request that was sent.

    holder: the worker of the previous turn; None for the first. predicted, reported: cached tokens.
    """

    conversation: int
    turn: int
    worker: str
    holder: str | None
    predicted: int
    reported: int

    @property
    def fault(self) -> str:
        """What is wrong with the request, "" if nothing is."""
        if self.holder is not None and self.worker != self.holder:
            return f"its prefix is on {self.holder}"
        return "" if self.predicted == self.reported else "prediction differs"


async def judge(envoy: str, admin: str, replays: Sequence[str], model: str) -> bool:
    """Sends the sample workload and prints its table; returns whether the check succeeded.

    envoy, admin: base URLs. replays: the workers' replay endpoints, in the router's order.
    """
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        conversations = [_Conversation(number, model) for number in range(CONVERSATIONS)]
        # in parallel, so that load spreads them
        rows = await asyncio.gather(*(one.turn(session, envoy, admin) for one in conversations))
        for _ in range(TURNS - 1):
            for conversation in conversations:
                await _caught_up(session, admin, replays)
                rows.append(await conversation.turn(session, envoy, admin))
        async with session.get(f"{admin}/workers") as response:
            workers = await response.json()
    return report(rows, workers)


class _Conversation:
    """number: its number. policy: the one to ask for in a header; None for the configured one."""

    def __init__(self, number: int, model: str, policy: str | None = None) -> None:
        self._number = number
        self._model = model
        self._headers = {POLICY_HEADER: policy} if policy else {}
        self._rng = random.Random(number)
        self._messages: list[dict[str, str]] = []
        self._turn = 0
        self._holder: str | None = None

    async def turn(self, session: aiohttp.ClientSession, envoy: str, admin: str) -> Row:
        """Asks for the prediction, sends the next message, and returns both results."""
        body = self.next()
        async with session.post(f"{admin}/explain", json={"path": CHAT, "body": body}) as response:
            explained = await response.json()
        worker, usage = await self.send(session, envoy, body)
        row = Row(
            conversation=self._number,
            turn=self._turn,
            worker=worker,
            holder=self._holder,
            predicted=_predicted(explained, worker),
            reported=usage["prompt_tokens_details"]["cached_tokens"],
        )
        self._turn += 1
        self._holder = worker
        return row

    def next(self) -> dict[str, Any]:
        """Adds the next message, and returns the request's body."""
        words = WORDS_IN_FOLLOW_UP if len(self._messages) else WORDS_IN_FIRST_PROMPT
        text = f"Conversation {self._number}. " + " ".join(
            self._rng.choices(_TEXT.split(), k=words)
        )
        self._messages.append({"role": "user", "content": text})
        return {"model": self._model, "messages": self._messages, "max_tokens": 24}

    async def send(
        self, session: aiohttp.ClientSession, envoy: str, body: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Sends a request, keeps its answer for the next one; returns its worker and usage."""
        async with session.post(f"{envoy}{CHAT}", json=body, headers=self._headers) as response:
            response.raise_for_status()
            answer = await response.json()
        self._messages.append(answer["choices"][0]["message"])
        return response.headers["x-worker"], answer["usage"]


def _predicted(explained: dict[str, Any], worker: str) -> int:
    overlaps = {one["endpoint"]: one["overlap_tokens"] for one in explained["candidates"]}
    return int(overlaps[worker])


async def _caught_up(session: aiohttp.ClientSession, admin: str, replays: Sequence[str]) -> None:
    """Waits until the router has applied every batch that the workers have published."""
    async with asyncio.timeout(CAUGHT_UP_SECONDS):
        while True:
            async with session.get(f"{admin}/workers") as response:
                workers = await response.json()
            last = [worker["feeds"][0]["last_sequence"] for worker in workers]
            # ask a worker again if it is too busy to answer
            with contextlib.suppress(ReplayError):
                left = [await _published_after(*pair) for pair in zip(replays, last, strict=True)]
                if not any(left):
                    return
            await asyncio.sleep(0.01)


async def _published_after(replay: str, sequence: int | None) -> bool:
    transport = ZmqTransport(ZmqSource(events=replay, replay=replay, topic=""))
    try:
        start = 0 if sequence is None else sequence + 1
        return [batch async for batch in transport.replay(start)] != []
    finally:
        await transport.close()


def report(rows: Sequence[Row], workers: Sequence[dict[str, Any]]) -> bool:
    """Prints the table and the faults; returns whether there are none.

    workers: the answer of GET /workers after the last request.
    """
    print(f"{'request':<24}{'worker':<24}{'predicted':>10}{'reported':>10}")
    for row in rows:
        name = f"conversation {row.conversation} turn {row.turn + 1}"
        print(f"{name:<24}{row.worker:<24}{row.predicted:>10}{row.reported:>10}  {row.fault}")
    faults = [f"{row.conversation}.{row.turn + 1}: {row.fault}" for row in rows if row.fault]
    faults += [
        f"feed of {worker['endpoint']} is {feed['state']}: {feed['reason']}"
        for worker in workers
        for feed in worker["feeds"]
        if feed["state"] != "live"
    ]
    used = {row.worker for row in rows}
    if len(used) < 2:
        faults.append(f"only {len(used)} worker was used")
    if not any(row.predicted for row in rows):
        faults.append("nothing was predicted to be cached")
    for fault in faults:
        print(f"FAULT {fault}")
    cached, reported = sum(row.predicted for row in rows), sum(row.reported for row in rows)
    print(
        f"{len(rows)} requests on {len(used)} workers, {reported} tokens cached,"
        f" {cached} predicted: {'FAILED' if faults else 'ok'}"
    )
    return not faults


async def compare(envoy: str, admin: str, replays: Sequence[str], model: str) -> str:
    """Sends conversations by round robin, and others with KVSteer; returns a table of both.

    envoy, admin: base URLs. replays: the workers' replay endpoints, in the router's order.
    """
    lines = [f"{'':<14}{'prompt tokens':>15}{'cached':>9}{'computed':>10}{'cached share':>14}"]
    timeout = aiohttp.ClientTimeout(total=30)
    try:
        async with (
            asyncio.timeout(COMPARE_SECONDS),
            aiohttp.ClientSession(timeout=timeout) as session,
        ):
            for name, policy, first in (
                ("round robin", "round_robin", 100),
                ("KVSteer", None, 200),
            ):
                sent = [_Conversation(first + at, model, policy) for at in range(COMPARED)]
                tokens, cached = await _played(session, sent, (envoy, admin), replays)
                counted = f"{tokens:>15,}{cached:>9,}{tokens - cached:>10,}"
                lines.append(f"{name:<14}{counted}{cached / max(tokens, 1):>14.0%}")
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"Round robin and KVSteer could not be compared: {error or 'no answer in time'}\n"
    title = f"{COMPARED} conversations of {TURNS} turns, once by round robin"
    return "\n".join([f"{title} over {len(replays)} workers, once with KVSteer:", "", *lines, ""])


async def _played(
    session: aiohttp.ClientSession,
    conversations: Sequence[_Conversation],
    servers: tuple[str, str],
    replays: Sequence[str],
) -> tuple[int, int]:
    """Sends all turns; returns the number of prompt tokens, and how many of them were cached."""
    tokens = cached = 0
    order = random.Random(7)
    for _ in range(TURNS):
        # shuffle each turn: in the same order, round robin would hit the cache in all or in none
        turn = order.sample(conversations, len(conversations))
        sent = (one.send(session, servers[0], one.next()) for one in turn)
        for _, usage in await asyncio.gather(*sent):
            tokens += usage["prompt_tokens"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
        await _caught_up(session, servers[1], replays)
    return tokens, cached
