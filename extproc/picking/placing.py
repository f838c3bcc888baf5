"""Places requests: collects the inputs of a decision, and accounts for its result.

`decide` changes nothing; `book` counts the request on its endpoint and claims its prompt for its
worker, until `release`.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from extproc.config.schema import Config
from extproc.picking.decision import Decision, Query, Snapshot, decide
from extproc.picking.disaggregation import decide_legs, with_source
from extproc.picking.eligibility import Candidate, Roster
from extproc.picking.load import Booking, Loads
from extproc.picking.policies import Chance, Ranks, policy_of, sample_size
from extproc.picking.sent import NO_CLAIMS, Claim, Holdings, Lifetimes, Sent
from extproc.picking.upstreams import FIRST_FAILURE, FIRST_SERVER_ERROR, Upstreams
from kvstate.overlap import Overlap, Prompt

# Why an endpoint that is about to be removed gets no new requests.
DRAINING = "draining"

# While nothing fails, the router asks for the response status of one request in this many.
REQUESTS_A_LOOK = 8

# The endpoint of an unsteered request until it is known who serves it.
NOWHERE = ""

# A prompt counts as a prefill worker's load for this multiple of its expected time.
LEG_SLACK = 2.0


class Fleet(Protocol):
    """What picks need of the workers, each by its name.

    upstreams: the records of their endpoints. loads: reads and updates the load in these.
    """

    @property
    def upstreams(self) -> Upstreams:
        """See above."""

    @property
    def loads(self) -> Loads:
        """See above."""

    @property
    def names_ranks(self) -> bool:
        """Returns whether requests may name a rank now."""

    @property
    def has_roles(self) -> bool:
        """Returns whether any worker takes only a part of requests."""

    def draining(self) -> set[str]:
        """Returns the draining endpoints, which get no new requests."""

    def holdings(self, name: str) -> Holdings:
        """Returns the record of what was sent to a worker."""

    def block_size(self, name: str) -> int:
        """Returns the number of tokens in a worker's block."""

    def ranks(self, name: str) -> int:
        """Returns how many ranks a worker has; 0 if unknown."""


class Telling(Protocol):
    """Reports to other routers which requests were sent where.

    touched: collects the endpoints whose requests changed.
    """

    @property
    def touched(self) -> set[str]:
        """See above."""

    @property
    def secret(self) -> int:
        """Returns the common key of these routers' marks."""

    def begun(self, claims: Sequence[Claim], endpoint: str, uncached_tokens: float) -> None:
        """Reports that a request was sent to an endpoint, the pick or another that serves it."""

    def ended(self, claim: Claim) -> None:
        """Reports that the request has ended."""

    def withdrawn(self, claim: Claim) -> None:
        """Reports that the request never reached its worker."""


