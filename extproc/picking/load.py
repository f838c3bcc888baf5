"""What each endpoint has to do: the streams in flight, corrected by what the worker reports.

Our own picks tell at once and exactly how many requests are under way, but neither what other
routers sent nor how fast the worker really is. A report tells both, late. So what a report says
beyond our own counts is added, and fades with its age; our estimate of the queue is held within
what the report allows, and goes on from there.

Routers that share tell each other their own counts. What they tell is added up in the record of the
endpoint when it arrives, so that a decision costs the same with any number of routers. Their tokens
join ours in one queue, since the worker computes one after the other, whoever sent it.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import exp
from typing import NamedTuple, Protocol

from extproc.picking.speed import LEAST_SECONDS, Common, Speed
from extproc.structs import Light, Record
from kvstate.events import EngineLoad
from kvstate.overlap import Prompt

# How fast an endpoint is taken to work off uncached prompt tokens where nobody says otherwise. Only
# its order of magnitude matters: it decides for how long a long prompt makes its endpoint less
# attractive.
PREFILL_TOKENS_PER_SECOND = 8_000

# A report counts fully when it is new and not at all at this age.
REPORT_SECONDS = 5.0

# Over how long the utilization of an endpoint is taken; a burst is over sooner.
UTILIZATION_SECONDS = 10.0

# The share of a new booking in the mean of uncached tokens.
_MEAN_STEP = 0.05


class Report(NamedTuple):
    """What a worker said of its load.

    running, waiting: requests. asked_at: when it was asked, or when the figures were taken.
    pending_tokens: prompt tokens not computed yet, of all its requests. cache_usage: share of its
    cache that running requests use, of its fullest rank. None where it does not say.
    """

    running: int
    waiting: int
    asked_at: float
    pending_tokens: int | None = None
    cache_usage: float | None = None


class Load(Light, frozen=True, gc=False):
    """What an endpoint has to do.

    in_flight: our own requests under way. backlog_tokens: prompt tokens not computed yet. others:
    requests that others sent: those of routers that share with us, and what the last report shows
    beyond. utilization: the prompt tokens that were sent lately, as a share of what it can compute.
    report: the last one, if it still counts; age_seconds of it. slowness: how many times as long as
    configured it takes.
    """

    in_flight: int = 0
    backlog_tokens: float = 0.0
    others: float = 0.0
    utilization: float = 0.0
    report: Report | None = None
    age_seconds: float = 0.0
    slowness: float = 1.0


class Told(Protocol):
    """What one router's own requests are to an endpoint, as it tells the others; see `Gauges`."""

    @property
    def in_flight(self) -> int:
        """Requests."""

    @property
    def booked_tokens(self) -> int:
        """Of these, those that are not computed."""

    @property
    def sent_tokens(self) -> int:
        """All that were ever sent."""

    @property
    def backlog_tokens(self) -> int:
        """Its part of the queue."""

    @property
    def lately_tokens(self) -> int:
        """Of all routers."""


class Gauges(NamedTuple):
    """What one router's own requests are to an endpoint, as figures.

    booked_tokens: uncached tokens of its requests in flight, but for those that it knows to be
    computed. sent_tokens: all that it ever sent there, so that a message that is lost is made good
    by the next one. For those that do not know the figures before: backlog_tokens, its part of the
    queue; lately_tokens, of all routers.
    """

    in_flight: int
    booked_tokens: int
    sent_tokens: int
    backlog_tokens: int
    lately_tokens: int


_NO_GAUGES: Told = Gauges(0, 0, 0, 0, 0)


@dataclass(eq=False, slots=True)
class EndpointLoad:
    """The load record of one endpoint: its requests under way, and what its worker reported last.

    It goes with the endpoint. A request that is still under way then keeps the record until it is
    over, and whoever has the same address later begins with an idle one.

    queued: those of its requests that are not known to be computed, oldest first; booked_tokens:
    their uncached tokens. told: what each other router said last of its own requests; shared,
    shared_tokens: the requests of all of these, and their booked tokens. ahead_tokens: of theirs,
    those that came after the last request of ours whose computing will be told: the next such one
    waits for them.
    """

    bookings: set["Booking"] = field(default_factory=set)
    queued: dict["Booking", None] = field(default_factory=dict)
    booked_tokens: float = 0.0
    backlog_tokens: float = 0.0
    backlog_at: float = -math.inf
    report: Report | None = None
    others: float = 0.0
    excess_tokens: float = 0.0
    lately_tokens: float = 0.0
    sent_tokens: float = 0.0
    shared: int = 0
    shared_tokens: int = 0
    ahead_tokens: float = 0.0
    told: dict[str, Told] = field(default_factory=dict)
    speed: Speed["Booking"] = field(default_factory=Speed)


