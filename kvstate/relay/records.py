"""The records by which one process passes on what it learns of the workers' caches.

A record is a head and its payload, back to back in a stream between two processes of one host and
one installation, so numbers are in the machine's order: u32 rank (a number of its own, given with
BEGIN), u32 kind, u32 length of the payload, u64 number and f64 stamp of a batch (elsewhere of the
last batch, where they mean something; a stamp of -inf stands for none).

    BATCH    a batch as published, msgpack    TYPED   a batch of another feed, see `typed_payload`
    FORGET   its publisher restarted          DEMOTE  there is a hole
    STATUS   its feed's `RelayedStatus`       GONE    the rank is not followed any more
    BEGIN    a rank's `Beginning`             ROWS    a piece of the rows that it holds
    END      the last row came; a `RelayedStatus`
    HELLO    the versions agree               BEAT    nothing happened
    CHANGES  what a batch stored and removed (kvstate/native/changes.h), instead of a BATCH
    ORPHANS  some of the blocks that wait for their parents
    STORE    a `StoreBeginning`               STORED  the last row of a store came

BEGIN, ROWS, ORPHANS and END describe a rank as it is between two batches; everything that follows
happens to it afterwards. STORE, ROWS, ORPHANS and STORED, with the rank `STORES`, describe a
store that workers share, in the same way; they follow the ranks of the workers that mount it. The
core reads batches by itself (`Core.apply_run`).

Changes are shorter than batches, and repeated without decoding or hashing. They have no tokens: of
a worker that any process listens to, the batches are passed on.
"""

import math
import struct
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvstate.errors import DamagedError
from kvstate.events import (
    AllCleared,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    EngineLoad,
    Event,
    EventBatch,
    OtherGroupStored,
)
from kvstate.feeds.feed import FeedState
from kvstate.index.orphans import Orphan
from kvstate.overlap import Tokens
from kvstate.rows.format import SavedOwner

# Counts every change of the records or of their meaning.
VERSION = 3

HEAD = struct.Struct("=IIIQd")

# Number and stamp of a rank's last batch, as the core copies them from a head.
MARK = struct.Struct("=Qd")

# The longest payload: a batch has at most 8 MiB, and rows are passed on in smaller pieces.
MAX_PAYLOAD = 64 * 1024 * 1024

# Stands for a rank in the records of stores.
STORES = 0xFFFF_FFFF


class Kind(IntEnum):
    """What a record says; the module describes each."""

    BATCH = 0
    TYPED = 1
    FORGET = 2
    DEMOTE = 3
    STATUS = 4
    BEGIN = 5
    ROWS = 6
    END = 7
    GONE = 8
    HELLO = 9
    BEAT = 10
    CHANGES = 11
    ORPHANS = 12
    STORE = 13
    STORED = 14


class Mark(NamedTuple):
    """Number and stamp of the last batch that was applied to a rank."""

    number: int
    stamp: float

    @property
    def is_known(self) -> bool:
        """Whether there was such a batch."""
        return math.isfinite(self.stamp)


NO_MARK = Mark(0, -math.inf)


class RelayedStatus(msgspec.Struct, frozen=True, array_like=True):
    """The state of a feed in the process that follows it."""

    # As in `FeedStatus`.
    state: FeedState
    reason: str
    # Whether the rank's certain blocks count as certain.
    trusted: bool
    # As in `FeedStatus`.
    last_sequence: int | None
    gaps: int
    replays: int
    restarts: int
    # Batches that the feed dropped by their number.
    dropped: int
    # As in `SavedFeed`.
    incomplete: str
    wants_everything: bool
    # By the same clock as here.
    lag_seconds: float
    # As in `FeedStatus`.
    counts: dict[str, int]
    # The last load report, and when it came, by the same clock as here; None if there was none.
    load: EngineLoad | None
    load_at: float
    # As in `FeedStatus`.
    unapplied: int


class Beginning(msgspec.Struct, frozen=True, array_like=True):
    """Which rank has a number from now on, and what is known of it besides its rows.

    shares: whether it has published blocks of a store.
    """

    worker: str
    rank: int
    ranks: int
    model: str
    saved: SavedOwner
    shares: bool


class StoreBeginning(msgspec.Struct, frozen=True, array_like=True):
    """A store's blocks of one model, and what is known of them besides their rows."""

    store: str
    model: str
    saved: SavedOwner


