"""Listens to a feed, and triggers events on it with a tiny completion of a unique prompt."""

import asyncio
import json
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from extproc.base.errors import RequestError
from extproc.config.schema import WorkerSettings
from extproc.fleet.feeds.feed_openers import open_feed
from extproc.requests.prompt import Text
from kvstate.errors import ReplayError, WireError
from kvstate.events import Batch, BlocksStored, EventBatch, OtherGroupStored
from kvstate.feeds.feed_sources import FeedSource, ZmqSource
from kvstate.feeds.feed_times import USUAL
from kvstate.feeds.transport import (
    Connected,
    Disconnected,
    FeedTransport,
    Malformed,
    Refused,
    Signal,
    SnapshotBegun,
)
from kvstate.feeds.zmq_transport import ZmqTransport
from kvstate.overlap import Tokens
from kvstate.wire.zmq_wire import decode_batch
from kvtools.doctor.findings import Finding, Subject
from kvtools.doctor.token_visit import engine_tokens
from kvtools.doctor.worker_visit import USUAL as DEFAULT
from kvtools.doctor.worker_visit import (
    VisitTools,
    WorkerReport,
    judge_block_size,
    judge_clock,
)

PATH = "/v1/completions"
RANK_HEADER = "X-data-parallel-rank"

# About five hundred tokens: more than one block of any engine.
WORDS = 96

# A subscription may start too late for the first event, so the wait is split among several tries.
TRIES = 3

# Limits for one feed, beside the number of messages.
MAX_BYTES = 128 * 1024 * 1024
MAX_CHAINS = 4_096

# This many tokens of a unique prompt in blocks prove that the blocks are the prompt's.
ENOUGH_TOKENS = 8

# A replay from this number has no batches, only its end: it costs the engine nothing.
BEYOND_ALL = 1 << 62


class MessageSummary:
    """A summary of one rank's messages.

    is_live: messages carry the publisher's own time, and arrive as they are published. provoked:
    the tokens of a test request whose blocks were announced here, and the number of the first batch
    that may have them. max_messages: with more, it is over its limit.
    """

    def __init__(self, rank: int, *, is_live: bool, max_messages: int = DEFAULT.messages) -> None:
        self._max_messages = max_messages
        self.rank = rank
        self.is_live = is_live
        self.is_connected = False
        self.refused = ""
        self.lost = ""
        self.batches = 0
        self.unreadable = 0
        self.first_sequence: int | None = None
        self.last_sequence: int | None = None
        self.provoked: tuple[Tokens, int] | None = None
        self.missing = 0
        self.ahead_seconds: float | None = None
        self.block_sizes: set[int] = set()
        self.other_groups: set[tuple[int, int]] = set()  # their block sizes and reach
        self.ranks: set[int] = set()
        self._chains: deque[Tokens] = deque(maxlen=MAX_CHAINS)
        self._messages = 0
        self._bytes = 0

    @property
    def is_over_limit(self) -> bool:
        """Whether more messages or bytes arrived than the doctor accepts."""
        return self._messages > self._max_messages or self._bytes > MAX_BYTES

    def count_message(self) -> None:
        """Counts one message of any kind."""
        self._messages += 1

    def holds(self, tokens: Tokens) -> bool:
        """Tells whether blocks of this prompt, which nobody else sends, were stored."""
        whole = tokens.tobytes()
        known = sum(len(chain) for chain in self._chains if _is_part(chain.tobytes(), whole))
        return known >= min(ENOUGH_TOKENS, len(tokens))

    def take(self, sequence: int, body: bytes | EventBatch, now: float) -> None:
        """Adds one batch to the summary.

        body: a payload as received, or already decoded. now: seconds since the epoch.
        """
        self.batches += 1
        if self.last_sequence is not None and sequence > self.last_sequence + 1:
            self.missing += sequence - self.last_sequence - 1
        self.last_sequence = sequence
        if self.first_sequence is None:
            self.first_sequence = sequence
        if isinstance(body, bytes):
            self._bytes += len(body)
        try:
            batch = body if isinstance(body, EventBatch) else decode_batch(body)
        except WireError:
            self.unreadable += 1
            return
        if self.is_live:
            self._note_time(batch.timestamp - now)
        if batch.rank is not None:
            self.ranks.add(batch.rank)
        for event in batch.events:
            if isinstance(event, BlocksStored):
                self.block_sizes.add(event.block_size)
                self._chains.append(event.tokens)
            elif isinstance(event, OtherGroupStored) and (event.block_size or event.hashes):
                self.other_groups.add((event.block_size, event.reach))

    def _note_time(self, ahead_seconds: float) -> None:
        """Keeps the smallest difference: the fastest batch is the best evidence."""
        if self.ahead_seconds is None or abs(ahead_seconds) < abs(self.ahead_seconds):
            self.ahead_seconds = ahead_seconds


def _is_part(chain: bytes, whole: bytes) -> bool:
    at = whole.find(chain)
    return at >= 0 and at % 4 == 0


