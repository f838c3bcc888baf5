from typing import Any

import pytest

from kvstate.bridge.mirror import Mirror
from kvstate.bridge.rank import MAX_BATCH_BYTES, MAX_BATCH_EVENTS, BridgedRank, History
from kvstate.errors import WireError
from kvstate.events import (
    AllCleared,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
    OtherGroupStored,
    Taken,
    finished,
)
from kvstate.feeds.feed import Feed, State
from kvstate.feeds.feed_sources import Recovery
from kvstate.overlap import Tokens
from kvstate.pb.kvsteer_kv_events_pb2 import KvCacheEvent, KvEventBatch
from tests.kvstate.publishing import block, payload

LIMITS = {"max_batches": 1000, "max_bytes": 2**28}


def store(block_hash: int, parent: int | None = None, **fields: Any) -> BlocksStored:
    return BlocksStored([block_hash], parent, Tokens("I", [block_hash]), 1, **fields)


class Ringing:
    """A rank, and how often it rang."""

    def __init__(self, mirror_bytes: int = 2**28) -> None:
        self.rings = 0
        self.rank = BridgedRank(
            History(0, 100, 0.0, **LIMITS),
            Mirror(mirror_bytes),
            Feed(Recovery.NONE),
            self.ring,
        )

    def ring(self) -> None:
        self.rings += 1

    def apply(self, *events: Event, **fields: Any) -> Taken:
        return finished(self.rank.applying(EventBatch(5.0, list(events), **fields)))

    def state(self, state: State) -> None:
        self.rank.feed.state = state
        self.rank.trust(state in (State.LIVE, State.DEGRADED))

    def batches(self) -> list[KvEventBatch]:
        """The batches numbered so far."""
        self.rank.flush()
        history = self.rank.history
        numbers = range(history.oldest, history.next)
        return [KvEventBatch.FromString(history.batch(number)) for number in numbers]

    def events(self) -> list[str]:
        return [_shown(event) for batch in self.batches() for event in batch.events]


def _shown(event: KvCacheEvent) -> str:
    hashes = [block.block_hash for block in event.stored.blocks]
    hashes += event.removed.block_hashes
    return " ".join([event.WhichOneof("data") or "", *map(str, hashes)])


def test_events_that_wait_together_are_one_batch() -> None:
    ringing = Ringing()
    ringing.apply(store(1))
    finished(ringing.rank.applying(payload(7, block(2, 1))))
    ringing.apply(BlocksRemoved([2]), AllCleared())
    (batch,) = ringing.batches()
    assert (batch.sequence_number, batch.timestamp) == (100, 5.0)
    assert ringing.events() == ["stored 1", "stored 2", "removed 2", "cleared"]
    assert [event.event_id for event in batch.events] == [1, 2, 3, 4]
    assert ringing.rings == 3


def test_many_events_are_several_batches() -> None:
    ringing = Ringing()
    ringing.apply(*map(store, range(MAX_BATCH_EVENTS + 1)))
    assert [len(batch.events) for batch in ringing.batches()] == [MAX_BATCH_EVENTS, 1]


def test_long_events_are_several_batches_too() -> None:
    ringing = Ringing()
    large = [BlocksStored([n], None, Tokens("I", [2**32 - 1] * 60_000), 60_000) for n in range(9)]
    ringing.apply(*large)
    sizes = [batch.ByteSize() for batch in ringing.batches()]
    assert len(sizes) == 3
    assert max(sizes) < 2 * MAX_BATCH_BYTES


def test_batch_without_events_takes_no_number() -> None:
    ringing = Ringing()
    assert ringing.apply(faults=("bad_hash",)) == Taken(faults=("bad_hash",))
    assert ringing.batches() == []


def test_what_is_no_batch_changes_nothing() -> None:
    ringing = Ringing()
    with pytest.raises(WireError):
        finished(ringing.rank.applying(b"\x00"))
    assert ringing.rings == 0


def test_clear_heals() -> None:
    ringing = Ringing()
    assert not ringing.apply(store(1)).healed
    assert ringing.apply(AllCleared()).healed


def test_copy_is_a_store_of_what_is_known() -> None:
    ringing = Ringing()
    taken = ringing.apply(store(1), BlocksCopied([1, 2], medium="CPU"))
    assert taken.faults == ("copied_unknown",)
    (batch,) = ringing.batches()
    assert [(event.stored.medium, event.event_id) for event in batch.events] == [
        ("GPU", 1),
        ("CPU", 0),
    ]