class Wish(msgspec.Struct, frozen=True, array_like=True):
    """A line of a process that reads: it wants a worker's ranks, or does not want them any more.

    is_heard: it needs the tokens of what the worker stores, as long as it is connected.
    """

    worker: str
    is_wanted: bool
    is_heard: bool = False


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first line of a process that reads.

    layout: whose rows it can use. proof: shows that its block keys have the same secret.
    """

    version: int
    layout: str
    proof: str


class Record(NamedTuple):
    """One record."""

    rank: int
    kind: int
    payload: bytes
    mark: Mark

    @property
    def size(self) -> int:
        """Its length in the stream."""
        return HEAD.size + len(self.payload)


def encoded(kind: Kind, rank: int = 0, payload: bytes = b"", mark: Mark = NO_MARK) -> bytes:
    """Returns the bytes of a record."""
    return HEAD.pack(rank, kind, len(payload), mark.number, mark.stamp) + payload


def record_at(data: bytes, at: int) -> Record | None:
    """Returns the record that begins at a byte, None if the rest of it is missing.

    Raises:
        DamagedError: there can be no such record.
    """
    if len(data) - at < HEAD.size:
        return None
    rank, kind, length, number, stamp = HEAD.unpack_from(data, at)
    if kind > Kind.STORED or length > MAX_PAYLOAD:
        raise DamagedError("a record that cannot be")
    begin = at + HEAD.size
    if len(data) - begin < length:
        return None
    return Record(rank, kind, data[begin : begin + length], Mark(number, stamp))


_KINDS: tuple[type[Event], ...] = (
    BlocksStored,
    BlocksCopied,
    OtherGroupStored,
    BlocksRemoved,
    AllCleared,
)


class _TypedEvent(msgspec.Struct, frozen=True, array_like=True):
    kind: int
    fields: msgspec.Raw


class _TypedBatch(msgspec.Struct, frozen=True, array_like=True):
    timestamp: float
    rank: int | None
    faults: tuple[str, ...]
    removal_lost: bool
    events: list[_TypedEvent]


def _plain(tokens: Any) -> bytes:
    return bytes(memoryview(tokens).cast("B"))


def _tokens(_: type, data: Any) -> Tokens:
    tokens = Tokens("I")
    tokens.frombytes(data)
    return tokens


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
Decoded = TypeVar("Decoded")

_batch_decoder = msgspec.msgpack.Decoder(_TypedBatch)
_decoders = [msgspec.msgpack.Decoder(kind, dec_hook=_tokens) for kind in _KINDS]


def typed_payload(batch: EventBatch) -> bytes:
    """Encodes a batch of typed events."""
    events = [
        _TypedEvent(_KINDS.index(type(event)), msgspec.Raw(_encoder.encode(event)))
        for event in batch.events
    ]
    return _encoder.encode(
        _TypedBatch(batch.timestamp, batch.rank, batch.faults, batch.removal_lost, events)
    )


def typed_batch(payload: bytes) -> EventBatch:
    """Decodes a batch of typed events.

    Raises:
        DamagedError: it is none.
    """
    try:
        batch = _batch_decoder.decode(payload)
        events = [_decoders[each.kind].decode(each.fields) for each in batch.events]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError, ValueError):
        raise DamagedError("a batch that cannot be read") from None
    return EventBatch(batch.timestamp, events, batch.rank, batch.faults, batch.removal_lost)


def _decoded(decoder: msgspec.msgpack.Decoder[Decoded], payload: bytes, what: str) -> Decoded:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise DamagedError(f"{what} that cannot be read") from None


def status_in(payload: bytes) -> RelayedStatus:
    """Decodes the state of a feed.

    Raises:
        DamagedError: it is none.
    """
    return _decoded(_statuses, payload, "a state of a feed")


def beginning_in(payload: bytes) -> Beginning:
    """Decodes what begins a rank.

    Raises:
        DamagedError: it is none.
    """
    return _decoded(_beginnings, payload, "a rank")


def store_beginning_in(payload: bytes) -> StoreBeginning:
    """Decodes what begins a store.

    Raises:
        DamagedError: it is none.
    """
    return _decoded(_store_beginnings, payload, "a store")


def orphans_payload(orphans: list[Orphan]) -> bytes:
    """Encodes blocks that wait for their parents."""
    return msgspec.msgpack.encode(orphans)


def orphans_in(payload: bytes) -> list[Orphan]:
    """Decodes blocks that wait for their parents.

    Raises:
        DamagedError: they are none.
    """
    return _decoded(_orphans, payload, "blocks")


_statuses = msgspec.msgpack.Decoder(RelayedStatus)
_beginnings = msgspec.msgpack.Decoder(Beginning)
_store_beginnings = msgspec.msgpack.Decoder(StoreBeginning)
_orphans = msgspec.msgpack.Decoder(list[Orphan])
