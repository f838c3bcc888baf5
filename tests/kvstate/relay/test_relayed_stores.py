"""Stores as records, and what a process makes of those that another one sends."""

from collections.abc import Iterator

import msgspec
import pytest

from kvstate.errors import DamagedError
from kvstate.events import BlocksStored
from kvstate.index.index import Index
from kvstate.index.orphans import Orphan
from kvstate.index.owner import IndexLimits, Owner
from kvstate.overlap import Prompt, Tokens
from kvstate.relay.holdings import ORPHANS_AT_ONCE, Holding, copying
from kvstate.relay.records import (
    NO_MARK,
    STORES,
    Kind,
    Record,
    StoreBeginning,
    orphans_in,
    store_beginning_in,
)
from kvstate.relay.relayed_stores import RelayedStores
from kvstate.steps import finished
from kvstate.stores.stores import StoreRules, Stores

SECRET = 12345678


def stores(limits: IndexLimits | None = None) -> tuple[Stores, Owner]:
    """Stores of a process with one worker, and the owner of what it shares."""
    index = Index(SECRET, limits)
    made = Stores(index, [StoreRules("s")])
    made.attach("a", index.add("a", 0, "m"))
    (shared,) = made.of_workers(["a"])
    return made, shared.owner


def stored(begin: int, end: int) -> BlocksStored:
    numbers: list[int | bytes] = list(range(begin, end))
    return BlocksStored(numbers, begin - 1 or None, Tokens("I", range(begin, end)), 1)


def fill(owner: Owner, *events: BlocksStored) -> None:
    for _ in owner.applying_events(events):
        pass


def records(store: str, owner: Owner) -> Iterator[Record]:
    """The records that describe a store."""
    holding = Holding([], [])
    saved = finished(copying(owner, holding))
    beginning = msgspec.msgpack.encode(StoreBeginning(store, "m", saved))
    yield Record(STORES, Kind.STORE, beginning, NO_MARK)
    for kind, pieces in ((Kind.ROWS, holding.rows), (Kind.ORPHANS, holding.orphans)):
        for piece in pieces:
            yield Record(STORES, kind, piece, NO_MARK)
    yield Record(STORES, Kind.STORED, b"", NO_MARK)


def take(relayed: RelayedStores, *some: Record) -> None:
    for record in some:
        for _ in relayed.taking(record):
            pass


def tokens(some: Stores, length: int) -> int:
    prompt = Prompt("m", Tokens("I", range(1, length + 2)))
    return sum(one.tokens for one in some.stored(prompt))


def test_a_store_is_taken_whole_in_place_of_what_it_had() -> None:
    (_, owner), (other, there) = stores(), stores()
    count = 3 * ORPHANS_AT_ONCE
    fill(owner, stored(1, 3), stored(4, count))
    fill(there, stored(1, 2), stored(9, 12))
    take(RelayedStores(other), *records("s", owner))
    assert (there.blocks, len(there.orphans)) == (owner.blocks, len(owner.orphans))
    assert tokens(other, count) == 2
    fill(there, stored(3, 4))
    assert tokens(other, count) == count - 1


def test_blocks_that_wait_are_kept_up_to_the_limit() -> None:
    (_, owner), (other, there) = stores(), stores(IndexLimits(orphans=5))
    fill(owner, stored(1, 2), stored(3, 20))
    take(RelayedStores(other), *records("s", owner))
    assert (there.blocks, len(there.orphans)) == (1, 5)


def test_a_store_that_is_not_configured_here_is_left_out() -> None:
    (_, owner), (other, there) = stores(), stores()
    fill(owner, stored(1, 3))
    take(RelayedStores(other), *records("elsewhere", owner))
    assert there.blocks == 0


def test_damaged_rows_of_a_store_leave_it_empty() -> None:
    (_, owner), (other, there) = stores(), stores()
    fill(owner, stored(1, 3))
    begin, _, *rest = records("s", owner)
    fill(there, stored(1, 2))
    take(RelayedStores(other), begin, Record(STORES, Kind.ROWS, b"damaged", NO_MARK), *rest)
    assert there.blocks == 0


@pytest.mark.parametrize("kind", [Kind.STORED, Kind.STORE, Kind.BATCH])
def test_records_that_no_store_has_are_refused(kind: Kind) -> None:
    with pytest.raises(DamagedError):
        take(RelayedStores(stores()[0]), Record(STORES, kind, b"", NO_MARK))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91\xc0", b"\x93\xa1s\xa1m\xc0"])
def test_payloads_that_cannot_be_read_are_refused(payload: bytes) -> None:
    for read in (store_beginning_in, orphans_in):
        with pytest.raises(DamagedError):
            read(payload)


def test_blocks_that_wait_are_read_as_they_were() -> None:
    _, owner = stores()
    fill(owner, stored(3, 5))
    waiting: list[Orphan] = owner.orphans.all()
    holding = Holding([], [])
    finished(copying(owner, holding))
    assert [one for piece in holding.orphans for one in orphans_in(piece)] == waiting
