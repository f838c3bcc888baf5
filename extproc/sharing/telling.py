"""Makes this router's messages: changes since the last tick, and everything from time to time.

Nothing queues up. Figures are absolute and are read when a message is made, so a router that cannot
send for a while keeps only the set of changed workers. Claims beyond a limit are dropped, the
oldest first, and counted.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from extproc.picking.load import Loads
from extproc.picking.sent import Claim
from extproc.sharing.messages import (
    MAX_CLAIMS,
    MAX_OVER,
    MAX_WORKERS,
    ClaimNews,
    Keys,
    News,
    WorkerNews,
    encoded,
    packed,
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


class Telling:
    """Makes the messages of one router.

    origin: its name. incarnation: higher than that of any earlier router with this name.
    silent_seconds: after this time without news, it sends a sign of life.
    touched: endpoints whose requests changed. dropped: claims for which there was no room.
    """

    def __init__(
        self, keys: Keys, origin: str, incarnation: int, silent_seconds: float = 0.05
    ) -> None:
        self.keys = keys
        self.origin = origin
        self.incarnation = incarnation
        self.tag = sender_tag(origin, incarnation)
        self.touched: set[str] = set()
        self.dropped = 0
        self._silent_seconds = silent_seconds
        self._sequence = 0
        self._number = 0
        self._open: dict[Claim, ClaimNews] = {}
        self._waiting: deque[ClaimNews] = deque(maxlen=MAX_WAITING)
        self._ended: deque[int] = deque(maxlen=MAX_WAITING)
        self._withdrawn: deque[int] = deque(maxlen=MAX_WAITING)
        self._ids: dict[str, int] = {}
        self._told_at = self._whole_at = -WHOLE_SECONDS
        self._says_hello = True
        self._is_asked = False

    @property
    def secret(self) -> int:
        """The key of all routers' marks."""
        return self.keys.marks

    def begun(self, claims: Sequence[Claim], endpoint: str, uncached_tokens: float) -> None:
        """Notes a request's claims on an endpoint; ignores those of a request with little work."""
        if uncached_tokens < LEAST_UNCACHED_TOKENS:
            return
        for claim in claims:
            if not claim.marks.keys:
                continue
            if len(self._open) >= MAX_OPEN:
                del self._open[next(iter(self._open))]
            if len(self._waiting) == MAX_WAITING:
                self.dropped += 1
            self._number += 1
            news = ClaimNews(self._number, self._id(endpoint), packed(claim.marks.keys))
            self._open[claim] = news
            self._waiting.append(news)

    def ended(self, claim: Claim) -> None:
        """Notes that the request has ended."""
        news = self._open.pop(claim, None)
        if news is not None:
            self._ended.append(news.number)

    def withdrawn(self, claim: Claim) -> None:
        """Notes that the request never reached its worker."""
        news = self._open.pop(claim, None)
        if news is not None:
            self._withdrawn.append(news.number)

    def hello(self) -> None:
        """Makes the next message ask the others for all their figures and open claims."""
        self._says_hello = True

    def asked(self) -> None:
        """Notes that another router asked for all figures and open claims."""
        self._is_asked = True

    def due(self, loads: Loads, now: float, wall_us: int) -> list[bytes]:
        """Returns the messages of this tick: usually one, none if there is nothing to report.

        now: seconds of the loads' clock. wall_us: microseconds since 1970.
        """
        endpoints, claims = list(self.touched), list(self._waiting)
        is_answer = self._is_asked and now - self._whole_at >= ANSWER_SECONDS
        is_whole = is_answer or now - self._whole_at >= WHOLE_SECONDS
        if is_whole:
            endpoints, self._whole_at = loads.used(), now
        if is_answer:
            claims, self._is_asked = list(self._open.values())[-MAX_ANSWERED:], False
        is_silent = now - self._told_at >= self._silent_seconds
        has_news = endpoints or claims or self._ended or self._withdrawn
        if not (has_news or self._says_hello or is_silent):
            return []
        workers = self._workers(endpoints, loads, now)
        over = (list(self._ended), list(self._withdrawn))
        for waiting in (self.touched, self._waiting, self._ended, self._withdrawn):
            waiting.clear()
        self._told_at = now
        return [*self._messages(workers, claims, over, wall_us, is_whole=is_whole)]

    def _workers(self, endpoints: Sequence[str], loads: Loads, now: float) -> list[WorkerNews]:
        told = ((endpoint, loads.gauges(endpoint, now)) for endpoint in endpoints)
        return [WorkerNews(self._id(name), *gauges) for name, gauges in told if gauges is not None]

    def _messages(
        self,
        workers: list[WorkerNews],
        claims: list[ClaimNews],
        over: tuple[list[int], list[int]],
        wall_us: int,
        *,
        is_whole: bool,
    ) -> Iterator[bytes]:
        """Yields the news in as many messages as needed, at least one."""
        begun, ended, withdrawn = iter(claims), iter(over[0]), iter(over[1])
        is_first, told = True, 0
        while True:
            parts = (
                tuple(workers[told : told + MAX_WORKERS]),
                tuple(islice(begun, MAX_CLAIMS)),
                tuple(islice(ended, MAX_OVER)),
                tuple(islice(withdrawn, MAX_OVER)),
            )
            if not (is_first or any(parts)):
                return
            self._sequence += 1
            is_hello, self._says_hello, is_first = self._says_hello, False, False
            told += MAX_WORKERS
            is_all, is_whole = is_whole and told >= len(workers), is_whole and told < len(workers)
            begins = (self.origin, self.incarnation, self._sequence, wall_us, is_hello, is_all)
            yield encoded(News(*begins, *parts), self.keys)

    def _id(self, endpoint: str) -> int:
        known = self._ids.get(endpoint)
        if known is None:
            if len(self._ids) >= MAX_OPEN:
                self._ids.clear()  # some are of workers that no longer exist
            known = self._ids[endpoint] = worker_id(self.keys, endpoint)
        return known
