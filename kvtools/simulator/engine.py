"""One worker's engine: admits requests, prefills and decodes them, and publishes cache events.

Prefills run one after the other, in order of arrival; decoding requests do not wait for them.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvtools.simulator.cache import Holding, PrefixCache
from kvtools.simulator.events import Event
from kvtools.simulator.hashing import NO_NAMESPACE, CacheNamespace
from kvtools.simulator.responses import AnswerWriter


@dataclass(frozen=True, slots=True)
class Latency:
    """Speeds in tokens per second; infinity means no delay at all."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float

    def prefill_seconds(self, uncached_tokens: int) -> float:
        """Returns the time until the first token, for this many uncached tokens."""
        return uncached_tokens / self.prefill_tokens_per_second

    @property
    def decode_seconds(self) -> float:
        """Seconds between two tokens of an answer."""
        return 1 / self.decode_tokens_per_second


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One answer to generate."""

    prompt: Sequence[int]
    output_tokens: int
    ends_turn: bool = False
    """Whether the last of them is the end-of-turn token, as if the model had finished."""
    namespace: CacheNamespace = NO_NAMESPACE
    session_id: str | None = None
    choice: int = 0
    """Distinguishes several answers to one prompt."""
    reuse: bool = True
    """If off, the cache is filled but not read."""
    received_tokens: int = 0
    """Prompt tokens that another worker computed; the last one is computed here."""


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token."""

    token: int
    cached_tokens: int
    """How many of the prompt's tokens came from the cache."""
    finish_reason: FinishReason | None
    """Set with the last token."""


@dataclass(slots=True)
class Counters:
    """The counters of /metrics, besides the cache's usage."""

    in_flight: int = 0
    running: int = 0
    """Those in flight that hold blocks; the others wait."""
    queried_tokens: int = 0
    """Prompt tokens looked up in the cache since start."""
    hit_tokens: int = 0
    """Those of them found."""


@dataclass(slots=True)
class _Request:
    job: Job
    tokens: list[int]
    cache: PrefixCache
    """The cache that it began with; another may have replaced it since."""
    cached_tokens: int | None = None
    holding: Holding | None = None


class SimulatedEngine:
    """Runs jobs on one cache.

    publish: is called with the events of every step, possibly none. publishes_idle: whether it is
    also called, at once, with events between steps.
    """

    def __init__(
        self,
        cache: PrefixCache,
        latency: Latency,
        writer: AnswerWriter,
        *,
        end_of_turn: int,
        max_running: int,
        publish: Callable[[Sequence[Event]], None],
        publishes_idle: bool = False,
    ) -> None:
        self.counters = Counters()
        self._cache = cache
        self._latency = latency
        self._writer = writer
        self._end_of_turn = end_of_turn
        self._publish = publish
        self._publishes_idle = publishes_idle
        self._slots = asyncio.Semaphore(max_running)
        self.prefilling = asyncio.Lock()
        self._blocks_released = asyncio.Event()
        self._idle()

    @property
    def cache(self) -> PrefixCache:
        """The cache that requests use from now on."""
        return self._cache

    @property
    def cache_usage(self) -> float:
        """The share of blocks that running requests use, 0 to 1."""
        return self._cache.usage

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks; returns False, and changes nothing, while requests run."""
        done = self._cache.reset()
        self._idle()
        return done

    def restart(self, cache: PrefixCache) -> None:
        """Starts over with an empty cache, as after the death of the process.

        Running requests are not cut off: they finish on their old cache, whose events are no longer
        published.
        """
        self._cache = cache
        self.counters.queried_tokens = self.counters.hit_tokens = 0
        self._blocks_released.set()
        self._idle()

    async def run(self, job: Job) -> AsyncGenerator[Step, None]:
        """Generates an answer token by token; closing the generator aborts it and frees its blocks.

        The cache must be able to hold the prompt and the answer together.
        """
        self.counters.in_flight += 1
        request = _Request(job, list(job.prompt), self._cache)
        seed = self._writer.seed(job.prompt, job.choice)
        try:
            async with self._slots:
                for position in range(job.output_tokens):
                    await self._compute(request)
                    finish = _finish_reason(job, position)
                    if finish == "stop":
                        token = self._end_of_turn
                    else:
                        token = self._writer.token(seed, position, request.tokens[-1])
                    request.tokens.append(token)
                    yield Step(token, request.cached_tokens or 0, finish)
        finally:
            self._release(request)
            self.counters.in_flight -= 1

    async def _compute(self, request: _Request) -> None:
        """Brings the request's KV up to its last token, which gives the next one."""
        if request.holding is not None:
            if request.cache.extend(request.holding, request.tokens[-1]):
                await self._step(self._latency.decode_seconds)
                return
            # The cache is full of running requests: this one is preempted and starts over, and
            # finds its blocks again if they are still there. vLLM preempts too, but the youngest
            # request.
            self._release(request)
        async with self.prefilling:
            await self._prefill(request)

    async def _prefill(self, request: _Request) -> None:
        job = request.job
        while True:
            request.cache = self._cache
            request.holding = request.cache.begin(
                request.tokens, job.namespace, session_id=job.session_id, reuse=job.reuse
            )
            if request.holding is not None:
                break
            self._blocks_released.clear()
            await self._blocks_released.wait()
        self.counters.running += 1
        found = request.holding.cached_tokens
        if request.cached_tokens is None:
            request.cached_tokens = found
            self.counters.queried_tokens += len(job.prompt)
            self.counters.hit_tokens += found
        uncached = max(1, len(request.tokens) - max(found, job.received_tokens))
        await self._step(self._latency.prefill_seconds(uncached))

    async def _step(self, seconds: float) -> None:
        # An aborted request's step is not undone: its blocks stay cached and are announced.
        try:
            await asyncio.sleep(seconds)
        finally:
            self._publish(self._cache.take_events())

    def _release(self, request: _Request) -> None:
        if request.holding is not None:
            request.cache.release(request.holding)
            request.holding = None
            self.counters.running -= 1
            self._blocks_released.set()
            self._idle()

    def _idle(self) -> None:
        if self._publishes_idle:
            self._publish(self._cache.take_events())


def _finish_reason(job: Job, position: int) -> FinishReason | None:
    if position + 1 < job.output_tokens:
        return None
    return "stop" if job.ends_turn else "length"
