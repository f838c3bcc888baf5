"""Running the replays that a feed asks for: one at a time, spaced, and each within its time."""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable

from kvstate.errors import ReplayError
from kvstate.feeds.feed_news import Place
from kvstate.feeds.transport import Batch, Malformed, Transport

log = logging.getLogger("kvsteer.feed")

# A whole replay; engines send them from the thread that publishes.
MAX_REPLAY_SECONDS = 60.0
# Two publishers on one wire seem to restart all the time; they are not asked all the time.
REPLAY_SPACING_SECONDS = 0.5
REPLAYS_AT_ONCE = 20


class Replays:
    """The replay of one feed that is under way, if any; a new one takes its place.

    slots: over all feeds of a process. take: is given each message of it. end: is called when it is
    complete, or why it is not. fail: is called after an error that nobody foresaw.
    """

    def __init__(
        self,
        place: Place,
        transport: Transport,
        slots: asyncio.Semaphore,
        *,
        take: Callable[[Batch | Malformed], Awaitable[None]],
        end: Callable[[ReplayError | None], Awaitable[None]],
        fail: Callable[[], None],
    ) -> None:
        self._place = place
        self._transport = transport
        self._slots = slots
        self._take = take
        self._end = end
        self._fail = fail
        self._running: asyncio.Task[None] | None = None
        self._due = -math.inf

    def start(self, start: int) -> None:
        """Begins one, from this number on, as soon as it may."""
        self.stop()
        now = asyncio.get_running_loop().time()
        credit_seconds = REPLAYS_AT_ONCE * REPLAY_SPACING_SECONDS
        self._due = max(self._due + REPLAY_SPACING_SECONDS, now - credit_seconds)
        self._running = asyncio.create_task(self._run(start, self._due - now))

    def stop(self) -> None:
        """Ends the one under way; one that replaces itself sees that it is no longer the one."""
        running, self._running = self._running, None
        if running is not None and running is not asyncio.current_task():
            running.cancel()

    async def close(self) -> None:
        """Ends the one under way, and waits for its end."""
        running = self._running
        self.stop()
        if running is not None:
            await asyncio.wait([running])

    async def _run(self, start: int, wait_seconds: float) -> None:
        try:
            await asyncio.sleep(wait_seconds)
            async with self._slots, _limited(MAX_REPLAY_SECONDS):
                await self._receive(start)
            if self._is_current():
                self._running = None
                await self._end(None)
        except ReplayError as error:
            self._running = None
            await self._end(error)
        except Exception:
            log.exception("replay of %s rank %d failed", *self._place)
            self._fail()

    async def _receive(self, start: int) -> None:
        async with contextlib.aclosing(self._transport.replay(start)) as batches:
            async for batch in batches:
                await self._take(batch)
                if not self._is_current():
                    return

    def _is_current(self) -> bool:
        """Whether this replay is still the one that the feed asked for last."""
        return self._running is asyncio.current_task()


@contextlib.asynccontextmanager
async def _limited(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ReplayError(f"it took longer than {seconds:g} s") from None
