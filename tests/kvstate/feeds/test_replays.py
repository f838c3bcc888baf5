import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvstate.errors import ReplayError
from kvstate.events import Batch
from kvstate.feeds.feed_times import USUAL, FeedTimes
from kvstate.feeds.replays import Replays, ReplaySlots
from kvstate.feeds.transport import Malformed, RankName
from tests.memory_transport import MemoryTransport
from tests.waiting import until


class Asked:
    """Replays, and what became of them."""

    def __init__(self, transport: MemoryTransport, slots: ReplaySlots, times: FeedTimes) -> None:
        self.taken: list[Batch | Malformed] = []
        self.ended: list[str | None] = []
        self.failed = 0
        self.restarts_at: Batch | None = None
        self.replays = Replays(
            RankName("w", 0), transport, slots, times, take=self.take, end=self.end, fail=self.fail
        )

    async def take(self, message: Batch | Malformed) -> None:
        self.taken.append(message)
        if message == self.restarts_at:
            self.restarts_at = None
            self.replays.start(0)

    async def end(self, error: ReplayError | None) -> None:
        self.ended.append(None if error is None else str(error))

    def fail(self) -> None:
        self.failed += 1


@asynccontextmanager
async def asked(
    transport: MemoryTransport, slots: ReplaySlots | None = None, times: FeedTimes = USUAL
) -> AsyncIterator[Asked]:
    asked = Asked(transport, slots or ReplaySlots(), times)
    yield asked
    await asked.replays.close()


BATCHES = [Batch(0, b"a"), Batch(1, b"b"), Batch(2, b"c")]


def publisher() -> MemoryTransport:
    return MemoryTransport({0: b"a", 1: b"b", 2: b"c"})


async def test_replay_delivers_batches_from_its_start_and_ends() -> None:
    async with asked(publisher()) as one:
        one.replays.start(1)
        await until(lambda: one.ended == [None])
        assert one.taken == BATCHES[1:]


async def test_failed_replay_reports_its_reason() -> None:
    transport = publisher()
    transport.replay_error = "silent"
    async with asked(transport) as one:
        one.replays.start(0)
        await until(lambda: one.ended == ["silent"])


class Unending(MemoryTransport):
    """Its replays never come to an end."""

    ended = 0

    async def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        self.replays.append(start)
        try:
            yield Malformed()
            await asyncio.Event().wait()
        finally:
            self.ended += 1


async def test_new_replay_replaces_the_one_under_way() -> None:
    transport = Unending()
    async with asked(transport) as one:
        one.replays.start(0)
        await until(lambda: transport.replays == [0])
        one.replays.start(7)
        await until(lambda: transport.replays == [0, 7])
        assert transport.ended == 1
    assert (transport.ended, one.ended) == (2, [])


async def test_replay_that_starts_another_delivers_no_more_batches() -> None:
    async with asked(publisher()) as one:
        one.restarts_at = BATCHES[1]
        one.replays.start(0)
        await until(lambda: one.ended == [None])
        assert one.taken == BATCHES[:2] + BATCHES


async def test_replay_that_takes_too_long_fails() -> None:
    async with asked(Unending(), times=FeedTimes(max_replay_seconds=0.02)) as one:
        one.replays.start(0)
        await until(lambda: one.ended == ["it took longer than 0.02 s"])


async def test_replay_waits_for_a_slot_of_the_process() -> None:
    slots = ReplaySlots(1)
    transport = publisher()
    async with asked(transport, slots) as one:
        async with slots.slot("another"):
            one.replays.start(0)
            for _ in range(9):
                await asyncio.sleep(0)
            assert transport.replays == []
        await until(lambda: one.ended == [None])


class Broken(MemoryTransport):
    """Fails in a way that nobody foresaw."""

    async def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        yield Batch(start, b"")
        raise RuntimeError("nobody foresaw this")


async def test_unforeseen_error_is_logged_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    async with asked(Broken()) as one:
        one.replays.start(0)
        await until(lambda: one.failed == 1)
        assert (one.ended, caplog.messages) == ([], ["replay of w rank 0 failed"])


async def test_close_stops_what_an_ended_replay_leads_to() -> None:
    begun, went_on = asyncio.Event(), []

    async def end(_: ReplayError | None) -> None:
        begun.set()
        await asyncio.sleep(0)
        went_on.append(True)

    async def take(_: Batch | Malformed) -> None: ...

    def fail() -> None: ...

    place = RankName("w", 0)
    replays = Replays(place, publisher(), ReplaySlots(), take=take, end=end, fail=fail)
    replays.start(0)
    await begun.wait()
    await replays.close()
    await asyncio.sleep(0)
    assert went_on == []


