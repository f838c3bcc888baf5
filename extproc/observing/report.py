"""Counts the outcomes of requests by time and by side: who placed them, and by what.

Steered requests were placed by what workers hold. Others were left to the proxy. Cache-unaware ones
were placed by a policy that does not consider what workers hold, so they compare as the others do.

A request counts in the minute of its end, and minutes are added to their hour and day. Minutes
are kept for an hour, hours for eight days, and days for a month. A report has only numbers, and a
hash of each worker's and each class's name.

Everything here adds up: two reports merged are the report of all requests of both.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, isfinite, log
from typing import Annotated, NamedTuple, Self

import msgspec
import xxhash
from msgspec import Meta

from extproc.base.errors import ReportError
from extproc.observing.outcomes import Outcome

# Times to the first byte are counted in buckets. A bucket's end is this multiple of its beginning.
# The first bucket begins at the shortest time, the last one ends above the longest.
RESOLUTION = 1.05
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-4, 1e3
_PER_STEP = 1 / log(RESOLUTION)
_OFFSET = -log(SHORTEST_SECONDS) * _PER_STEP
BUCKETS = ceil(log(LONGEST_SECONDS / SHORTEST_SECONDS) * _PER_STEP)

# Beyond this many workers in one period, requests are counted without their worker.
MAX_WORKERS = 256

# Requests of further classes are in no row of a class.
MAX_CLASSES = 8

# Largest count, so that no sum in a report is too large to be written.
_MOST = 2**50

_CLIENT_ERROR, _SERVER_ERROR = 400, 500

Count = Annotated[int, Meta(ge=0, le=_MOST)]
Bucket = Annotated[int, Meta(ge=0, lt=BUCKETS)]


class Span(NamedTuple):
    """Periods of one length, of which the newest are kept."""

    seconds: int
    max_periods: int


MINUTES, HOURS, DAYS = SPANS = Span(60, 60), Span(3_600, 192), Span(86_400, 31)


class Side(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The requests of one side in one period.

    unanswered: those without a response. known: successful requests whose prompt tokens are
    known, here or by the engine's report. reported: those of them whose cached tokens the engine
    reported; for the rest, the prediction counts. saved_seconds: the time that the workers would
    have taken to compute the cached tokens. first_bytes: requests by the bucket of their time to
    the first byte. workers: requests by the hash of the worker's name. handed_tokens: of prompts
    whose ids went with them, so that no engine made them.
    """

    requests: Count = 0
    unanswered: Count = 0
    server_errors: Count = 0
    client_errors: Count = 0
    known: Count = 0
    reported: Count = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    saved_seconds: Annotated[float, Meta(ge=0, le=float(_MOST))] = 0.0
    first_bytes: Annotated[dict[Bucket, Count], Meta(max_length=BUCKETS)] = {}
    workers: Annotated[dict[Count, Count], Meta(max_length=MAX_WORKERS)] = {}
    handed_tokens: Count = 0

    def add(self, other: "Side") -> None:
        """Adds the requests of another side."""
        self.requests += other.requests
        self.unanswered += other.unanswered
        self.server_errors += other.server_errors
        self.client_errors += other.client_errors
        self.known += other.known
        self.reported += other.reported
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.saved_seconds += other.saved_seconds
        self.handed_tokens += other.handed_tokens
        for bucket, count in other.first_bytes.items():
            self.first_bytes[bucket] = self.first_bytes.get(bucket, 0) + count
        for worker, count in other.workers.items():
            if worker in self.workers or len(self.workers) < MAX_WORKERS:
                self.workers[worker] = self.workers.get(worker, 0) + count

    def count(self, outcome: Outcome, worker: int, tokens_per_second: float) -> None:
        """Counts an ended request.

        worker: the hash of its worker's name, 0 if unknown. tokens_per_second: the worker's speed,
        0 if unknown.
        """
        self.requests += 1
        if worker:
            workers = self.workers
            if worker in workers:
                workers[worker] += 1
            elif len(workers) < MAX_WORKERS:
                workers[worker] = 1
        status = outcome.status
        if status is None:
            self.unanswered += 1
        elif status >= _SERVER_ERROR:
            self.server_errors += 1
        elif status >= _CLIENT_ERROR:
            self.client_errors += 1
        else:
            self._count_answered(outcome, tokens_per_second)

    def _count_answered(self, outcome: Outcome, tokens_per_second: float) -> None:
        self.handed_tokens += outcome.handed_tokens
        seconds = outcome.ttft_seconds
        if seconds is not None:
            bucket, times = bucket_of(seconds), self.first_bytes
            times[bucket] = times.get(bucket, 0) + 1
        tokens, cached = outcome.prompt_tokens, outcome.reported.cached_tokens
        if not tokens:
            self._count_as_reported(outcome, tokens_per_second)
            return
        is_of_prompt = outcome.is_comparable or outcome.prompt is not None
        if cached is None or not is_of_prompt or cached > tokens:
            if not outcome.worker:
                return  # what an unknown server held is not known
            cached = min(outcome.predicted_tokens, tokens)
        else:
            self.reported += 1
        self._count_tokens(tokens, cached, tokens_per_second)

    def _count_as_reported(self, outcome: Outcome, tokens_per_second: float) -> None:
        """Counts a request whose tokens only the engine knows, by its own figures."""
        tokens, cached = outcome.reported.prompt_tokens, outcome.reported.cached_tokens
        if tokens and cached is not None and cached <= tokens:
            self.reported += 1
            self._count_tokens(tokens, cached, tokens_per_second)

    def _count_tokens(self, tokens: int, cached: int, tokens_per_second: float) -> None:
        self.known += 1
        self.prompt_tokens += tokens
        self.cached_tokens += cached
        if tokens_per_second:
            self.saved_seconds += cached / tokens_per_second