class Listener:
    """Listens to one rank's feed until it is closed."""

    def __init__(
        self, rank: int, transport: FeedTransport, max_messages: int, *, is_live: bool
    ) -> None:
        self.summary = MessageSummary(rank, is_live=is_live, max_messages=max_messages)
        self._transport = transport
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._listen())

    async def wait_until(self, condition: Callable[[MessageSummary], bool], seconds: float) -> bool:
        """Waits until the summary meets a condition; returns whether it did in time."""
        try:
            async with asyncio.timeout(seconds):
                while not condition(self.summary):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stops listening."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._transport.close()

    async def _listen(self) -> None:
        while not self.summary.is_over_limit:
            for signal in await self._transport.receive():
                self._take(signal)
            self._changed.set()
            await asyncio.sleep(0)  # a feed that never pauses must not block the others

    def _take(self, signal: Signal) -> None:
        heard = self.summary
        heard.count_message()
        match signal:
            case Connected():
                heard.is_connected = True
            case Disconnected(reason):
                heard.lost = reason
            case Refused(reason):
                heard.refused = reason
            case SnapshotBegun():
                heard.last_sequence = None
            case Malformed():
                heard.unreadable += 1
            case Batch(sequence, body):
                heard.take(sequence, body, time.time())


def subscribed(sources: Mapping[int, ZmqSource], max_messages: int) -> list[Listener]:
    """Returns a listener for each of some ranks of a ZMQ feed."""
    return [
        Listener(rank, ZmqTransport(one), max_messages, is_live=True)
        for rank, one in sources.items()
    ]


def connected(source: FeedSource, max_messages: int) -> list[Listener]:
    """Returns a listener for each rank of a feed with one connection for all.

    Raises:
        ExtraError: it is a gRPC feed, and grpcio is not installed.
    """
    return [
        Listener(rank, one, max_messages, is_live=False)
        for rank, one in enumerate(open_feed(source))
    ]


async def replayed(
    source: ZmqSource, start: int, seconds: float, heard: MessageSummary | None = None
) -> tuple[list[int], str]:
    """Requests a replay; returns the numbers of its batches, and why it did not end, "" if it did.

    start: the first number requested. seconds: limit for each batch; all of them have
    `FeedTimes.max_replay_seconds`, since a full buffer takes long. heard: receives each batch.
    """
    transport = ZmqTransport(source)
    numbers: list[int] = []
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(seconds) as patience, asyncio.timeout(USUAL.max_replay_seconds):
            async for batch in transport.replay(start):
                numbers.append(getattr(batch, "sequence", start))
                if heard is not None and isinstance(batch, Batch):
                    heard.take(batch.sequence, batch.body, time.time())
                patience.reschedule(now() + seconds)
                await asyncio.sleep(0)  # a replay must not block the others either
    except TimeoutError:
        return numbers, f"neither a batch nor the end arrived within {seconds:g} s"
    except ReplayError as error:
        return numbers, str(error)
    finally:
        await transport.close()
    return numbers, ""


def judge_heard(about: Subject, heard: Iterable[MessageSummary]) -> Iterator[Finding]:
    """Yields the findings about a worker's connected feeds."""
    all_heard = list(heard)
    batches = sum(one.batches for one in all_heard)
    unreadable = sum(one.unreadable for one in all_heard)
    if unreadable:
        says = f"{unreadable} of {batches or unreadable} messages could not be read"
        yield about.wrong("feed-unreadable", says)
    elif batches:
        yield about.right("feed", f"batches received and decoded: {batches}")
    if any(one.is_over_limit for one in all_heard):
        yield about.wrong("feed-flooded", f"{batches} batches arrived, too many to read")
    for one in all_heard:
        others = sorted(one.ranks - {one.rank})
        if one.is_live and others:
            says = f"the feed of rank {one.rank} carries events of rank {others[0]}"
            yield about.wrong("ranks-mixed-up", says)
    times = [one.ahead_seconds for one in all_heard if one.ahead_seconds is not None]
    if times:
        yield judge_clock(about, min(times, key=abs), "the time in its batches")


def judge_sizes(
    tools: VisitTools, worker: WorkerSettings, heard: Sequence[MessageSummary], about: Subject
) -> Iterator[Finding]:
    """Yields whether the blocks in events have the configured size."""
    for size in sorted({size for one in heard for size in one.block_sizes}):
        yield judge_block_size(about, tools.config, worker, size, "its events")


def judge_groups(about: Subject, heard: Sequence[MessageSummary]) -> Iterator[Finding]:
    """Yields notes about a model with several kinds of attention: what of a prefix is reused."""
    groups = {group for one in heard for group in one.other_groups}
    if not groups:
        return
    if any(not (size and reach) for size, reach in groups):
        yield about.note("attention", "it cannot be told what it reuses: nothing of it is certain")
        return
    sizes = [size for one in heard for size in one.block_sizes]
    unit = math.lcm(*sizes, *(size for size, _ in groups))
    longest = max(reach for _, reach in groups)
    says = f"hits end at multiples of {unit} tokens, so shorter prefixes are never cached here"
    if any(reach == 1 for _, reach in groups):
        yield about.note("attention", f"it has states: {says}, and only at its checkpoints")
    if longest > 1:
        window = f"it has windows: {says}, and only where the {longest} tokens before are kept"
        yield about.note("attention", window)


