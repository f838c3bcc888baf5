"""What a publisher says about its cache, independent of engine and encoding."""

import math
from collections.abc import Generator
from typing import TypeVar

import msgspec

from kvstate.overlap import Extra, Tokens


class EngineLoad(msgspec.Struct, frozen=True):
    """One report (EngineLoad of smg-grpc-proto 0.4.28; None: the engine did not say).

    running, waiting: requests. waiting_uncached_tokens: prompt tokens of waiting requests that no
    cache will serve. prefill_pending_tokens: prompt tokens handed to the engine that gave no output
    yet. cache_usage: share of the cache in use, 0 to 1; active_cache_usage: without what could be
    evicted. max_running: how many requests run at once. age_ms: of the figures when they were sent.
    silence_ms: since the engine last produced anything while it had work.
    """

    running: int
    waiting: int
    waiting_uncached_tokens: int | None = None
    prefill_pending_tokens: int | None = None
    cache_usage: float | None = None
    active_cache_usage: float | None = None
    tokens_per_second: float = 0.0
    max_running: int | None = None
    age_ms: int = 0
    silence_ms: int | None = None


# An engine's own id of a block: opaque, unique within one rank's feed only. Signed 64-bit hashes
# are folded to unsigned by the wire decoders.
BlockHash = int | bytes


class BlocksStored(msgspec.Struct, frozen=True):
    """A chain of full blocks that a rank now holds.

    hashes: one a block, each the child of the one before, the first the child of `parent`.
    tokens: len(hashes) * block_size ids, uint32.
    lora: the adapter's name; its number where the layout carries no name; None for the base model.
    extras: one a block, empty where only tokens count. A cache salt is the root block's only.
    group: the engine's attention group, None where it has only one.
    kind: the group's kind of attention as on the wire, one that holds the whole prefix; None where
        the layout does not say.
    bigrams: the engine's tokens are pairs that overlap by one, [a, b], [b, c] (SGLang with EAGLE).
        Then `tokens` are the second ones, and the root block carries the first of all as its first
        extra.
    names_salts, names_loras: whether this layout would have said so, had there been a cache salt or
        an adapter's name; None where that cannot be told.
    """

    hashes: list[BlockHash]
    parent: BlockHash | None
    tokens: Tokens
    block_size: int
    lora: str | int | None = None
    extras: list[Extra] | None = None
    medium: str = "GPU"
    group: int | None = None
    kind: str | None = None
    bigrams: bool = False
    names_salts: bool | None = None
    names_loras: bool | None = None


class BlocksCopied(msgspec.Struct, frozen=True):
    """Blocks that the rank holds, known by their hashes only, have one more copy on this medium."""

    hashes: list[BlockHash]
    medium: str = "GPU"
    group: int | None = None


class OtherGroupStored(msgspec.Struct, frozen=True):
    """Blocks of an attention group that does not hold the whole prefix: a window, or a state.

    They are not indexed; later events of this group that do not name its kind follow it.
    """

    group: int | None = None


class BlocksRemoved(msgspec.Struct, frozen=True):
    """One copy of each of these blocks is gone from a medium."""

    hashes: list[BlockHash]
    medium: str = "GPU"
    group: int | None = None


class AllCleared(msgspec.Struct, frozen=True):
    """The rank holds nothing any more, on any medium."""


Event = BlocksStored | BlocksCopied | OtherGroupStored | BlocksRemoved | AllCleared


def blocks_of(event: Event) -> int:
    """How many blocks an event names."""
    return 0 if isinstance(event, OtherGroupStored | AllCleared) else len(event.hashes)


class EventBatch(msgspec.Struct, frozen=True):
    """One message of a feed.

    timestamp: the publisher's clock in seconds; together with the sequence number it identifies
        the batch.
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


# A batch's contents as a transport gives them: a msgpack payload, or events decoded already.
Body = bytes | EventBatch


class Batch(msgspec.Struct):
    """One message of a feed, the same object from the wire to the index.

    sequence: its number, counted by the publisher for each rank. body: what it says; nothing where
    it could not be decoded, for the reason in fault. stamp: the publisher's time stamp, in seconds.
    size_bytes: what it takes while it is held back. The subscriber of the feed fills in the last
    three.
    """

    sequence: int
    body: Body
    stamp: float = -math.inf
    size_bytes: int = 0
    fault: str = ""


class Taken(msgspec.Struct, frozen=True):
    """What became of a batch.

    healed: nothing uncertain is left since. missed: why not all that it said is known, "" if it is.
    faults: names of what was skipped, one each. clears: it emptied the cache.
    """

    healed: bool = False
    missed: str = ""
    faults: tuple[str, ...] = ()
    clears: bool = False


# As mostly: nothing is to be told of it.
ALL_TAKEN = Taken()


Result = TypeVar("Result")


def finished(steps: Generator[None, None, Result]) -> Result:
    """Does in one go what may be done in steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
