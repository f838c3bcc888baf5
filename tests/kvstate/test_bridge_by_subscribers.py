"""Whatever the engine does and whenever somebody subscribes, every subscriber knows the truth."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstate.bridge.bridge import Subscription, subscribe
from kvstate.bridge.mirror import Mirror
from kvstate.bridge.rank import BatchHistory, BridgedRank, Ended, StreamStatus
from kvstate.events import (
    AllCleared,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
)
from kvstate.feeds.feed import Feed, FeedState
from kvstate.feeds.feed_sources import Recovery
from kvstate.overlap import Tokens
from kvstate.pb.kvsteer_kv_events_pb2 import KvEventBatch
from kvstate.steps import finished
from tests.kvstate.bridging import Account, Lying

HASHES = st.integers(1, 12)
PLACES = st.tuples(st.sampled_from(["GPU", "CPU"]), st.sampled_from([None, 0]))


@st.composite
def stores(draw: st.DrawFn) -> BlocksStored:
    hashes = draw(st.lists(HASHES, min_size=1, max_size=4, unique=True))
    parent = draw(st.none() | HASHES)
    medium, group = draw(PLACES)
    return BlocksStored(list(hashes), parent, Tokens("I", hashes), 1, medium=medium, group=group)


@st.composite
def others(draw: st.DrawFn) -> Event:
    hashes: list[int | bytes] = list(draw(st.lists(HASHES, max_size=3)))
    medium, group = draw(PLACES)
    choices: list[Event] = [
        BlocksRemoved(hashes, medium, group),
        BlocksCopied(hashes, medium, group),
        AllCleared(),
    ]
    return draw(st.sampled_from(choices))


EVENTS = st.lists(stores() | others(), max_size=4)
STEPS = st.lists(
    st.sampled_from(["store", "flush", "come", "read", "lose_connection", "restart", "hole"])
    | EVENTS,
    max_size=30,
)


def _stored(*hashes: int) -> BlocksStored:
    return BlocksStored(list(hashes), None, Tokens("I", hashes), 1)


@dataclass
class Truth:
    """Computes in the simplest way what the engine holds of what it stored since the last hole."""

    copies: Counter[Lying] = field(default_factory=Counter)

    def apply(self, event: Event) -> None:
        match event:
            case BlocksStored():
                self._add(event.hashes, event)
            case BlocksCopied():
                held = {number for number, *_ in +self.copies}
                self._add([number for number in event.hashes if number in held], event)
            case BlocksRemoved():
                for number in event.hashes:
                    place = (int(number), event.medium, event.group)
                    self.copies[place] -= self.copies[place] > 0
            case _:
                self.copies.clear()

    def _add(self, hashes: list[Any], event: BlocksStored | BlocksCopied) -> None:
        for number in hashes:
            self.copies[number, event.medium, event.group] += 1


@dataclass
class Gateway:
    """A subscriber like SMG's: it resumes at the last number that it saw."""

    rank: BridgedRank
    account: Account = field(default_factory=Account)
    stream: Subscription | None = None

    def read(self, messages: int = 1_000) -> None:
        """Reads this many messages, or all that there are."""
        if self.stream is None:
            self._connect()
        for _ in range(messages):
            message = self.stream.take() if self.stream is not None else None
            if message is None:
                return
            if isinstance(message, Ended):
                assert message.status is StreamStatus.DATA_LOSS
                self.account = Account()
                self._connect()
                continue
            batch = KvEventBatch.FromString(message)
            if self.account.last is None or batch.sequence_number > self.account.last:
                self.account.take(batch)

    def _connect(self) -> None:
        stream = subscribe([self.rank], self.account.last or 0)
        if isinstance(stream, Ended):
            assert stream.status is StreamStatus.OUT_OF_RANGE
            self.account = Account()
            stream = subscribe([self.rank], 0)
        assert isinstance(stream, Subscription)
        self.stream = stream


class Scene:
    """An engine's rank, its subscribers, and the truth; a method for each thing that happens."""

    def __init__(self, batch_events: int) -> None:
        history = BatchHistory(0, 1_000, 0.0, max_batches=8, max_bytes=2**20)
        feed = Feed(Recovery.NONE)
        self.rank = BridgedRank(history, Mirror(2**20), feed, lambda: None, batch_events)
        self.rank.feed.state = FeedState.LIVE
        self.rank.trust(trusted=True)
        self.truth = Truth()
        self.gateways = [Gateway(self.rank)]

    def apply(self, events: Sequence[Event]) -> None:
        finished(self.rank.applying(EventBatch(1.0, list(events))))
        for event in events:
            self.truth.apply(event)

    def store(self) -> None:
        """Applies batches that differ from the pieces of a snapshot with the same numbers."""
        for events in ([_stored(9)], [BlocksRemoved([9])], [_stored(1, 2, 3)], [_stored(4)]):
            self.apply(events)
            self.flush()

    def flush(self) -> None:
        self.rank.flush()

    def come(self) -> None:
        self.gateways.append(Gateway(self.rank))

    def restart(self) -> None:
        finished(self.rank.forgetting())
        self.truth.copies.clear()

    def hole(self) -> None:
        finished(self.rank.demoting())
        self.truth.copies.clear()

    def read(self) -> None:
        for gateway in self.gateways:
            gateway.read(messages=1)

    def lose_connection(self) -> None:
        for gateway in self.gateways:
            gateway.stream = None


@pytest.mark.parametrize("batch_events", [2, 1024])  # snapshots of several pieces, and of one
@given(steps=STEPS)
@example(steps=["store", "read", "lose_connection"])  # within the snapshot
@example(
    steps=["store", "come", "read", "read", "hole", "store", "read", "lose_connection", "store"]
)
def test_subscribers_always_know_the_cache_of_the_engine(
    batch_events: int, steps: list[Any]
) -> None:
    scene = Scene(batch_events)
    for step in steps:
        if isinstance(step, str):
            getattr(scene, step)()
        else:
            scene.apply(step)
    scene.flush()
    for gateway in scene.gateways:
        gateway.read()
        assert +gateway.account.copies == +scene.truth.copies
    assert scene.rank.mirror.copies == scene.truth.copies.total()


@given(st.lists(EVENTS, max_size=15))
def test_newcomer_gets_parents_before_their_children(batches: list[list[Event]]) -> None:
    rank = BridgedRank(
        BatchHistory(0, 1, 0.0, max_batches=4, max_bytes=2**20),
        Mirror(2**20),
        Feed(Recovery.NONE),
        lambda: None,
    )
    for events in batches:
        finished(rank.applying(EventBatch(1.0, events)))
    first_told: dict[int, int] = {}
    parents: dict[int, int] = {}
    (piece,) = rank.state().pieces
    events_told = KvEventBatch.FromString(b"".join(copy.entry for copy in piece)).events
    for position, event in enumerate(events_told):
        number = event.stored.blocks[0].block_hash
        if number not in first_told and event.stored.HasField("parent_block_hash"):
            parents[number] = event.stored.parent_block_hash
        first_told.setdefault(number, position)
    for number, parent in parents.items():
        if parent in first_told and not _is_its_own_ancestor(number, parents):
            assert first_told[parent] < first_told[number]


def _is_its_own_ancestor(number: int, parents: dict[int, int]) -> bool:
    seen: set[int] = set()
    ancestor = parents.get(number)
    while ancestor is not None and ancestor not in seen:
        seen.add(ancestor)
        ancestor = parents.get(ancestor)
    return ancestor is not None