class ProbeResult(NamedTuple):
    """The outcome of a probe.

    refused: why the engine refused it, "" if it did not. has_heard: whether its blocks were
    announced, or any batch if its tokens are unknown. by_engine: whether the engine computed its
    tokens, not KVSteer. is_elsewhere: whether batches arrived after the test request.
    """

    refused: str = ""
    has_heard: bool = False
    by_engine: bool = True
    is_elsewhere: bool = False


async def judge_probe(
    tools: VisitTools,
    worker: WorkerSettings,
    visited: WorkerReport,
    listeners: Sequence[Listener],
    about: Subject,
) -> list[Finding]:
    """Probes one rank after the other, up to the first fault; returns the findings."""
    if not visited.is_served:
        return [about.note("probe", "not made: the worker does not serve the model")]
    ranks = [one.summary.rank for one in listeners] if len(listeners) > 1 else [None]
    for rank in ranks:
        probed = await probe(tools, worker, visited, listeners, rank)
        where = "" if rank is None else f" to rank {rank}"
        if probed.refused:
            return [about.wrong("probe-refused", probed.refused)]
        if not probed.has_heard and probed.is_elsewhere and not probed.by_engine:
            says = f"blocks were stored after a test request{where}, but none with KVSteer's tokens"
            return [about.wrong("tokens-differ", says)]
        if not probed.has_heard:
            says = f"a test request{where} was answered, but the feed did not announce its blocks"
            return [about.wrong("feed-silent", says)]
    return [about.right("probe", "the engine published the blocks of a test request")]


async def probe(
    tools: VisitTools,
    worker: WorkerSettings,
    visited: WorkerReport,
    listeners: Sequence[Listener],
    rank: int | None,
) -> ProbeResult:
    """Sends prompts to a worker until the feed announces one of them, up to `TRIES`.

    rank: the rank that should compute it; None if the worker has only one.
    """
    probed = ProbeResult()
    for _ in range(TRIES):
        text = " ".join(f"{random.getrandbits(32):08x}" for _ in range(WORDS))
        tokens, by_engine = await _tokens(tools, worker, visited, text)
        before = sum(one.summary.batches for one in listeners)
        last = [one.summary.last_sequence for one in listeners]
        refused = await _send(tools, worker, visited, text, rank)
        if refused:
            return ProbeResult(refused=refused)
        heard = await _any_holds(listeners, tokens, before, tools.seconds / TRIES)
        elsewhere = sum(one.summary.batches for one in listeners) > before
        probed = ProbeResult("", heard, by_engine, elsewhere)
        if heard:
            _note(listeners, tokens, last)
            break
    return probed


def _note(listeners: Sequence[Listener], tokens: Tokens | None, last: Sequence[int | None]) -> None:
    """Marks the feed that announced a prompt.

    last: the number of each feed's last batch before the prompt was sent.
    """
    for one, before in zip(listeners, last, strict=True):
        heard = one.summary
        if tokens is not None and heard.holds(tokens):
            since = heard.first_sequence if before is None else before + 1
            heard.provoked = (tokens, since or 0)


async def _send(
    tools: VisitTools, worker: WorkerSettings, visited: WorkerReport, text: str, rank: int | None
) -> str:
    """Requests the completion; returns why it was refused, "" if it was not."""
    body = {"model": visited.model_name, "prompt": text, "max_tokens": 1, "temperature": 0}
    headers = {} if rank is None else {RANK_HEADER: str(rank)}
    answer = await tools.web.post(
        f"http://{worker.endpoint}{PATH}", json.dumps(body).encode(), headers
    )
    return "" if answer.is_ok else f"{PATH}: {answer.reason or f'status {answer.status}'}"


async def _tokens(
    tools: VisitTools, worker: WorkerSettings, visited: WorkerReport, text: str
) -> tuple[Tokens | None, bool]:
    """Returns the prompt's token ids, None if unknown, and whether they are the engine's own."""
    theirs = await engine_tokens(tools, worker, visited, Text(text))
    if not isinstance(theirs, str):
        return theirs, True
    tokenizer = tools.tokenizers.get(visited.model.name) if visited.model else None
    if tokenizer is None:
        return None, True
    try:
        return await asyncio.to_thread(tokenizer.encode, Text(text)), False
    except RequestError:
        return None, True


async def _any_holds(
    listeners: Sequence[Listener], tokens: Tokens | None, before: int, seconds: float
) -> bool:
    """Tells whether any feed announces the prompt in time."""

    def is_heard() -> bool:
        if tokens is None:
            return sum(one.summary.batches for one in listeners) > before
        return any(one.summary.holds(tokens) for one in listeners)

    waits = [
        asyncio.ensure_future(one.wait_until(lambda _: is_heard(), seconds)) for one in listeners
    ]
    if not waits:
        return False
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    return is_heard()
