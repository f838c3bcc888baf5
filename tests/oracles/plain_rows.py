"""What the plain core saves of an owner, as msgpack: `kvstate/_core.pyi` has the methods.

Another release may change the layout of these bytes, or how keys are computed; then it changes
`LAYOUT`, since what was saved with another one is of no use.
"""

from typing import NamedTuple

import msgspec

from kvstate.events import BlockHash
from kvstate.index.core import BlockPool
from kvstate.undecodable import UNDECODABLE
from kvstate.wire.extras import MAX_GROUP, MAX_GROUPS
from tests.oracles.media import ORDER_OF_MEDIUM

LAYOUT = 2

MAX_BLOCK_SIZE = 65_536


class SavedGroups(msgspec.Struct, frozen=True, array_like=True):
    """The other groups of an owner: of each its number, block size and reach."""

    groups: list[tuple[int, int, int]]
    is_inexact: bool

    @property
    def is_sound(self) -> bool:
        """Whether stores can have named these groups."""
        return len({group for group, _, _ in self.groups}) == len(self.groups) and all(
            0 <= group <= MAX_GROUP and 0 < size <= MAX_BLOCK_SIZE and reach > 0
            for group, size, reach in self.groups
        )


class Learned(msgspec.Struct, frozen=True, array_like=True):
    """What was learned of an owner's events, besides its blocks.

    groups: of attention, by number, with the state of each; the encoder orders only names of dicts.
    ends: what `tests.oracles.plain_ends` knows of other groups, None if there are none.
    """

    block_size: int
    removing: set[str]
    aging: set[str]
    age: int
    copies_announced: bool
    mark: int
    removed_certain: int
    groups: list[tuple[int, int]]
    ends: SavedGroups | None

    @property
    def is_sound(self) -> bool:
        """Whether a core can have learned this."""
        if self.ends is not None and not self.ends.is_sound:
            return False
        media = self.removing | self.aging
        return (
            0 <= self.block_size <= MAX_BLOCK_SIZE
            and media <= ORDER_OF_MEDIUM.keys()
            and self.age > 0
            and self.mark > 0
            and self.removed_certain >= 0
            and len(self.groups) <= MAX_GROUPS
            and all(0 <= group <= MAX_GROUP for group, _ in self.groups)
        )


class SavedRow(NamedTuple):
    """One hash of an owner, in a pool and segment. age: 0 where copies are counted."""

    medium: str
    group: int | None
    block_size: int
    is_uncertain: bool
    block: BlockHash
    key: int
    copies: int
    mark: int
    may_be_fewer: bool
    age: int

    @property
    def pool(self) -> BlockPool:
        """The pool of the hash.

        Raises:
            ValueError: there is no such pool.
        """
        if not 0 < self.block_size <= MAX_BLOCK_SIZE:
            raise ValueError("no block has this size")
        if self.group is not None and not 0 <= self.group <= MAX_GROUP:
            raise ValueError("no group has this number")
        return BlockPool.of(self.medium, self.group, self.block_size)


class EndRow(NamedTuple):
    """The ends under one hash: of each group its number, and the fields of its `End`."""

    block: BlockHash
    ends: list[tuple[int, int, bool, bool]]


class SavedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """A piece of what an owner holds."""

    blocks: list[SavedRow]
    ends: list[EndRow]


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_rows = msgspec.msgpack.Decoder(SavedBlocks)
_learned = msgspec.msgpack.Decoder(Learned)


def encoded(saved: SavedBlocks | Learned) -> bytes:
    """Returns what is saved, as bytes."""
    return _encoder.encode(saved)


def rows_in(saved: bytes) -> SavedBlocks:
    """Returns saved rows.

    Raises:
        ValueError: they are no rows.
    """
    try:
        return _rows.decode(saved)
    except UNDECODABLE as error:
        raise ValueError(f"these are no rows of an owner: {error}") from None


def learned_in(saved: bytes) -> Learned | None:
    """Returns what was learned; None if the bytes are damaged."""
    try:
        learned = _learned.decode(saved)
    except UNDECODABLE:
        return None
    return learned if learned.is_sound else None
