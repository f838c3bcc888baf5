"""What a core is: the inner part of the index, of which there are two implementations.

A core knows owners by number, engine hashes, tokens and tiers; names, orphans and counters that
people see are `kvstate.index`'s. `kvstate/native/` has the compiled one, `kvstate/plain_core.py`
the same in Python; one set of tests holds both to one oracle.

Block keys of the plain core: chained from the namespace and the token ids.

A key is a 64-bit routing hint, secret to this process: a collision costs a bad route, never a
wrong answer, and nobody outside can aim for one. Keys are never shared or stored. The compiled core
has keys of its own (kvstate/native/index.h).
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol, TypedDict

import msgspec
import xxhash

from kvstate.events import BlockHash
from kvstate.overlap import ORDER_OF_MEDIUM, Overlap, Tier, Tokens, tier_of

BYTES_PER_TOKEN = 4


def root_key(secret: int, seed: bytes, lora: str | int | None, block_size: int) -> int:
    """The key before the first block of a prompt: one key space per model and block size.

    secret: 64 random bits of this process. seed: stands for the model. An adapter that is known by
    number only never meets one known by name, nor the base model.
    """
    namespace = msgspec.msgpack.encode((secret, seed, lora, block_size))
    return int(xxhash.xxh3_64_intdigest(namespace))


def child(parent: int, tokens: memoryview | bytes, extra: bytes | None) -> int:
    """The key of the block with these tokens (uint32, as bytes) behind `parent`.

    extra: what it carries besides tokens.
    """
    key: int = xxhash.xxh3_64_intdigest(tokens, seed=parent)
    return key if extra is None else int(xxhash.xxh3_64_intdigest(extra, seed=key))


def chain(
    root: int, tokens: Tokens | memoryview, block_size: int, first: bytes | None, limit: int
) -> Iterator[int]:
    """The keys of the first `limit` full blocks of a prompt, made as they are asked for.

    first: what the first block carries besides its tokens (a cache salt).
    """
    step = block_size * BYTES_PER_TOKEN
    view = memoryview(tokens).cast("B")
    key, extra = root, first
    for start in range(0, min(limit * step, len(view) - step + 1), step):
        key = child(key, view[start : start + step], extra)
        extra = None
        yield key


# Work that is done at once, in looks at a table or as much: a part of a slice of a millisecond.
WORK = 2_048

# Of a message that the core applied: events done, events, whether it cleared, and the names of what
# was skipped of those done.
Outcome = tuple[int, int, bool, tuple[str, ...]]


class StoreResult(IntEnum):
    """What became of a store; anything but STORED left everything as it was."""

    STORED = 0
    UNKNOWN_PARENT = 1
    OVER_LIMIT = 2


class OwnerStatus(TypedDict):
    """Counts of one owner.

    block_size: of its last store, 0 before the first. doubted: tiers on which nothing counts as
    certain, a bit each; see `kvstate.overlap`.
    """

    blocks: int
    block_size: int
    doubted: int
    removed_unknown: int
    restored_with_other_tokens: int
    over_limit: int
    copied_unknown: int


class Core(Protocol):
    """Which owner (rank) holds which blocks.

    Made with (secret, limit_blocks, overlap type): 64 random bits, the most blocks of an owner
    that was given no other limit, and `Overlap`, which a compiled core cannot import. Engine hashes
    are unsigned 64-bit ints, as the wire decoders fold them, or bytes.
    """

    def add_model(self, seed: bytes) -> int:
        """The number of a new key space, apart from all others by its seed."""

    def add_owner(self, worker: int, model: int, rank: int) -> int:
        """The number of a new owner, which holds nothing; ranks of one worker share its number."""

    def limit(self, owner: int, blocks: int) -> None:
        """From now on an owner may hold so many blocks at the most."""

    def remove_owner(self, owner: int) -> None:
        """Frees everything an owner had; its number may be given to another."""

    def clear(self, owner: int) -> None:
        """Forgets everything an owner holds."""

    def demote(self, owner: int) -> None:
        """Makes everything an owner holds uncertain."""

    def clear_some(self, owner: int, work: int) -> bool:
        """As `clear`, so much at the most; whether all is done."""

    def demote_some(self, owner: int, work: int) -> bool:
        """As `demote`, so much at the most; whether all is done.

        What is not demoted yet still counts as certain, unless the owner is not trusted.
        """

    def trust(self, owner: int, trusted: bool) -> None:  # noqa: FBT001 - compiled, positional
        """Whether an owner's certain blocks count as such; at first they do not."""

    def store(  # noqa: PLR0913, PLR0917 - compiled, positional
        self,
        owner: int,
        hashes: list[BlockHash],
        parent: BlockHash | None,
        tokens: Tokens | memoryview,
        block_size: int,
        lora: str | int | None,
        extras: list[bytes | None] | None,
        medium: str,
        group: int | None,
    ) -> int:
        """Holds one more copy of each block of a chain; a `StoreResult`."""

    def copy(self, owner: int, hashes: list[BlockHash], medium: str, group: int | None) -> None:
        """Holds one more copy of each block, as certain as the one found by its hash.

        A block that is not held anywhere is counted as copied_unknown.
        """

    def remove(self, owner: int, block: BlockHash, medium: str, group: int | None) -> bool:
        """Drops one copy, a certain one first; False if there was none."""

    def admit(self, owner: int, group: int | None, holds_prefix: bool | None) -> int:  # noqa: FBT001
        """Notes that blocks of a group were stored; an `Admission`.

        holds_prefix: whether its kind of attention holds the whole prefix; None where the kind is
            not named. See `kvstate.wire.extras`.
        """

    def admission(self, owner: int, group: int | None) -> int:
        """What becomes of blocks of a group, by what was stored so far; an `Admission`."""

    def forget_layout(self, owner: int) -> None:
        """Forgets what was learned of an owner's groups, layouts and media.

        It may be another engine now.
        """

    def layout(self, owner: int) -> tuple[bool | None, bool | None]:
        """What `apply` saw of (names_salts, names_loras), as `BlocksStored` has them."""

    def start(self, owner: int, payload: bytes, work: int) -> Outcome | bool:
        """Begins to apply a message, and does so much of it at the most.

        True: there is more to do, by `proceed`. False: as `apply` has None. Only one message of an
        owner is under way; another one takes its place.
        """

    def proceed(self, owner: int, work: int) -> Outcome | bool:
        """Goes on with the message that `start` began; the same."""

    def abandon(self, owner: int) -> None:
        """Leaves the message that is under way, if any, as far as it is done."""

    def apply(self, owner: int, payload: bytes) -> Outcome | None:
        """Applies a whole message if it is as expected.

        It stops before a store whose parent is unknown or whose group is doubtful. None, and
        nothing has happened, if anything in the message is surprising.
        """

    def overlaps(
        self,
        model: int,
        tokens: Tokens | memoryview,
        lora: str | int | None,
        first: bytes | None,
        names: Sequence[str],
    ) -> dict[str, Overlap]:
        """The best overlap of each worker that holds the first block, by its name.

        first: what the first block carries besides tokens. names: of workers, by number.
        """

    def status(self, owner: int) -> OwnerStatus:
        """Counts of one owner."""

    def tiers(self, owner: int, uncertain: bool) -> tuple[int, int, int, int]:  # noqa: FBT001
        """Hashes that an owner holds on each tier, certain or uncertain."""

    def expire(self, owner: int, slots: int) -> bool:
        """Forgets blocks on doubted media that were not stored since the last age began.

        slots: how many places of a table are looked at, at most. Returns whether all were looked
        at; then a new age begins.
        """

    def memory(self) -> int:
        """Memory of all tables, in bytes."""

    def check(self) -> None:
        """Raises AssertionError where an invariant does not hold; slow."""


class Pool(NamedTuple):
    """Where copies of a block are counted together: engines remove by medium, group and hash."""

    medium: str
    group: int | None
    block_size: int
    tier: Tier

    @classmethod
    def of(cls, medium: str, group: int | None, block_size: int) -> "Pool":
        """The pool of a stored event; its medium is one that `tier_of` knows."""
        tier = tier_of(medium)
        if tier is None:
            raise ValueError("events of unknown media never reach the index")
        return cls(medium, group, block_size, tier)

    @property
    def order(self) -> tuple[int, int, int]:
        """In which order the pools of an owner are searched, the same in both cores."""
        return (
            ORDER_OF_MEDIUM[self.medium],
            -1 if self.group is None else self.group,
            self.block_size,
        )