class Booking(Record, eq=False):
    """One request on its way to an endpoint; uncached_tokens is the work it was expected to be.

    load: the record that it is booked in. rank: the one that it names, None if none. prompt: by
    which the worker's feed tells when it is computed; None where it does not. computed_at: when
    that was seen, None while it was not. ahead_tokens: what other routers sent there since the
    request of ours before it, which is computed first.
    """

    endpoint: str
    uncached_tokens: float
    load: EndpointLoad
    began_at: float = 0.0
    rank: int | None = None
    prompt: Prompt | None = None
    is_sure: bool = True
    computed_at: float | None = None
    ahead_tokens: float = 0.0


_IDLE = Load()
_NEVER = -math.inf


class Loads:
    """Reads and keeps the load of endpoints. Times are seconds of one monotonic clock.

    endpoints: their records, by ip:port; who owns them adds and removes them. An endpoint without a
    record is idle. touched: is given the endpoints whose own requests changed, for who shares them.
    learns: whether the speed of each endpoint is learned. routers: the other ones that told of
    theirs.
    """

    def __init__(
        self,
        endpoints: Mapping[str, EndpointLoad],
        prefill_tokens_per_second: float = PREFILL_TOKENS_PER_SECOND,
        touched: set[str] | None = None,
        *,
        learns: bool = False,
    ) -> None:
        self._endpoints = endpoints
        self._rate = prefill_tokens_per_second
        self._capacity_tokens = prefill_tokens_per_second * UTILIZATION_SECONDS
        self._mean_uncached = 0.0
        self._touched = touched
        self.routers: set[str] = set()
        self._learns = learns
        self._common = Common()

    def begin(
        self,
        endpoint: str,
        uncached_tokens: float,
        now: float,
        rank: int | None = None,
        prompt: Prompt | None = None,
        *,
        is_sure: bool = True,
    ) -> Booking:
        """Books a request on an endpoint until `end`."""
        state = self._record(endpoint)
        booking = Booking(endpoint, uncached_tokens, state, now, rank, prompt, is_sure)
        self._add(booking, now)
        self._mean_uncached += _MEAN_STEP * (uncached_tokens - self._mean_uncached)
        return booking

    def _record(self, endpoint: str) -> EndpointLoad:
        """The load record of an endpoint; of one that is not there, a record that nobody reads."""
        found = self._endpoints.get(endpoint)
        return EndpointLoad() if found is None else found

    def _add(self, booking: Booking, now: float) -> None:
        state, left = booking.load, self._backlog(booking.load, now)
        state.backlog_tokens = left + booking.uncached_tokens
        state.lately_tokens = _faded(state, now) + booking.uncached_tokens
        state.backlog_at = now
        state.bookings.add(booking)
        state.queued[booking] = None
        state.booked_tokens += booking.uncached_tokens
        state.sent_tokens += booking.uncached_tokens
        if self._touched is not None:
            self._touched.add(booking.endpoint)
        if self._learns:
            work = booking.uncached_tokens / self._rate
            if work <= LEAST_SECONDS:
                return
            if booking.prompt is None:
                state.speed.begin_unseen(work, now)
            else:
                self._begin(booking, min(state.ahead_tokens, left), now)

    def _begin(self, booking: Booking, ahead_tokens: float, now: float) -> None:
        """Has the speed learned from a request; ahead_tokens: of other routers, just before it.

        What of those is left when the worker computes nothing else of ours is a guess, and spoils
        the measurement.
        """
        state, speed = booking.load, booking.load.speed
        state.ahead_tokens = 0.0
        if speed.waiting:
            booking.ahead_tokens = ahead_tokens
        else:
            speed.begin_unseen(ahead_tokens / self._rate, now)
        work = (booking.uncached_tokens + booking.ahead_tokens) / self._rate
        speed.begin(booking, work, now, is_sure=booking.is_sure)

    def revise(self, booking: Booking, uncached_tokens: float) -> None:
        """The oldest request's uncached tokens are known better, now that it is its turn."""
        booking.is_sure = True
        work = (uncached_tokens + booking.ahead_tokens) / self._rate
        booking.load.speed.revise(booking, work)

    def computed(self, booking: Booking, now: float) -> None:
        """The worker's feed told that a prompt is computed, and with it all that came before it.

        These leave the queue, and other routers are told so. They would otherwise have to guess
        from its speed what is left of the queue, and be wrong by more and more.
        """
        state = booking.load
        booking.prompt, booking.computed_at = None, now
        backlog = self._backlog(state, now)
        state.speed.computed(booking, now, self._common)
        if booking in state.queued:
            for one in list(takewhile(lambda one: one is not booking, state.queued)):
                _leave_queue(one)
            _leave_queue(booking)
            if self._touched is not None:
                self._touched.add(booking.endpoint)
        _bound(state, backlog, now)

    def look(self, endpoint: str, now: float) -> None:
        """Notices that an endpoint is late with what it has to compute."""
        self._record(endpoint).speed.look(now, self._common)

    def end(self, booking: Booking, now: float) -> None:
        """The request is over; ending it again changes nothing."""
        state = booking.load
        if booking not in state.bookings:
            return
        if booking.computed_at is not None:
            state.speed.ended(now - booking.computed_at)
        elif booking in state.speed.waiting:
            state.speed.drop(booking)
        state.bookings.remove(booking)
        if booking in state.queued:
            _leave_queue(booking)
        _bound(state, self._backlog(state, now), now)
        if self._touched is not None:
            self._touched.add(booking.endpoint)

    def move(
        self, booking: Booking, endpoint: str, now: float, uncached_tokens: float | None = None
    ) -> bool:
        """The request is served by another endpoint than was picked; False if it is over.

        uncached_tokens: the work that it is there; None where that is as before.
        """
        if booking not in booking.load.bookings:
            return False
        self.end(booking, now)
        if uncached_tokens is not None:
            booking.uncached_tokens = uncached_tokens
        booking.endpoint, booking.began_at = endpoint, now
        booking.prompt = booking.computed_at = None
        booking.ahead_tokens = 0.0
        booking.load = self._record(endpoint)
        self._add(booking, now)
        return True

    def report(self, endpoint: str, report: Report, now: float) -> None:
        """Takes what a worker says of its load; an older report than the last one is ignored."""
        state = self._record(endpoint)
        if state.report is not None and report.asked_at < state.report.asked_at:
            return
        total = report.running + report.waiting
        state.report = report
        state.others = max(0.0, total - len(state.bookings) - state.shared)
        least, most, excess = self._pending(state, report, total)
        state.lately_tokens = _faded(state, now)
        state.backlog_tokens = min(max(self._backlog(state, now), least), most)
        state.backlog_at = now
        state.excess_tokens = excess

    def _pending(
        self, state: EndpointLoad, report: Report, total: int
    ) -> tuple[float, float, float]:
        """What a report allows of our own requests, at least and at most, and those of others.

        Engines begin with the oldest request: so those that wait are the newest ones, and one
        before them may be under way.
        """
        newest_first = sorted(state.bookings, key=lambda one: one.began_at, reverse=True)
        on_the_way = [one for one in newest_first if one.began_at >= report.asked_at]
        arrived = [one.uncached_tokens for one in newest_first[len(on_the_way) :]]
        unseen = sum(one.uncached_tokens for one in on_the_way)
        if report.pending_tokens is not None:
            own = min(report.pending_tokens, sum(arrived) + state.shared_tokens)
            return own + unseen, own + unseen, report.pending_tokens - own
        requests = max(1, total)
        own_waiting = min(len(arrived), round(report.waiting * len(arrived) / requests))
        shared_waiting = min(state.shared, round(report.waiting * state.shared / requests))
        each = state.shared_tokens / state.shared if state.shared else 0.0
        least = sum(arrived[:own_waiting]) + unseen + each * shared_waiting
        most = sum(arrived[: own_waiting + 1]) + unseen
        # no tokens are told of those that are computed, so one that waits may be more than the mean
        most_each = max(each, self._mean_uncached)
        most += min(most_each * min(state.shared, shared_waiting + 1), state.shared_tokens)
        others_waiting = max(0, report.waiting - own_waiting - shared_waiting)
        return least, most, others_waiting * self._mean_uncached

    def gauges(self, endpoint: str, now: float) -> Gauges | None:
        """What our own requests are to an endpoint, to be told to other routers."""
        state = self._endpoints.get(endpoint)
        if state is None:
            return None
        booked = state.booked_tokens + state.shared_tokens
        own_part = state.booked_tokens / booked if booked else 0.0
        return Gauges(
            len(state.bookings),
            round(state.booked_tokens),
            round(state.sent_tokens),
            round(own_part * self._backlog(state, now)),
            round(_faded(state, now)),
        )

    def used(self) -> list[str]:
        """The endpoints that anything was sent to from here."""
        return [name for name, state in self._endpoints.items() if state.sent_tokens]

    def told(self, router: str, endpoint: str, told: Told, now: float, *, is_known: bool) -> bool:
        """Takes what another router says of its own requests; False if nobody is at the endpoint.

        is_known: whether it told of all endpoints before, so that it had sent nothing to this one
        if it did not tell of it.
        """
        state = self._endpoints.get(endpoint)
        if state is None:
            return False
        self.routers.add(router)
        before = state.told.get(router, _NO_GAUGES)
        state.told[router] = told
        state.shared += told.in_flight - before.in_flight
        state.shared_tokens += told.booked_tokens - before.booked_tokens
        backlog, lately = self._backlog(state, now), _faded(state, now)
        if before is _NO_GAUGES and not is_known:
            more = told.backlog_tokens
            lately = max(lately, told.lately_tokens)
        else:
            more = told.sent_tokens - before.sent_tokens
            if more < 0:  # it started anew, or the worker did there
                more = told.sent_tokens
            if before is _NO_GAUGES:  # the worker may be new here alone, and have come back
                more = min(more, told.lately_tokens)
            lately += more
        state.ahead_tokens += more
        most = state.booked_tokens + state.shared_tokens
        state.backlog_tokens, state.backlog_at = min(backlog + more, most), now
        state.lately_tokens = lately
        return True

    def in_flight_of(self, router: str) -> int:
        """Requests under way of another router, as it told."""
        states = self._endpoints.values()
        return sum(told.in_flight for one in states if (told := one.told.get(router)))

    def forget(self, router: str, now: float) -> None:
        """Nothing is known any more of another router's requests."""
        self.routers.discard(router)
        for state in self._endpoints.values():
            before = state.told.pop(router, None)
            if before is not None:
                state.shared -= before.in_flight
                state.shared_tokens -= before.booked_tokens
                _bound(state, self._backlog(state, now), now)

    def speed_shown(self, endpoint: str) -> dict[str, float]:
        """What is known of an endpoint's speed, for people and metrics; used: by its cost."""
        speed = self._record(endpoint).speed
        used = self.load(endpoint, 0.0).slowness  # which is the same at any time
        return {
            "tokens_per_second": round(self._rate / speed.slowness),
            "confidence": round(speed.confidence, 3),
            "used_tokens_per_second": round(self._rate / used),
        }

    def tokens_per_second(self, endpoint: str) -> float:
        """How many tokens of prompts an endpoint computes in a second, as learned or configured."""
        found = self._endpoints.get(endpoint)
        return self._rate if found is None else self._rate / found.speed.slowness

    def in_flight(self, endpoint: str) -> int:
        """Requests of ours on their way to, or being answered by, an endpoint."""
        found = self._endpoints.get(endpoint)
        return 0 if found is None else len(found.bookings)

    def work_by_rank(self, endpoint: str, now: float, running: float) -> dict[int, float]:
        """What the ranks have to do that requests name, in tokens; running: for each request."""
        state = self._record(endpoint)
        if not state.bookings:
            return {}
        booked = sum([booking.uncached_tokens for booking in state.bookings])
        booked += state.shared_tokens
        left = self._backlog(state, now) / booked if booked else 0.0
        work: defaultdict[int, float] = defaultdict(float)
        for booking in state.bookings:
            if booking.rank is not None:
                work[booking.rank] += running + left * booking.uncached_tokens
        return work

    def load(self, endpoint: str, now: float) -> Load:
        """What an endpoint has to do now."""
        state = self._endpoints.get(endpoint)
        if state is None:
            return _IDLE
        backlog, lately, passed = state.backlog_tokens, state.lately_tokens, now - state.backlog_at
        slowness = self._common.slowness if state.speed.is_even else state.speed.slowness
        if passed > 0.0:
            backlog -= passed * self._rate * state.speed.pace
            if backlog < 0.0:  # noqa: PLR1730 - max() costs as much as the rest, for every worker
                backlog = 0.0
            lately *= exp(-passed / UTILIZATION_SECONDS)
        utilization = lately * slowness / self._capacity_tokens
        in_flight, report = len(state.bookings), state.report
        if report is None:
            return Load(in_flight, backlog, state.shared, utilization, slowness=slowness)
        age = max(0.0, now - report.asked_at)
        share = 1.0 - age / REPORT_SECONDS
        if share <= 0.0:
            return Load(in_flight, backlog, state.shared, utilization, slowness=slowness)
        backlog += share * state.excess_tokens
        others = state.shared + share * state.others
        return Load(in_flight, backlog, others, utilization, report, age, slowness)

    def _backlog(self, state: EndpointLoad, now: float) -> float:
        """Uncached tokens of requests that we know of and that are probably not computed yet."""
        done = max(0.0, now - state.backlog_at) * self._rate * state.speed.pace
        return max(0.0, state.backlog_tokens - done)


