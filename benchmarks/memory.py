"""Memory per worker-block; each measurement has its own process.

The figure is the growth of the resident set while an index fills, divided by the blocks that its
workers hold (a block that n workers hold counts n times). Blocks come in chats of 64 behind one
system prompt; "unique" gives every worker its own chats, "shared" gives all workers the same.
"""

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from indexed_workers import CORE, IndexedWorkers
from measure import CannotRunError, Figure, Goal, Row, Scale, or_reason
from peer_dynamo import Radix
from workload import SYSTEM_BLOCKS, Piece, Source, message, stored

KINDS = ("unique", "shared")
RADIX = "RadixTree"
WARM_UP_BLOCKS = 2_000

Store = Callable[[int, Piece], None]


# The lowest of the published figures.
PUBLISHED_BYTES = {"Dynamo": 69.0, "AIBrix": 403.0}

GOALS = {
    "unique": Goal(64, "<= 64 B", of_ratio=False),
    "shared": Goal(40, "<= 40 B", of_ratio=False),
}


def memory(scale: Scale) -> list[Row]:
    """Bytes per worker-block, compared with published figures and the radix tree measured here."""
    return [
        row
        for workers in scale.memory_fleets
        for kind in KINDS
        for row in _memory(workers, kind, scale.memory_blocks)
    ]


def _memory(workers: int, kind: str, blocks: int) -> list[Row]:
    radix = or_reason(lambda: _measured(RADIX, workers, kind, blocks))
    ours = or_reason(lambda: _measured(CORE, workers, kind, blocks))
    what = f"memory, {workers} workers, {kind}, {CORE} (B per worker-block)"
    published = [
        Row(f"{what}; {peer} as published", ours, Figure([figure]), GOALS[kind])
        for peer, figure in PUBLISHED_BYTES.items()
    ]
    return [*published, Row(f"{what}; Dynamo's {RADIX} here", ours, radix)]


def _measured(contestant: str, workers: int, kind: str, blocks: int) -> Figure:
    """Measures a contestant (CORE or RADIX) in a fresh process.

    Raises:
        CannotRunError: it cannot run here.
    """
    arguments = [contestant, str(workers), kind, str(blocks)]
    done = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, check=False
    )
    lines = done.stdout.split()
    if done.returncode or not lines:
        raise CannotRunError((done.stderr.strip().splitlines() or ["did not run"])[-1])
    return Figure([float(lines[-1])])


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contestant", choices=[CORE, RADIX])
    parser.add_argument("workers", type=int)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("blocks", type=int)
    wanted = parser.parse_args()
    try:
        print(_measure(wanted.contestant, wanted.workers, wanted.kind, wanted.blocks))
    except CannotRunError as error:
        sys.exit(str(error))


def _measure(contestant: str, workers: int, kind: str, blocks: int) -> float:
    _fill(_store_of(contestant, 1), 1, WARM_UP_BLOCKS, kind)  # code and buffers used for filling
    store = _store_of(contestant, workers)
    before = _resident_bytes()
    held = _fill(store, workers, blocks // workers, kind)
    return (_resident_bytes() - before) / held


def _store_of(contestant: str, workers: int) -> Store:
    if contestant == RADIX:
        return Radix().store
    ours = IndexedWorkers(workers)
    return lambda worker, piece: ours.apply(worker, message([stored(piece)]))


def _fill(store: Store, workers: int, blocks_each: int, kind: str) -> int:
    """Fills an index, worker by worker; returns the number of blocks of all workers."""
    held = 0
    for worker in range(workers):
        for piece in _pieces(worker if kind == "unique" else 0, blocks_each):
            store(worker, piece)
            held += len(piece)
    return held


def _pieces(seed: int, blocks: int) -> Iterator[Piece]:
    system = Source(0).piece(SYSTEM_BLOCKS)
    yield system
    source = Source(seed + 1)
    for _ in range(blocks // SYSTEM_BLOCKS - 1):
        yield source.piece(SYSTEM_BLOCKS, system)


def _resident_bytes() -> int:
    gc.collect()
    try:
        pages = Path("/proc/self/statm").read_text("ascii").split()[1]
    except OSError:
        raise CannotRunError("did not run: the resident set is read from Linux's /proc") from None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    _main()
