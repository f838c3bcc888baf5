"""One rank of the bridge: follows the engine's feed, and keeps its state and recent batches.

The batches kept are numbered for subscribers. Numbers ascend by one, independently of the
subscribers. They begin at a number made from the wall clock. Unless the clock was set back, no
earlier run has reached it, so a cursor of an earlier run is refused. A hole takes a number of its
own, so that no cursor from before it can continue.

A stream of the bridge ends, or is refused, with one of these:

    status              when                                         the subscriber
    OUT_OF_RANGE        it wants a number that cannot be had         begins again, from 0
    DATA_LOSS           a hole, or it fell behind the history        begins again, from 0
    UNAVAILABLE         the engine is not connected, or we stop      tries again at its number
    UNIMPLEMENTED       the engine publishes no events               does without

SMG's gateway (its kv_event_monitor) and KVSteer's own subscriber act like this.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple, TypeVar

from kvstate.bridge.mirror import Copy, Mirror
from kvstate.events import (
    BatchResult,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    Body,
    Event,
    EventBatch,
    OtherGroupStored,
)
from kvstate.feeds.feed import Feed, FeedState
from kvstate.index.turnover import Turnover
from kvstate.steps import Steps
from kvstate.wire.extras import ADMISSION_FAULTS, Admission, Groups, missed_of
from kvstate.wire.grpc_encoding import (
    MAX_ENTRY_BYTES,
    BatchHead,
    encode_cleared,
    encode_head,
    encode_removed,
    encode_store,
    encode_stored,
)
from kvstate.wire.zmq_wire import decoding


@dataclass(frozen=True, slots=True)
class BridgeLimits:
    """Limits on what is kept and sent.

    history_batches, history_bytes: of one rank's batches, for later subscribers. mirror_bytes: of
    one rank's live blocks. streams: at once, more than any fleet of gateways needs; each new
    subscriber's snapshot is kept while it is sent.
    """

    history_batches: int = 10_000
    history_bytes: int = 256 * 1024 * 1024
    mirror_bytes: int = 1024 * 1024 * 1024
    streams: int = 1_024


class BatchHistory:
    """One rank's batches.

    first: the number of the first batch. timestamp: of the last batch, in seconds by the engine's
    clock; before the first batch, of the start. At most `max_batches` and `max_bytes` are kept, the
    oldest dropped first; one batch is kept whatever its size.
    """

    def __init__(
        self, rank: int, first: int, timestamp: float, *, max_batches: int, max_bytes: int
    ) -> None:
        self.rank = rank
        self.next = first
        self.holes = 0
        self.timestamp = timestamp
        self.size_bytes = 0
        self._resumable = first
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def last(self) -> int:
        """Number of the last batch, or of the hole if no batch has arrived since."""
        return self.next - 1

    @property
    def oldest(self) -> int:
        """Number of the oldest batch kept; `next` if there is none."""
        return self.next - len(self._batches)

    @property
    def resumable(self) -> int:
        """The lowest number from which a subscriber may continue."""
        return max(self.oldest, self._resumable)

    def append(self, entries: list[bytes], timestamp: float) -> None:
        """Adds these entries as one batch with the next number."""
        batch = encode_head(BatchHead(self.next, timestamp, self.rank)) + b"".join(entries)
        self.next += 1
        self.timestamp = timestamp
        self._batches.append(batch)
        self.size_bytes += len(batch)
        while len(self._batches) > 1 and self._is_over_limit():
            self.size_bytes -= len(self._batches.popleft())

    def batch(self, number: int) -> bytes:
        """Returns a batch that is still kept."""
        return self._batches[number - self.oldest]

    def hole(self) -> None:
        """Notes that batches were lost here: no subscriber can continue from before."""
        self.holes += 1
        self.next += 1
        self._batches.clear()
        self.size_bytes = 0

    def close_past(self) -> None:
        """Prevents subscribers from continuing at any number up to the last one.

        The pieces of a snapshot are numbered like batches. A subscriber that lost its connection
        between two pieces would otherwise mistake those batches for the rest of the snapshot.
        """
        self._resumable = self.next

    def _is_over_limit(self) -> bool:
        return len(self._batches) > self._max_batches or self.size_bytes > self._max_bytes


class StreamStatus(StrEnum):
    """The gRPC status codes that a stream ends with, by name."""

    OUT_OF_RANGE = "OUT_OF_RANGE"
    DATA_LOSS = "DATA_LOSS"
    UNAVAILABLE = "UNAVAILABLE"
    UNIMPLEMENTED = "UNIMPLEMENTED"


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream ends; the reason is for operators."""

    status: StreamStatus
    reason: str


