"""What is written of a rank or a store, so that another router or process knows it.

Four ways carry it: the state file, which also passes from a router to the one that takes over; the
rows that a starting router gets from another one, which are a state file without a secret; and what
a process begins with that reads what another one of its host passes on (`kvstate.relay`). All have
the same rows and the same `SavedOwner`. The first three have them in sections
(`kvstate.rows.sections`), with `SavedRank` or `SavedStore`; the last one in records
(`kvstate.relay.records`), between those of live batches, and with orphans.

No tokens are saved, so no text of a prompt: of each block its engine hash, its key and its copies
(`saved_rows` in `kvstate/_core.pyi`), and the ends of other attention groups by hash. Orphans,
which would need their tokens, are in records only.
"""

from math import isfinite

import msgspec

ABOUT, RANK, ROWS, STORE = "about", "rank", "rows", "store"
VERSION = 1  # of each of these sections

# The longest reason of a degraded feed that is kept.
MAX_REASON = 500


class StateHeader(msgspec.Struct, frozen=True, array_like=True):
    """Who wrote a state file.

    layout: whose rows it has (`kvstate.index.index.saved_layout`). release: the router's.
    written_at: seconds since the epoch. secret: 64 random bits, from which block keys are computed.
    """

    layout: str
    release: str
    written_at: float
    secret: int


class SavedFeed(msgspec.Struct, frozen=True, array_like=True):
    """Where a feed was: what proves its publisher, and what it missed before.

    next: the number expected next. stamps: those of its last batches by number, in order; the last
    one is that of batch next - 1, which proves the publisher when it comes again. newest: the
    newest stamp of all batches. incomplete: why something is missing, "" if nothing is.
    wants_everything: whether a complete replay may repair that.
    """

    next: int
    stamps: tuple[tuple[int, float], ...]
    newest: float
    incomplete: str
    wants_everything: bool

    @property
    def is_sound(self) -> bool:
        """Whether a feed can have been there."""
        numbers = [number for number, _ in self.stamps]
        return (
            bool(numbers)
            and numbers == sorted(set(numbers))
            and numbers[0] >= 0
            and numbers[-1] == self.next - 1
            and all(isfinite(stamp) and stamp <= self.newest for _, stamp in self.stamps)
            and isfinite(self.newest)
            and len(self.incomplete) <= MAX_REASON
            and self.incomplete.isprintable()
        )


class SavedOwner(msgspec.Struct, frozen=True, array_like=True):
    """What an owner knew besides its blocks.

    learned: see `saved_learned` in `kvstate/_core.pyi`. blocks: how many hashes its rows have.
    numbered: adapters that its events name by number only. has_bigrams: whether its model stores
    bigrams.
    """

    learned: bytes
    blocks: int
    names_salts: bool | None
    names_loras: bool | None
    numbered: tuple[int, ...]
    has_bigrams: bool


class SavedRank(msgspec.Struct, frozen=True, array_like=True):
    """One rank of a worker, without its rows.

    identity: the engine's, as discovery tells it; "" for a configured worker. ranks: how many the
    worker had.
    """

    worker: str
    identity: str
    model: str
    rank: int
    ranks: int
    feed: SavedFeed
    owner: SavedOwner

    @property
    def is_sound(self) -> bool:
        """Whether there can be such a rank."""
        is_sound = 0 <= self.rank < self.ranks and self.owner.blocks >= 0
        return is_sound and self.feed.is_sound


class SavedStore(msgspec.Struct, frozen=True, array_like=True):
    """The blocks that a store has of one model, without their rows."""

    # Its configured name.
    store: str
    model: str
    # How the store was configured (`kvstate.stores.stores.StoreRules`).
    workers: tuple[str, ...] | None
    media: tuple[str, ...]
    max_age_seconds: float
    # The workers whose events may have changed it.
    publishers: tuple[str, ...]
    # When its last age began, in seconds since the epoch.
    swept_at: float
    # What its owner knew besides its blocks.
    owner: SavedOwner

    @property
    def is_sound(self) -> bool:
        """Whether there can be such a store."""
        return bool(self.publishers) and isfinite(self.swept_at) and self.owner.blocks >= 0


class SavedRows(msgspec.Struct, frozen=True):
    """A rank with its rows, in pieces of bytes."""

    rank: SavedRank
    rows: list[bytes]


class SavedStoreRows(msgspec.Struct, frozen=True):
    """A store with its rows, in pieces of bytes."""

    store: SavedStore
    rows: list[bytes]