class Placing:
    """One router's accounts of its requests. Times are seconds of one monotonic clock.

    fleet: the workers, whose records are updated here. secret: 64 random bits of this process.
    telling: reports every claim to other routers, None if routers do not share. steered: steered
    requests, by model.
    """

    def __init__(
        self, config: Config, secret: int, fleet: Fleet, telling: Telling | None = None
    ) -> None:
        self._fleet = fleet
        self._telling = telling
        self._upstreams = fleet.upstreams
        policy = config.policy
        self.loads = fleet.loads
        self.sent = Sent(
            secret if telling is None else telling.secret,
            policy.sent_bytes,
            Lifetimes(
                speculative=policy.speculative_ms / 1000,
                approximate=policy.approximate_ms / 1000,
            ),
        )
        self._config = config
        self._rules = policy
        names = (None, *(model.name for model in config.models))
        self._policies = {name: policy_of(config, name, None) for name in names}
        self._ranks = Ranks(fleet.ranks, self.loads.work_by_rank)
        self.steered: Counter[str | None] = Counter()
        self._claims: dict[Booking, list[Claim]] = {}
        self._legs: dict[Booking, Booking] = {}  # the prefill workers', by the answering workers'
        self._leg_numbers = itertools.count()
        self._legs_over: list[tuple[float, int, Booking]] = []
        self._looks = 0
        self._rosters: dict[str | None, Roster] = {}

    def decide(
        self,
        query: Query,
        workers: Sequence[Candidate],
        held: Sequence[Mapping[str, Overlap]],
        state: Callable[[str], str],
        now: float,
        rng: Chance,
    ) -> Decision:
        """Decides where a query goes; books nothing.

        held: for each prompt, the overlaps of the workers that hold a part of it. state: returns
        the state of a worker's feeds, by its name.
        """
        policy = self._policies.get(query.model) if query.policy is None else None
        draining = self._fleet.draining()
        snapshot = Snapshot(
            workers=workers,
            held=held,
            load=self.loads.load,
            policy=policy or policy_of(self._config, query.model, query.policy),
            turn=self.steered[query.model],
            rules=self._rules,
            sent=self.sent,
            state=state,
            block_size=self._fleet.block_size,
            unfit=dict.fromkeys(draining, DRAINING) if draining else {},
            ejected=self._upstreams.ejected(now),
            doubted=self._upstreams.doubted() if self._fleet.has_roles else (),
            ranks=self._ranks if self._fleet.names_ranks else None,
            sample=sample_size(self._rules, is_alone=not self.loads.routers),
            roster=self._roster_of(query.model, workers),
        )
        rules = self._config.disaggregation
        if self._fleet.has_roles:
            made = decide_legs(query, snapshot, rules, now, rng)
        else:
            made = decide(query, snapshot, now, rng)
        if rules.min_pulled_tokens is None:
            return made
        return with_source(query, made, rules.min_pulled_tokens, snapshot.ejected)

    def _roster_of(self, model: str | None, workers: Sequence[Candidate]) -> Roster:
        """Returns the roster of a model's workers, which is reused while the list is the same."""
        roster = self._rosters.get(model)
        if roster is None or roster.workers is not workers:
            roster = self._rosters[model] = Roster(workers)
        return roster

    def wants_status(self) -> bool:
        """Returns whether to ask for the next response's status: for a few, or all if in doubt.

        Always true if two workers share requests, since either may fail one.
        """
        self._looks += 1
        is_doubtful = self._upstreams.has_suspects or self._fleet.has_roles
        return is_doubtful or self._looks % REQUESTS_A_LOOK == 0

    def book(self, decision: Decision, now: float, prompt: Prompt | None = None) -> Booking | None:
        """Counts a request on its first pick; returns None if there is none.

        prompt: the one that the computing worker's feed announces once it is computed; None if it
        does not. The request also counts on a prefill worker, until `release` or for twice the
        expected time of the prompt: nothing announces the end there.
        """
        if not decision.pick:
            return None
        self.steered[decision.model] += 1
        if self._legs_over:
            self._end_legs(now)
        prefill = decision.prefill
        if prefill is None:
            return self._begin(decision, decision.uncached_tokens, now, prompt)
        booking = self._begin(decision, 0.0, now, None)
        leg = self._legs[booking] = self._begin(prefill, prefill.uncached_tokens, now, prompt)
        rate = self._rules.cost.prefill_tokens_per_second
        load = self.loads.load(leg.endpoint, now)
        seconds = LEG_SLACK * load.backlog_tokens * load.slowness / rate
        heapq.heappush(self._legs_over, (now + seconds, next(self._leg_numbers), leg))
        return booking

    def _begin(
        self, decision: Decision, uncached: float, now: float, prompt: Prompt | None
    ) -> Booking:
        is_sure = prompt is None or not decision.claims.get(decision.worker, NO_CLAIMS).speculative
        booking = self.loads.begin(
            decision.pick[0], uncached, now, decision.rank, prompt, is_sure=is_sure
        )
        if decision.marks:
            self._claim(booking, decision, decision.worker, now)
        return booking

    def _claim(self, booking: Booking, decision: Decision, worker: str, now: float) -> None:
        """Claims that a worker is about to hold the prompt of a request booked there."""
        holdings, record = self._fleet.holdings(worker), self.sent.record
        claims = self._claims[booking] = [record(holdings, one, now) for one in decision.marks]
        if self._telling is not None:
            self._telling.begun(claims, booking.endpoint, booking.uncached_tokens)

    def note(self, decision: Decision, now: float) -> Booking | None:
        """Books an unsteered request on no endpoint, until `found`; None if there is no pick."""
        if not decision.pick:
            return None
        return self.loads.begin(NOWHERE, decision.uncached_tokens, now)

    def found(
        self, booking: Booking, decision: Decision, worker: str, endpoint: str, now: float
    ) -> None:
        """Books an unsteered request on the worker to which it went.

        Its uncached tokens there are those that this worker lacked at the decision.
        """
        uncached = decision.weighed_tokens - decision.claims.get(worker, NO_CLAIMS).saved
        if endpoint == booking.endpoint or not self.loads.move(booking, endpoint, now, uncached):
            return
        self._withdraw(self._claims.pop(booking, []))
        if decision.marks:
            self._claim(booking, decision, worker, now)

    def _end_legs(self, now: float) -> None:
        """Ends the load of prompts that are assumed to be computed."""
        while self._legs_over and self._legs_over[0][0] <= now:
            self.loads.end(heapq.heappop(self._legs_over)[2], now)

    def move(self, booking: Booking, worker: str, endpoint: str, now: float) -> None:
        """Moves a request to the worker that serves it instead of the picked one.

        Changes nothing if it is booked on that worker already, or has ended.
        """
        if endpoint == booking.endpoint or not self.loads.move(booking, endpoint, now):
            return
        claims = self._claims.get(booking, [])
        self._withdraw(claims)
        holdings = self._fleet.holdings(worker)
        claims[:] = [self.sent.record(holdings, claim.marks, now) for claim in claims]
        if self._telling is not None:
            self._telling.begun(claims, endpoint, booking.uncached_tokens)

    def answered(self, booking: Booking, status: int, served: str, now: float) -> float | None:
        """Notes that a response began; returns what `Outlier.answered` does.

        A worker that answers with an error stores nothing; the request is in flight until released.
        served: the endpoint that answered, "" if the proxy does not name it.
        """
        leg = self._legs.get(booking)
        if status >= FIRST_FAILURE:
            self.disclaim(booking)
        if leg is not None:  # if one of the two is failing, it also fails with other partners
            self._upstreams.answered(leg.endpoint, status, now)
            if status >= FIRST_SERVER_ERROR:
                # only its health check clears it: an answer may be older than the fault
                self._upstreams.doubt(leg.endpoint, is_doubted=True)
                for endpoint in (leg.endpoint, booking.endpoint):
                    self._upstreams.failed_half(endpoint)
        if served not in ("", booking.endpoint):
            return None  # not a known worker: otherwise the request would have been moved there
        if served:
            self._upstreams.doubt(served, is_doubted=False)
        return self._upstreams.answered(booking.endpoint, status, now)

    def disclaim(self, booking: Booking) -> None:
        """Withdraws the claim that a worker holds the request's prompt."""
        for one in (booking, self._legs.get(booking)):
            self._withdraw(self._claims.pop(one, []) if one is not None else ())

    def _withdraw(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self.sent.withdraw(claim)
            if self._telling is not None:
                self._telling.withdrawn(claim)

    def release(self, booking: Booking, now: float) -> None:
        """Releases the booking of an ended request; a second call changes nothing."""
        leg = self._legs.pop(booking, None)
        if leg is not None:
            self.release(leg, now)
        self.loads.end(booking, now)
        for claim in self._claims.pop(booking, []):
            self.sent.end(claim, now)
            if self._telling is not None:
                self._telling.ended(claim)