def _leave_queue(booking: Booking) -> None:
    """A request is computed, or over."""
    state = booking.load
    del state.queued[booking]
    # kept, not summed up: thousands may be queued; what sums lose ends with the last of them
    state.booked_tokens -= booking.uncached_tokens if state.queued else state.booked_tokens


def _bound(state: EndpointLoad, backlog_tokens: float, now: float) -> None:
    """Sets the queue as of now: an estimate, and no more than is not known to be computed."""
    most = state.booked_tokens + state.shared_tokens
    state.lately_tokens = _faded(state, now)
    state.backlog_tokens, state.backlog_at = min(backlog_tokens, most), now


def _faded(state: EndpointLoad, now: float) -> float:
    """Uncached tokens sent lately, those of long ago counting less; as `Loads.load` has it."""
    return state.lately_tokens * exp(-max(0.0, now - state.backlog_at) / UTILIZATION_SECONDS)


# More text than this is not read; an engine's metrics take some 100 KiB.
MAX_METRICS_BYTES = 2 * 1024 * 1024

# Above this a number of requests is no number of requests.
_MAX_REQUESTS = 1_000_000

# vLLM 0.6 to 0.32 and SGLang 0.4 to 0.5; one series for each model, rank or engine.
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")

# The share of the cache that running requests use, 0 to 1 in spite of vLLM's names, of which the
# second is the older one.
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")

