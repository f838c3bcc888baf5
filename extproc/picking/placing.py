"""Placing requests: what a decision looks at, and the books that are kept of those made.

`decide` looks only; `book` counts the request on its endpoint and claims its prompt for its worker,
until `release`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from extproc.config import Config
from extproc.picking.decision import FAILING, Decision, Query, Snapshot, decide
from extproc.picking.decision_terms import one_token
from extproc.picking.eligibility import Worker
from extproc.picking.load import Booking, Loads
from extproc.picking.outliers import Outliers
from extproc.picking.pick import Chance
from extproc.picking.ranks import Ranks
from extproc.picking.rules import policy_of, rules_of
from extproc.picking.sent import Claim, Lifetimes, Sent
from kvstate.overlap import Overlap

# From this status on, the worker did not compute the prompt, or not to its end.
FIRST_FAILURE = 400

# Why an endpoint gets no new requests that is to be taken away.
DRAINING = "draining"


class Placing:
    """One router's books. Times are seconds of one monotonic clock.

    secret: 64 random bits of this process. block_size: of a worker, in tokens, by its name.
    """

    def __init__(
        self, config: Config, secret: int, block_size: Callable[[str], int] = one_token
    ) -> None:
        self._block_size = block_size
        policy = config.policy
        self.loads = Loads(policy.cost.prefill_tokens_per_second)
        self.sent = Sent(
            secret,
            policy.sent_bytes,
            Lifetimes(
                speculative=policy.speculative_ms / 1000,
                approximate=policy.approximate_ms / 1000,
            ),
        )
        # against endpoints, each by who says so: none clears what another one said
        self.draining: set[str] = set()
        self.unfit: dict[str, str] = {}  # why, by scrapes
        self.unhealthy: dict[str, str] = {}  # why, by probes
        self.dead: dict[str, str] = {}  # why, by what made us ask
        self.doubted: set[str] = set()  # others answered in their place
        self.outliers = Outliers()
        self._config = config
        self._rules = rules_of(policy)
        names = (None, *(model.name for model in config.models))
        self._policies = {name: policy_of(config, name, None) for name in names}
        self._ranks: Ranks | None = None
        self._turns: Counter[str | None] = Counter()
        self._claims: dict[Booking, list[Claim]] = {}

    def name_ranks(self, count: Callable[[str], int], may_name: Callable[[], bool]) -> None:
        """Lets requests name the rank that holds most of their prompt, where they may.

        count: ranks of a worker, by its name; 0 where that is not known.
        """
        self._ranks = Ranks(may_name, count, self.loads.work_by_rank)

    def decide(
        self,
        query: Query,
        workers: Sequence[Worker],
        held: Sequence[Mapping[str, Overlap]],
        state: Callable[[str], str],
        now: float,
        rng: Chance,
    ) -> Decision:
        """Places a query; nothing is booked.

        held: for each prompt, the overlap of every worker that holds something of it. state: of a
        worker's feeds, by its name.
        """
        policy = self._policies.get(query.model) if query.policy is None else None
        snapshot = Snapshot(
            workers=workers,
            held=held,
            load=self.loads.load,
            policy=policy or policy_of(self._config, query.model, query.policy),
            turn=self._turns[query.model],
            rules=self._rules,
            sent=self.sent,
            state=state,
            block_size=self._block_size,
            unfit=dict.fromkeys(self.draining, DRAINING) if self.draining else {},
            left_out=self._left_out(now),
            ranks=self._ranks if self._ranks is not None and self._ranks.may_name() else None,
        )
        return decide(query, snapshot, now, rng)

    def down(self, endpoint: str, now: float) -> str:
        """Why an endpoint is taken for down, "" while it is not."""
        for known in (self.unhealthy, self.unfit, self.dead):
            if endpoint in known:
                return known[endpoint]
        return FAILING if self.outliers.is_left_out(endpoint, now) else ""

    def is_doubted(self, endpoint: str) -> bool:
        """Whether the answers to requests speak against an endpoint."""
        return endpoint in self.doubted or self.outliers.is_doubted(endpoint)

    def _left_out(self, now: float) -> Mapping[str, str]:
        """What is known against endpoints now, which are picked only where no other is left."""
        failing = self.outliers.left_out(now)
        if not (failing or self.dead or self.unhealthy):
            return self.unfit
        return {**dict.fromkeys(failing, FAILING), **self.dead, **self.unfit, **self.unhealthy}

    def book(self, decision: Decision, now: float) -> Booking | None:
        """Counts a request on its way to its first pick; None if there is none."""
        self._turns[decision.model] += 1
        if not decision.pick:
            return None
        uncached = decision.uncached_tokens
        booking = self.loads.begin(decision.pick[0], uncached, now, decision.rank)
        claims = [self.sent.record(decision.worker, marks, now) for marks in decision.marks]
        if claims:
            self._claims[booking] = claims
        return booking

    def move(self, booking: Booking, worker: str, endpoint: str, now: float) -> None:
        """The request is served by another worker than the one that was picked.

        Nothing changes where it is served by the one that is booked, or is over.
        """
        if endpoint == booking.endpoint or not self.loads.move(booking, endpoint, now):
            return
        claims = self._claims.get(booking, [])
        for claim in claims:
            self.sent.withdraw(claim)
        claims[:] = [self.sent.record(worker, claim.marks, now) for claim in claims]

    def answered(self, booking: Booking, status: int, served: str, now: float) -> float | None:
        """A response began; what that says of its endpoint, as `Outliers.answered` has it.

        Who answers with an error stores nothing; the request is in flight until it is released.
        served: the endpoint that answered, "" where the proxy does not tell.
        """
        if status >= FIRST_FAILURE:
            self.disclaim(booking)
        if served not in ("", booking.endpoint):
            return None  # none of ours, or it would have been moved there
        if served:
            self.doubted.discard(served)
        return self.outliers.answered(booking.endpoint, status, now)

    def disclaim(self, booking: Booking) -> None:
        """No worker holds the prompt of the request on its account."""
        for claim in self._claims.pop(booking, []):
            self.sent.withdraw(claim)

    def remove(self, worker: str, endpoint: str, now: float) -> None:
        """A worker is gone, and all that is known of it."""
        self.loads.remove(endpoint)
        self.sent.forget(worker, now)
        self.draining.discard(endpoint)
        self.unfit.pop(endpoint, None)
        self.unhealthy.pop(endpoint, None)
        self.dead.pop(endpoint, None)
        self.doubted.discard(endpoint)
        self.outliers.remove(endpoint)

    def release(self, booking: Booking, now: float) -> None:
        """The request is over; releasing it again changes nothing."""
        self.loads.end(booking)
        for claim in self._claims.pop(booking, []):
            self.sent.end(claim, now)
