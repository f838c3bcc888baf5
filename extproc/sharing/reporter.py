"""Makes this router's messages: changes since the last tick, and everything from time to time.

Figures are absolute and are read when a message is made, so of them a router that cannot send for a
while keeps only the set of changed workers. Claims, their ends and their withdrawals wait up to a
limit each; beyond it the oldest are dropped, and dropped claims are counted.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from extproc.routing.claims.claim_table import Claim
from extproc.routing.claims.homes import Turn
from extproc.routing.claims.lines import Lines
from extproc.routing.load.loads import Loads
from extproc.routing.load.reports import MAX_WORKERS, WorkerLoadReport
from extproc.sharing.home_reports import HomeReports, some_of
from extproc.sharing.item_reports import ItemReports
from extproc.sharing.messages import (
    MAX_CHALLENGES,
    MAX_CLAIMS,
    MAX_MARKS,
    MAX_OVER,
    AnyClaim,
    Challenge,
    ClaimReport,
    HomeReport,
    Keys,
    LinesReport,
    OutlineReport,
    RouterReport,
    claim_report,
    encoded,
    lines_report,
    sender_tag,
    worker_id,
)

# A request with fewer uncached tokens is no reason to send similar ones to the same worker.
LEAST_UNCACHED_TOKENS = 256

# Most claims that are open, that wait for the next tick, and that are reported to a newcomer.
MAX_OPEN = 4_096
MAX_WAITING = 1_024
MAX_ANSWERED = 512

# All workers that anything was sent to are reported at this interval, in seconds, and when a
# newcomer asks.
WHOLE_SECONDS = 1.0

# Shortest time between two answers to newcomers, in seconds.
ANSWER_SECONDS = 0.25

Reported = TypeVar("Reported")

# Returns the homes that are known at a time.
KnownHomes = Callable[[float], Sequence[HomeReport]]


def no_homes(_: float) -> Sequence[HomeReport]:
    """Returns nothing: no home is known."""
    return ()


class Reporter:
    """Makes the messages of one router.

    origin: its name. incarnation: higher than that of any earlier router with this name.
    silent_seconds: after this time without anything to report, it sends a sign of life.
    max_open, max_waiting: claims that are open, and that wait for a message.
    touched: endpoints whose requests changed. items: the media items to be told of. lines: those of
    who waits here, None if nobody may.
    """

    def __init__(
        self,
        keys: Keys,
        origin: str,
        incarnation: int,
        silent_seconds: float = 0.05,
        *,
        max_open: int = MAX_OPEN,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._max_open = max_open
        self.keys = keys
        self.origin = origin
        self.incarnation = incarnation
        self.tag = sender_tag(origin, incarnation)
        self.touched: set[str] = set()
        self._dropped = 0
        self._silent_seconds = silent_seconds
        self._sequence = 0
        self._number = 0
        self._open: dict[Claim, AnyClaim] = {}
        self._waiting: deque[AnyClaim] = deque(maxlen=max_waiting)
        self._ended: deque[int] = deque(maxlen=max_waiting)
        self._withdrawn: deque[int] = deque(maxlen=max_waiting)
        self._homes = HomeReports()
        self.items = ItemReports()
        self.lines: Lines | None = None
        self._ids: dict[str, int] = {}
        self._reported_at = self._whole_at = self._answered_at = -WHOLE_SECONDS
        self._says_hello = True
        self._is_asked = False
        self._challenges: dict[bytes, Challenge] = {}
        self._answers: dict[int, None] = {}

    @property
    def dropped(self) -> int:
        """Claims and homes for which there was no room."""
        return self._dropped + self._homes.dropped

    @property
    def secret(self) -> int:
        """The key of all routers' marks."""
        return self.keys.marks

    def begin(self, claims: Sequence[Claim], endpoint: str, uncached_tokens: float) -> None:
        """Notes a request's claims on an endpoint; ignores those of a request with little work."""
        if uncached_tokens < LEAST_UNCACHED_TOKENS:
            return
        for claim in claims:
            if not claim.keys:
                continue
            if len(self._open) >= self._max_open:
                del self._open[next(iter(self._open))]
            if len(self._waiting) == self._waiting.maxlen:
                self._dropped += 1
            self._number += 1
            report = claim_report(self._number, self._id(endpoint), claim)
            self._open[claim] = report
            self._waiting.append(report)

    def end(self, claim: Claim) -> None:
        """Notes that the request has ended."""
        report = self._open.pop(claim, None)
        if report is not None:
            self._ended.append(report.number)

    def withdraw(self, claim: Claim) -> None:
        """Notes that the request never reached its worker."""
        report = self._open.pop(claim, None)
        if report is not None:
            self._withdrawn.append(report.number)

    def note_turn(self, turn: Turn, endpoint: str) -> None:
        """Notes that a conversation's request was sent to an endpoint; see `Homes.turn`."""
        self._homes.note_turn(self._id(endpoint), turn)

    def note_home(self, key: int, endpoint: str) -> None:
        """Notes that what has this key belongs to an endpoint; see `Homes.note`."""
        self._homes.note_home(self._id(endpoint), key)

    def note_not_computed(self, keys: Sequence[int], endpoint: str) -> None:
        """Notes that a conversation's request was not computed at an endpoint."""
        self._homes.note_not_computed(self._id(endpoint), keys)

    def hello(self) -> None:
        """Makes the next message ask the others for all their figures and open claims."""
        self._says_hello = True

    def note_hello(self) -> None:
        """Notes that another router asked for all figures and open claims."""
        self._is_asked = True

    def challenge(self, tag: bytes, number: int) -> None:
        """Asks the router with this tag to send a number back, so that its messages count here."""
        if tag in self._challenges or len(self._challenges) < MAX_CHALLENGES:
            self._challenges[tag] = Challenge(tag, number)

    def answer(self, number: int) -> None:
        """Answers a challenge of another router, to which all figures and open claims are new."""
        if len(self._answers) < MAX_CHALLENGES:
            self._answers[number] = None
            self.note_hello()

    def compose(
        self, loads: Loads, now: float, wall_us: int, known: KnownHomes = no_homes
    ) -> list[bytes]:
        """Returns the messages of this tick: usually one, none if there is nothing to report.

        now: seconds of the loads' clock. wall_us: microseconds since 1970. known: returns the homes
        for a newcomer.
        """
        endpoints, claims = list(self.touched), list(self._waiting)
        # whoever challenged this router has ignored all that it said so far
        since = self._answered_at if self._answers else self._whole_at
        is_answer = self._is_asked and now - since >= ANSWER_SECONDS
        is_whole = is_answer or now - self._whole_at >= WHOLE_SECONDS
        if is_whole:
            endpoints, self._whole_at = loads.used_endpoints(), now
        if is_answer:
            claims, self._is_asked = list(self._open.values())[-MAX_ANSWERED:], False
            self._answered_at = now
        homes = self._homes.take()
        if is_answer:  # behind what is known: the later report counts
            homes.extendleft(reversed(known(now)))
            self.items.answer()
        told = None if self.lines is None else self.lines.take(now, is_whole=is_whole)
        lines = None if told is None else lines_report(told)
        is_silent = now - self._reported_at >= self._silent_seconds
        has_news = endpoints or claims or homes or self.items or self._ended or self._withdrawn
        has_challenges = self._challenges or self._answers
        if not (has_news or lines is not None or has_challenges or self._says_hello or is_silent):
            return []
        workers = self._workers(endpoints, loads, now)
        over = (list(self._ended), list(self._withdrawn))
        for waiting in (self.touched, self._waiting, self._ended, self._withdrawn):
            waiting.clear()
        self._reported_at = now
        return [*self._messages(workers, claims, homes, over, lines, wall_us, is_whole=is_whole)]

    def _workers(
        self, endpoints: Sequence[str], loads: Loads, now: float
    ) -> list[WorkerLoadReport]:
        ids = self._ids
        return [
            WorkerLoadReport(
                ids.get(name) or self._id(name), in_flight, booked, sent, backlog, lately
            )
            for name, (in_flight, booked, sent, backlog, lately) in loads.gauges(endpoints, now)
        ]

    def _messages(
        self,
        workers: list[WorkerLoadReport],
        claims: list[AnyClaim],
        homes: deque[HomeReport],
        over: tuple[list[int], list[int]],
        lines: LinesReport | None,
        wall_us: int,
        *,
        is_whole: bool,
    ) -> Iterator[bytes]:
        """Yields the reports in as many messages as needed, at least one.

        No claim's end comes before the claim itself: it would be ignored, and the claim kept. Each
        message has room for the longest claim, home or item, so that there is less left after it.
        """
        begun, (ended, withdrawn) = deque(claims), over
        challenges, answers = tuple(self._challenges.values()), tuple(self._answers)
        self._challenges.clear()
        self._answers.clear()
        is_first = True
        while is_first or workers or begun or homes or ended or withdrawn or self.items:
            some_workers = _first_of(workers, MAX_WORKERS)
            some_begun, some_homes = _some(begun), some_of(homes)
            over_now = 0 if begun else MAX_OVER
            some_ended, some_withdrawn = _first_of(ended, over_now), _first_of(withdrawn, over_now)
            # not beside claims, whose marks may fill a message
            some_items = () if some_begun or some_homes else self.items.take()
            self._sequence += 1
            is_all, is_whole = is_whole and not workers, is_whole and bool(workers)
            report = RouterReport(
                self.origin,
                self.incarnation,
                self._sequence,
                wall_us,
                self._says_hello,
                is_all,
                some_workers,
                tuple([one for one in some_begun if isinstance(one, ClaimReport)]),
                some_ended,
                some_withdrawn,
                challenges,
                answers,
                tuple([one for one in some_begun if isinstance(one, OutlineReport)]),
                some_homes,
                some_items,
                lines,
            )
            yield encoded(report, self.keys)
            self._says_hello, is_first = False, False
            challenges, answers, lines = (), (), None

    def _id(self, endpoint: str) -> int:
        known = self._ids.get(endpoint)
        if known is None:
            if len(self._ids) >= self._max_open:
                self._ids.clear()  # some are of workers that no longer exist
            known = self._ids[endpoint] = worker_id(self.keys, endpoint)
        return known


def _first_of(waiting: list[Reported], most: int) -> tuple[Reported, ...]:
    """Takes the first ones from what waits."""
    first = tuple(waiting[:most])
    del waiting[:most]
    return first


def _some(claims: deque[AnyClaim]) -> tuple[AnyClaim, ...]:
    """Takes as many claims as one message may have."""
    some: list[AnyClaim] = []
    marks = 0
    while claims and len(some) < MAX_CLAIMS:
        marks += claims[0].mark_count
        if marks > MAX_MARKS:
            break
        some.append(claims.popleft())
    return tuple(some)
