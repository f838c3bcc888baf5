"""The ledger: what one router has under way, and the snapshots that follow from it.

For a decision it makes a snapshot, which changes nothing. For a request that was decided it has one
ticket, whose life is its methods here:

    book or note    counts it on its worker, or nowhere until the proxy's choice is known
    move            another worker serves it than the picked one
    note_answer     its response began, maybe with a failure
    disclaim        its worker did not compute its prompt
    lose            no known worker serves it
    release         it is over; again changes nothing

A request that is booked on a worker has load there, claims its prompts for it, and has its
conversation at home there. It has no clock and no sockets; times are arguments, in seconds of one
monotonic clock.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from extproc.config.schema import Config
from extproc.requests.request import RoutingRequest
from extproc.requests.request_class import RequestClass
from extproc.routing.candidates.eligibility import Candidate, Roster
from extproc.routing.candidates.pins import RankChoice
from extproc.routing.candidates.ranks import Ranks
from extproc.routing.candidates.sampling import sample_size
from extproc.routing.claims.claim_table import Claim, ClaimTable, Holdings, Lifetimes
from extproc.routing.claims.homes import NO_TURN, Homes, Turn
from extproc.routing.claims.lines import Lines
from extproc.routing.decision import Decision
from extproc.routing.health.statuses import is_uncomputed
from extproc.routing.health.upstreams import Upstreams
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.endpoint_load import Ticket
from extproc.routing.load.loads import Load, Loads
from extproc.routing.policy_choice import policy_of
from extproc.routing.savings.belonging import RESPONSE
from kvstate.overlap import Overlap, Prompt

# Why an endpoint that is about to be removed gets no new requests.
DRAINING = "draining"

# While nothing fails, the router asks for the response status of one request in this many.
REQUESTS_A_LOOK = 8

# The endpoint of an unsteered request until it is known who serves it.
NOWHERE = ""


class LedgerFleet(Protocol):
    """What the ledger needs of the workers, each by its name."""

    @property
    def upstreams(self) -> Upstreams:
        """The records of their endpoints."""

    @property
    def loads(self) -> Loads:
        """Reads and updates the load in these."""

    @property
    def has_roles(self) -> bool:
        """Whether any worker takes only a part of requests."""

    def draining(self) -> set[str]:
        """Returns the draining endpoints, which get no new requests."""

    def holdings(self, name: str) -> Holdings:
        """Returns the record of what was sent to a worker."""

    def endpoint(self, name: str) -> str:
        """Returns a worker's ip:port, "" for an unknown worker."""

    def block_size(self, name: str) -> int:
        """Returns the number of tokens in a worker's block."""

    def ranks(self, name: str) -> int:
        """Returns how many ranks a worker has; 0 if unknown."""

    def rank_choice(self, name: str, path: str, *, writes_body: bool) -> RankChoice:
        """Returns how a request on a path may name a rank of a worker.

        writes_body: whether the request's body may be changed.
        """


class ClaimReporter(Protocol):
    """Reports to other routers which requests were sent where."""

    @property
    def touched(self) -> set[str]:
        """The endpoints whose requests changed."""

    @property
    def secret(self) -> int:
        """The common key of these routers' marks."""

    def begin(self, claims: Sequence[Claim], endpoint: str, uncached_tokens: float) -> None:
        """Reports that a request was sent to an endpoint, the pick or another that serves it."""

    def end(self, claim: Claim) -> None:
        """Reports that the request has ended."""

    def withdraw(self, claim: Claim) -> None:
        """Reports that the request never reached its worker."""

    def note_turn(self, turn: Turn, endpoint: str) -> None:
        """Reports that a conversation's request was sent to an endpoint; see `Homes.turn`."""

    def note_home(self, key: int, endpoint: str) -> None:
        """Reports that what has this key belongs to an endpoint; see `Homes.note`."""

    def note_not_computed(self, keys: Sequence[int], endpoint: str) -> None:
        """Reports that a conversation's request was not computed at an endpoint."""