async def test_replays_beyond_the_burst_are_spaced() -> None:
    transport = publisher()
    times = FeedTimes(replays_at_once=3, replay_spacing_seconds=100.0)
    async with asked(transport, times=times) as one:
        for count in range(1, 5):
            one.replays.start(0)
            await until(lambda count=count: len(one.ended) == count)  # type: ignore[misc]
        one.replays.start(0)
        for _ in range(20):  # far more turns than a replay without spacing takes to start
            await asyncio.sleep(0)
        assert len(transport.replays) == 4


class Trickling(MemoryTransport):
    """Its replays bring next to nothing."""

    async def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        for number in itertools.count(start):
            yield Batch(number, b"")
            await asyncio.sleep(0)


async def test_replay_that_trickles_fails() -> None:
    # however fast the machine is, a batch takes longer than what it earns
    times = FeedTimes(patience_seconds=0.0, seconds_a_batch=1e-12)
    async with asked(Trickling(), times=times) as one:
        one.replays.start(0)
        await until(lambda: len(one.ended) == 1)
        assert one.ended[0] is not None
        assert one.ended[0].startswith("it is too slow: ")


class Filling(MemoryTransport):
    """Its replays bring much; each batch earns 1,600 seconds."""

    async def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        body = bytes(100 << 20)
        for number in range(start, 10):
            await asyncio.sleep(0)
            yield Batch(number, body)


async def test_slow_replay_of_many_bytes_is_completed() -> None:
    times = FeedTimes(patience_seconds=0.0, seconds_a_batch=0.0)
    async with asked(Filling(), times=times) as one:
        one.replays.start(0)
        await until(lambda: one.ended == [None])


class Turn:
    """A replay that waits for its slot, holds it, and releases it when told."""

    def __init__(self, slots: ReplaySlots, worker: str, order: list[str]) -> None:
        self.done = asyncio.Event()
        self.task = asyncio.create_task(self._take(slots, worker, order))

    async def _take(self, slots: ReplaySlots, worker: str, order: list[str]) -> None:
        async with slots.slot(worker):
            order.append(worker)
            await self.done.wait()

    async def end(self) -> None:
        self.done.set()
        await self.task


async def take_all(slots: ReplaySlots, *workers: str) -> None:
    """Holds the slots for these workers at once, which is possible only if all were given back."""
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(slots.slot(worker))


async def test_slots_are_not_exhausted_by_a_worker_of_many_ranks() -> None:
    slots, order = ReplaySlots(4, 2), list[str]()
    turns = [Turn(slots, worker, order) for worker in ("many",) * 16 + ("few", "one")]
    await until(lambda: order == ["many", "many", "few", "one"])
    for turn in turns:
        turn.done.set()
    await asyncio.gather(*(turn.task for turn in turns))
    assert order.count("many") == 16
    await take_all(slots, "many", "many", "few", "few")


async def test_slots_are_given_to_workers_in_turn() -> None:
    slots, order = ReplaySlots(1, 1), list[str]()
    turns = [Turn(slots, worker, order) for worker in "aaabbc"]
    await until(lambda: order == ["a"])
    for turn in turns:
        turn.done.set()
    await asyncio.gather(*(turn.task for turn in turns))
    assert order == list("aabcab")


async def test_slots_are_not_held_by_a_replay_cancelled_before_its_turn() -> None:
    slots, order = ReplaySlots(1, 1), list[str]()
    first, *others = (Turn(slots, worker, order) for worker in "abb")
    await until(lambda: order == ["a"])
    for other in others:
        other.task.cancel()
    await asyncio.wait([other.task for other in others])
    await first.end()
    last = Turn(slots, "b", order)
    await last.end()
    assert order == ["a", "b"]
    await take_all(slots, "b")


async def test_slots_are_returned_by_a_replay_cancelled_at_its_turn() -> None:
    slots, order = ReplaySlots(1, 1), list[str]()
    first, second, third = (Turn(slots, worker, order) for worker in "abc")
    await until(lambda: order == ["a"])
    second.task.cancel()  # its turn comes before it sees that
    await first.end()
    await third.end()
    assert order == ["a", "c"]
    await take_all(slots, "b")