def test_other_attention_groups_are_counted_and_not_told() -> None:
    ringing = Ringing()
    taken = ringing.apply(
        OtherGroupStored(1),
        store(1, group=1),
        BlocksCopied([1], group=1),
        BlocksRemoved([1], group=1),
        OtherGroupStored(None),
    )
    assert taken.faults == ("other_attention_group",) * 3
    assert ringing.events() == []
    ringing.apply(store(1, group=1, kind="full_attention"))
    assert ringing.events() == ["stored 1"]


def test_groups_that_cannot_be_told_apart_are_a_hole_each() -> None:
    ringing = Ringing()
    assert not ringing.apply(store(1, group=0)).missed
    for group, holes in ((1, 1), (0, 2), (1, 2)):
        taken = ringing.apply(store(1, group=group))
        assert taken.missed == "its attention groups cannot be distinguished"
        assert taken.faults == ("group_without_kind",)
        assert ringing.rank.history.holes == holes
    assert (ringing.events(), ringing.rank.mirror.copies) == ([], 0)
    finished(ringing.rank.forgetting())
    assert not ringing.apply(store(1, group=0)).faults


def test_store_that_is_too_long_is_left_out() -> None:
    ringing = Ringing()
    assert ringing.apply(store(1, extras=[("x" * 2**21,)])).faults == ("too_large_to_carry",)
    assert (ringing.events(), ringing.rank.mirror.copies) == ([], 0)


def test_pairs_without_their_first_token_are_left_out() -> None:
    ringing = Ringing()
    assert ringing.apply(store(2, 1, bigrams=True)).faults == ("bigrams_without_parent",)
    assert ringing.events() == []


def test_lost_removal_is_a_hole() -> None:
    ringing = Ringing()
    taken = ringing.apply(AllCleared(), store(1), removal_lost=True)
    assert taken.missed == "an event that may have been a removal could not be read"
    assert not taken.healed
    assert (ringing.rank.history.holes, ringing.events()) == (1, [])


def test_more_than_is_kept_is_told_to_those_who_listen_and_missed() -> None:
    ringing = Ringing(mirror_bytes=0)
    assert ringing.apply(store(1)).missed == "it holds more blocks than the bridge keeps"
    assert ringing.events() == ["stored 1"]


def test_restart_is_told_as_a_clear_if_there_may_be_something_to_clear() -> None:
    ringing = Ringing()
    finished(ringing.rank.forgetting())
    ringing.apply(store(1), BlocksRemoved([1]))
    finished(ringing.rank.forgetting())
    finished(ringing.rank.forgetting())
    assert ringing.events() == ["stored 1", "removed 1", "cleared"]


def test_hole_forgets_what_is_not_numbered_yet_and_takes_a_number() -> None:
    ringing = Ringing()
    ringing.apply(store(1))
    finished(ringing.rank.demoting())
    ringing.apply(store(2))
    assert [batch.sequence_number for batch in ringing.batches()] == [101]
    assert ringing.events() == ["stored 2"]


def test_state_has_the_number_of_its_last_batch() -> None:
    ringing = Ringing()
    ringing.apply(store(1), store(2, 1))
    state = ringing.rank.state()
    assert (state.head.sequence, state.head.timestamp, state.blocks) == (100, 5.0, 2)
    assert [len(piece) for piece in state.pieces] == [2]
    assert ringing.rank.history.resumable == 100


def test_state_in_several_pieces_closes_the_past() -> None:
    ringing = Ringing()
    ringing.apply(*map(store, range(MAX_BATCH_EVENTS)))
    assert [len(piece) for piece in ringing.rank.state().pieces] == [MAX_BATCH_EVENTS - 1, 1]
    assert ringing.rank.history.resumable == ringing.rank.history.next


def test_what_was_never_seen_is_counted_until_the_cache_is_emptied() -> None:
    ringing = Ringing()
    ringing.state(State.LIVE)
    assert ringing.rank.unknown_before == 0
    finished(ringing.rank.demoting())
    finished(ringing.rank.demoting())
    ringing.state(State.DEGRADED)
    assert ringing.rank.state().unknown_before == 2
    ringing.state(State.REPLAYING)
    assert ringing.rank.unknown_before == 2
    ringing.apply(AllCleared())
    ringing.state(State.LIVE)
    assert ringing.rank.unknown_before == 0


def test_unknown_past_is_at_least_one_loss() -> None:
    ringing = Ringing()
    ringing.state(State.DEGRADED)
    assert ringing.rank.unknown_before == 1


def test_standing_follows_the_feed() -> None:
    ringing = Ringing()

    def is_told() -> bool:
        return ringing.rank.standing.fault is None

    assert not is_told()
    ringing.state(State.LIVE)
    assert is_told()
    ringing.state(State.STALE)
    assert not is_told()
