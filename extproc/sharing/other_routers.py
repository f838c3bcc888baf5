"""Merges the other routers' messages into the workers' records as they arrive.

Each router's figures about its own requests are absolute, so later messages make up for lost ones.
A router that is silent for too long is forgotten with all its figures. The number of routers and
the size of their figures are bounded: at worst, a message makes known workers look busier than they
are, or as if they held prompts that they do not.

A recorded message proves nothing. So a router counts only after it has sent back a number that was
drawn here, and then only what is newer than its last message and was not held back. After it was
forgotten, it has to do so again. Two routers of the same name are told apart by their incarnations,
so none of them can silence the other.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from extproc.media.identities import Identities
from extproc.routing.claims.claim_table import Claim, ClaimTable, Holdings
from extproc.routing.claims.homes import Homes
from extproc.routing.claims.lines import KnownLines, Lines
from extproc.routing.load.loads import Loads
from extproc.sharing.item_reports import learn_items
from extproc.sharing.messages import (
    MAX_HOME_KEYS,
    MAX_MARKS,
    AnyClaim,
    HomeKind,
    HomeReport,
    MessageError,
    RouterReport,
    decoded,
    sender_tag,
)
from extproc.sharing.reporter import Reporter

MAX_ROUTERS = 64

# Most open claims of one router; beyond that, the oldest are left to expire.
MAX_CLAIMS = 8_192

# The marks of its claims, and keys of homes, that one router may add at once, and in each second
# after that.
MARKS_AT_ONCE = 131_072
MARKS_PER_SECOND = 32_768

# Shortest time between two requests for what was missed, in seconds.
ASK_SECONDS = 1.0

# Routers that have not answered a challenge yet, and the shortest time between two challenges of
# one of them, in seconds.
MAX_STRANGERS = 64
CHALLENGE_SECONDS = 0.1

# Routers that were forgotten, of which the last message is remembered.
MAX_GONE = 1_024

# A router that is silent is forgotten so many times as soon if another run has its name.
SOONER = 10

# How fast two clocks may part: a thousand times as fast as ordinary ones do.
DRIFT = 0.001


class SharedWorker(NamedTuple):
    """Where a worker is, and the record of what was sent to it."""

    endpoint: str
    holdings: Holdings


class SharedWorkers(Protocol):
    """The workers that are known here."""

    def __call__(self) -> dict[int, SharedWorker]:
        """Returns them by their ids in messages."""


class RouterIdentity(NamedTuple):
    """One run of a router: its name, and a number that is higher after every restart."""

    origin: str
    incarnation: int


@dataclass(slots=True)
class Peer:
    """Another router."""

    # Which run of which router it is.
    identity: RouterIdentity
    # When its first message arrived, in seconds of a monotonic clock.
    since: float
    # When its last message arrived, by the same clock.
    heard_at: float
    # The smallest lag that a message had, see `_lag`.
    lag: float
    # The number of its last message.
    sequence: int = 0
    # How many messages had not arrived when a later one did.
    lost: int = 0
    # How long its last message took, by both wall clocks.
    delay_seconds: float = 0.0
    # Whether it has named all workers to which it sent anything.
    is_known: bool = False
    # Its open claims, by their numbers.
    claims: dict[int, Claim] = field(default_factory=dict)
    # How many marks it may add now.
    remaining_marks: float = MARKS_AT_ONCE
    # Its name in the workers' records.
    key: str = field(init=False)

    def __post_init__(self) -> None:
        self.key = f"{self.identity.incarnation} {self.identity.origin}"

    @property
    def origin(self) -> str:
        """Its name."""
        return self.identity.origin


@dataclass(slots=True)
class Stranger:
    """A router that has not yet sent back the number that it was sent.

    drawn_at, asked_at: when the number was drawn and last sent. is_hello: whether the router asked
    for everything.
    """

    number: int
    drawn_at: float
    asked_at: float = -inf
    is_hello: bool = False


class OtherRouters:
    """The other routers. Times are seconds of one monotonic clock.

    reporter: makes this router's messages; it sends challenges and answers. loads, sent, homes: the
    records into which messages are merged. places: returns the workers. forget_seconds: for how
    long a router may be silent, and its messages may be held back. draw: returns a random number of
    63 bits. identities: the media items that are known here, None if none is learned from others.
    max_claims: open ones of one router. lines: of who waits for room.
    counts: messages, by "accepted" or the reason why they were rejected. unknown_workers:
    figures, claims and homes for workers that are not known here. excess_claims: claims and homes
    of routers that sent too many.
    """

    def __init__(
        self,
        reporter: Reporter,
        loads: Loads,
        sent: ClaimTable,
        homes: Homes,
        places: SharedWorkers,
        forget_seconds: float,
        draw: Callable[[], int],
        identities: Identities | None = None,
        max_claims: int = MAX_CLAIMS,
        *,
        lines: Lines,
    ) -> None:
        self._lines = lines
        self._max_claims = max_claims
        self._reporter = reporter
        self._identities = identities
        self._loads = loads
        self._claims = sent
        self._homes = homes
        self._places = places
        self._forget_seconds = forget_seconds
        self._draw = draw
        self._has_gap = False
        self._asked_at = -ASK_SECONDS
        self.strangers: OrderedDict[RouterIdentity, Stranger] = OrderedDict()
        self.departed: OrderedDict[RouterIdentity, int] = OrderedDict()
        self.peers: dict[RouterIdentity, Peer] = {}
        self.counts: Counter[str] = Counter()
        self.unknown_workers = 0
        self.excess_claims = 0

    def hear(self, wire: bytes, now: float, wall_us: int) -> RouterReport | None:
        """Merges a message and returns it; returns None if it was rejected.

        wall_us: microseconds since 1970.
        """
        try:
            report = decoded(wire, self._reporter.keys)
            self._answer(report)
            other = self._sender(report, now, wall_us)
        except MessageError as error:
            self.counts[error.reason] += 1
            return None
        self.counts["accepted"] += 1
        if other.sequence and report.sequence > other.sequence + 1:
            other.lost += report.sequence - other.sequence - 1
            self._has_gap = True
        added = MARKS_PER_SECOND * (now - other.heard_at)
        other.remaining_marks = min(MARKS_AT_ONCE, other.remaining_marks + added)
        other.sequence, other.heard_at = report.sequence, now
        other.delay_seconds = max(0.0, (wall_us - report.sent_us) / 1e6)
        if report.is_hello:
            self._reporter.note_hello()
        self._merge(other, report, now)
        other.is_known |= report.is_whole
        return report

    def asks(self, now: float) -> bool:
        """Returns whether to ask the others for all their figures, since messages were lost."""
        if not self._has_gap or now - self._asked_at < ASK_SECONDS:
            return False
        self._has_gap, self._asked_at = False, now
        return True

    def lost(self) -> int:
        """Returns how many messages of the routers known now did not arrive before later ones."""
        return sum(other.lost for other in self.peers.values())

    def forget(self, now: float) -> list[Peer]:
        """Forgets the routers that have been silent for too long, and returns them."""
        since = now - self._forget_seconds / SOONER
        silent = [
            other
            for other in self.peers.values()
            if other.heard_at < since and self._is_over(other, now)
        ]
        for other in silent:
            self._drop(other, now)
        return silent

    def _is_over(self, other: Peer, now: float) -> bool:
        """Returns whether a router is silent for good, sooner if another run has its name."""
        silence = now - other.heard_at
        return silence > self._forget_seconds or (
            silence > self._forget_seconds / SOONER
            and any(
                one.origin == other.origin and one.identity > other.identity
                for one in self.peers.values()
            )
        )

    def _answer(self, report: RouterReport) -> None:
        """Answers the challenge to this router in a message, if there is one."""
        for one in report.challenges:
            if one.tag == self._reporter.tag:
                self._reporter.answer(one.number)

    def _sender(self, report: RouterReport, now: float, wall_us: int) -> Peer:
        """Returns the record of a message's sender.

        Raises:
            MessageError: the sender has not proved that it runs, the message is no newer than one
                that was accepted, or was held back, or there are too many routers.
        """
        identity = report.origin, report.incarnation  # equal to a `RouterIdentity`, and made sooner
        other: Peer | None = self.peers.get(identity)  # type: ignore[call-overload]
        if other is None:
            return self._newcomer(RouterIdentity(*identity), report, now, wall_us)
        if report.sequence <= other.sequence:
            raise MessageError("out_of_order")
        lag = _lag(report, wall_us)
        least = min(lag, other.lag + DRIFT * (now - other.heard_at))
        if lag - least > self._forget_seconds:
            raise MessageError("late")
        other.lag = least
        return other

    def _newcomer(
        self, identity: RouterIdentity, report: RouterReport, now: float, wall_us: int
    ) -> Peer:
        """Returns a record for a sender that has answered its challenge; else challenges it.

        Raises:
            MessageError: as `_sender` does.
        """
        if report.sequence <= self.departed.get(identity, 0):
            raise MessageError("out_of_order")
        if len(self.peers) >= MAX_ROUTERS:
            raise MessageError("too_many_routers")
        stranger = self.strangers.get(identity)
        if stranger is None or now - stranger.drawn_at > self._forget_seconds:
            stranger = Stranger(self._draw(), now)
            self.strangers[identity] = stranger
            self.strangers.move_to_end(identity)
            if len(self.strangers) > MAX_STRANGERS:
                self.strangers.popitem(last=False)
        stranger.is_hello |= report.is_hello
        if stranger.number not in report.answers:
            if now - stranger.asked_at >= CHALLENGE_SECONDS:
                stranger.asked_at = now
                self._reporter.challenge(sender_tag(*identity), stranger.number)
            raise MessageError("unproven")
        del self.strangers[identity]
        if stranger.is_hello:
            self._reporter.note_hello()
        other = self.peers[identity] = Peer(identity, now, now, _lag(report, wall_us))
        return other

    def _merge(self, other: Peer, report: RouterReport, now: float) -> None:
        places = self._places()
        self.unknown_workers += self._loads.record_reports(
            other.key, report.workers, places, now, is_known=other.is_known
        )
        if report.claims or report.outlines:
            self._claim(other, report, places, now)
        if report.homes:
            self._settle(other, report.homes, now)
        if self._identities is not None:
            learn_items(self._identities, report.items)
        if report.lines is not None:
            self._learn_lines(other, report.lines.lines, now)
        claims = other.claims
        for number in report.ended:
            if (known := claims.pop(number, None)) is not None:
                self._claims.end(known, now)
        for number in report.withdrawn:
            if (known := claims.pop(number, None)) is not None:
                self._claims.withdraw(known)

    def _learn_lines(self, other: Peer, known: KnownLines, now: float) -> None:
        self._lines.learn(other.key, known, now)
        for one in known.places:  # what they held is lost
            self._homes.pause(one.place.follows)

    def _claim(
        self, other: Peer, report: RouterReport, places: Mapping[int, SharedWorker], now: float
    ) -> None:
        claims: Sequence[AnyClaim] = report.claims
        if report.outlines:
            claims = (*claims, *report.outlines)
        bounds = (MAX_MARKS, other.remaining_marks, self._max_claims)
        new_marks, unknown, excess = self._claims.record_reported(
            claims, places, other.claims, bounds, now
        )
        other.remaining_marks -= new_marks
        self.unknown_workers += unknown
        self.excess_claims += excess

    def _settle(self, other: Peer, reports: Sequence[HomeReport], now: float) -> None:
        """Merges where conversations belong."""
        places, left = self._places(), MAX_HOME_KEYS
        for report in reports:
            count = report.key_count
            left -= count
            if left < 0 or other.remaining_marks < count:
                self.excess_claims += 1
            elif (place := places.get(report.worker)) is None:
                self.unknown_workers += 1
            else:
                other.remaining_marks -= count
                self._note_home(report, place.holdings, now)

    def _note_home(self, report: HomeReport, holdings: Holdings, now: float) -> None:
        if report.kind is HomeKind.TURN:
            self._homes.turn(report.turn, holdings, now)
        elif report.kind is HomeKind.OVER:
            self._homes.forget_at(report.each_key, holdings)
        else:
            for key, age in zip(report.each_key, report.each_age, strict=True):
                self._homes.learn(key, holdings, now - age)

    def _drop(self, other: Peer, now: float) -> None:
        """Forgets a router: its requests may still be under way, but nobody reports them."""
        del self.peers[other.identity]
        self.departed[other.identity] = other.sequence
        self.departed.move_to_end(other.identity)
        if len(self.departed) > MAX_GONE:
            self.departed.popitem(last=False)
        self._loads.forget(other.key, now)
        self._lines.forget(other.key, now)
        for claim in other.claims.values():
            self._claims.end(claim, now)


def _lag(report: RouterReport, wall_us: int) -> float:
    """Returns how long a message took and how far the wall clocks differ, together, in seconds."""
    return (wall_us - report.sent_us) / 1e6
