"""A rank that another process follows: what cannot have been passed on, and what is not."""

import math

import msgspec
import pytest

from kvstate.errors import DamagedError
from kvstate.feeds.feed import FeedState
from kvstate.index.index import Index
from kvstate.relay.holdings import Holding, copying, putting
from kvstate.relay.records import NO_MARK, Beginning, Kind, Mark, Record, RelayedStatus
from kvstate.relay.relayed import RelayedRank
from kvstate.rows.format import SavedOwner
from kvstate.steps import Steps, finished
from tests.kvstate.publishing import block, payload

STATUS = RelayedStatus(
    FeedState.LIVE, "", True, 0, 0, 0, 0, 0, "", False, 0.0, {"batches": 1}, None, -math.inf, 0
)
NOTHING = SavedOwner(b"no such thing", 0, None, None, (), False)


@pytest.fixture
def rank() -> RelayedRank:
    return RelayedRank(Index(1).add("w", 0, "m"), lambda _: None, lambda: None)


def take(rank: RelayedRank, kind: Kind, data: object = b"", mark: Mark = NO_MARK) -> None:
    body = data if isinstance(data, bytes) else msgspec.msgpack.encode(data)
    finished(rank.taking(Record(0, kind, body, mark), None))


def copying_alone(rank: RelayedRank) -> Steps[None]:
    yield from copying(rank.owner, Holding([], []))


def test_rows_without_their_rank_are_refused(rank: RelayedRank) -> None:
    with pytest.raises(DamagedError):
        take(rank, Kind.END, STATUS)


def test_changes_that_cannot_be_repeated_are_refused(rank: RelayedRank) -> None:
    with pytest.raises(DamagedError):
        take(rank, Kind.CHANGES, b"no changes")


def test_waiting_blocks_that_cannot_be_read_are_refused_and_leave_nothing(
    rank: RelayedRank,
) -> None:
    take(rank, Kind.BATCH, payload(0, block(1)))
    holding = Holding([], [b"no blocks"])
    saved = finished(copying(rank.owner, holding))
    assert rank.owner.blocks == 1
    with pytest.raises(DamagedError):
        finished(putting(rank.owner, saved, holding))
    assert rank.owner.blocks == 0


def test_rows_that_cannot_be_used_are_refused_and_leave_nothing(rank: RelayedRank) -> None:
    take(rank, Kind.BATCH, payload(0, block(1)))
    take(rank, Kind.BEGIN, Beginning("w", 0, 1, "m", NOTHING, shares=False))
    take(rank, Kind.ROWS, b"no rows")
    with pytest.raises(DamagedError):
        take(rank, Kind.END, STATUS)
    assert rank.owner.blocks == 0
    assert not rank.owner.trusted


def test_a_record_of_a_rank_that_is_removed_ends_before_its_owner_is_gone() -> None:
    index = Index(1)
    rank = RelayedRank(index.add("w", 0, "m"), lambda _: None, lambda: None)
    batch = payload(0, *(block(number) for number in range(1, 9)), ["Unknown"])
    steps = rank.taking(Record(0, Kind.BATCH, batch, NO_MARK), None)
    next(steps)
    rank.remove()
    index.remove(rank.owner)
    assert next(steps, "end") == "end"


def test_a_rank_is_removed_between_two_records(rank: RelayedRank) -> None:
    rank.remove()
    take(rank, Kind.BATCH, payload(0, block(1)))
    rank.remove()
    assert rank.owner.blocks == 1


def test_saving_a_rank_that_is_removed_ends_before_its_owner_is_gone() -> None:
    index = Index(1)
    rank = RelayedRank(index.add("w", 0, "m"), lambda _: None, lambda: None)
    many = list(range(1, 9_000))
    take(rank, Kind.BATCH, payload(0, ["BlockStored", many, None, many, 1]))
    saving = rank.working(copying_alone(rank))
    next(saving)
    rank.remove()
    index.remove(rank.owner)
    assert next(saving, "end") == "end"


def test_an_undecodable_batch_changes_nothing(rank: RelayedRank) -> None:
    take(rank, Kind.BATCH, payload(0, block(1)))
    take(rank, Kind.BATCH, b"no batch")
    assert rank.owner.blocks == 1
    take(rank, Kind.FORGET)
    assert rank.owner.blocks == 0


def test_a_rank_that_is_lost_is_not_trusted_until_its_state_comes_again(rank: RelayedRank) -> None:
    take(rank, Kind.STATUS, STATUS)
    assert rank.owner.trusted
    rank.lose("gone")
    assert (rank.owner.trusted, rank.feed.state) == (False, FeedState.STALE)
    take(rank, Kind.STATUS, STATUS)
    assert rank.owner.trusted
    take(rank, Kind.GONE)
    rank.lose("gone")
    assert (rank.owner.trusted, rank.feed.state) == (False, FeedState.CONNECTING)


def test_a_position_needs_a_batch_and_a_reason_that_can_be_kept(rank: RelayedRank) -> None:
    assert rank.position(*NO_MARK) is None
    found = rank.position(7, 1.5)
    assert found is not None
    assert (found.next, found.stamps) == (8, ((7, 1.5),))
    take(rank, Kind.STATUS, msgspec.structs.replace(STATUS, incomplete="x" * 501))
    assert rank.position(7, 1.5) is None
