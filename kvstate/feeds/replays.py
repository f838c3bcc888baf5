"""Runs the replays that feeds request: one at a time, spaced, and each with a time limit.

Engines answer from the thread that publishes, and the answers are held in memory until they are
applied. So the number of replays at a time is limited over all feeds of a process, and more
strictly for one worker, so that a worker whose ranks all answer slowly does not block the replays
of others.
"""

import asyncio
import contextlib
import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from kvstate.errors import ReplayError
from kvstate.events import Batch
from kvstate.feeds.feed_times import USUAL, FeedTimes
from kvstate.feeds.transport import FeedTransport, Malformed, RankName

log = logging.getLogger("kvsteer.feed")

# A publisher may take longer if it sends much.
BYTES_A_SECOND = 64 * 1024

# Replays under way at once, over all feeds of a process and of one worker.
MAX_REPLAYS = 8
MAX_REPLAYS_OF_WORKER = 2


class ReplaySlots:
    """Slots for the replays of all feeds of a process.

    Workers take turns, however many ranks each of them has.
    """

    def __init__(self, at_once: int = MAX_REPLAYS, of_worker: int = MAX_REPLAYS_OF_WORKER) -> None:
        self._free = at_once
        self._of_worker = of_worker
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def slot(self, worker: str) -> AsyncIterator[None]:
        """Waits for the worker's turn, and holds a slot for one replay."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(worker, deque()).append(turn)
        self._give()
        try:
            await turn
            yield
        finally:
            if turn.cancelled():
                self._withdraw(worker, turn)
            else:
                self._release(worker)

    def _give(self) -> None:
        while self._free:
            worker = next((one for one in self._waiting if not self._is_busy(one)), None)
            if worker is None:
                return
            turn = self._waiting[worker].popleft()
            self._waiting.move_to_end(worker)
            if not self._waiting[worker]:
                del self._waiting[worker]
            if not turn.done():  # unless the waiting replay was cancelled
                self._free -= 1
                self._running[worker] += 1
                turn.set_result(None)

    def _is_busy(self, worker: str) -> bool:
        return self._running[worker] >= self._of_worker

    def _release(self, worker: str) -> None:
        self._free += 1
        self._running[worker] -= 1
        if not self._running[worker]:
            del self._running[worker]
        self._give()

    def _withdraw(self, worker: str, turn: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(worker, deque())
        if turn in waiting:
            waiting.remove(turn)
        if not waiting:
            self._waiting.pop(worker, None)


class Replays:
    """The replay of one feed that is under way, if any; a new one replaces it.

    slots: of the process. times: of all feeds. take: is called with each message. end: is called
    when the replay is complete, or with the reason why it is not. fail: is called after an
    unexpected error.
    """

    def __init__(
        self,
        place: RankName,
        transport: FeedTransport,
        slots: ReplaySlots,
        times: FeedTimes = USUAL,
        *,
        take: Callable[[Batch | Malformed], Awaitable[None]],
        end: Callable[[ReplayError | None], Awaitable[None]],
        fail: Callable[[], None],
    ) -> None:
        self._place = place
        self._transport = transport
        self._slots = slots
        self._times = times
        self._take = take
        self._end = end
        self._fail = fail
        self._running: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # of one that ended, what it ends is under way
        self._due_at = -math.inf

    def start(self, start: int) -> None:
        """Starts a replay from this number on, as soon as a slot is free."""
        self.stop()
        now = asyncio.get_running_loop().time()
        spacing_seconds = self._times.replay_spacing_seconds
        credit_seconds = self._times.replays_at_once * spacing_seconds
        self._due_at = max(self._due_at + spacing_seconds, now - credit_seconds)
        self._running = task = asyncio.create_task(self._run(start, self._due_at - now))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Stops the replay under way; one that is replaced notices that it is no longer current."""
        running, self._running = self._running, None
        if running is not None and running is not asyncio.current_task():
            running.cancel()

    async def close(self) -> None:
        """Stops the replay under way, and what an ended one leads to, and waits for both."""
        self.stop()
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, start: int, wait_seconds: float) -> None:
        try:
            await asyncio.sleep(wait_seconds)
            limit = _limited(self._times.max_replay_seconds)
            async with self._slots.slot(self._place.worker), limit:
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
        async with (
            contextlib.aclosing(self._transport.replay(start)) as batches,
            contextlib.aclosing(_in_time(batches, self._times)) as in_time,
        ):
            async for batch in in_time:
                await self._take(batch)
                if not self._is_current():
                    return

    def _is_current(self) -> bool:
        """Whether this is still the replay that the feed requested last."""
        return self._running is asyncio.current_task()


async def _in_time(
    batches: AsyncGenerator[Batch | Malformed], times: FeedTimes
) -> AsyncGenerator[Batch | Malformed]:
    """Yields the batches as they arrive, unless the publisher is too slow.

    Raises:
        ReplayError: the publisher is too slow to keep its slot.
    """
    time = asyncio.get_running_loop().time
    waited_seconds, earned_seconds, count, began_at = 0.0, times.patience_seconds, 0, time()
    async for batch in batches:
        count += 1
        waited_seconds += time() - began_at
        earned_seconds += times.seconds_a_batch
        if isinstance(batch, Batch) and isinstance(batch.body, bytes):
            earned_seconds += len(batch.body) / BYTES_A_SECOND
        if waited_seconds > earned_seconds:
            raise ReplayError(f"it is too slow: {count} batches in {waited_seconds:.1f} s")
        yield batch
        began_at = time()


@contextlib.asynccontextmanager
async def _limited(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ReplayError(f"it took longer than {seconds:g} s") from None
