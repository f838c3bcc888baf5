"""The rows of the index, from a router that serves to a new one: asked for once, at its start.

What another router sends is worth no more than a state file: each rank counts as uncertain until
its publisher has repeated the last batch (`kvstate.feeds.feed`). If no router answers, or one is
too slow, the new one begins without.
"""

import asyncio
import functools
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import NamedTuple

from extproc.sharing.messages import Keys
from extproc.sharing.row_messages import (
    MAX_BYTES,
    PIECE_BYTES,
    TO_ALL,
    RowsAsk,
    RowsMessage,
    RowsOffer,
    RowsPiece,
    RowsTake,
    address_of,
    decoded,
    encoded,
)

log = logging.getLogger("kvsteer.sharing")


@dataclass(frozen=True, slots=True)
class RowsLimits:
    """How long an exchange waits, and how much it keeps."""

    # How long a new router waits for an offer if it has heard nobody, or one that has nothing to
    # give.
    offer_seconds: float = 0.5
    # How long it waits for one if it has heard somebody.
    late_offer_seconds: float = 5.0
    # How long it waits for the first piece.
    first_seconds: float = 5.0
    # How long it waits for each further piece.
    piece_seconds: float = 1.0
    # When it says again what was not answered.
    again_seconds: float = 0.1
    # For how long it takes rows at all.
    all_seconds: float = 20.0
    # How many offers are remembered.
    offers: int = 16
    # How long an offer waits to be taken up, and how long rows are kept for the router that takes
    # them, from then on.
    keep_seconds: float = 30.0
    # How long rows are kept after the last piece, which may have been lost.
    last_seconds: float = 2.0
    # The largest number of times that a piece is sent.
    times: int = 16
    # The most bytes of rows that a router gives.
    max_bytes: int = MAX_BYTES


USUAL = RowsLimits()

# Returns the rows that this router has now: sections of a state file, one after the other.
Sections = Callable[[], AsyncIterator[bytes]]


