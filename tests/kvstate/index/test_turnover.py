"""A degraded feed beside an engine that evicts: it heals, and credits nothing that is not held."""

import random
from collections.abc import Callable, Iterable
from typing import Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.bridge.mirror import Mirror
from kvstate.bridge.rank import BatchHistory, BridgedRank
from kvstate.events import Batch, BlocksRemoved, BlocksStored, Event, EventBatch
from kvstate.feeds.effects import Sink
from kvstate.feeds.feed import Demote, Effect, Feed, FeedState, Forget
from kvstate.feeds.feed_sources import Recovery
from kvstate.index.index import Index
from kvstate.index.turnover import Turnover
from kvstate.overlap import Prompt, Tokens
from kvstate.steps import finished


class Engine:
    """An engine's cache of prompts of one block: it evicts the one used last, or any."""

    def __init__(self, capacity: int, chance: random.Random, *, is_lru: bool) -> None:
        self.held: dict[int, None] = {}  # in the order of their last use
        self._capacity = capacity
        self._chance = chance
        self._is_lru = is_lru

    def serve(self, block: int) -> list[Event]:
        """Returns what it publishes for one request: nothing if the block is held."""
        events: list[Event] = []
        if self.held.pop(block, False) is False:
            if len(self.held) == self._capacity:
                gone = next(iter(self.held)) if self._is_lru else self._chance.choice([*self.held])
                del self.held[gone]
                events.append(BlocksRemoved([gone]))
            events.append(BlocksStored([block], None, Tokens("I", [block]), 1))
        self.held[block] = None
        return events


class Reader(Protocol):
    """What follows a feed, and the blocks that it takes for held for certain."""

    sink: Sink

    def certain(self, _blocks: Iterable[int], /) -> set[int]: ...


class Router:
    """A rank of a router's index."""

    sink: Sink

    def __init__(self, _feed: Feed) -> None:
        self.index = Index(12345678)
        self.sink = self.index.add("w", 0, "m")

    def certain(self, blocks: Iterable[int]) -> set[int]:
        prompts = {block: Prompt("m", Tokens("I", [block, 0])) for block in blocks}
        found = {block: self.index.overlaps(prompts[block]).get("w") for block in blocks}
        return {block for block, overlap in found.items() if overlap and sum(overlap.tiers)}


class Bridge:
    """A rank of a bridge."""

    sink: Sink

    def __init__(self, feed: Feed) -> None:
        history = BatchHistory(0, 100, 0.0, max_batches=9, max_bytes=999)
        self.sink = self.rank = BridgedRank(history, Mirror(2**20), feed, lambda: None)

    def certain(self, _blocks: Iterable[int]) -> set[int]:
        return {copy.last_token for piece in self.rank.state().pieces for copy in piece}


READERS = [pytest.param(Router, id="router"), pytest.param(Bridge, id="bridge")]
MakeReader = Callable[[Feed], Reader]


class Followed:
    """A feed without replays, and its reader."""

    def __init__(self, make_reader: MakeReader) -> None:
        self.feed = Feed(Recovery.NONE)
        self.reader = make_reader(self.feed)
        self.feed.connect()

    def receive(self, number: int, events: list[Event]) -> None:
        for effect in self.feed.receive(Batch(number, EventBatch(number, events), number)):
            self._carry_out(effect)
        self.reader.sink.trust(trusted=self.feed.certain)

    def _carry_out(self, effect: Effect) -> None:
        sink = self.reader.sink
        match effect:
            case Batch():
                taken = finished(sink.applying(effect.body))
                if taken.healed:
                    self.feed.heal()
            case Demote():
                finished(sink.demoting())
            case Forget():
                finished(sink.forgetting())


@pytest.mark.parametrize("make_reader", READERS)
@given(
    capacity=st.integers(1, 12),
    before=st.integers(0, 40),
    losses=st.sets(st.integers(0, 60), max_size=3),
    is_lru=st.booleans(),
    seed=st.integers(0, 999),
)
def test_busy_feed_heals_and_credits_only_what_the_engine_holds(
    *,
    make_reader: MakeReader,
    capacity: int,
    before: int,
    losses: set[int],
    is_lru: bool,
    seed: int,
) -> None:
    chance = random.Random(seed)
    engine, followed = Engine(capacity, chance, is_lru=is_lru), Followed(make_reader)
    blocks = range(1, 2 * capacity + 2)
    for _ in range(before):
        engine.serve(chance.choice(blocks))
    number, stored_since = 1, 0
    while number <= max(losses, default=0) + 1 or stored_since <= 4 * capacity + 2:
        events = engine.serve(chance.choice(blocks))
        if not events:
            continue
        if number in losses:
            stored_since = 0
        else:
            followed.receive(number, events)
            stored_since += 1
            assert followed.reader.certain(blocks) <= engine.held.keys()
        number += 1
    assert followed.feed.state is FeedState.LIVE


@pytest.mark.parametrize("make_reader", READERS)
@given(capacity=st.integers(8, 40), data=st.data())
def test_feed_heals_once_the_removals_of_unseen_blocks_have_come(
    *, make_reader: MakeReader, capacity: int, data: st.DataObject
) -> None:
    engine, followed = Engine(capacity, random.Random(1), is_lru=True), Followed(make_reader)
    unseen = range(1000, 1000 + data.draw(st.integers(1, capacity)))
    in_use = unseen[: data.draw(st.integers(0, min(len(unseen) - 1, capacity // 2)))]
    for block in unseen:
        engine.serve(block)
    number, stored_after = 0, 0
    while stored_after <= capacity // 8 + 1:
        for block in in_use:
            assert not engine.serve(block)
        number += 1
        followed.receive(number, engine.serve(number))
        if engine.held.keys() & set(unseen) - set(in_use):
            assert followed.feed.state is FeedState.DEGRADED
        else:
            stored_after += 1
    assert followed.feed.state is FeedState.LIVE


@pytest.mark.parametrize("make_reader", READERS)
def test_feed_without_turnover_stays_degraded(*, make_reader: MakeReader) -> None:
    chance = random.Random(1)
    engine, followed = Engine(50, chance, is_lru=True), Followed(make_reader)
    for block in range(30):
        engine.serve(block)
    for number in range(1, 21):
        followed.receive(number, engine.serve(100 + number))
    assert followed.feed.state is FeedState.DEGRADED


def test_bridge_states_no_loss_after_its_feed_healed() -> None:
    engine, followed = Engine(4, random.Random(1), is_lru=True), Followed(Bridge)
    rank = followed.reader.sink
    assert isinstance(rank, BridgedRank)
    missed = []
    for number in range(1, 30):
        events = engine.serve(number)
        if number not in {10, 11, 12}:
            followed.receive(number, events)
            missed.append(rank.state().unknown_before)
    assert (missed[0], missed[-1]) == (1, 0)
    engine.serve(30)
    followed.receive(31, engine.serve(31))
    assert rank.state().unknown_before == 1


def test_turnover_that_is_over_is_not_complete_once_more() -> None:
    turnover = Turnover()
    turnover.is_waiting = False
    assert not turnover.is_complete(removed=9, unknown=0, held=1)
