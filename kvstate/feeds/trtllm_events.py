"""TensorRT-LLM's events from its own process: from an iterator such as get_kv_cache_events_async.

For a server that embeds `tensorrt_llm.LLM` and runs the bridge beside it; the drain by HTTP is in
`kvstate.feeds.trtllm_transport`. Either way an event is given to one consumer only, once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec

from kvstate.errors import WireError
from kvstate.feeds.backoff import Backoff
from kvstate.feeds.feed_terms import Recovery
from kvstate.feeds.shared_connection import RankTransport, SharedConnection
from kvstate.feeds.transport import Batch, Connected, Disconnected, Malformed, Refused
from kvstate.feeds.turns import SLICE_SECONDS
from kvstate.wire.trtllm_drain import parse_event
from kvstate.wire.trtllm_wire import RankDecoder

# Between drains: the first while events come, longer and longer while none do.
DRAIN_SECONDS = (0.01, 0.5)
RETRY_SECONDS = (0.1, 5.0)
REFUSED_SECONDS = 60.0

# The events of one drain differ from those of the next in their stamps, however coarse the clock.
_CLOCK_STEP_SECONDS = 1e-6

Drain = Callable[[], AsyncIterator[object]]


def trtllm_events(
    drain: Drain,
    ranks: int,
    clock: Callable[[], float],
    chance: Callable[[], float],
) -> list[RankTransport]:
    """The transports of an engine's ranks, in the order of ranks.

    drain: called again and again; gives the events that wait, each as a mapping or as JSON, one by
    one or in lists, and ends. It must not block the event loop. NotImplementedError says that the
    engine has no events (event_buffer_max_size is 0). clock: seconds since the epoch, for the
    stamps that the events lack. chance: 0 to 1, for jitter.
    """
    return _Drained(drain, ranks, clock, chance).shared.transports


class _Drained:
    def __init__(
        self, drain: Drain, ranks: int, clock: Callable[[], float], chance: Callable[[], float]
    ) -> None:
        self.shared = SharedConnection("TensorRT-LLM", ranks, Recovery.QUEUED, self._follow)
        self._drain = drain
        self._clock = clock
        self._decoders = [RankDecoder() for _ in range(ranks)]
        self._drains = Backoff(*DRAIN_SECONDS, chance)
        self._retries = Backoff(*RETRY_SECONDS, chance)
        self._is_connected = False
        self._stamp = 0.0
        self._slice_ends = 0.0

    async def _follow(self) -> None:
        self._is_connected = False
        while True:
            seconds = await self._drain_once()
            await asyncio.sleep(seconds)

    async def _drain_once(self) -> float:
        """Takes what waits; returns the seconds until the next time."""
        self._stamp = max(self._clock(), self._stamp + _CLOCK_STEP_SECONDS)
        try:
            async for item in self._drain():
                self._tell_connected()
                self._drains.reset()
                await self._take(item)
        except NotImplementedError as error:
            self._is_connected = False
            self.shared.tell(Refused(str(error) or "publishes no events"))
            return REFUSED_SECONDS
        except Exception as error:  # noqa: BLE001 - whatever the engine raises, it may mend itself
            self._is_connected = False
            self.shared.tell(Disconnected(f"its events cannot be had: {type(error).__name__}"))
            return self._retries.next_seconds()
        self._tell_connected()
        self._retries.reset()
        return self._drains.next_seconds()

    def _tell_connected(self) -> None:
        if not self._is_connected:
            self._is_connected = True
            self.shared.tell(Connected())

    async def _take(self, item: object) -> None:
        for raw in _events(item):
            await self._hand(raw)
            now = asyncio.get_running_loop().time()
            if now >= self._slice_ends:  # an iterator whose events are all there never waits
                await asyncio.sleep(0)
                self._slice_ends = now + SLICE_SECONDS

    async def _hand(self, raw: bytes) -> None:
        try:
            event = parse_event(msgspec.Raw(raw))
        except WireError:  # the next number shows whose it was
            await self.shared.transports[0].hand(Malformed())
            return
        transport = self.shared.of_rank(event.rank)
        if transport is not None:
            batch = self._decoders[event.rank].decode(event, self._stamp)
            await transport.hand(Batch(event.sequence, batch), len(raw))


def _events(item: object) -> Iterator[bytes]:
    """The events in one item, as JSON."""
    if isinstance(item, list | tuple):
        for one in item:
            yield from _events(one)
    elif isinstance(item, str):
        yield item.encode(errors="replace")
    elif isinstance(item, bytes):
        yield item
    else:
        try:
            yield msgspec.json.encode(item)
        except (TypeError, ValueError, RecursionError):
            yield b""
