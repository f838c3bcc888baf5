"""Events at steady state: every message stores new blocks and removes as many old ones.

Each of 8 workers keeps a system prompt and the same number of chats of 64 blocks. One period of the
stream removes all blocks that it stores, so that it can be applied repeatedly.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from workload import (
    BLOCKS_PER_WORKER,
    SYSTEM_BLOCKS,
    Piece,
    Source,
    message,
    removed,
    stored,
)

WORKERS = 8
CHAT_BLOCKS = 64
RESIDENT_CHATS = (BLOCKS_PER_WORKER - SYSTEM_BLOCKS) // CHAT_BLOCKS
CHATS = RESIDENT_CHATS + 8

# How many blocks one message and one event of it store.
LAYOUTS = {"16 blocks an event": (16, 16), "64 events of 1 block": (64, 1)}

# One store or removal of one block is one operation.
OPERATIONS = 2 * WORKERS * CHATS * CHAT_BLOCKS


class Sent(NamedTuple):
    """One message of a worker."""

    worker: int
    payload: bytes


class Churn:
    """The stream of one layout: `fill` comes first, once; then `period`, any number of times.

    resident: blocks that each worker holds after both. gone: for each, a chat that came and went.
    """

    def __init__(self, layout: str, seed: int = 2) -> None:
        per_message, per_event = LAYOUTS[layout]
        source = Source(seed)
        system = source.piece(SYSTEM_BLOCKS)
        chats = [[source.piece(CHAT_BLOCKS, system) for _ in range(CHATS)] for _ in range(WORKERS)]
        self.resident = [[system, *mine[:RESIDENT_CHATS]] for mine in chats]
        self.gone = [mine[RESIDENT_CHATS] for mine in chats]
        self.fill = [
            Sent(worker, message([stored(piece)]))
            for worker, pieces in enumerate(self.resident)
            for piece in pieces
        ]
        self.period = list(_period(chats, per_message, per_event))


def _period(chats: Sequence[Sequence[Piece]], per_message: int, per_event: int) -> Iterator[Sent]:
    for turn in range(CHATS):
        for start in range(0, CHAT_BLOCKS, per_message):
            for worker, mine in enumerate(chats):
                new, old = mine[(turn + RESIDENT_CHATS) % CHATS], mine[turn]
                events = _removals(old, start, per_message)
                events += _stores(new, start, per_message, per_event)
                yield Sent(worker, message(events))


def _removals(old: Piece, done: int, count: int) -> list[dict[str, Any]]:
    """Removals in the order of engines: a chat's last blocks first."""
    end = CHAT_BLOCKS - done
    return [removed(block) for block in reversed(old.hashes[end - count : end])]


def _stores(new: Piece, start: int, count: int, per_event: int) -> list[dict[str, Any]]:
    return [
        stored(new, first, first + per_event) for first in range(start, start + count, per_event)
    ]


def marker(number: int) -> Piece:
    """Returns a block of no other stream; once it is visible, all before it has been applied."""
    return Source(1_000_000 + number).piece(1)