class RankStatus:
    """Whether the bridge's knowledge of a rank is current, by the states of the rank's feed.

    A replay after a gap changes nothing: the known state stays true for its number, and the missing
    batches follow. A replay after a lost connection has yet to prove that the engine is the same
    one.
    """

    def __init__(self) -> None:
        self.fault: Ended | None = Ended(
            StreamStatus.UNAVAILABLE, "the engine is not connected yet"
        )

    def note(self, state: FeedState, reason: str) -> None:
        """Notes the state of the feed and its reason."""
        match state:
            case FeedState.LIVE | FeedState.DEGRADED:
                self.fault = None
            case FeedState.UNSUPPORTED:
                self.fault = Ended(StreamStatus.UNIMPLEMENTED, f"it publishes no events: {reason}")
            case FeedState.REPLAYING if self.fault is None:
                pass
            case _:
                self.fault = Ended(
                    StreamStatus.UNAVAILABLE, f"the engine's feed is {state}: {reason}"
                )


# As in TensorRT-LLM's own bridge: one event per batch would saturate the serving process.
MAX_BATCH_EVENTS = 1_024
# Far below the 4 MiB that consumers accept, even with the last entry.
MAX_BATCH_BYTES = 1024 * 1024

_Item = TypeVar("_Item")


class StateOfRank(NamedTuple):
    """The state of a rank, for a new subscriber.

    head: of the last batch included. pieces: the content of each message. blocks: the number of
    copies in all pieces. unknown_before: at least this many losses, whose blocks may be missing; 0
    if none is missing.
    """

    head: BatchHead
    pieces: list[list[Copy]]
    blocks: int
    unknown_before: int


