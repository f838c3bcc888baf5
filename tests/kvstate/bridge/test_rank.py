from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.bridge.mirror import Mirror
from kvstate.bridge.rank import MAX_BATCH_BYTES, MAX_BATCH_EVENTS, BatchHistory, BridgedRank
from kvstate.errors import WireError
from kvstate.events import (
    AllCleared,
    BatchResult,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
    OtherGroupStored,
)
from kvstate.feeds.feed import Feed, FeedState
from kvstate.feeds.feed_sources import Recovery
from kvstate.overlap import Tokens
from kvstate.pb.kvsteer_kv_events_pb2 import KvCacheEvent, KvEventBatch
from kvstate.steps import finished
from tests.kvstate.publishing import block, payload

LIMITS = {"max_batches": 1000, "max_bytes": 2**28}


def store(block_hash: int, parent: int | None = None, **fields: Any) -> BlocksStored:
    return BlocksStored([block_hash], parent, Tokens("I", [block_hash]), 1, **fields)


class Ringing:
    """A rank, and how often it rang."""

    def __init__(self, mirror_bytes: int = 2**28) -> None:
        self.rings = 0
        self.rank = BridgedRank(
            BatchHistory(0, 100, 0.0, **LIMITS),
            Mirror(mirror_bytes),
            Feed(Recovery.NONE),
            self.ring,
        )

    def ring(self) -> None:
        self.rings += 1

    def apply(self, *events: Event, **fields: Any) -> BatchResult:
        return finished(self.rank.applying(EventBatch(5.0, list(events), **fields)))

    def state(self, state: FeedState) -> None:
        self.rank.feed.state = state
        self.rank.trust(trusted=state in (FeedState.LIVE, FeedState.DEGRADED))

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


def test_waiting_events_form_one_batch() -> None:
    ringing = Ringing()
    ringing.apply(store(1))
    finished(ringing.rank.applying(payload(7, block(2, 1))))
    ringing.apply(BlocksRemoved([2]), AllCleared())
    (batch,) = ringing.batches()
    assert (batch.sequence_number, batch.timestamp) == (100, 5.0)
    assert ringing.events() == ["stored 1", "stored 2", "removed 2", "cleared"]
    assert [event.event_id for event in batch.events] == [1, 2, 3, 4]
    assert ringing.rings == 3


def test_many_events_form_several_batches() -> None:
    ringing = Ringing()
    ringing.apply(*map(store, range(MAX_BATCH_EVENTS + 1)))
    assert [len(batch.events) for batch in ringing.batches()] == [MAX_BATCH_EVENTS, 1]


def test_long_events_form_several_batches() -> None:
    ringing = Ringing()
    large = [BlocksStored([n], None, Tokens("I", [2**32 - 1] * 60_000), 60_000) for n in range(9)]
    ringing.apply(*large)
    sizes = [batch.ByteSize() for batch in ringing.batches()]
    assert len(sizes) == 3
    assert max(sizes) < 2 * MAX_BATCH_BYTES


def test_batch_without_events_takes_no_number() -> None:
    ringing = Ringing()
    assert ringing.apply(faults=("bad_hash",)) == BatchResult(faults=("bad_hash",))
    assert ringing.batches() == []


def test_invalid_payload_changes_nothing() -> None:
    ringing = Ringing()
    with pytest.raises(WireError):
        finished(ringing.rank.applying(b"\x00"))
    assert ringing.rings == 0


def test_clear_heals_the_rank() -> None:
    ringing = Ringing()
    assert not ringing.apply(store(1)).healed
    assert ringing.apply(AllCleared()).healed


def test_copy_of_a_known_block_is_sent_as_a_store() -> None:
    ringing = Ringing()
    taken = ringing.apply(store(1), BlocksCopied([1, 2], medium="CPU"))
    assert taken.faults == ("copied_unknown",)
    (batch,) = ringing.batches()
    assert [(event.stored.medium, event.event_id) for event in batch.events] == [
        ("GPU", 1),
        ("CPU", 0),
    ]


def test_other_attention_groups_are_counted_and_not_sent() -> None:
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


def test_indistinguishable_groups_are_a_hole_each() -> None:
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


def test_oversized_store_is_left_out() -> None:
    ringing = Ringing()
    assert ringing.apply(store(1, extras=[("x" * 2**21,)])).faults == ("too_large_to_carry",)
    assert (ringing.events(), ringing.rank.mirror.copies) == ([], 0)


def test_bigrams_without_their_first_token_are_left_out() -> None:
    ringing = Ringing()
    assert ringing.apply(store(2, 1, bigrams=True)).faults == ("bigrams_without_parent",)
    assert ringing.events() == []


def test_lost_removal_is_a_hole() -> None:
    ringing = Ringing()
    taken = ringing.apply(AllCleared(), store(1), removal_lost=True)
    assert taken.missed == "an event that may have been a removal could not be read"
    assert not taken.healed
    assert (ringing.rank.history.holes, ringing.events()) == (1, [])


def test_block_over_the_mirror_limit_is_sent_and_missed() -> None:
    ringing = Ringing(mirror_bytes=0)
    assert ringing.apply(store(1)).missed == "it holds more blocks than the bridge keeps"
    assert ringing.events() == ["stored 1"]


def test_restart_is_sent_as_a_clear_if_blocks_were_sent() -> None:
    ringing = Ringing()
    finished(ringing.rank.forgetting())
    ringing.apply(store(1), BlocksRemoved([1]))
    finished(ringing.rank.forgetting())
    finished(ringing.rank.forgetting())
    assert ringing.events() == ["stored 1", "removed 1", "cleared"]


def test_hole_drops_unnumbered_events_and_takes_a_number() -> None:
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


def test_unknown_past_counts_holes_until_the_cache_is_cleared() -> None:
    ringing = Ringing()
    ringing.state(FeedState.LIVE)
    assert ringing.rank.unknown_before == 0
    finished(ringing.rank.demoting())
    finished(ringing.rank.demoting())
    ringing.state(FeedState.DEGRADED)
    assert ringing.rank.state().unknown_before == 2
    ringing.state(FeedState.REPLAYING)
    assert ringing.rank.unknown_before == 2
    ringing.apply(AllCleared())
    ringing.state(FeedState.LIVE)
    assert ringing.rank.unknown_before == 0


def test_unknown_past_is_at_least_one_loss() -> None:
    ringing = Ringing()
    ringing.state(FeedState.DEGRADED)
    assert ringing.rank.unknown_before == 1


def test_status_follows_the_feed() -> None:
    ringing = Ringing()

    def is_told() -> bool:
        return ringing.rank.status.fault is None

    assert not is_told()
    ringing.state(FeedState.LIVE)
    assert is_told()
    ringing.state(FeedState.STALE)
    assert not is_told()


@given(
    st.lists(st.none() | st.integers(0, 200), max_size=40), st.integers(1, 6), st.integers(0, 300)
)
def test_history_keeps_within_its_limits_and_the_newest_batch(
    sizes: list[int | None], most: int, most_bytes: int
) -> None:
    history, newest = BatchHistory(0, 100, 0.0, max_batches=most, max_bytes=most_bytes), 0
    for size in sizes:
        if size is None:
            history.hole()
        else:
            history.append([bytes(size)], 0.0)
        numbers = range(history.oldest, history.next)
        kept = [len(history.batch(number)) for number in numbers]
        assert len(kept) == len(history) <= most
        assert sum(kept) == history.size_bytes
        assert history.size_bytes <= most_bytes or len(kept) == 1
        assert bool(kept) == (size is not None)
        assert history.next == (newest := newest + 1) + 100
