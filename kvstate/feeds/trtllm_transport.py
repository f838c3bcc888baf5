"""TensorRT-LLM feeds by `POST /kv_cache_events`: the server hands out what it has queued, once.

trtllm-serve keeps the events since its start, up to `event_buffer_max_size`, and gives each to one
caller only. So one poller serves all ranks of a worker, nobody else may drain it, and an answer
that is lost on its way is a gap in the numbers.
"""

import asyncio
import time
from collections.abc import Callable

import aiohttp
from msgspec import Raw

from kvstate.errors import WireError
from kvstate.feeds.backoff import Backoff
from kvstate.feeds.feed_sources import DrainSource
from kvstate.feeds.feed_terms import Recovery
from kvstate.feeds.shared_connection import RankTransport, SharedConnection
from kvstate.feeds.transport import Batch, Connected, Disconnected, Malformed, Refused
from kvstate.feeds.turns import SLICE_SECONDS
from kvstate.wire.trtllm_drain import error_of, parse_drain, parse_event
from kvstate.wire.trtllm_wire import RankDecoder

# Between polls: the first while events come, longer and longer while none do.
POLL_SECONDS = (0.05, 0.5)
RETRY_SECONDS = (0.1, 5.0)
REFUSED_SECONDS = 60.0

CONNECT_SECONDS = 2.0
# Releases up to 1.2 answer only after two seconds without an event, and what was drained is lost if
# nobody waits for it.
ANSWER_SECONDS = 30.0
MAX_ANSWER_BYTES = 16 * 1024 * 1024
_READ_BYTES = 65_536

# No such route, not with this method, not in this build.
_REFUSALS = (404, 405, 501)
_OK = 200
_MAX_WORDS = 200

# Drains differ in their stamps, however coarse the clock.
_CLOCK_STEP_SECONDS = 1e-6


class _Refusal(Exception):  # noqa: N818 - control flow inside this module, not an error
    """The server has no events to give."""


class _Unusable(Exception):  # noqa: N818 - control flow inside this module, not an error
    """The server gave no answer that can be read."""


class _Drain:
    """The feeds of one worker's ranks, polled together."""

    def __init__(
        self, source: DrainSource, chance: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._url = f"{source.url}/kv_cache_events"
        self._chance = chance
        self._clock = clock
        self._shared = SharedConnection(source.url, source.ranks, Recovery.QUEUED, self._follow)
        self._decoders = [RankDecoder() for _ in range(source.ranks)]
        self._polls = Backoff(*POLL_SECONDS, chance)
        self._retries = Backoff(*RETRY_SECONDS, chance)
        self._is_connected = False
        self._drained_at = 0.0

    @property
    def transports(self) -> list[RankTransport]:
        """One a rank, in the order of ranks."""
        return self._shared.transports

    async def _follow(self) -> None:
        self._is_connected = False
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS, connect=CONNECT_SECONDS)
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
            return REFUSED_SECONDS * (0.5 + self._chance())
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
                if len(body) > MAX_ANSWER_BYTES:
                    raise _Unusable(f"answer of more than {MAX_ANSWER_BYTES} bytes")
        error = error_of(bytes(body))
        if error is not None:
            raise _Refusal(error)
        return bytes(body)

    async def _hand(self, events: list[Raw]) -> None:
        """Hands each rank its events, a few at a time."""
        self._drained_at = max(self._clock(), self._drained_at + _CLOCK_STEP_SECONDS)
        loop = asyncio.get_running_loop()
        slice_ends = loop.time() + SLICE_SECONDS
        for raw in events:
            await self._hand_one(raw)
            if loop.time() >= slice_ends:
                await asyncio.sleep(0)
                slice_ends = loop.time() + SLICE_SECONDS

    async def _hand_one(self, raw: Raw) -> None:
        try:
            event = parse_event(raw)
        except WireError:  # the next number shows whose it was
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
) -> list[RankTransport]:
    """The transports of one worker's ranks, in the order of ranks, over one poller.

    chance: 0 to 1, for the jitter of tries and polls. clock: seconds since the epoch, for the
    stamps that the events lack.
    """
    return _Drain(source, chance, clock).transports


def _words(error: Exception) -> str:
    """What went wrong; time-outs say nothing of themselves."""
    return str(error)[:_MAX_WORDS] or type(error).__name__
