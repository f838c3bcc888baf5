"""Placing requests: what a decision looks at, and the books that are kept of those made.

`decide` looks only; `book` counts the request on its endpoint and claims its prompt for its worker,
until `release`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from extproc.config import Config
from extproc.picking.decision import Decision, Query, Snapshot, decide
from extproc.picking.eligibility import Worker
from extproc.picking.load import Booking, Loads
from extproc.picking.pick import Chance
from extproc.picking.rules import policy_of, rules_of
from extproc.picking.sent import Claim, Lifetimes, Sent
from kvstate.overlap import Overlap, Prompt

Overlaps = Callable[[Prompt], Mapping[str, Overlap]]


class Placing:
    """One router's books. Times are seconds of one monotonic clock.

    secret: 64 random bits of this process.
    """

    def __init__(self, config: Config, secret: int) -> None:
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
        self.unfit: dict[str, str] = {}  # why, by endpoint: draining, failing a probe
        self._config = config
        self._rules = rules_of(policy)
        self._turns: Counter[str | None] = Counter()
        self._claims: dict[Booking, list[Claim]] = {}

    def decide(
        self,
        query: Query,
        workers: Sequence[Worker],
        overlaps: Overlaps,
        state: Callable[[str], str],
        now: float,
        rng: Chance,
    ) -> Decision:
        """Places a query; nothing is booked.

        state: of a worker's feeds, by its name.
        """
        snapshot = Snapshot(
            workers=workers,
            overlaps=overlaps,
            load=self.loads.load,
            policy=policy_of(self._config, query.model, query.policy),
            turn=self._turns[query.model],
            rules=self._rules,
            sent=self.sent,
            state=state,
            unfit=self.unfit,
        )
        return decide(query, snapshot, now, rng)

    def book(self, decision: Decision, now: float) -> Booking | None:
        """Counts a request on its way to its first pick; None if there is none."""
        self._turns[decision.model] += 1
        if not decision.pick:
            return None
        booking = self.loads.begin(decision.pick[0], decision.uncached_tokens, now)
        claims = [self.sent.record(decision.worker, marks, now) for marks in decision.marks]
        if claims:
            self._claims[booking] = claims
        return booking

    def move(self, booking: Booking, worker: str, endpoint: str, now: float) -> None:
        """The request is served by another worker than the one that was picked."""
        self.loads.move(booking, endpoint, now)
        claims = self._claims.get(booking, [])
        for claim in claims:
            self.sent.withdraw(claim)
        claims[:] = [self.sent.record(worker, claim.marks, now) for claim in claims]

    def release(self, booking: Booking, now: float) -> None:
        """The request is over; releasing it again changes nothing."""
        self.loads.end(booking)
        for claim in self._claims.pop(booking, []):
            self.sent.end(claim, now)
