"""Blocks whose parent has not been seen: kept without a key until it turns up."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvstate.core import BYTES_PER_TOKEN, encoded
from kvstate.events import BlockHash, BlocksStored
from kvstate.plain_core import Pool

# What an orphan takes besides its bytes: the object, its names, and its share of both tables.
ORPHAN_OVERHEAD_BYTES = 600


class Name(NamedTuple):
    """What a removal says of a block."""

    medium: str
    group: int | None
    block: BlockHash


@dataclass(slots=True)
class Orphan:
    """One stored block that waits for its parent.

    tokens: its uint32 ids as bytes. extra: what it carries besides tokens.
    """

    parent: BlockHash
    pool: Pool
    block: BlockHash
    tokens: bytes
    extra: bytes | None
    copies: int = 1

    @property
    def content(self) -> tuple[BlockHash, bytes, bytes | None]:
        """What its key is made of."""
        return self.parent, self.tokens, self.extra

    @property
    def size_bytes(self) -> int:
        """What it takes, with its share of the tables; hashes may be its own or its parent's."""
        return (
            ORPHAN_OVERHEAD_BYTES
            + len(self.tokens)
            + len(self.extra or b"")
            + sum(len(one) for one in (self.parent, self.block) if isinstance(one, bytes))
        )

    @property
    def name(self) -> Name:
        """By which it is removed."""
        return Name(self.pool.medium, self.pool.group, self.block)


def orphans_of(event: BlocksStored) -> Iterator[Orphan]:
    """The blocks of a chain whose parent is unknown, each the parent of the next."""
    pool = Pool.of(event.medium, event.group, event.block_size)
    step = event.block_size * BYTES_PER_TOKEN
    view = memoryview(event.tokens).cast("B")
    parents = [event.parent, *event.hashes]
    for position, (parent, block) in enumerate(zip(parents, event.hashes, strict=False)):
        tokens = bytes(view[position * step : (position + 1) * step])
        extra = encoded(event.extras[position]) if event.extras else None
        if parent is not None:  # a chain that begins a prompt leaves no orphan there
            yield Orphan(parent, pool, block, tokens, extra)


class Orphanage:
    """The orphans of one rank."""

    def __init__(self) -> None:
        self.bytes = 0  # all that they take
        self._orphans: dict[Name, Orphan] = {}
        self._children: dict[BlockHash, dict[Name, None]] = {}

    def __len__(self) -> int:
        return len(self._orphans)

    def park(self, orphan: Orphan) -> None:
        """Keeps a block; one that waits already gets one more copy, or its newer tokens."""
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
        """The children of a block that turned up; they wait no longer."""
        taken = [self._orphans.pop(name) for name in self._children.pop(parent, {})]
        self.bytes -= sum(orphan.size_bytes for orphan in taken)
        return taken

    def remove(self, medium: str, group: int | None, block: BlockHash) -> bool:
        """Drops one copy of a waiting block; False if there was none."""
        orphan = self._orphans.get(Name(medium, group, block))
        if orphan is None:
            return False
        orphan.copies -= 1
        if orphan.copies == 0:
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
