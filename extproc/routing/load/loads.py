"""The load of each endpoint: this router's requests in flight, corrected by the worker's reports.

This router's own picks give an immediate and exact count of its requests, but not what other
routers sent, nor how fast the worker is. A report shows both, but late. So the part of a report
that exceeds the router's own count is added, and fades with its age; the estimate of the queue is
kept within the bounds of the report, and continues from there.

Routers that share report their own counts to each other. These are summed up in the endpoint's
record when they arrive, so that a decision costs the same with any number of routers. Their tokens
join this router's in one queue, since the worker computes one prompt after the other.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import msgspec

from extproc._core import LoadColumns, load_of
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.candidates.pins import PinnedRank
from extproc.routing.load.endpoint_load import EndpointLoad, LevelLoad, LoadSample, Ticket
from extproc.routing.load.reports import GaugesOf, Place, ReportedGauges, WorkerLoadReport
from extproc.routing.load.speed import LEAST_SECONDS, Common
from extproc.routing.load.transfers import FleetTransfers, Transfers
from kvstate.overlap import Prompt

# The speed at which an endpoint is assumed to compute uncached prompt tokens. Only its order of
# magnitude matters: it decides how long a long prompt makes its endpoint less attractive.
PREFILL_TOKENS_PER_SECOND = 8_000

# A report's weight fades to zero over this time.
REPORT_SECONDS = 5.0

# The window of an endpoint's utilization; a burst is over sooner.
UTILIZATION_SECONDS = 10.0

# Most tokens that other routers' figures can make count as sent lately: as many as the worker can
# compute in so many of these windows.
MAX_REPORTED_WINDOWS = 4.0

# The weight of a new request in the moving average of uncached tokens.
_MEAN_STEP = 0.05


class Load(msgspec.Struct, frozen=True, gc=False):
    """The load of an endpoint.

    in_flight: this router's requests. backlog_tokens: prompt tokens not computed yet. others:
    requests of other routers: those that share, and any more that the last report shows.
    utilization: the prompt tokens sent lately, as a share of what it can compute. report: the last
    one, if it still counts; age_seconds: its age. slowness: its time divided by the configured one.
    If requests have classes, for the one that asks: below, this router's requests of lower classes,
    whose tokens are not in the backlog; peers, those of its own.
    """

    in_flight: int = 0
    backlog_tokens: float = 0.0
    others: float = 0.0
    utilization: float = 0.0
    report: LoadSample | None = None
    age_seconds: float = 0.0
    slowness: float = 1.0
    below: int = 0
    peers: int = 0

    @property
    def counted(self) -> float:
        """The requests that a limit counts: those of lower classes do not stand in the way."""
        return self.in_flight + self.others - self.below


class Gauges(NamedTuple):
    """The load that one router's own requests put on an endpoint, as reported to the others.

    booked_tokens: uncached tokens of its requests in flight, without those known to be computed.
    sent_tokens: all tokens that it ever sent there, so that the next message makes up for a lost
    one. For routers without earlier figures: backlog_tokens, its part of the queue; lately_tokens,
    those that all routers sent lately.
    """

    in_flight: int
    booked_tokens: int
    sent_tokens: int
    backlog_tokens: int
    lately_tokens: int


# The configured tokens per second, the tokens of a window, the fleet's slowness, and the seconds of
# a window and of a report.
Rates = tuple[float, float, float, float, float]


class Loads:
    """Reads and keeps the load of endpoints. Times are seconds of one monotonic clock.

    endpoints: their records, by ip:port; the owner adds and removes them. An endpoint without a
    record is idle. touched: collects the endpoints whose own requests changed, to be shared.
    learns: whether the speed of each endpoint is learned. routers: the other routers heard from.
    rates: what every load depends on. fleet_transfers: what workers pull from each other.
    """

    def __init__(
        self,
        endpoints: dict[str, EndpointLoad],
        prefill_tokens_per_second: float = PREFILL_TOKENS_PER_SECOND,
        touched: set[str] | None = None,
        *,
        learns: bool = False,
    ) -> None:
        self._endpoints = self.endpoints = endpoints
        self._rate = prefill_tokens_per_second
        self._capacity_tokens = prefill_tokens_per_second * UTILIZATION_SECONDS
        self._most_reported = MAX_REPORTED_WINDOWS * self._capacity_tokens
        self._mean_uncached = 0.0
        self._touched = touched
        self.routers: set[str] = set()
        self._learns = learns
        self._common = Common()
        self.fleet_transfers = FleetTransfers()
        self.rates = self._rates()

    def begin(
        self,
        endpoint: str,
        uncached_tokens: float,
        now: float,
        rank: PinnedRank | None = None,
        prompt: Prompt | None = None,
        *,
        is_sure: bool = True,
        level: int | None = None,
    ) -> Ticket:
        """Books a request on an endpoint until `end`; returns its ticket."""
        state = self._endpoints.get(endpoint) or EndpointLoad()  # one that nobody reads
        ticket = Ticket(endpoint, uncached_tokens, state, now, rank, prompt, is_sure, level=level)
        self._add(ticket, now)
        self._mean_uncached += _MEAN_STEP * (uncached_tokens - self._mean_uncached)
        return ticket

    def _record(self, endpoint: str) -> EndpointLoad:
        """Returns an endpoint's load record; for an unknown endpoint, one that nobody reads."""
        found = self._endpoints.get(endpoint)
        return EndpointLoad() if found is None else found

    def _add(self, ticket: Ticket, now: float) -> None:
        state, tokens = ticket.load, ticket.uncached_tokens
        left = state.numbers.begin(tokens, now, self._rate, UTILIZATION_SECONDS)
        state.tickets.add(ticket)
        state.queued[ticket] = None
        if ticket.level is not None:
            of_level = state.levels.setdefault(ticket.level, LevelLoad())
            of_level.requests += 1
            of_level.queued_tokens += tokens
        if self._touched is not None:
            self._touched.add(ticket.endpoint)
        if self._learns:
            work = tokens / self._rate
            if work <= LEAST_SECONDS:
                return
            if ticket.prompt is None:
                state.speed.begin_unseen(work, now)
            else:
                self._begin(ticket, min(state.numbers.ahead_tokens, left), now)

    def _begin(self, ticket: Ticket, ahead_tokens: float, now: float) -> None:
        """Starts learning the speed from a request; ahead_tokens: other routers', just before it.

        How many of those are left when the worker has computed this router's earlier requests is a
        guess, which spoils the measurement.
        """
        state, speed = ticket.load, ticket.load.speed
        state.numbers.ahead_tokens = 0.0
        if speed.waiting:
            ticket.ahead_tokens = ahead_tokens
        else:
            speed.begin_unseen(ahead_tokens / self._rate, now)
        work = (ticket.uncached_tokens + ticket.ahead_tokens) / self._rate
        speed.begin(ticket, work, now, is_sure=ticket.is_sure)

    def revise(self, ticket: Ticket, uncached_tokens: float) -> None:
        """Corrects the oldest request's uncached tokens for the measurement of the speed.

        They are known once all requests before it are computed.
        """
        ticket.is_sure = True
        work = (uncached_tokens + ticket.ahead_tokens) / self._rate
        ticket.load.speed.revise(ticket, work)

    def unseen(self, ticket: Ticket) -> None:
        """Notes that nothing will announce when this request is computed."""
        ticket.prompt = None
        ticket.load.speed.drop(ticket)

    def note_computed(self, ticket: Ticket, now: float) -> None:
        """Notes that the worker's feed announced a prompt as computed, and so all before it.

        These leave the queue, and other routers are informed. Otherwise they would have to estimate
        the queue from the worker's speed, with a growing error.
        """
        state = ticket.load
        ticket.prompt, ticket.computed_at = None, now
        backlog = state.numbers.backlog(now, self._rate)
        state.speed.note_computed(ticket, now, self._common)
        self._update_common(now)
        if ticket in state.queued:
            for one in list(takewhile(lambda one: one is not ticket, state.queued)):
                _leave_queue(one)
            _leave_queue(ticket)
            if self._touched is not None:
                self._touched.add(ticket.endpoint)
        state.numbers.bound(backlog, now, UTILIZATION_SECONDS)

    def note_unseen(self, endpoint: str, seconds: float, now: float) -> None:
        """Notes that an endpoint does what nothing announces, for about so many seconds."""
        if self._learns:
            self._record(endpoint).speed.begin_unseen(seconds, now)

    def transfers(self, endpoint: str) -> Transfers:
        """Returns what other workers pull from an endpoint."""
        return self._record(endpoint).transfers

    def look(self, endpoint: str, now: float) -> None:
        """Updates an endpoint's speed if its oldest prompt is late, or as its measurements age."""
        self._update_common(now)
        self._record(endpoint).speed.look(now, self._common)

    def _update_common(self, now: float) -> None:
        if self._common.is_due(now):
            self._common.update([state.speed for state in self._endpoints.values()], now)
            self.rates = self._rates()

    def end(self, ticket: Ticket, now: float) -> None:
        """Ends a request; a second call changes nothing."""
        state = ticket.load
        if ticket not in state.tickets:
            return
        if ticket.computed_at is not None:
            state.speed.note_end(now - ticket.computed_at)
        elif ticket in state.speed.waiting:
            state.speed.drop(ticket)
        state.tickets.remove(ticket)
        if ticket in state.queued:
            _leave_queue(ticket)
        if ticket.level is not None:
            state.levels[ticket.level].requests -= 1
        state.numbers.end(now, self._rate, UTILIZATION_SECONDS)
        if self._touched is not None:
            self._touched.add(ticket.endpoint)

    def move(
        self, ticket: Ticket, endpoint: str, now: float, uncached_tokens: float | None = None
    ) -> bool:
        """Moves a request to the endpoint that serves it instead; returns False if it has ended.

        uncached_tokens: its work there; None if unchanged.
        """
        if ticket not in ticket.load.tickets:
            return False
        self.end(ticket, now)
        if uncached_tokens is not None:
            ticket.uncached_tokens = uncached_tokens
        ticket.endpoint, ticket.began_at = endpoint, now
        ticket.prompt = ticket.computed_at = None
        ticket.ahead_tokens = 0.0
        ticket.load = self._record(endpoint)
        self._add(ticket, now)
        return True

    def report(self, endpoint: str, report: LoadSample, now: float) -> None:
        """Records a worker's report of its load; ignores one that is older than the last."""
        state = self._record(endpoint)
        numbers = state.numbers
        if state.report is not None and report.asked_at < state.report.asked_at:
            return
        total = report.running + report.waiting
        state.report, numbers.asked_at = report, report.asked_at
        numbers.others = max(0.0, total - numbers.in_flight - numbers.shared)
        least, most, excess = self._pending(state, report, total)
        numbers.lately_tokens = numbers.lately(now, UTILIZATION_SECONDS)
        numbers.backlog_tokens = min(max(numbers.backlog(now, self._rate), least), most)
        numbers.backlog_at = now
        numbers.excess_tokens = excess

    def _pending(
        self, state: EndpointLoad, report: LoadSample, total: int
    ) -> tuple[float, float, float]:
        """Returns the least and most queued tokens that a report allows, and the tokens of others.

        The first two are of known requests: this router's, and those of routers that share. Engines
        begin with the oldest request, so the waiting ones are the newest, and the one before them
        may be running.
        """
        numbers = state.numbers
        newest_first = sorted(state.tickets, key=lambda one: one.began_at, reverse=True)
        on_the_way = [one for one in newest_first if one.began_at >= report.asked_at]
        arrived = [one.uncached_tokens for one in newest_first[len(on_the_way) :]]
        unseen = sum(one.uncached_tokens for one in on_the_way)
        if report.pending_tokens is not None:
            own = min(report.pending_tokens, sum(arrived) + numbers.shared_tokens)
            return own + unseen, own + unseen, report.pending_tokens - own
        requests = max(1, total)
        own_waiting = min(len(arrived), round(report.waiting * len(arrived) / requests))
        shared_waiting = min(numbers.shared, round(report.waiting * numbers.shared / requests))
        each = numbers.shared_tokens / numbers.shared if numbers.shared else 0.0
        least = sum(arrived[:own_waiting]) + unseen + each * shared_waiting
        most = sum(arrived[: own_waiting + 1]) + unseen
        # computed ones have no tokens in the sum, so a waiting one may exceed the mean
        most_each = max(each, self._mean_uncached)
        most += min(most_each * min(numbers.shared, shared_waiting + 1), numbers.shared_tokens)
        others_waiting = max(0, report.waiting - own_waiting - shared_waiting)
        return least, most, others_waiting * self._mean_uncached

    def gauges(self, endpoints: Sequence[str], now: float) -> list[tuple[str, ReportedGauges]]:
        """Returns this router's own load on those of the endpoints that are known, for others."""
        states, rate = self._endpoints, self._rate
        return [
            (name, states[name].numbers.reported(now, rate, UTILIZATION_SECONDS))
            for name in endpoints
            if name in states
        ]

    def used_endpoints(self) -> list[str]:
        """Returns the endpoints to which this router has sent requests."""
        return [name for name, state in self._endpoints.items() if state.numbers.sent_tokens]

    def record_reports(
        self,
        router: str,
        told: Sequence[WorkerLoadReport],
        places: Mapping[int, Place],
        now: float,
        *,
        is_known: bool,
    ) -> int:
        """Records another router's figures of some workers; returns how many of them are unknown.

        places: the workers by their ids in messages. is_known: as in `record_report`.
        """
        unknown = 0
        for one in told:
            place = places.get(one.worker)
            if place is None or not self.record_report(
                router, place[0], one, now, is_known=is_known
            ):
                unknown += 1
        return unknown

    def record_report(
        self, router: str, endpoint: str, gauges: GaugesOf, now: float, *, is_known: bool
    ) -> bool:
        """Records another router's figures; returns False if the endpoint is unknown.

        is_known: whether it reported all its endpoints before, so that it has sent nothing to one
        that it did not report.
        """
        state = self._endpoints.get(endpoint)
        if state is None:
            return False
        before = state.gauges.get(router)
        state.gauges[router] = gauges
        requests, booked = gauges.in_flight, gauges.booked_tokens
        if before is None:
            self.routers.add(router)
            more, lately = self._new_tokens(state, gauges, now, is_known=is_known)
        else:
            requests -= before.in_flight
            booked -= before.booked_tokens
            more = gauges.sent_tokens - before.sent_tokens
            if more < 0:  # the router restarted, or re-added the worker
                more = gauges.sent_tokens
            lately = more
        state.numbers.share(
            requests,
            booked,
            more,
            lately,
            now,
            self._rate,
            UTILIZATION_SECONDS,
            self._most_reported,
        )
        return True

    def _new_tokens(
        self, state: EndpointLoad, gauges: GaugesOf, now: float, *, is_known: bool
    ) -> tuple[int, float]:
        """Returns the tokens queued, and those sent lately, that a router's first figures add."""
        if is_known:  # the worker may be new only here, after an absence
            more = min(gauges.sent_tokens, gauges.lately_tokens)
            return more, more
        lately = state.numbers.lately(now, UTILIZATION_SECONDS)
        return gauges.backlog_tokens, max(0.0, gauges.lately_tokens - lately)

    def in_flight_of(self, router: str) -> int:
        """Returns another router's requests in flight, as it reported."""
        states = self._endpoints.values()
        return sum(told.in_flight for one in states if (told := one.gauges.get(router)))

    def forget(self, router: str, now: float) -> None:
        """Removes all figures of another router."""
        self.routers.discard(router)
        for state in self._endpoints.values():
            before = state.gauges.pop(router, None)
            if before is not None:
                numbers = state.numbers
                numbers.shared -= before.in_flight
                numbers.shared_tokens -= before.booked_tokens
                backlog = numbers.backlog(now, self._rate)
                numbers.bound(backlog, now, UTILIZATION_SECONDS)

    def speed_as_json(self, endpoint: str) -> dict[str, float]:
        """Returns an endpoint's learned speed, its confidence, and the speed used in its cost."""
        speed = self._record(endpoint).speed
        used = self.load(endpoint, 0.0).slowness  # slowness does not depend on the time
        return {
            "tokens_per_second": round(self._rate / speed.slowness),
            "confidence": round(speed.confidence, 3),
            "used_tokens_per_second": round(self._rate / used),
        }

    def tokens_per_second(self, endpoint: str) -> float:
        """Returns an endpoint's speed in prompt tokens per second, learned or configured."""
        found = self._endpoints.get(endpoint)
        return self._rate if found is None else self._rate / found.speed.slowness

    def in_flight(self, endpoint: str) -> int:
        """Returns this router's requests in flight on an endpoint."""
        found = self._endpoints.get(endpoint)
        return 0 if found is None else len(found.tickets)

    def work_by_rank(self, endpoint: str, now: float, running: float) -> dict[int, float]:
        """Returns each named rank's load in tokens; running: what each request adds, in tokens."""
        state = self._record(endpoint)
        if not state.tickets:
            return {}
        booked = sum([ticket.uncached_tokens for ticket in state.tickets])
        booked += state.numbers.shared_tokens
        left = state.numbers.backlog(now, self._rate) / booked if booked else 0.0
        work: defaultdict[int, float] = defaultdict(float)
        for ticket in state.tickets:
            if ticket.rank is not None:
                work[ticket.rank.rank] += running + left * ticket.uncached_tokens
        return work

    def load(self, endpoint: str, now: float) -> Load:
        """Returns the current load of an endpoint."""
        return load_of(Load, self._endpoints, endpoint, now, self.rates)

    def columns(self, workers: Sequence[Candidate], now: float) -> LoadColumns:
        """Returns the current loads of workers, in their order."""
        return LoadColumns(Load, self._endpoints, workers, now, self.rates)

    def load_of_level(self, level: int, endpoint: str, now: float) -> Load:
        """Returns the load of an endpoint for a request of a class, by the level of that class.

        An engine that schedules by priority computes the prompts of lower classes later, so their
        share of the queue is left out. What other routers sent counts in full.
        """
        load, state = self.load(endpoint, now), self._endpoints.get(endpoint)
        if state is None or not state.levels:
            return load
        below, behind, peers = 0, 0.0, 0
        for of_level, found in state.levels.items():
            if of_level > level:
                below += found.requests
                behind += found.queued_tokens
            elif of_level == level:
                peers = found.requests
        known = state.numbers.booked_tokens + state.numbers.shared_tokens
        share = 1.0 - behind / known if 0.0 < behind < known else float(behind <= 0.0)
        return msgspec.structs.replace(
            load, backlog_tokens=load.backlog_tokens * share, below=below, peers=peers
        )

    def _rates(self) -> Rates:
        seconds = (UTILIZATION_SECONDS, REPORT_SECONDS)
        return (self._rate, self._capacity_tokens, self._common.slowness, *seconds)


def _leave_queue(ticket: Ticket) -> None:
    """Removes a request from the queue: it is computed, or has ended."""
    state = ticket.load
    del state.queued[ticket]
    # a running sum, since thousands may be queued
    state.numbers.leave(ticket.uncached_tokens, not state.queued)
    if ticket.level is not None:
        of_level = state.levels[ticket.level]
        of_level.queued_tokens -= ticket.uncached_tokens if state.queued else of_level.queued_tokens
