"""Merges the other routers' messages into the workers' records as they arrive.

Each router's figures about its own requests are absolute, so later messages make up for lost ones.
A router that is silent for too long is forgotten with all its figures. The number of routers and
the size of their figures are bounded: at worst, a message makes known workers look busier than they
are, or as if they held prompts that they do not.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from extproc.picking.load import Loads
from extproc.picking.sent import Claim, Holdings, Sent
from extproc.sharing.messages import Keys, MessageError, News, decoded

MAX_ROUTERS = 64

# Most open claims of one router; beyond that, the oldest are left to expire.
MAX_CLAIMS = 8_192

# Shortest time between two requests for what was missed, in seconds.
ASK_SECONDS = 1.0


class Place(NamedTuple):
    """Where a worker is, and the record of what was sent to it."""

    endpoint: str
    holdings: Holdings


class Places(Protocol):
    """The workers that are known here."""

    def __call__(self) -> Mapping[int, Place]:
        """Returns them by their ids in messages."""


@dataclass(slots=True)
class Other:
    """Another router.

    since, heard_at: when its first and its last message arrived, in seconds of a monotonic clock.
    delay_seconds: how long its last message took, by both wall clocks. lost: messages that never
    arrived. is_known: whether it has named all workers to which it sent anything.
    """

    origin: str
    incarnation: int
    since: float
    heard_at: float
    sequence: int = 0
    lost: int = 0
    delay_seconds: float = 0.0
    is_known: bool = False
    claims: dict[int, Claim] = field(default_factory=dict)


class Picture:
    """The other routers. Times are seconds of one monotonic clock.

    loads, sent: the records into which messages are merged. places: returns the workers.
    forget_seconds: for how long a router may be silent. counts: messages, by "accepted" or the
    reason why they were rejected. unknown_workers: figures and claims for workers that are not
    known here.
    """

    def __init__(
        self, keys: Keys, loads: Loads, sent: Sent, places: Places, forget_seconds: float
    ) -> None:
        self._keys = keys
        self._loads = loads
        self._sent = sent
        self._places = places
        self._forget_seconds = forget_seconds
        self._has_gap = False
        self._asked_at = -ASK_SECONDS
        self.others: dict[str, Other] = {}
        self.counts: Counter[str] = Counter()
        self.unknown_workers = 0

    def hear(self, wire: bytes, now: float, wall_us: int) -> News | None:
        """Merges a message and returns it; returns None if it was rejected.

        wall_us: microseconds since 1970.
        """
        try:
            news = decoded(wire, self._keys)
            other = self._sender(news, now)
        except MessageError as error:
            self.counts[error.reason] += 1
            return None
        self.counts["accepted"] += 1
        if other.sequence and news.sequence > other.sequence + 1:
            other.lost += news.sequence - other.sequence - 1
            self._has_gap = True
        other.sequence, other.heard_at = news.sequence, now
        other.delay_seconds = max(0.0, (wall_us - news.sent_us) / 1e6)
        if news.sequence == 1:
            other.is_known = True
        self._merge(other, news, now)
        other.is_known |= news.is_whole
        return news

    def asks(self, now: float) -> bool:
        """Returns whether to ask the others for all their figures, since messages were lost."""
        if not self._has_gap or now - self._asked_at < ASK_SECONDS:
            return False
        self._has_gap, self._asked_at = False, now
        return True

    def lost(self) -> int:
        """Returns how many messages of the routers known now never arrived."""
        return sum(other.lost for other in self.others.values())

    def forget(self, now: float) -> list[Other]:
        """Forgets the routers that have been silent for too long, and returns them."""
        silent = [
            other for other in self.others.values() if now - other.heard_at > self._forget_seconds
        ]
        for other in silent:
            self._drop(other, now)
        return silent

    def forget_all(self, now: float) -> None:
        """Forgets every other router."""
        for other in list(self.others.values()):
            self._drop(other, now)

    def _sender(self, news: News, now: float) -> Other:
        """Returns the record of a message's sender.

        Raises:
            MessageError: it is no newer than one that was accepted, or there are too many routers.
        """
        other = self.others.get(news.origin)
        if other is not None and news.incarnation > other.incarnation:
            self._drop(other, now)
            other = None
        if other is None:
            if len(self.others) >= MAX_ROUTERS:
                raise MessageError("too_many_routers")
            other = Other(news.origin, news.incarnation, now, now)
            self.others[news.origin] = other
        elif news.incarnation < other.incarnation or news.sequence <= other.sequence:
            raise MessageError("out_of_order")
        return other

    def _merge(self, other: Other, news: News, now: float) -> None:
        if news.workers or news.claims:
            places = self._places()
            told, origin, is_known = self._loads.told, other.origin, other.is_known
            for one in news.workers:
                place = places.get(one.worker)
                if place is None or not told(origin, place.endpoint, one, now, is_known=is_known):
                    self.unknown_workers += 1
            self._claim(other, news, places, now)
        claims = other.claims
        for number in news.ended:
            if (known := claims.pop(number, None)) is not None:
                self._sent.end(known, now)
        for number in news.withdrawn:
            if (known := claims.pop(number, None)) is not None:
                self._sent.withdraw(known)

    def _claim(self, other: Other, news: News, places: Mapping[int, Place], now: float) -> None:
        claims = other.claims
        for claim in news.claims:
            place = places.get(claim.worker)
            if place is None:
                self.unknown_workers += 1
            elif claim.number not in claims:
                if len(claims) >= MAX_CLAIMS:
                    del claims[next(iter(claims))]
                claims[claim.number] = self._sent.record(place.holdings, claim.marks, now)

    def _drop(self, other: Other, now: float) -> None:
        """Forgets a router: its requests may still be under way, but nobody reports them."""
        del self.others[other.origin]
        self._loads.forget(other.origin, now)
        for claim in other.claims.values():
            self._sent.end(claim, now)
