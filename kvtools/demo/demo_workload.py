"""The sample conversations of the demo: judged, and sent with KVSteer and with what is free."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp

from extproc.config.sections import ALL_PERCENT
from kvstate.errors import ReplayError
from kvstate.feeds.feed_sources import ZmqSource
from kvstate.feeds.zmq_transport import ZmqTransport

CONVERSATIONS = 6
TURNS = 3
COMPARED = 12
COMPARE_SECONDS = 90.0
MOST_PAUSE_SECONDS = 0.5
WORDS_IN_FIRST_PROMPT = 240
WORDS_IN_FOLLOW_UP = 30
CHAT = "/v1/chat/completions"

# The header with which the demo's requests may name another policy.
POLICY_HEADER = "x-kvsteer-policy"

# The header with which they name their conversation, as coding agents do.
SESSION_HEADER = "x-session-id"
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
        self._headers = {SESSION_HEADER: f"conversation {number}"}
        self._headers |= {POLICY_HEADER: policy} if policy else {}
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

    async def hold(self, session: aiohttp.ClientSession, envoy: str) -> None:
        """Holds the conversation: each message some time after the last answer."""
        for _ in range(TURNS):
            await asyncio.sleep(self._rng.uniform(0.0, MOST_PAUSE_SECONDS))
            await self.send(session, envoy, self.next())

    def next(self) -> dict[str, Any]:
        """Adds the next message, and returns the request's body."""
        words = WORDS_IN_FOLLOW_UP if len(self._messages) else WORDS_IN_FIRST_PROMPT
        text = f"Conversation {self._number}. " + " ".join(
            self._rng.choices(_TEXT.split(), k=words)
        )
        self._messages.append({"role": "user", "content": text})
        return {
            "model": self._model,
            "messages": self._messages,
            "max_tokens": 24,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def send(
        self, session: aiohttp.ClientSession, envoy: str, body: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Sends a request, keeps its answer for the next one; returns its worker and usage."""
        async with session.post(f"{envoy}{CHAT}", json=body, headers=self._headers) as response:
            response.raise_for_status()
            text, usage = _read_events([line async for line in response.content])
        self._messages.append({"role": "assistant", "content": text})
        return response.headers["x-worker"], usage


def _read_events(lines: Iterable[bytes]) -> tuple[str, dict[str, Any]]:
    """Returns the text and the usage of a streamed answer."""
    texts: list[str] = []
    usage: dict[str, Any] = {}
    for line in lines:
        data = line.removeprefix(b"data: ")
        if data == line or data.startswith(b"[DONE]"):
            continue
        event = json.loads(data)
        usage = event.get("usage") or usage
        texts += [one["delta"].get("content") or "" for one in event["choices"]]
    return "".join(texts), usage


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


class Contestant(NamedTuple):
    """A way to place the conversations.

    side: in the report. policy: the router's, named in a header; None for the configured one.
    is_steered: whether Envoy follows the router; else its fallback chooses, which hashes the
    session's header.
    """

    name: str
    side: str
    policy: str | None
    is_steered: bool


CONTESTANTS = (
    Contestant("round robin", "cache_unaware", "round_robin", is_steered=True),
    Contestant("hash by session", "others", None, is_steered=False),
    Contestant("KVSteer", "steered", None, is_steered=True),
)


async def compare(envoy: str, admin: str, replays: Sequence[str], model: str) -> str:
    """Has the same number of people chat by each contestant; returns a table of what came of it.

    The figures are those of the router's report, which counts each contestant as a side of its own.

    envoy, admin: base URLs. replays: the workers' replay endpoints, in the router's order.
    """
    timeout = aiohttp.ClientTimeout(total=30)
    try:
        async with (
            asyncio.timeout(COMPARE_SECONDS),
            aiohttp.ClientSession(timeout=timeout) as session,
        ):
            for place, one in enumerate(CONTESTANTS):
                first = 100 * (place + 1)
                sent = [_Conversation(first + at, model, one.policy) for at in range(COMPARED)]
                async with _steering(session, admin, is_steered=one.is_steered):
                    await asyncio.gather(*(each.hold(session, envoy) for each in sent))
                await _caught_up(session, admin, replays)
            window = await _reported(session, admin)
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"The conversations could not be compared: {error or 'no answer in time'}\n"
    title = (
        f"{COMPARED} chats of {TURNS} turns at once over {len(replays)} workers, placed by round"
        f"\nrobin, by Envoy's RING_HASH of the header {SESSION_HEADER}, and by KVSteer:"
    )
    return "\n".join([title, "", HEADS, *(_line(one, window) for one in CONTESTANTS), "", ABOUT])


HEADS = f"{'':<17}{'cached share':>14}{'time to first byte p90':>24}{'busiest worker to mean':>24}"


def _line(one: Contestant, window: dict[str, Any]) -> str:
    """Returns a contestant's line of the table, of a window of the report."""
    side = window[one.side]
    spread = side["load_spread"]
    busiest = "-" if spread is None else f"{spread['busiest_to_mean']:.2f}"
    seconds = f"{side['first_byte_seconds']['p90']['value']:.3f} s"
    return f"{one.name:<17}{side['cached_share']['value']:>13.0%} {seconds:>23}{busiest:>24}"


ABOUT = """\
The load is light: a hash by session does about as well, for clients that send such a
header. What it does under load, and what it cannot do, is in docs/why-not-hash.md.
"""


@contextlib.asynccontextmanager
async def _steering(
    session: aiohttp.ClientSession, admin: str, *, is_steered: bool
) -> AsyncIterator[None]:
    """Has Envoy follow the router or not, and follow it afterwards."""
    await _steer(session, admin, ALL_PERCENT if is_steered else 0)
    try:
        yield
    finally:
        await _steer(session, admin, ALL_PERCENT)


async def _steer(session: aiohttp.ClientSession, admin: str, percent: float) -> None:
    async with session.post(f"{admin}/steering", json={"percent": percent}) as response:
        response.raise_for_status()


async def _reported(session: aiohttp.ClientSession, admin: str) -> dict[str, Any]:
    """Returns the first window of the report, as soon as it has all requests."""
    while True:
        async with session.get(f"{admin}/report", params={"format": "json"}) as response:
            window: dict[str, Any] = (await response.json())["windows"][0]
        if all(window[one.side]["requests"] >= COMPARED * TURNS for one in CONTESTANTS):
            return window
        await asyncio.sleep(0.05)
