"""What one rank holds now, block by block, in the form that new subscribers get.

A block is kept encoded (`kvstate.wire.grpc_encoding`), once for each physical copy: engines store a
hash more than once and remove it once for every copy. Hashes are in the form of the proto.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvstate.events import BlocksCopied, BlocksRemoved, BlocksStored
from kvstate.overlap import Tokens
from kvstate.wire.grpc_encoding import (
    EncodedStore,
    Namespace,
    copied_block,
    copied_origin,
    is_text,
    signed_hash,
    stored_entry,
)

# Memory of a copy besides its bytes: tuples, lists, and its share of the table.
COPY_OVERHEAD_BYTES = 300


class StoreOrigin(NamedTuple):
    """The common part of the blocks of one store; `encoded` is that of EncodedStore."""

    medium: str
    group: int | None
    salt: str | None
    encoded: bytes


class Copy(NamedTuple):
    """One copy of a block.

    last_token: the last one that the engine sent for it, to convert its children if they are pairs.
    """

    origin: StoreOrigin
    parent: int | None
    last_token: int
    block: bytes

    @property
    def entry(self) -> bytes:
        """The entry that new subscribers get."""
        return stored_entry(self.origin.encoded, self.parent, [self.block])

    @property
    def size_bytes(self) -> int:
        """The memory it takes here, which is more than its entry takes."""
        return len(self.origin.encoded) + len(self.block) + COPY_OVERHEAD_BYTES


class Mirror:
    """The blocks of one rank.

    max_bytes: memory for them; further copies are rejected, so that what subscribers get stays
    correct.
    """

    def __init__(self, max_bytes: int) -> None:
        self.copies = 0
        self.size_bytes = 0
        self.refused = 0  # copies rejected for lack of room, ever
        self.removed = 0  # copies removed by the engine, ever
        self.removed_unknown = 0  # removals of blocks that were not held here, ever
        self._max_bytes = max_bytes
        self._blocks: dict[int, list[Copy]] = {}

    def namespace_of(self, stored: BlocksStored) -> Namespace:
        """Returns the namespace of a store; engines name the salt only at the root of a chain."""
        if stored.parent is not None:
            parent = self._blocks.get(signed_hash(stored.parent))
            return Namespace(stored.lora, None if parent is None else parent[0].origin.salt)
        root = stored.extras[0] if stored.extras else ()
        texts = (item for item in root if isinstance(item, str) and is_text(item))
        return Namespace(stored.lora, next(texts, None))

    def plain(self, stored: BlocksStored) -> BlocksStored | None:
        """Converts a store of pairs to one of their first tokens, as SMG's relay does.

        Returns None if the very first token is unknown, because the store's parent is unknown.
        """
        if not stored.bigrams:
            return stored
        extras = stored.extras
        if stored.parent is not None:
            parent = self._blocks.get(signed_hash(stored.parent))
            first = None if parent is None else parent[0].last_token
        else:
            root, *others = extras or [()]
            first, extras = next(iter(root), None), [root[1:], *others]
        if not isinstance(first, int):
            return None
        tokens = Tokens("I", [first]) + stored.tokens[:-1]
        return msgspec.structs.replace(stored, tokens=tokens, extras=extras, bigrams=False)

    def store(self, stored: BlocksStored, encoded: EncodedStore, ends: Tokens) -> None:
        """Adds a copy of each block.

        ends: the tokens as the engine sent them; with pairs, they are one position ahead.
        """
        origin = StoreOrigin(stored.medium, stored.group, encoded.namespace.salt, encoded.origin)
        parent = None if stored.parent is None else signed_hash(stored.parent)
        end = -1
        for block_hash, block in zip(stored.hashes, encoded.blocks, strict=True):
            end += stored.block_size
            number = signed_hash(block_hash)
            self._keep(number, Copy(origin, parent, ends[end], block))
            parent = number

    def copy(self, copied: BlocksCopied) -> Iterator[bytes | None]:
        """Adds a copy of each block; returns its entry, or None if the block is unknown."""
        for block_hash in copied.hashes:
            number = signed_hash(block_hash)
            known = self._blocks.get(number)
            if known is None:
                yield None
                continue
            copy = _copied(known[0], copied.medium, copied.group)
            self._keep(number, copy)
            yield copy.entry

    def remove(self, removed: BlocksRemoved) -> None:
        """Drops one copy of each of these blocks on this medium; unknown blocks are ignored."""
        for block_hash in removed.hashes:
            number = signed_hash(block_hash)
            copies = self._blocks.get(number, [])
            for position, copy in enumerate(copies):
                if copy.origin[:2] == (removed.medium, removed.group):
                    self._drop(number, position)
                    self.removed += 1
                    break
            else:
                self.removed_unknown += 1

    def clear(self) -> None:
        """Drops everything."""
        self._blocks.clear()
        self.copies = self.size_bytes = 0

    def in_order(self) -> list[Copy]:
        """Returns every copy, parents before children."""
        ordered: list[Copy] = []
        listed: set[int] = set()
        for number, copies in self._blocks.items():
            parent = copies[0].parent
            if parent is not None and parent in self._blocks and parent not in listed:
                for ancestor in self._line(number, listed):
                    ordered += self._blocks[ancestor]
            elif number not in listed:
                listed.add(number)
                ordered += copies
        return ordered

    def _line(self, number: int, listed: set[int]) -> Iterator[int]:
        """Returns a block and its ancestors that are not listed yet, oldest first.

        A parent may have been stored again after its children.
        """
        line: list[int] = []
        ancestor: int | None = number
        while ancestor is not None and ancestor in self._blocks and ancestor not in listed:
            listed.add(ancestor)
            line.append(ancestor)
            ancestor = self._blocks[ancestor][0].parent
        return reversed(line)

    def _keep(self, number: int, copy: Copy) -> None:
        if self.size_bytes + copy.size_bytes > self._max_bytes:
            self.refused += 1
            return
        self._blocks.setdefault(number, []).append(copy)
        self.copies += 1
        self.size_bytes += copy.size_bytes

    def _drop(self, number: int, position: int) -> None:
        copies = self._blocks[number]
        self.size_bytes -= copies.pop(position).size_bytes
        self.copies -= 1
        if not copies:
            del self._blocks[number]


def _copied(copy: Copy, medium: str, group: int | None) -> Copy:
    encoded = copied_origin(copy.origin.encoded, medium, group)
    origin = StoreOrigin(medium, group, copy.origin.salt, encoded)
    return copy._replace(origin=origin, block=copied_block(copy.block, medium))
