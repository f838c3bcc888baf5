"""Rows of the index from one router to another: whole, once, and within bounds."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sharing import row_messages
from extproc.sharing.messages import Keys, MessageError, keys_of, sealed, sender_tag
from extproc.sharing.row_messages import (
    MAGIC,
    PIECE_BYTES,
    RowsAsk,
    RowsMessage,
    RowsOffer,
    RowsPiece,
    RowsTake,
    decoded,
    encoded,
    is_about_rows,
)
from extproc.sharing.rows import RowsExchange, RowsLimits
from tests.waiting import until

KEYS, LAYOUT = keys_of(b"a secret of this fleet"), "compiled 2"
HASTY = RowsLimits(again_seconds=0.01)
# What is on its way arrives in this time, even on a busy machine.
PATIENT: dict[str, Any] = dict.fromkeys(
    ("offer_seconds", "first_seconds", "piece_seconds", "all_seconds", "last_seconds"), 500.0
)
ROWS = [bytes([number]) * 40_000 for number in range(8)]


class Net:
    """Carries messages between routers, all but those that are `lost`."""

    def __init__(self) -> None:
        self.routers: list[Router] = []
        self.sent: list[RowsMessage] = []
        self.lost: set[int] = set()

    def carry(self, sender: "Router", wire: bytes) -> None:
        assert is_about_rows(wire)
        self.sent.append(decoded(wire, KEYS))
        if len(self.sent) in self.lost:
            return
        for one in self.routers:
            if one is not sender:
                asyncio.get_running_loop().call_soon(one.hear, wire)

    def count(self, kind: type[RowsMessage]) -> int:
        return sum(isinstance(one, kind) for one in self.sent)


class Router:
    """A router that has rows, or none."""

    def __init__(
        self,
        net: Net,
        own: Sequence[bytes],
        layout: str = LAYOUT,
        keys: Keys = KEYS,
        **limits: Any,
    ) -> None:
        self.own, self.made, self.rejected = own, 0, 0
        self.is_ready = bool(own)
        self.is_alone = True
        tag = sender_tag("router", len(net.routers))
        self.exchange = RowsExchange(
            keys,
            tag,
            layout,
            lambda wire: net.carry(self, wire),
            self.sections,
            lambda: self.is_ready,
            lambda: self.is_alone,
            replace(HASTY, **limits),
        )
        net.routers.append(self)

    async def sections(self) -> AsyncIterator[bytes]:
        self.made += 1
        for section in self.own:
            await asyncio.sleep(0)
            yield section

    def hear(self, wire: bytes) -> None:
        try:
            self.exchange.hear(wire)
        except MessageError:
            self.rejected += 1


@pytest.fixture
def net() -> Net:
    return Net()


async def test_new_router_gets_all_rows_of_one_other(net: Net) -> None:
    others, new = [Router(net, ROWS), Router(net, ROWS)], Router(net, [], **PATIENT)
    assert await new.exchange.take() == b"".join(ROWS)
    assert sorted(one.made for one in others) == [0, 1]
    assert net.count(RowsPiece) >= sum(map(len, ROWS)) // PIECE_BYTES


@given(lost=st.sets(st.integers(1, 20), max_size=12))
def test_lost_messages_are_sent_again(lost: set[int]) -> None:
    async def run() -> None:
        net = Net()
        net.lost = lost
        Router(net, ROWS, **PATIENT)
        new = Router(net, [], again_seconds=0.001, **PATIENT)
        assert await new.exchange.take() == b"".join(ROWS)

    asyncio.run(run())


@pytest.mark.parametrize("why", ["not ready", "another layout", "another secret", "nobody"])
async def test_new_router_begins_without_rows_if_none_are_offered(net: Net, why: str) -> None:
    late = 0.1 if why == "another secret" else HASTY.late_offer_seconds
    new = Router(net, [], offer_seconds=0.05, late_offer_seconds=late)
    if why != "nobody":
        keys = keys_of(b"the secret of another fleet") if why == "another secret" else KEYS
        other = Router(net, ROWS, "plain 2" if why == "another layout" else LAYOUT, keys)
        other.is_ready = why != "not ready"
    new.is_alone = why == "nobody"  # whoever answers makes the wait as short
    assert await new.exchange.take() is None
    assert not [one for one in net.sent if isinstance(one, RowsOffer) and one.offer is not None]


async def test_new_router_gives_up_on_one_that_falls_silent(net: Net) -> None:
    other, new = Router(net, ROWS), Router(net, [], **PATIENT | {"piece_seconds": 0.05})
    net.lost = set(range(7, 1_000))
    assert await new.exchange.take() is None
    assert 0 < net.count(RowsPiece) < len(b"".join(ROWS)) // PIECE_BYTES
    other.exchange.close()


async def test_rows_beyond_the_bound_are_not_given(net: Net) -> None:
    Router(net, ROWS, max_bytes=100_000)
    assert await Router(net, [], first_seconds=0.1).exchange.take() is None
    assert net.count(RowsPiece) == 0


async def test_rows_are_given_to_one_router_at_a_time_and_then_given_up(
    net: Net,
) -> None:
    other = Router(net, ROWS, last_seconds=0.02)
    first, second = Router(net, [], **PATIENT), Router(net, [], **PATIENT)
    found = await asyncio.gather(first.exchange.take(), second.exchange.take())
    assert list(found) == [b"".join(ROWS)] * 2
    assert other.made == 2


def test_offers_that_are_remembered_are_bounded() -> None:
    net = Net()
    other = Router(net, ROWS)

    async def ask() -> None:
        for number in range(HASTY.offers + 1):
            other.hear(encoded(RowsAsk(number, LAYOUT), KEYS, b"somebody"))
        first = next(one for one in net.sent if isinstance(one, RowsOffer))
        assert first.offer is not None
        other.hear(encoded(RowsTake(first.offer, 0), KEYS, b"somebody"))  # it is forgotten

    asyncio.run(ask())
    assert net.count(RowsOffer) == HASTY.offers + 1
    assert other.made == 0


async def test_router_does_not_read_what_is_for_another_one(net: Net) -> None:
    Router(net, ROWS)
    # whatever it read, it would reject
    third = Router(net, ROWS, keys=keys_of(b"the secret of another fleet"))
    assert await Router(net, [], **PATIENT).exchange.take() == b"".join(ROWS)
    assert third.rejected == net.count(RowsAsk)


async def test_pieces_and_offers_that_nobody_asked_for_are_ignored(net: Net) -> None:
    other, new = Router(net, ROWS), Router(net, [], **PATIENT)
    for message in (RowsPiece(1, 0, 5, b"forged"), RowsOffer(1, 1), RowsTake(1, 0)):
        new.hear(encoded(message, KEYS, b"somebody"))
        other.hear(encoded(message, KEYS, b"somebody"))
    taking = asyncio.create_task(new.exchange.take())
    await until(lambda: net.count(RowsTake) > 0)
    take = next(one for one in net.sent if isinstance(one, RowsTake))
    new.hear(encoded(RowsPiece(take.offer, 7, 9, b"of another place"), KEYS, b"somebody"))
    assert await taking == b"".join(ROWS)


@given(body=st.binary(max_size=60))
def test_any_sealed_body_is_a_message_or_malformed(body: bytes) -> None:
    reasons = set[str]()
    try:
        decoded(sealed(bytes(8) + body, KEYS, b"somebody", MAGIC), KEYS)
    except MessageError as error:
        reasons.add(error.reason)
    assert reasons <= {"malformed"}


def test_piece_that_is_too_long_is_malformed() -> None:
    piece = RowsPiece(1, 0, 1, bytes(PIECE_BYTES + 1))
    with pytest.raises(MessageError, match="malformed"):
        decoded(encoded(piece, KEYS, b"somebody"), KEYS)
    assert row_messages.PIECE_BYTES < 64 * 1024


@pytest.mark.parametrize("is_alone", [True, False])
async def test_new_router_waits_longer_if_it_has_heard_another_one(
    net: Net, is_alone: bool
) -> None:
    net.lost = set(range(1, 11))  # what it asks for 0.1 s
    Router(net, ROWS)
    new = Router(net, [], offer_seconds=0.02)
    new.is_alone = is_alone
    assert await new.exchange.take() == (None if is_alone else b"".join(ROWS))


async def recorded(net: Net, new: Router) -> list[bytes]:
    """What a new router said while it took rows, as anybody on the channel hears it."""
    assert await new.exchange.take() == b"".join(ROWS)
    said = [one for one in net.sent if isinstance(one, RowsAsk | RowsTake)]
    return [encoded(one, KEYS, b"somebody") for one in said]


async def test_recording_of_an_exchange_is_answered_with_no_rows(net: Net) -> None:
    other = Router(net, ROWS, last_seconds=0.01)
    said = await recorded(net, Router(net, [], **PATIENT))
    await until(lambda: not other.exchange.is_giving_rows, "given up")
    pieces = net.count(RowsPiece)
    for wire in said * 3:
        other.hear(wire)
        await asyncio.sleep(0)
    assert (other.made, net.count(RowsPiece)) == (1, pieces)


@given(times=st.integers(1, 20), repeats=st.integers(1, 60))
def test_recording_of_a_running_exchange_sends_a_piece_a_few_times(
    times: int, repeats: int
) -> None:
    async def run() -> None:
        net = Net()
        other = Router(net, ROWS, times=times, **PATIENT)
        for wire in await recorded(net, Router(net, [], **PATIENT)) * repeats:
            other.hear(wire)
        assert net.count(RowsPiece) <= len(b"".join(ROWS)) // PIECE_BYTES + 1 + times
        other.exchange.close()

    asyncio.run(run())


async def offered(net: Net, other: Router) -> bytes:
    """Asks a router for rows; returns what takes up its offer."""
    other.hear(encoded(RowsAsk(1, LAYOUT), KEYS, b"somebody"))
    offer = next(one for one in net.sent if isinstance(one, RowsOffer))
    assert offer.offer is not None
    return encoded(RowsTake(offer.offer, 0), KEYS, b"somebody")


async def test_offer_that_is_not_taken_up_in_time_is_gone(net: Net) -> None:
    other = Router(net, ROWS, keep_seconds=0.01)
    take = await offered(net, other)

    def is_gone() -> bool:
        other.hear(encoded(RowsAsk(1, LAYOUT), KEYS, b"somebody"))
        *_, last = (one.offer for one in net.sent if isinstance(one, RowsOffer))
        assert last is not None
        return take != encoded(RowsTake(last, 0), KEYS, b"somebody")

    await until(is_gone, "another offer is made")
    other.hear(take)
    assert not other.exchange.is_giving_rows


async def test_rows_are_given_up_in_time_however_often_they_are_asked_for(net: Net) -> None:
    other = Router(net, ROWS, keep_seconds=0.1)
    take = await offered(net, other)

    def is_given_up() -> bool:
        other.hear(take)
        return not other.exchange.is_giving_rows

    assert not is_given_up()
    await until(is_given_up, "given up")
    assert other.made == 1