def side_of(outcome: Outcome) -> int:
    """Returns the index of the side to which a request belongs."""
    if not outcome.is_steered:
        return OTHERS
    return STEERED if outcome.is_cache_aware else CACHE_UNAWARE


def bucket_of(seconds: float) -> int:
    """Returns the bucket in which a time is counted."""
    if seconds <= SHORTEST_SECONDS:
        return 0
    bucket = int(log(seconds) * _PER_STEP + _OFFSET)
    return bucket if bucket < BUCKETS else BUCKETS - 1


def seconds_at(position: float) -> float:
    """Returns the time at a position in the buckets: 3.5 is in the middle of bucket 3."""
    return SHORTEST_SECONDS * float(RESOLUTION**position)


class ClassSide(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The requests of one class in one period.

    shed: those that were refused because all workers were busy. side: those that were sent on,
    without their workers.
    """

    shed: Count = 0
    side: Side = msgspec.field(default_factory=Side)

    def add(self, other: "ClassSide") -> None:
        """Adds the requests of the class in another period."""
        self.shed += other.shed
        self.side.add(other.side)


Classes = Annotated[dict[Count, ClassSide], Meta(max_length=MAX_CLASSES)]


def class_in(classes: Classes, key: int) -> ClassSide | None:
    """Returns the entry of a class, made if it is new; None if there are too many.

    key: the hash of its name.
    """
    found = classes.get(key)
    if found is None and len(classes) < MAX_CLASSES:
        found = classes[key] = ClassSide()
    return found


def add_classes(classes: Classes, others: Classes) -> None:
    """Adds the requests of other periods, class by class."""
    for key, other in others.items():
        found = class_in(classes, key)
        if found is not None:
            found.add(other)


def hash_of(name: str) -> int:
    """Returns the hash by which a report names a worker or a class."""
    return int(xxhash.xxh32_intdigest(name.encode()))


class Period(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One period.

    span: the index in `SPANS`. number: how many such periods lie between 1970 and it. seen_seconds:
    for how much of it a router ran. classes: by the hash of their names.
    """

    span: Annotated[int, Meta(ge=0, lt=len(SPANS))]
    number: Count
    seen_seconds: Annotated[float, Meta(ge=0, le=float(DAYS.seconds))] = 0.0
    steered: Side = msgspec.field(default_factory=Side)
    others: Side = msgspec.field(default_factory=Side)
    classes: Classes = {}
    cache_unaware: Side = msgspec.field(default_factory=Side)

    def sides(self) -> "SideSums":
        """Returns the sides of this period, which the sums share."""
        return SideSums(self.steered, self.others, self.cache_unaware)


# The indices of the sides.
STEERED, OTHERS, CACHE_UNAWARE = range(3)


class SideSums(NamedTuple):
    """The sums of each side over some periods."""

    steered: Side
    others: Side
    cache_unaware: Side

    @classmethod
    def of(cls, parts: "Iterable[SideSums]") -> Self:
        """Adds up parts, none of which is changed."""
        total = cls(Side(), Side(), Side())
        for part in parts:
            total.add(part)
        return total

    def add(self, other: "SideSums") -> None:
        """Adds the requests of other periods, side by side."""
        for side, more in zip(self, other, strict=True):
            side.add(more)

    def known(self, sides: Sequence[int]) -> list[int]:
        """Returns the requests with known prompt tokens of some sides."""
        return [self[side].known for side in sides]

    @property
    def requests(self) -> int:
        """How many requests all sides have."""
        return sum([side.requests for side in self])


class Window(NamedTuple):
    """The last periods, the oldest first; step_seconds: each one's length. begins_at: the start."""

    step_seconds: int
    begins_at: int
    periods: Sequence[Period]


class SideTokens(NamedTuple):
    """The tokens of the requests of one side since the start: of prompts, and cached ones."""

    prompt: int = 0
    cached: int = 0

    def with_those_of(self, side: Side) -> "SideTokens":
        """Returns the sums with those of more requests."""
        return SideTokens(self.prompt + side.prompt_tokens, self.cached + side.cached_tokens)


class Report:
    """The requests of one router, or of several.

    now: when it begins; times are seconds since 1970. settled: how often requests were added to
    their periods, which shows whether there are new ones.
    """

    def __init__(self, now: float) -> None:
        self._periods: tuple[dict[int, Period], ...] = tuple({} for _ in SPANS)
        self._sides = SideSums.of(())
        self._before = (SideTokens(),) * len(self._sides)  # of requests that are in their periods
        self._classes: Classes = {}
        self._minute = now // MINUTES.seconds
        self._observed_until = now
        self.settled = 0

    def feed(self, outcome: Outcome, tokens_per_second: float, now: float) -> None:
        """Counts an ended request; tokens_per_second: its worker's speed, 0 if unknown."""
        if now // MINUTES.seconds != self._minute:
            self.settle(now)
        side = self._sides[side_of(outcome)]
        name = outcome.worker
        side.count(outcome, hash_of(name) if name else 0, tokens_per_second)
        if outcome.of_class:
            found = class_in(self._classes, hash_of(outcome.of_class))
            if found is not None:
                found.side.count(outcome, 0, tokens_per_second)

    def tokens(self) -> Sequence[SideTokens]:
        """Returns the tokens of this router's requests, of each side."""
        pairs = zip(self._before, self._sides, strict=True)
        return [before.with_those_of(side) for before, side in pairs]

    def shed(self, of_class: str, now: float) -> None:
        """Counts a request of a class that was refused because all workers were busy."""
        if now // MINUTES.seconds != self._minute:
            self.settle(now)
        found = class_in(self._classes, hash_of(of_class))
        if found is not None:
            found.shed += 1

    def settle(self, now: float) -> None:
        """Adds new counts to their periods, and drops old periods.

        If the clock was set back by a period or more, the periods that are then in the future are
        lost.
        """
        at = self._minute * MINUTES.seconds
        for span, kept in enumerate(self._periods):
            if self._has_news():
                period = _period_at(kept, span, int(at // SPANS[span].seconds))
                period.sides().add(self._sides)
                add_classes(period.classes, self._classes)
            self._see(span, now)
            _drop(span, kept, now)
        if self._has_news():
            self._before = tuple(self.tokens())
            self._sides, self._classes = SideSums.of(()), {}
            self.settled += 1
        self._minute = now // MINUTES.seconds
        self._observed_until = now

    def _has_news(self) -> bool:
        return bool(self._sides.requests or self._classes)

    def _see(self, span: int, now: float) -> None:
        """Notes that the router ran until now."""
        seconds, count = SPANS[span]
        begin = max(self._observed_until, now - seconds * count)
        while begin < now:
            number = int(begin // seconds)
            end = min(now, float((number + 1) * seconds))
            period = _period_at(self._periods[span], span, number)
            period.seen_seconds = min(period.seen_seconds + end - begin, float(seconds))
            begin = end

    def merge(self, periods: Iterable[Period], now: float) -> None:
        """Adds the periods of another report; time that both routers ran counts once."""
        for other in periods:
            period = _period_at(self._periods[other.span], other.span, other.number)
            period.sides().add(other.sides())
            add_classes(period.classes, other.classes)
            period.seen_seconds = max(period.seen_seconds, other.seen_seconds)
        for span, kept in enumerate(self._periods):
            _drop(span, kept, now)

    def periods(self, now: float) -> Iterator[Period]:
        """Yields all periods; count no requests before the last one is yielded."""
        self.settle(now)
        for kept in self._periods:
            yield from kept.values()

    def window(self, seconds: float, now: float) -> Window:
        """Returns the periods of the last seconds: minutes, or for longer windows hours or days."""
        self.settle(now)
        span = next((one for one in SPANS if seconds <= one.seconds * one.max_periods), DAYS)
        count = min(ceil(seconds / span.seconds), span.max_periods)
        last, at = int(now // span.seconds), SPANS.index(span)
        numbers = range(last - count + 1, last + 1)
        kept = self._periods[at]
        found = [kept.get(number) or Period(at, number) for number in numbers]
        return Window(span.seconds, numbers[0] * span.seconds, found)


def _period_at(kept: dict[int, Period], span: int, number: int) -> Period:
    found = kept.get(number)
    if found is None:
        found = kept[number] = Period(span, number)
    return found


def _drop(span: int, kept: dict[int, Period], now: float) -> None:
    seconds, count = SPANS[span]
    last = int(now // seconds)
    # the next period is kept too: a clock may be set back a little
    for number in [one for one in kept if not last - count < one <= last + 1]:
        del kept[number]


# The format's version. Earlier ones are read, too: 2 has no classes, 3 counts cache-unaware ones as
# steered. Others are refused.
VERSION = 4
_EARLIER = (2, 3, VERSION)

# More than the size of a report with the most periods, workers, classes and buckets.
MAX_BYTES = 28 * 1024 * 1024

_MAX_PERIODS = sum(span.max_periods + 1 for span in SPANS)


class _StoredReport(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    periods: Annotated[list[Period], Meta(max_length=_MAX_PERIODS)]


def encode_report(encoded: Iterable[bytes]) -> bytes:
    """Returns a report as JSON, from its encoded periods."""
    return b"[%d,[%b]]\n" % (VERSION, b",\n".join(encoded))


def read(text: bytes) -> list[Period]:
    """Returns the periods of a written report.

    Raises:
        ReportError: the text is not a report.
    """
    if len(text) > MAX_BYTES:
        raise ReportError(f"is larger than {MAX_BYTES} bytes")
    try:
        current = _without_groups(text) if text.startswith(_FIRST_VERSION) else text
        found = msgspec.json.decode(current, type=_StoredReport)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"cannot be read: {error}") from None
    if found.version not in _EARLIER:
        raise ReportError(f"has version {found.version}, and not {VERSION}")
    for period in found.periods:
        of_classes = [one.side for one in period.classes.values()]
        if not all(map(_is_sound, (*period.sides(), *of_classes))):
            raise ReportError("has figures that contradict each other")
    return found.periods


# How a report of version 1 begins. Its sides have counts of groups of conversations, in this place
# of so many values.
_FIRST_VERSION, _GROUPS, _VALUES = b"[1,", 9, 12


def _without_groups(text: bytes) -> bytes:
    """Returns a report of version 1 in version 2."""
    found = msgspec.json.decode(text)
    match found:
        case [1, [*periods]]:
            sides = [side for one in periods if isinstance(one, list) for side in one[3:]]
            for side in sides:
                if isinstance(side, list) and len(side) == _VALUES:
                    del side[_GROUPS]
            found = [2, periods]
    return msgspec.json.encode(found)


def _is_sound(side: Side) -> bool:
    failed = side.unanswered + side.server_errors + side.client_errors
    return (
        isfinite(side.saved_seconds)
        and side.reported <= side.known <= side.requests - failed
        and side.cached_tokens <= side.prompt_tokens
        and sum(side.first_bytes.values()) <= side.requests
        and sum(side.workers.values()) <= side.requests
    )