class Ledger:
    """One router's accounts of its requests. Times are seconds of one monotonic clock.

    fleet: the workers, whose records are updated here. secret: 64 random bits of this process.
    reporter: reports every claim to other routers, None if routers do not share. steered: steered
    requests, by model.
    """

    def __init__(
        self, config: Config, secret: int, fleet: LedgerFleet, reporter: ClaimReporter | None = None
    ) -> None:
        self.fleet = fleet
        self._reporter = reporter
        secret = secret if reporter is None else reporter.secret
        self._upstreams = fleet.upstreams
        policy = config.policy
        self.loads = fleet.loads
        self.claims = ClaimTable(
            secret,
            policy.sent_bytes,
            Lifetimes(
                speculative=policy.speculative_ms / 1000,
                approximate=policy.approximate_ms / 1000,
            ),
        )
        self.homes = Homes(secret)
        most = policy.hold.max_requests
        most_of_tenant = most if config.isolation is None else max(1, most // 2)
        self.lines = Lines(secret, policy.hold.bound_seconds, most, most_of_tenant)
        self._config = config
        self._rules = policy
        self._samples = [sample_size(policy, is_alone=is_alone) for is_alone in (False, True)]
        self.steered: Counter[str | None] = Counter()
        self._looks = 0
        self._usual: dict[str | None, Snapshot] = {}

    def snapshot(
        self,
        request: RoutingRequest,
        query: Query,
        workers: Sequence[Candidate],
        held: Sequence[Mapping[str, Overlap]],
        state: Callable[[str], str],
        now: float,
        ranks: Ranks | None = None,
        *,
        may_split: bool = True,
    ) -> Snapshot:
        """Returns what a decision depends on, as it is now.

        held: for each prompt, the overlaps of the workers that hold a part of it. state: returns
        the state of a worker's feeds, by its name. ranks: the workers', as `ranks` returns them.
        may_split: whether two workers may share the request.
        """
        model, sample = query.model, self._samples[not self.loads.routers]
        usual = self._usual.get(model)
        if usual is None or usual.workers is not workers:
            usual = self._usual[model] = self._usual_snapshot(model, workers)
        draining, turn = self.fleet.draining(), self.steered[model]
        named, of_class = request.head.policy, request.of_class
        is_plain = named is None and of_class is None and ranks is None
        if is_plain and not (draining or self._upstreams.has_bad):  # most requests end here
            return replace(
                usual, overlaps=held, turn=turn, state=state, sample=sample, may_split=may_split
            )
        policy = usual.policy
        if named is not None:
            policy = policy_of(self._config, model, named)
        return replace(
            usual,
            overlaps=held if ranks is None else [ranks.held(one) for one in held],
            load=self._load_for(of_class),
            policy=policy,
            turn=turn,
            state=state,
            unfit=dict.fromkeys(draining, DRAINING),
            ejected=self._upstreams.ejections(now),
            doubted=self._upstreams.doubts(),
            ranks=ranks,
            sample=sample,
            may_split=may_split,
            columns=self.loads.columns if of_class is None else None,
        )

    def _usual_snapshot(self, model: str | None, workers: Sequence[Candidate]) -> Snapshot:
        """Returns what decisions for a model have in common while its workers are the same."""
        return Snapshot(
            workers=workers,
            overlaps=(),
            load=self.loads.load,
            policy=policy_of(self._config, model, None),
            turn=0,
            rules=self._rules,
            claims=self.claims,
            block_size=self.fleet.block_size,
            roster=Roster(workers),
            homes=self.homes,
            records=[self.fleet.holdings(worker.name) for worker in workers],
            columns=self.loads.columns,
        )

    def _load_for(self, of_class: RequestClass | None) -> Callable[[str, float], Load]:
        """Returns the function that reads an endpoint's load for requests of a class."""
        if of_class is None:
            return self.loads.load
        return partial(self.loads.load_of_level, of_class.level)

    def ranks(self, path: str, *, writes_body: bool) -> Ranks:
        """Returns the workers' ranks for a request on a path.

        writes_body: whether the request's body may be changed.
        """
        fleet = self.fleet

        def choice(worker: str) -> RankChoice:
            return fleet.rank_choice(worker, path, writes_body=writes_body)

        return Ranks(fleet.ranks, self.loads.work_by_rank, choice, path)

    def wants_status(self) -> bool:
        """Returns whether to ask for the next response's status: for a few, or all if in doubt.

        With roles it is true for all: either of the two workers of a request may fail it.
        """
        self._looks += 1
        is_doubtful = self._upstreams.has_suspects or self.fleet.has_roles
        return is_doubtful or self._looks % REQUESTS_A_LOOK == 0

    def book(
        self,
        decision: Decision,
        now: float,
        prompt: Prompt | None = None,
        uncached_tokens: float | None = None,
    ) -> Ticket | None:
        """Counts a request on its first pick; returns None if there is none.

        prompt: the one that the worker's feed announces once it is computed; None if it does not.
        uncached_tokens: those that the worker computes, None for the decision's.
        """
        if not decision.pick:
            return None
        self.steered[decision.model] += 1
        if uncached_tokens is None:
            uncached_tokens = decision.uncached_tokens
        return self.begin(decision, uncached_tokens, now, prompt)

    def begin(
        self, decision: Decision, uncached: float, now: float, prompt: Prompt | None
    ) -> Ticket:
        """Books one leg of a request on its first pick, and claims its prompt for that worker."""
        level = None if decision.of_class is None else decision.of_class.level
        is_sure = prompt is None or not decision.basis.claims_on(decision.worker).speculative
        ticket = self.loads.begin(
            decision.pick[0], uncached, now, decision.rank, prompt, is_sure=is_sure, level=level
        )
        try:
            self._claim(ticket, decision, decision.worker, now)
        except BaseException:  # nobody gets the ticket that would release it
            self.loads.end(ticket, now)
            raise
        return ticket

    def _claim(self, ticket: Ticket, decision: Decision, worker: str, now: float) -> None:
        """Claims that a worker is about to hold the prompt of a request booked there."""
        turn = decision.basis.belonging.turn
        if not (decision.marks or turn.keys):
            return
        holdings, record = self.fleet.holdings(worker), self.claims.record
        ticket.turn = turn
        self._note_turn(ticket, holdings, now)
        marks = decision.marks
        if len(marks) == 1:  # the usual case
            claims: Sequence[Claim] = (record(holdings, marks[0], now),)
        else:
            claims = tuple([record(holdings, one, now) for one in marks])
        ticket.claims = claims
        if holdings.is_blind:
            basis = decision.basis
            there = basis.claims_on(worker).approximate
            holdings.fill(max(0.0, basis.weighed_tokens - there), now)
        if self._reporter is not None:
            self._reporter.begin(claims, ticket.endpoint, ticket.uncached_tokens)

    def _note_turn(self, ticket: Ticket, holdings: Holdings, now: float) -> None:
        """Notes that a request's conversation is where the request is booked."""
        if not ticket.turn.keys:
            return
        self.homes.turn(ticket.turn, holdings, now)
        if self._reporter is not None:
            self._reporter.note_turn(ticket.turn, ticket.endpoint)

    def note(self, decision: Decision, now: float) -> Ticket | None:
        """Books an unsteered request nowhere, until `note_worker`; None if there is no pick."""
        if not decision.pick:
            return None
        level = None if decision.of_class is None else decision.of_class.level
        return self.loads.begin(NOWHERE, decision.uncached_tokens, now, level=level)

    def note_worker(
        self, ticket: Ticket, decision: Decision, worker: str, endpoint: str, now: float
    ) -> None:
        """Books an unsteered request on the worker to which it went.

        Its uncached tokens there are those that this worker lacked at the decision.
        """
        uncached = decision.basis.weighed_tokens - decision.basis.claims_on(worker).saved
        if endpoint == ticket.endpoint or not self.loads.move(ticket, endpoint, now, uncached):
            return
        self.disclaim(ticket)
        self._claim(ticket, decision, worker, now)

    def move(self, ticket: Ticket, worker: str, endpoint: str, now: float) -> None:
        """Moves a request to the worker that serves it instead of the picked one.

        Changes nothing if it is booked on that worker already, or has ended.
        """
        if endpoint == ticket.endpoint or not self.loads.move(ticket, endpoint, now):
            return
        self._withdraw(ticket.claims)
        holdings = self.fleet.holdings(worker)
        ticket.turn = replace(ticket.turn, follows=0)  # it counts at the picked worker now
        self._note_turn(ticket, holdings, now)
        record = self.claims.record
        ticket.claims = tuple([record(holdings, claim, now) for claim in ticket.claims])
        if self._reporter is not None:
            self._reporter.begin(ticket.claims, endpoint, ticket.uncached_tokens)

    def note_answer(self, ticket: Ticket, status: int, served: str, now: float) -> float | None:
        """Notes that a response began; returns what `Upstreams.note_answer` does.

        If the status shows that the prompt was not computed, its claim is withdrawn. The request is
        in flight until released.
        served: the endpoint that answered, "" if the proxy does not name it.
        """
        if is_uncomputed(status):
            self.disclaim(ticket)
        if served not in ("", ticket.endpoint):
            return None  # not a known worker: otherwise the request would have been moved there
        if served:
            self._upstreams.doubt(served, is_doubted=False)
        return self._upstreams.note_answer(ticket.endpoint, status, now)

    def note_response(self, worker: str, response: str, now: float) -> None:
        """Notes that a worker keeps the response with an id: others cannot continue it."""
        key = self.homes.key(RESPONSE, None, None, response)
        self.homes.note((key,), self.fleet.holdings(worker), now)
        endpoint = self.fleet.endpoint(worker)
        if self._reporter is not None and endpoint:
            self._reporter.note_home(key, endpoint)

    def disclaim(self, ticket: Ticket) -> None:
        """Withdraws the claim that a worker holds the request's prompt; older claims stay."""
        claims, keys = ticket.claims, ticket.turn.keys
        ticket.claims, ticket.turn = (), NO_TURN
        self._withdraw(claims)
        self.homes.forget(keys)
        if self._reporter is not None and keys:
            self._reporter.note_not_computed(keys, ticket.endpoint)

    def lose(self, ticket: Ticket, now: float) -> None:
        """Ends the load of a request that no known worker serves, and withdraws its claims."""
        self.disclaim(ticket)
        self.loads.end(ticket, now)

    def _withdraw(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self.claims.withdraw(claim)
            if self._reporter is not None:
                self._reporter.withdraw(claim)

    def release(self, ticket: Ticket, now: float) -> None:
        """Releases what an ended request began; a second call changes nothing."""
        self.loads.end(ticket, now)
        claims, ticket.claims, ticket.turn = ticket.claims, (), NO_TURN
        for claim in claims:
            self.claims.end(claim, now)
            if self._reporter is not None:
                self._reporter.end(claim)
