"""One rank of the bridge: follows the engine's feed, keeps what newcomers and the late need."""

from collections.abc import Callable, Generator, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeVar

from kvstate.bridge.history import History
from kvstate.bridge.mirror import Copy, Mirror
from kvstate.bridge.status import Standing
from kvstate.events import BlocksCopied, BlocksRemoved, BlocksStored, Event, OtherGroupStored
from kvstate.feeds.feed import Feed
from kvstate.feeds.feed_choice import make_feed
from kvstate.feeds.feed_terms import Recovery, State
from kvstate.feeds.sink import Body, Taken
from kvstate.wire.groups import Admission, Groups
from kvstate.wire.grpc_encoding import (
    MAX_ENTRY_BYTES,
    Head,
    encode_cleared,
    encode_removed,
    encode_store,
    encode_stored,
)
from kvstate.wire.zmq_wire import decoding

# TensorRT-LLM's own bridge packs as many: one event a batch saturates the serving process.
MAX_BATCH_EVENTS = 1_024
# Far below the 4 MiB that consumers take, whatever the last entry adds.
MAX_BATCH_BYTES = 1024 * 1024

_Item = TypeVar("_Item")

_OVER_LIMIT = "it holds more than the bridge keeps of one rank"
_REMOVAL_LOST = "an event that may have been a removal could not be read"
_NO_KINDS = "its attention groups cannot be told apart"
_DOUBTFUL = "group_without_kind"


class StateOfRank(NamedTuple):
    """What a rank holds, for a newcomer.

    head: of the last batch that is in it. pieces: what each message tells of. blocks: in all.
    unknown_before: losses, at least, that it may lack blocks of; 0 if it lacks nothing.
    """

    head: Head
    pieces: list[list[Copy]]
    blocks: int
    unknown_before: int


class BridgedRank:
    """One rank; a `kvstate.feeds.sink.Sink`.

    changed: called when there is something to flush or to tell. feed: the one that this is the
    sink of, set before it runs.
    """

    def __init__(self, history: History, mirror: Mirror, changed: Callable[[], None]) -> None:
        self.history = history
        self.mirror = mirror
        self.standing = Standing()
        self.feed: Feed[Body] = make_feed(Recovery.NONE)
        self.unknown_before = 0
        self._changed = changed
        self._groups = Groups()
        self._doubtful: set[int | None] = set()
        self._pending: list[bytes] = []
        self._timestamp = 0.0
        self._event_id = 0
        self._holes = 0
        self._may_hold = False  # whether a subscriber may hold a block of this rank

    def applying(self, body: Body) -> Generator[None, None, Taken]:
        """Takes one batch of the engine, event by event; raises WireError where it is none."""
        batch = (yield from decoding(body)) if isinstance(body, bytes) else body
        self._timestamp = batch.timestamp
        refused, doubtful = self.mirror.refused, len(self._doubtful)
        faults = [*batch.faults]
        for event in batch.events:
            faults += self._apply(event)
            yield
        missed = ""
        if self.mirror.refused > refused:
            missed = _OVER_LIMIT
        if _DOUBTFUL in faults:
            missed = _NO_KINDS
        if batch.removal_lost:
            missed = _REMOVAL_LOST
        if batch.removal_lost or len(self._doubtful) > doubtful:
            yield from self.demoting()
        self._changed()
        return Taken(batch.clears and not missed, missed, tuple(faults))

    def forgetting(self) -> Generator[None, None, None]:
        """The engine restarted: subscribers are told that nothing is left."""
        yield
        self._holes = 0
        self._groups.forget()
        self._doubtful.clear()
        if self._may_hold:
            self._clear()
            self._changed()

    def demoting(self) -> Generator[None, None, None]:
        """A hole: what was held may be gone, so it is told to nobody any more."""
        yield
        self._holes += 1
        self.unknown_before = self._holes
        self._pending.clear()
        self.mirror.clear()
        self.history.hole()
        self._may_hold = False
        self._changed()

    def trust(self, trusted: bool) -> None:  # noqa: FBT001 - as Sink has it
        """Notes what the state of the feed means for subscribers."""
        state = self.feed.state
        self.standing.note(state, self.feed.reason)
        if trusted:
            self.unknown_before = 0 if state is State.LIVE else max(1, self._holes)
        self._changed()

    def flush(self) -> None:
        """Numbers what came since the last time, as few batches as the limits allow."""
        for entries in _packed(self._pending, len, MAX_BATCH_EVENTS):
            self.history.append(entries, self._timestamp)
        self._pending = []

    def state(self) -> StateOfRank:
        """What the rank holds now."""
        self.flush()
        history = self.history
        head = Head(history.last, history.timestamp, history.rank)
        copies = self.mirror.in_order()
        room = MAX_BATCH_EVENTS - 1  # the first message begins with a clear
        pieces = list(_packed(copies, attrgetter("size_bytes"), room)) or [[]]
        if len(pieces) > 1:
            history.close_past()
        return StateOfRank(head, pieces, len(copies), self.unknown_before)

    def _apply(self, event: Event) -> Iterator[str]:
        """Takes one event; gives the names of what was wrong with it."""
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
            return _DOUBTFUL
        return "other_attention_group"

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
    """Items in their order, in as few batches as the limits allow."""
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
