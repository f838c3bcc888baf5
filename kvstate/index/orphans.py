"""Orphans: stored blocks whose parent is unknown, which wait for it without a key or any credit."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvstate.events import BlockHash, BlocksStored
from kvstate.index.core import BYTES_PER_TOKEN, BlockPool
from kvstate.overlap import encoded

# Memory of an orphan besides its bytes: the object, its names, and its share of both tables.
ORPHAN_OVERHEAD_BYTES = 600


class Name(NamedTuple):
    """The name by which a removal identifies a block."""

    medium: str
    group: int | None
    block: BlockHash


@dataclass(slots=True)
class Orphan:
    """One stored block that waits for its parent.

    tokens: its uint32 ids as bytes. extra: its encoded extra keys.
    """

    parent: BlockHash
    pool: BlockPool
    block: BlockHash
    tokens: bytes
    extra: bytes | None
    copies: int = 1

    @property
    def content(self) -> tuple[BlockHash, bytes, bytes | None]:
        """The parts from which its key is computed."""
        return self.parent, self.tokens, self.extra

    @property
    def size_bytes(self) -> int:
        """Its memory, including both hashes if they are bytes, and its share of the tables."""
        return (
            ORPHAN_OVERHEAD_BYTES
            + len(self.tokens)
            + len(self.extra or b"")
            + sum(len(one) for one in (self.parent, self.block) if isinstance(one, bytes))
        )

    @property
    def name(self) -> Name:
        """The name by which it is removed."""
        return Name(self.pool.medium, self.pool.group, self.block)


def orphans_of(event: BlocksStored) -> Iterator[Orphan]:
    """Yields the blocks of a chain whose parent is unknown, each the parent of the next."""
    pool = BlockPool.of(event.medium, event.group, event.block_size)
    step = event.block_size * BYTES_PER_TOKEN
    view = memoryview(event.tokens).cast("B")
    parents = [event.parent, *event.hashes]
    for position, (parent, block) in enumerate(zip(parents, event.hashes, strict=False)):
        tokens = bytes(view[position * step : (position + 1) * step])
        extra = encoded(event.extras[position]) if event.extras else None
        if parent is not None:  # the first block of a prompt is never an orphan
            yield Orphan(parent, pool, block, tokens, extra)


class Orphanage:
    """The orphans of one rank."""

    def __init__(self) -> None:
        self.bytes = 0  # their memory in all
        self._orphans: dict[Name, Orphan] = {}
        self._children: dict[BlockHash, dict[Name, None]] = {}

    def __len__(self) -> int:
        return len(self._orphans)

    def all(self) -> list[Orphan]:
        """Returns those that wait, in the order in which they came."""
        return list(self._orphans.values())

    def park(self, orphan: Orphan) -> None:
        """Keeps a block; if it waits already, adds a copy, or replaces one of other content."""
        known = self._orphans.get(orphan.name)
        if known is not None:
            if known.content == orphan.content:
                known.copies += 1
                return
            self._drop(known)
        self._orphans[orphan.name] = orphan
        self.bytes += orphan.size_bytes
        self._children.setdefault(orphan.parent, {})[orphan.name] = None

    def take(self, parent: BlockHash) -> list[Orphan]:
        """Removes and returns the children of a block that arrived."""
        taken = [self._orphans.pop(name) for name in self._children.pop(parent, {})]
        self.bytes -= sum(orphan.size_bytes for orphan in taken)
        return taken

    def remove(self, medium: str, group: int | None, block: BlockHash) -> bool:
        """Drops a waiting block, with all copies; returns False if there was none.

        It may have been the last copy, and what would be left earns no credit yet.
        """
        orphan = self._orphans.get(Name(medium, group, block))
        if orphan is None:
            return False
        self._drop(orphan)
        return True

    def clear(self) -> None:
        """Drops everything."""
        self.bytes = 0
        self._orphans.clear()
        self._children.clear()

    def _drop(self, orphan: Orphan) -> None:
        del self._orphans[orphan.name]
        self.bytes -= orphan.size_bytes
        children = self._children[orphan.parent]
        del children[orphan.name]
        if not children:
            del self._children[orphan.parent]