class RowsExchange:
    """One router's part: at first it takes rows, later it gives some.

    layout: of this process's core. send: sends a message to all other routers. sections: see
    `Sections`. is_giving: returns whether it knows enough to give rows. is_alone: returns whether
    no other router was heard.
    """

    def __init__(
        self,
        keys: Keys,
        tag: bytes,
        layout: str,
        send: Callable[[bytes], object],
        sections: Sections,
        is_giving: Callable[[], bool],
        is_alone: Callable[[], bool],
        limits: RowsLimits = USUAL,
    ) -> None:
        self._limits = limits
        self._keys = keys
        self._tag = tag
        self._layout = layout
        self._send = send
        self._sections = sections
        self._is_giving = is_giving
        self._is_alone = is_alone
        self._is_denied = False  # by one that has nothing to give yet
        self._asked: int | None = None  # the number under which it asks
        self._taken: int | None = None  # the offer that it took up
        self._came: asyncio.Future[RowsMessage] | None = None
        self._offers: OrderedDict[int, _Offer] = OrderedDict()  # by the number of who asked
        self._giving: _RowsTransfer | None = None
        self._expiry: asyncio.TimerHandle | None = None

    def hear(self, wire: bytes) -> None:
        """Takes a message of another router, unless it is for somebody else.

        Raises:
            MessageError: it is not from this fleet, or malformed.
        """
        if not self._is_for_this(address_of(wire)):
            return
        message = decoded(wire, self._keys)
        match message:
            case RowsAsk():
                self._offer(message)
            case RowsTake():
                self._give(message)
            case RowsOffer(number=number, offer=offer):
                if number == self._asked:
                    self._is_denied = offer is None
                    if offer is not None:
                        self._note(message)
            case RowsPiece(offer=offer):
                if offer == self._taken:
                    self._note(message)

    def _is_for_this(self, address: int) -> bool:
        """Returns whether this router waits for messages with this address."""
        if address in (TO_ALL, self._asked, self._taken):
            return True
        given = self._giving
        if given is not None and given.offer == address:
            return True
        return any(offer.number == address for offer in self._offers.values())

    async def take(self) -> bytes | None:
        """Returns the rows of another router, as a state file; None if there are none to be had."""
        self._asked = secrets.randbits(63)
        try:
            async with asyncio.timeout(self._limits.all_seconds):
                return await self._take(RowsAsk(self._asked, self._layout))
        except TimeoutError:
            return None
        finally:
            self._asked = self._taken = None

    @property
    def is_giving_rows(self) -> bool:
        """Whether it keeps rows for another router."""
        return self._giving is not None

    def close(self) -> None:
        """Gives up the rows that it was giving."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self._giving is not None:
            self._giving.close()
            self._giving = None

    async def _take(self, ask: RowsAsk) -> bytes:
        offer = await self._answer(ask, self._offer_seconds)
        assert isinstance(offer, RowsOffer)
        assert offer.offer is not None
        self._asked, self._taken = None, offer.offer
        rows, seconds = bytearray(), self._limits.first_seconds
        while True:
            take = RowsTake(offer.offer, len(rows))
            piece = await self._answer(take, functools.partial(float, seconds))
            if not isinstance(piece, RowsPiece) or piece.at != len(rows):
                continue  # an answer to what was asked twice
            rows += piece.data
            if len(rows) >= piece.total:
                log.info("sharing: got %d bytes of rows from another router", len(rows))
                return bytes(rows)
            seconds = self._limits.piece_seconds

    def _offer_seconds(self) -> float:
        if self._is_denied or self._is_alone():
            return self._limits.offer_seconds
        return self._limits.late_offer_seconds

    async def _answer(self, message: RowsMessage, most: Callable[[], float]) -> RowsMessage:
        """Says something until it is answered.

        most: returns how many seconds it waits at most.

        Raises:
            TimeoutError: it is not.
        """
        wire = encoded(message, self._keys, self._tag)
        came: asyncio.Future[RowsMessage] = asyncio.get_running_loop().create_future()
        self._came = came
        began_at = asyncio.get_running_loop().time()
        while not came.done():
            if asyncio.get_running_loop().time() - began_at > most():
                raise TimeoutError
            self._send(wire)
            await asyncio.wait([came], timeout=self._limits.again_seconds)
        return came.result()

    def _note(self, message: RowsMessage) -> None:
        if self._came is not None and not self._came.done():
            self._came.set_result(message)

    def _offer(self, ask: RowsAsk) -> None:
        now = asyncio.get_running_loop().time()
        while self._offers and next(iter(self._offers.values())).ends_at <= now:
            self._offers.popitem(last=False)
        number = None
        if ask.layout == self._layout and self._is_giving():
            made = _Offer(secrets.randbits(63), now + self._limits.keep_seconds)
            number = self._offers.setdefault(ask.number, made).number
        if len(self._offers) > self._limits.offers:
            self._offers.popitem(last=False)
        self._send(encoded(RowsOffer(ask.number, number), self._keys, self._tag))

    def _give(self, take: RowsTake) -> None:
        """Sends a piece of the rows, which are put together when their offer is taken up."""
        if self._giving is None and self._is_taken_up(take.offer):
            self._giving = _RowsTransfer(take.offer, self._sections(), self._limits)
            self._keep(self._limits.keep_seconds)
        given = self._giving
        if given is None or given.offer != take.offer:
            return
        piece = given.piece_at(take.at)
        if piece is None:
            return
        self._send(encoded(piece, self._keys, self._tag))
        if piece.at + len(piece.data) == piece.total and given.is_first_time:
            self._keep(self._limits.last_seconds)

    def _is_taken_up(self, number: int) -> bool:
        """Returns whether an offer with this number holds, and withdraws it: it is for one router.

        A recorded message would otherwise have the rows put together again at any time.
        """
        now = asyncio.get_running_loop().time()
        for asked, offer in self._offers.items():
            if offer.number == number:
                del self._offers[asked]
                return offer.ends_at > now
        return False

    def _keep(self, seconds: float) -> None:
        """Keeps rows for so long, for the router that takes them, and then gives them up."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(seconds, self.close)


class _Offer(NamedTuple):
    """An offer of rows that nobody has taken up yet. ends_at: by the event loop's clock."""

    number: int
    ends_at: float


class _RowsTransfer:
    """Rows that are given to one router, which takes one piece after the other."""

    def __init__(self, offer: int, sections: AsyncIterator[bytes], limits: RowsLimits) -> None:
        self._limits = limits
        self.offer = offer
        self._rows: bytes | None = None  # None until they are put together
        self._at = 0  # where the piece begins that was sent last, and how often it was
        self._times = 0
        self._task = asyncio.create_task(self._make(sections))

    @property
    def is_first_time(self) -> bool:
        """Whether the last piece was sent for the first time."""
        return self._times == 1

    def close(self) -> None:
        """Gives them up."""
        self._task.cancel()

    def piece_at(self, at: int) -> RowsPiece | None:
        """Returns the piece that begins there: the last one again, or the next one.

        Returns None if there is no such piece, or none yet, or it was sent often enough.
        """
        rows = self._rows
        if rows is None or at >= len(rows) or at not in (self._at, self._at + PIECE_BYTES):
            return None
        if at != self._at:
            self._at, self._times = at, 0
        if self._times >= self._limits.times:
            return None
        self._times += 1
        return RowsPiece(self.offer, at, len(rows), rows[at : at + PIECE_BYTES])

    async def _make(self, sections: AsyncIterator[bytes]) -> None:
        made: list[bytes] = []
        length = 0
        async for section in sections:
            length += len(section)
            if length > self._limits.max_bytes:
                log.warning("sharing: this router has more rows than it gives another one")
                return
            made.append(section)
        self._rows = await asyncio.to_thread(b"".join, made)