class BridgedRank:
    """One rank of the engine; a `kvstate.feeds.effects.Sink`.

    feed: the feed that writes into this sink. changed: called when there is something to flush or
    send. max_batch_events: the most events in one message.
    """

    def __init__(
        self,
        history: BatchHistory,
        mirror: Mirror,
        feed: Feed,
        changed: Callable[[], None],
        max_batch_events: int = MAX_BATCH_EVENTS,
    ) -> None:
        self.history = history
        self.mirror = mirror
        self.status = RankStatus()
        self.feed = feed
        self.unknown_before = 0
        self._changed = changed
        self._max_batch_events = max_batch_events
        self._groups = Groups()
        self._doubtful: set[int | None] = set()
        self._pending: list[bytes] = []
        self.timestamp = 0.0
        self._event_id = 0
        self._holes = 0
        self._turnover = Turnover()
        self._may_hold = False  # whether a subscriber may hold a block of this rank

    def applying(self, body: Body) -> Steps[BatchResult]:
        """Applies one batch of the engine, event by event; raises WireError if it is not one."""
        batch = (yield from decoding(body)) if isinstance(body, bytes) else body
        self.timestamp = batch.timestamp
        refused, doubtful = self.mirror.refused, len(self._doubtful)
        faults = [*batch.faults]
        for event in batch.events:
            faults += self._apply(event)
            yield
        missed = missed_of(faults, removal_lost=batch.removal_lost)
        if self.mirror.refused > refused and not missed:
            missed = "it holds more blocks than the bridge keeps"
        if batch.removal_lost or len(self._doubtful) > doubtful:
            yield from self.demoting()
        self._changed()
        return BatchResult(self._is_healed(batch, missed), missed, tuple(faults))

    def _is_healed(self, batch: EventBatch, missed: str) -> bool:
        """Whether nothing matters any more of what was missed before this batch or in it."""
        mirror = self.mirror
        if missed:
            self._turnover.begin(mirror.removed)
            return False
        is_renewed = self._turnover.is_complete(
            mirror.removed, mirror.removed_unknown, mirror.copies
        )
        if is_renewed:
            self._holes = 0
        return is_renewed or batch.clears

    def forgetting(self) -> Steps[None]:
        """Forgets all blocks, because the engine restarted: subscribers get a cleared event."""
        yield
        self._holes = 0
        self._groups.forget()
        self._doubtful.clear()
        if self._may_hold:
            self._clear()
            self._changed()

    def demoting(self) -> Steps[None]:
        """Notes a hole: earlier blocks may be gone, so new subscribers no longer get them."""
        yield
        self._holes += 1
        self.unknown_before = self._holes
        self._pending.clear()
        self.mirror.clear()
        self._turnover.begin(self.mirror.removed)
        self.history.hole()
        self._may_hold = False
        self._changed()

    def trust(self, *, trusted: bool) -> None:
        """Updates subscribers' view of the rank from the state of the feed."""
        state = self.feed.state
        self.status.note(state, self.feed.reason)
        if trusted:
            self.unknown_before = 0 if state is FeedState.LIVE else max(1, self._holes)
        self._changed()

    def flush(self) -> None:
        """Numbers the events since the last flush, in as few batches as the limits allow."""
        for entries in _packed(self._pending, len, self._max_batch_events):
            self.history.append(entries, self.timestamp)
        self._pending = []

    def state(self) -> StateOfRank:
        """Returns what the rank holds now."""
        self.flush()
        history = self.history
        head = BatchHead(history.last, history.timestamp, history.rank)
        copies = self.mirror.in_order()
        room = self._max_batch_events - 1  # the first message begins with a clear
        pieces = list(_packed(copies, attrgetter("size_bytes"), room)) or [[]]
        if len(pieces) > 1:
            history.close_past()
        return StateOfRank(head, pieces, len(copies), self.unknown_before)

    def _apply(self, event: Event) -> Iterator[str]:
        """Applies one event; yields the names of its faults."""
        self._event_id += 1
        match event:
            case BlocksStored():
                yield from self._stored_in_group(event)
            case OtherGroupStored(group):
                yield self._fault_of(group, self._groups.stored(group, holds_prefix=False))
            case BlocksCopied():
                yield from self._copy(event)
            case BlocksRemoved():
                if self._groups.admission(event.group) is Admission.INDEXED:
                    self._pending += encode_removed(event, self._event_id)
                    self.mirror.remove(event)
            case _:  # everything was cleared
                self._holes = 0
                self._clear()

    def _stored_in_group(self, event: BlocksStored) -> Iterator[str]:
        named = None if event.kind is None else True
        admission = self._groups.stored(event.group, holds_prefix=named)
        if admission is Admission.INDEXED:
            yield from self._store(event)
        else:
            yield self._fault_of(event.group, admission)

    def _fault_of(self, group: int | None, admission: Admission) -> str:
        if admission is Admission.DOUBTFUL:
            self._doubtful.add(group)
        return ADMISSION_FAULTS[admission]

    def _copy(self, event: BlocksCopied) -> Iterator[str]:
        if self._groups.admission(event.group) is not Admission.INDEXED:
            return
        for entry in self.mirror.copy(event):
            if entry is None:
                yield "copied_unknown"
            else:
                self._pending.append(entry)

    def _store(self, event: BlocksStored) -> Iterator[str]:
        stored = self.mirror.plain(event)
        if stored is None:
            yield "bigrams_without_parent"
            return
        encoded = encode_store(stored, self.mirror.namespace_of(stored))
        entries = list(encode_stored(stored, encoded, self._event_id))
        if any(len(entry) > MAX_ENTRY_BYTES for entry in entries):
            yield "too_large_to_carry"
            return
        self._pending += entries
        self._may_hold = True
        self.mirror.store(stored, encoded, event.tokens)

    def _clear(self) -> None:
        self.mirror.clear()
        self._pending.append(encode_cleared(self._event_id))
        self._may_hold = False


def _packed(
    items: Sequence[_Item], size_of: Callable[[_Item], int], limit: int
) -> Iterator[list[_Item]]:
    """Packs the items in order into as few batches as the limits allow."""
    batch: list[_Item] = []
    size_bytes = 0
    for item in items:
        if len(batch) == limit or size_bytes >= MAX_BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(item)
        size_bytes += size_of(item)
    if batch:
        yield batch
