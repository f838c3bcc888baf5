"""The numbers and names with which the index and its core speak to each other.

The core, the inner part of the index, is compiled: `kvstate/native/` has its sources, and
`kvstate/_core.pyi` describes its methods. It knows owners by number, engine hashes, tokens and
tiers; names are in `kvstate.index.index`, orphans and visible counters in `kvstate.index.owner`.
"""

from enum import IntEnum
from typing import NamedTuple, TypedDict

from kvstate.errors import importing_cores
from kvstate.overlap import Tier, tier_of

with importing_cores():
    from kvstate._core import LAYOUT as LAYOUT  # noqa: PLC0414 - others import it from here
    from kvstate._core import Core as Core  # noqa: PLC0414 - others import it from here

BYTES_PER_TOKEN = 4

# Whether the blocks of a store that are held may only be announced again; see `Core.store`.
NEW_COPIES, MAY_REPEAT = False, True

# Which blocks `Core.tiers` counts.
CERTAIN, UNCERTAIN = False, True
# For `Core.admit`: a kind of attention that does not hold the whole prefix.
OTHER_KIND = False

# The most work in one step, in table lookups or their equivalent: a fraction of a 1 ms slice.
WORK = 2_048

# How many blocks of an owner can be watched at once.
WATCHES = 32

# Marks an owner in `Core.apply_run`.
SPECIAL = 0x80000000

# The result of applying a message: events applied, events in all, whether it cleared the cache, and
# the names of the skipped events among those applied.
Outcome = tuple[int, int, bool, tuple[str, ...]]


class StoreResult(IntEnum):
    """The result of a store; with anything but STORED, nothing was changed."""

    STORED = 0
    UNKNOWN_PARENT = 1
    OVER_LIMIT = 2


class OwnerStatus(TypedDict):
    """Counts of one owner."""

    # Block hashes held, over all media.
    blocks: int
    # Tokens per block of its last store, 0 before the first.
    block_size: int
    # Tiers on which nothing is certain, one bit each; see `kvstate.overlap`.
    doubted: int
    # Removals of blocks that were not held.
    removed_unknown: int
    # Blocks that were removed while they were certain, so stored since the last hole.
    removed_certain: int
    # Blocks that were stored again under their hash with other tokens.
    restored_with_other_tokens: int
    # Stores that were rejected, since the owner holds as many blocks as it may.
    over_limit: int
    # Copies of blocks that were not held.
    copied_unknown: int


class BlockPool(NamedTuple):
    """The scope in which a block's copies are counted: engines remove by medium, group and hash."""

    medium: str
    group: int | None
    block_size: int
    tier: Tier

    @classmethod
    def of(cls, medium: str, group: int | None, block_size: int) -> "BlockPool":
        """Returns the pool of a stored event.

        Raises:
            ValueError: `tier_of` does not know the medium.
        """
        tier = tier_of(medium)
        if tier is None:
            raise ValueError("events of unknown media never reach the index")
        return cls(medium, group, block_size, tier)
