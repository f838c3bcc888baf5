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

from extproc.sharing.messages import Keys
from extproc.sharing.row_messages import (
    MAX_BYTES,
    PIECE_BYTES,
    RowsAsk,
    RowsMessage,
    RowsOffer,
    RowsPiece,
    RowsTake,
    decoded,
    encoded,
)

log = logging.getLogger("kvsteer.sharing")


@dataclass(frozen=True, slots=True)
class RowsLimits:
    """How long an exchange waits, and how much it keeps.

    offer_seconds, late_offer_seconds: how long a new router waits for an offer: if it has heard
    nobody, or one that has nothing to give; and if it has heard somebody. first_seconds,
    piece_seconds: for the first piece, and for each further one. again_seconds: when it says again
    what was not answered. all_seconds: for how long it takes rows at all.

    offers: that are remembered. keep_seconds, last_seconds: how long rows are kept for the router
    that takes them: after each piece, and after the last, which may have been lost. max_bytes: of
    the rows that a router gives.
    """

    offer_seconds: float = 0.5
    late_offer_seconds: float = 5.0
    first_seconds: float = 5.0
    piece_seconds: float = 1.0
    again_seconds: float = 0.1
    all_seconds: float = 20.0
    offers: int = 16
    keep_seconds: float = 30.0
    last_seconds: float = 2.0
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
        self._offers: OrderedDict[int, int] = OrderedDict()  # by the number of who asked
        self._giving: _Given | None = None
        self._expiry: asyncio.TimerHandle | None = None

    def hear(self, wire: bytes) -> None:
        """Takes a message of another router.

        Raises:
            MessageError: it is not from this fleet, or malformed.
        """
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
        offer = None
        if ask.layout == self._layout and self._is_giving():
            offer = self._offers.setdefault(ask.number, secrets.randbits(63))
        if len(self._offers) > self._limits.offers:
            self._offers.popitem(last=False)
        self._send(encoded(RowsOffer(ask.number, offer), self._keys, self._tag))

    def _give(self, take: RowsTake) -> None:
        """Sends a piece of the rows, which are put together for the first one."""
        if self._giving is None and take.offer in self._offers.values():
            self._giving = _Given(take.offer, self._sections(), self._limits.max_bytes)
        given = self._giving
        if given is None or given.offer != take.offer:
            return
        self._keep(self._limits.keep_seconds)
        rows = given.rows
        if rows is None or take.at >= len(rows):
            return
        data = rows[take.at : take.at + PIECE_BYTES]
        piece = RowsPiece(take.offer, take.at, len(rows), data)
        self._send(encoded(piece, self._keys, self._tag))
        if take.at + len(data) == len(rows):
            self._keep(self._limits.last_seconds)

    def _keep(self, seconds: float) -> None:
        """Keeps rows for so long, for the router that takes them, and then gives them up."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(seconds, self.close)


class _Given:
    """Rows that are given to one router. rows: None until they are put together."""

    def __init__(self, offer: int, sections: AsyncIterator[bytes], max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.offer = offer
        self.rows: bytes | None = None
        self._task = asyncio.create_task(self._make(sections))

    def close(self) -> None:
        """Gives them up."""
        self._task.cancel()

    async def _make(self, sections: AsyncIterator[bytes]) -> None:
        made: list[bytes] = []
        length = 0
        async for section in sections:
            length += len(section)
            if length > self._max_bytes:
                log.warning("sharing: this router has more rows than it gives another one")
                return
            made.append(section)
        self.rows = await asyncio.to_thread(b"".join, made)
