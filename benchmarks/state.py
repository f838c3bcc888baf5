"""What the state file costs: bytes, CPU time, and the longest step on the loop.

Ten ranks of 100,000 blocks of 16 tokens each are written and read again, as a router does it. A
step is the CPU time of the event loop's thread between two turns of it.
"""

import asyncio
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
from kvstate.index import default_layout
from kvstate.saved_state import StateHeader
from tests.memory_transport import MemoryTransport

RANKS, BLOCKS_A_BATCH, TOKENS = 10, 1_000, 16
SMOKE_BATCHES, BATCHES = 2, 100
SECRET = 1


def payload(rank: int, number: int) -> bytes:
    """A batch that stores a chain of blocks."""
    first = (1_000 * rank + number) * BLOCKS_A_BATCH
    hashes = [(first + n) * 0x9E3779B97F4A7C15 % 2**64 for n in range(BLOCKS_A_BATCH)]
    tokens = [(first + n) % 150_000 for n in range(BLOCKS_A_BATCH * TOKENS)]
    event = ["BlockStored", hashes, None, tokens, TOKENS]
    return msgspec.msgpack.encode([float(number), [event], 0])


def publisher(rank: int, first: int, batches: int) -> MemoryTransport:
    """A rank whose buffer begins with this batch."""
    made = MemoryTransport({n: payload(rank, n) for n in range(first, batches)})
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
    while any(fleet.state(f"w{rank}") is not FeedState.LIVE for rank in range(RANKS)):
        await asyncio.sleep(0.001)


async def measured(path: Path, batches: int) -> list[Row]:
    """Returns all rows."""
    fleet = FollowedWorkers(SECRET, time.time)
    for rank in range(RANKS):
        fleet.add(f"w{rank}", "m", [publisher(rank, 0, batches)])
    await until_live(fleet)
    header = StateHeader(default_layout(), "benchmark", time.time(), SECRET)
    file = StateFile(str(path), 60.0, fleet, lambda: header, lambda _: "")
    began = time.process_time()
    await file.write()
    write_seconds = time.process_time() - began
    longest = LongestStep()
    await file.write()
    step_ms = longest.end()
    await fleet.close()
    transports = [publisher(rank, batches - 1, batches) for rank in range(RANKS)]
    began = time.process_time()
    state = read(str(path), default_layout(), time.time())
    again = FollowedWorkers(SECRET, time.time)
    assert state is not None
    RestoredWorkers(again, lambda _: "").add(state)
    for rank, transport in enumerate(transports):
        again.add(f"w{rank}", "m", [transport])
    await until_live(again)
    restore_seconds = time.process_time() - began
    blocks = sum(sum(again.blocks_by_tier(f"w{rank}")) for rank in range(RANKS))
    assert blocks == RANKS * batches * BLOCKS_A_BATCH
    await again.close()
    return [
        _row("size (MB)", file.bytes / 1e6, Goal(60.0, "<= 60 MB", of_ratio=False)),
        _row("write, CPU (s)", write_seconds, Goal(2.0, "<= 2 s", of_ratio=False)),
        _row("write, longest step (ms)", step_ms, Goal(1.0, "<= 1 ms", of_ratio=False)),
        _row("read until certain, CPU (s)", restore_seconds, Goal(2.0, "<= 2 s", of_ratio=False)),
    ]


def _row(what: str, value: float, goal: Goal) -> Row:
    return Row(what, Figure([value]), NO_REFERENCE, goal)


def main() -> None:
    """Measures a file of a million blocks."""
    parser = arguments("Benchmark of the state file.", "the same")
    with run(parser, __doc__ or "") as one, tempfile.TemporaryDirectory() as directory:
        batches = one.amount(SMOKE_BATCHES, BATCHES, BATCHES)
        one.add(asyncio.run(measured(Path(directory) / "state", batches)))


if __name__ == "__main__":
    main()