# A sample of Prometheus' text format 0.0.4: a name, labels in braces, a number.
_SAMPLE = re.compile(
    rb"^((?:vllm|sglang):(?:num_[a-z_]+|[a-z_]+_usage_perc|token_usage))"
    rb"(?:\{[^\n]*\})?[ \t]+([^ \t\r\n]+)",
    re.MULTILINE,
)


def report_of_metrics(text: bytes, asked_at: float) -> Report | None:
    """The load in a worker's metrics, over all its series; None if it is not there."""
    values: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text[:MAX_METRICS_BYTES]):
        number = _number(value)
        if number is not None:
            values.setdefault(name.decode(), []).append(number)
    running = [_requests(values[name]) for name in _RUNNING if name in values]
    waiting = [_requests(values[name]) for name in _WAITING if name in values]
    if not running or not waiting:
        return None
    usage = [max(values[name]) for name in _USAGE if name in values]
    is_share = bool(usage) and usage[0] <= 1.0
    return Report(running[0], waiting[0], asked_at, cache_usage=usage[0] if is_share else None)


def _requests(series: Sequence[float]) -> int:
    return sum(round(number) for number in series)


def _number(value: bytes) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and 0 <= number <= _MAX_REQUESTS else None


def report_of_feeds(loads: Sequence[tuple[EngineLoad, float]], now: float) -> Report | None:
    """The load of a worker, from what the feeds of its ranks said of theirs.

    loads: each with its age in seconds since it arrived. None where no feed says anything.
    """
    if not loads:
        return None
    age = max(seconds + load.age_ms / 1000 for load, seconds in loads)
    pending = [tokens for load, _ in loads if (tokens := _pending(load)) is not None]
    used = [share for load, _ in loads if (share := _usage(load)) is not None]
    return Report(
        running=sum(load.running for load, _ in loads),
        waiting=sum(load.waiting for load, _ in loads),
        asked_at=now - age,
        pending_tokens=sum(pending) if len(pending) == len(loads) else None,
        cache_usage=max(used) if used else None,
    )


def _usage(load: EngineLoad) -> float | None:
    active = load.active_cache_usage
    return load.cache_usage if active is None else active


def _pending(load: EngineLoad) -> int | None:
    if load.prefill_pending_tokens is not None:
        return load.prefill_pending_tokens
    return load.waiting_uncached_tokens
