"""TensorRT-LLM feeds by `POST /kv_cache_events`: the server returns each queued event once.

trtllm-serve keeps the events since its start, up to `event_buffer_max_size`, and returns each to
one caller only. So one poller serves all ranks of a worker, nobody else may drain it, and a lost
answer is a gap in the numbers.
"""

import asyncio
import time
from collections.abc import Callable

import aiohttp
from msgspec import Raw

from kvstate.errors import WireError
from kvstate.events import Batch
from kvstate.feeds.backoff import Backoff
from kvstate.feeds.drain_limits import USUAL, DrainLimits
from kvstate.feeds.feed_sources import DrainSource, Recovery
from kvstate.feeds.shared_connection import RankTransport, SharedConnection
from kvstate.feeds.transport import Connected, Disconnected, Malformed, Refused
from kvstate.wire.trtllm_wire import RankDecoder, error_of, parse_drain, parse_event

# Stamps differ from one drain to the next by at least this, however coarse the clock is.
_CLOCK_STEP_SECONDS = 1e-6

_READ_BYTES = 65_536

# The route, the method or the feature does not exist in this build.
_REFUSALS = (404, 405, 501)
_OK = 200
_MAX_WORDS = 200

_TAKEN = "another consumer drains this worker, or its event buffer overflowed"


class _Refusal(Exception):
    """The server publishes no events."""


class _Unusable(Exception):
    """The server's answer cannot be read."""


class _Drain:
    """The feeds of one worker's ranks, polled together."""

    def __init__(
        self,
        source: DrainSource,
        chance: Callable[[], float],
        clock: Callable[[], float],
        limits: DrainLimits,
    ) -> None:
        self._url = f"{source.url}/kv_cache_events"
        self._chance = chance
        self._clock = clock
        self._limits = limits
        self._shared = SharedConnection(
            source.url, source.ranks, Recovery.QUEUED, _TAKEN, self._follow, limits.queue
        )
        self._decoders = [RankDecoder() for _ in range(source.ranks)]
        self._polls = Backoff(*limits.poll_seconds, chance)
        self._retries = Backoff(*limits.retry_seconds, chance)
        self._is_connected = False
        self._drained_at = 0.0

    @property
    def transports(self) -> list[RankTransport]:
        """One for each rank, in order."""
        return self._shared.transports

    async def _follow(self) -> None:
        self._is_connected = False
        timeout = aiohttp.ClientTimeout(
            total=self._limits.answer_seconds, connect=self._limits.connect_seconds
        )
        async with aiohttp.ClientSession(
            timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        ) as session:
            while True:
                seconds = await self._poll(session)
                await asyncio.sleep(seconds)

    async def _poll(self, session: aiohttp.ClientSession) -> float:
        """Drains the server once; returns the seconds until the next time."""
        try:
            events = parse_drain(await self._answer(session))
        except _Refusal as refusal:
            self._is_connected = False
            self._shared.tell(Refused(f"publishes no events: {refusal}"))
            return self._limits.refused_seconds * (0.5 + self._chance())
        except (aiohttp.ClientError, OSError, WireError, _Unusable) as error:
            self._is_connected = False
            self._shared.tell(Disconnected(_words(error)))
            return self._retries.next_seconds()
        if not self._is_connected:
            self._is_connected = True
            self._shared.tell(Connected())
        self._retries.reset()
        if events:
            self._polls.reset()
            await self._hand(events)
        return self._polls.next_seconds()

    async def _answer(self, session: aiohttp.ClientSession) -> bytes:
        async with session.post(
            self._url, allow_redirects=False, headers={"Accept-Encoding": "identity"}
        ) as response:
            if response.status in _REFUSALS:
                raise _Refusal(f"HTTP {response.status}")
            if response.status != _OK:
                raise _Unusable(f"HTTP {response.status}")
            body = bytearray()
            async for piece in response.content.iter_chunked(_READ_BYTES):
                body += piece
                if len(body) > self._limits.max_answer_bytes:
                    raise _Unusable(f"answer of more than {self._limits.max_answer_bytes} bytes")
        error = error_of(bytes(body))
        if error is not None:
            raise _Refusal(error)
        return bytes(body)

    async def _hand(self, events: list[Raw]) -> None:
        """Passes each rank its events, a few at a time."""
        self._drained_at = max(self._clock(), self._drained_at + _CLOCK_STEP_SECONDS)
        loop = asyncio.get_running_loop()
        slice_ends = loop.time() + self._limits.slice_seconds
        for raw in events:
            await self._hand_one(raw)
            if loop.time() >= slice_ends:
                await asyncio.sleep(0)
                slice_ends = loop.time() + self._limits.slice_seconds

    async def _hand_one(self, raw: Raw) -> None:
        try:
            event = parse_event(raw)
        except WireError:  # the next number shows which rank it was for
            await self.transports[0].hand(Malformed())
            return
        transport = self._shared.of_rank(event.rank)
        if transport is not None:
            batch = self._decoders[event.rank].decode(event, self._drained_at)
            await transport.hand(Batch(event.sequence, batch), len(bytes(raw)))


def drain_transports(
    source: DrainSource,
    chance: Callable[[], float],
    clock: Callable[[], float] = time.time,
    limits: DrainLimits = USUAL,
) -> list[RankTransport]:
    """Returns the transports of one worker's ranks, in order, over one poller.

    chance: 0 to 1, for the jitter of tries and polls. clock: seconds since the epoch, because the
    events have no stamps.
    """
    return _Drain(source, chance, clock, limits).transports


def _words(error: Exception) -> str:
    """Describes an error; time-outs have no text of their own."""
    return str(error)[:_MAX_WORDS] or type(error).__name__
