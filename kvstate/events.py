"""A publisher's cache events, independent of engine and encoding."""

import math
from enum import StrEnum

import msgspec

from kvstate.overlap import Extra, Tokens


class Loss(StrEnum):
    """Why a rank has lost all blocks: its publisher started anew, or cleared its cache."""

    RESTARTED = "restarted"
    CLEARED = "cleared"


class EngineLoad(msgspec.Struct, frozen=True):
    """One load report (EngineLoad of smg-grpc-proto 0.4.28); None: not reported by the engine."""

    # Requests.
    running: int
    waiting: int
    # Prompt tokens of waiting requests that no cache will serve.
    waiting_uncached_tokens: int | None = None
    # Prompt tokens of requests in the engine that have no output yet.
    prefill_pending_tokens: int | None = None
    # The share of the cache in use, 0 to 1; and the same without evictable blocks.
    cache_usage: float | None = None
    active_cache_usage: float | None = None
    # Tokens that the engine generates in a second.
    tokens_per_second: float = 0.0
    # The most requests that run at once.
    max_running: int | None = None
    # The age of the figures when they were sent.
    age_ms: int = 0


# An engine's own id of a block: opaque, unique within one rank's feed only. Signed 64-bit hashes
# are folded to unsigned by the wire decoders.
BlockHash = int | bytes


class BlocksStored(msgspec.Struct, frozen=True):
    """A chain of full blocks that a rank now holds."""

    # One for each block; each block is the child of the one before, the first of `parent`.
    hashes: list[BlockHash]
    # The block before the chain, None if the chain begins a prompt.
    parent: BlockHash | None
    # len(hashes) * block_size ids, uint32.
    tokens: Tokens
    block_size: int
    # The adapter's name, or its number if the layout has no names; None for the base model.
    lora: str | int | None = None
    # One for each block, empty if only tokens count. Only the root block has a cache salt.
    extras: list[Extra] | None = None
    # Where the blocks lie, as named on the wire.
    medium: str = "GPU"
    # The engine's attention group; None if it has only one.
    group: int | None = None
    # The group's kind of attention as named on the wire, one of those that hold the whole prefix
    # (other groups have events of their own); None if it is not named.
    kind: str | None = None
    # Whether the engine's tokens are pairs that overlap by one, [a, b], [b, c] (SGLang with EAGLE).
    # Then `tokens` are the second tokens of the pairs, and the very first token is the first extra
    # of the root block.
    bigrams: bool = False
    # Whether this layout would name a cache salt, or an adapter, if there were one; None if this is
    # not known.
    names_salts: bool | None = None
    names_loras: bool | None = None


class BlocksCopied(msgspec.Struct, frozen=True):
    """Blocks that the rank holds, named by hash only, have one more copy on this medium."""

    hashes: list[BlockHash]
    medium: str = "GPU"
    group: int | None = None


class OtherGroupStored(msgspec.Struct, frozen=True):
    """Stored blocks of an attention group that does not hold the whole prefix (a window, a state).

    They are not indexed, and neither are blocks of later events of this group that name no kind;
    but it is noted at which blocks of the prefix they end, since an engine reuses a prefix only
    where each group holds what it needs. The hash of such a block is that of the full-attention
    block that ends at the same token.

    reach: how many tokens before its end a prefix needs in this group; 0 if that is not known.
    is_root: the chain begins at a prompt's start. is_sparse: there are more tokens than the blocks
    hold, since not all blocks of the chain are kept.
    """

    group: int | None = None
    hashes: list[BlockHash] = []
    block_size: int = 0
    reach: int = 0
    medium: str = "GPU"
    is_root: bool = False
    is_sparse: bool = False

    @property
    def need(self) -> int:
        """How many blocks before its end a prefix needs in this group."""
        return (self.reach - 1) // (self.block_size or 1) + 1


class BlocksRemoved(msgspec.Struct, frozen=True):
    """One copy of each of these blocks is gone from a medium.

    remaining_copies: how many copies of each are left there; None if the event does not say.
    """

    hashes: list[BlockHash]
    medium: str = "GPU"
    group: int | None = None
    remaining_copies: list[int] | None = None


class AllCleared(msgspec.Struct, frozen=True):
    """The rank holds nothing any more, on any medium."""


Event = BlocksStored | BlocksCopied | OtherGroupStored | BlocksRemoved | AllCleared


def blocks_of(event: Event) -> int:
    """Returns how many blocks an event names."""
    return 0 if isinstance(event, AllCleared) else len(event.hashes)


class EventBatch(msgspec.Struct, frozen=True):
    """One message of a feed.

    timestamp: by the publisher's clock, in seconds; identifies the batch together with the sequence
        number.
    faults: names of what was skipped in this batch, one entry each.
    removal_lost: a skipped event may have been a removal, so what was stored before is uncertain.
    """

    timestamp: float
    events: list[Event]
    rank: int | None = None
    faults: tuple[str, ...] = ()
    removal_lost: bool = False

    @property
    def clears(self) -> bool:
        """Whether the batch empties the cache."""
        return any(isinstance(event, AllCleared) for event in self.events)


# A batch's contents as a transport delivers them: a msgpack payload, or decoded events.
Body = bytes | EventBatch


class Batch(msgspec.Struct):
    """One message of a feed, the same object from the wire to the index.

    sequence: its number, counted by the publisher for each rank. body: its contents; empty if they
    could not be decoded, for the reason in fault. stamp: the publisher's time stamp, in seconds.
    size_bytes: its memory while it is held back. The subscriber of the feed fills in the last
    three.
    """

    sequence: int
    body: Body
    stamp: float = -math.inf
    size_bytes: int = 0
    fault: str = ""


class BatchResult(msgspec.Struct, frozen=True):
    """The result of applying a batch.

    healed: what was missed earlier does not matter any more. missed: why some of its contents are
    unknown, "" if none are. faults: one name for each skipped event. clears: it emptied the cache.
    """

    healed: bool = False
    missed: str = ""
    faults: tuple[str, ...] = ()
    clears: bool = False


# The usual result: nothing to report.
ALL_TAKEN = BatchResult()
