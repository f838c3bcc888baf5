"""What a tap writes down, and when."""

import msgspec
import pytest

from kvstate.events import Batch, EngineLoad
from kvstate.feeds.feed import Feed, FeedState
from kvstate.feeds.feed_sources import Recovery
from kvstate.relay.records import NO_MARK, Kind, Mark, Record, record_at, status_in
from kvstate.relay.taps import Tap, Taps
from tests.kvstate.cores import new_core


class Rank(msgspec.Struct):
    """A rank that is followed."""

    feed: Feed
    reason: str = ""
    counts: dict[str, int] = {}
    lag_seconds: float = 0.0
    load: EngineLoad | None = None
    load_at: float = 0.0
    unapplied: int = 0


@pytest.fixture
def rank() -> Rank:
    return Rank(Feed(Recovery.REPLAY))


@pytest.fixture
def taps() -> Taps:
    return Taps(new_core())


@pytest.fixture
def tap(taps: Taps, rank: Rank) -> Tap:
    tap = taps.add("w")
    tap.watch(rank, 0)
    return tap


@pytest.fixture
def records(taps: Taps) -> list[Record]:
    """What was written down."""
    written: list[Record] = []

    def put(data: bytes) -> None:
        record = record_at(data, 0)
        assert record is not None
        written.append(record)

    taps.put = put
    return written


def test_a_rank_that_nobody_reads_is_not_written_down(tap: Tap, records: list[Record]) -> None:
    tap.note_applied(Batch(3, b"body", 1.5))
    tap.note_demoted()
    tap.note_trust(trusted=True)
    tap.refresh()
    assert (records, tap.mark) == ([], Mark(3, 1.5))
    tap.note_forgotten()
    assert tap.mark == NO_MARK


def test_counts_are_written_down_later_and_once(
    taps: Taps, tap: Tap, rank: Rank, records: list[Record]
) -> None:
    tap.begin(trusted=True)
    for number in range(3):
        rank.counts["batches"] = number + 1
        tap.note_trust(trusted=True)
    assert records == []
    taps.refresh()
    taps.refresh()
    assert [status_in(record.payload).counts for record in records] == [{"batches": 3}]


def test_a_state_is_written_down_at_once(tap: Tap, rank: Rank, records: list[Record]) -> None:
    tap.begin(trusted=False)
    rank.feed.connect()
    tap.note_trust(trusted=False)
    assert [status_in(record.payload).state for record in records] == [FeedState.REPLAYING]


def test_numbers_of_ranks_that_are_gone_are_used_again(
    taps: Taps, tap: Tap, records: list[Record]
) -> None:
    tap.begin(trusted=False)
    assert taps.of("w") == [tap]
    taps.remove("w")
    assert [record.kind for record in records] == [Kind.GONE]
    assert taps.of("w") is None
    assert taps.add("v").number == tap.number
    taps.remove("v")
    assert len(records) == 1


def test_nothing_is_written_down_after_the_last_reader(
    taps: Taps, tap: Tap, records: list[Record]
) -> None:
    tap.begin(trusted=False)
    taps.stop()
    tap.note_demoted()
    assert records == []
