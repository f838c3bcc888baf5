"""What the state file costs: bytes, CPU time, and the longest step on the loop.

Ten ranks of 100,000 blocks of 16 tokens each are written and read again, as a router does it; then
once more with a store that has all of these blocks too. A step is the CPU time of the event loop's
thread between two turns of it.
"""

import asyncio
import functools
import tempfile
import time
from pathlib import Path

import msgspec
from measure import NO_REFERENCE, Figure, Goal, Row
from rows import arguments, run

from extproc.running.restored_workers import RestoredWorkers
from extproc.running.state_file import StateFile, read
from kvstate.feeds.feed import FeedState
from kvstate.feeds.transport import Connected
from kvstate.fleet import FollowedWorkers
from kvstate.index.index import saved_layout
from kvstate.rows.format import StateHeader
from kvstate.stores.stores import StoreRules
from tests.memory_transport import MemoryTransport

RANKS, BLOCKS_A_BATCH, TOKENS = 10, 1_000, 16
SMOKE_BATCHES, BATCHES = 2, 100
SECRET = 1
STORE = StoreRules("s", frozenset(f"w{rank}" for rank in range(RANKS)), media=frozenset({"CPU"}))


def payload(rank: int, number: int, *, is_shared: bool) -> bytes:
    """A batch that stores a chain of blocks. is_shared: also in STORE."""
    first = (1_000 * rank + number) * BLOCKS_A_BATCH
    hashes = [(first + n) * 0x9E3779B97F4A7C15 % 2**64 for n in range(BLOCKS_A_BATCH)]
    tokens = [(first + n) % 150_000 for n in range(BLOCKS_A_BATCH * TOKENS)]
    event = ["BlockStored", hashes, None, tokens, TOKENS]
    events = [event, [*event, None, "CPU"]] if is_shared else [event]
    return msgspec.msgpack.encode([float(number), events, 0])


def publisher(rank: int, first: int, batches: int, *, is_shared: bool) -> MemoryTransport:
    """A rank whose buffer begins with this batch."""
    numbers = range(first, batches)
    made = MemoryTransport({n: payload(rank, n, is_shared=is_shared) for n in numbers})
    made.put(Connected())
    return made


class LongestStep:
    """The longest step on the loop, in milliseconds of its thread's CPU time."""

    def __init__(self) -> None:
        self.ms = 0.0
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            self.ms = max(self.ms, 1_000 * (time.thread_time() - began))

    def end(self) -> float:
        """Stops watching; returns it."""
        self._task.cancel()
        return self.ms


async def until_live(fleet: FollowedWorkers) -> None:
    """Waits until all ranks are certain."""
    while any(fleet.feeds.state(f"w{rank}") is not FeedState.LIVE for rank in range(RANKS)):
        await asyncio.sleep(0.001)


async def measured(path: Path, batches: int, *, is_shared: bool) -> list[Row]:
    """Returns the rows without a store, or with one."""
    stores = [STORE] if is_shared else []
    fleet = FollowedWorkers(SECRET, time.time, stores=stores)
    for rank in range(RANKS):
        fleet.add(f"w{rank}", "m", [publisher(rank, 0, batches, is_shared=is_shared)])
    await until_live(fleet)
    header = StateHeader(saved_layout(), "benchmark", time.time(), SECRET)
    file = StateFile(str(path), 60.0, fleet, lambda: header, lambda _: "")
    began = time.process_time()
    await file.write()
    write_seconds = time.process_time() - began
    longest = LongestStep()
    await file.write()
    step_ms = longest.end()
    await fleet.close()
    last = batches - 1
    transports = [publisher(rank, last, batches, is_shared=is_shared) for rank in range(RANKS)]
    began = time.process_time()
    state = read(str(path), saved_layout(), time.time())
    again = FollowedWorkers(SECRET, time.time, stores=stores)
    assert state is not None
    restored = RestoredWorkers(again, lambda _: "")
    restored.add(state)
    await restored.begin()
    for rank, transport in enumerate(transports):
        again.add(f"w{rank}", "m", [transport])
    await until_live(again)
    restore_seconds = time.process_time() - began
    blocks = sum(sum(again.blocks.by_tier(f"w{rank}")) for rank in range(RANKS))
    assert blocks == RANKS * batches * BLOCKS_A_BATCH
    assert [count for _, count in again.stores.blocks()] == [blocks] * is_shared
    await again.close()
    row = functools.partial(_row_of, "with a store: " if is_shared else "")
    return [
        row("size (MB)", file.bytes / 1e6, Goal(60.0, "<= 60 MB", of_ratio=False)),
        row("write, CPU (s)", write_seconds, Goal(2.0, "<= 2 s", of_ratio=False)),
        row("write, longest step (ms)", step_ms, Goal(1.0, "<= 1 ms", of_ratio=False)),
        row("read until certain, CPU (s)", restore_seconds, Goal(2.0, "<= 2 s", of_ratio=False)),
    ]


def _row_of(case: str, what: str, value: float, goal: Goal) -> Row:
    return Row(f"{case}{what}", Figure([value]), NO_REFERENCE, goal)


def main() -> None:
    """Measures a file of a million blocks."""
    parser = arguments("Benchmark of the state file.", "the same")
    with run(parser, __doc__ or "") as one, tempfile.TemporaryDirectory() as directory:
        batches = one.amount(SMOKE_BATCHES, BATCHES, BATCHES)
        for is_shared in (False, True):
            path = Path(directory) / "state"
            one.add(asyncio.run(measured(path, batches, is_shared=is_shared)))


if __name__ == "__main__":
    main()
