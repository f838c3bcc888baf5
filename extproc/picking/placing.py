"""Placing requests: what a decision looks at, and the books that are kept of those made.

`decide` looks only; `book` counts the request on its endpoint and claims its prompt for its worker,
until `release`.

Workers that fail: that answer request after request with failures, or do not answer any more.

Who refuses at once has nothing in flight and nothing queued, so to a balancer it looks idle, and
draws what the others could serve. Envoy's own outlier detection does not see to it: the endpoint
that is named to it is used whether it is ejected or not. The same holds for who is dead.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from extproc.config import Config
from extproc.picking.decision import FAILING, Decision, Query, Snapshot, decide, one_token
from extproc.picking.eligibility import Worker
from extproc.picking.load import Booking, Loads
from extproc.picking.policies import Chance, Ranks, policy_of
from extproc.picking.sent import Claim, Lifetimes, Sent
from kvstate.overlap import Overlap

# Failures in a row, with no other answer between; as many as Envoy's outlier detection asks for.
FAILURES_UNTIL_LEFT_OUT = 5

# How long it is left out the first time; twice as long whenever it fails again right afterwards.
LEFT_OUT_SECONDS = 1.0
MAX_LEFT_OUT_SECONDS = 30.0

# From the last failure on: then it was long ago, and counts for nothing.
FORGET_SECONDS = 90.0

# As long as nothing fails, one request in so many has its response's status shown to us.
REQUESTS_A_LOOK = 8

# With requests under way, a worker that gives no sign of life for so long is asked whether it is
# well; and so long after an answer it may be asked again, if the reason is still there.
SILENT_SECONDS = 0.5
ASKED_AGAIN_SECONDS = 0.75

# So soon after a question that it did not answer.
RETRY_SECONDS = 0.25

# Failures in a row that leave it out, where one alone proves nothing.
FAILURES_UNTIL_DEAD = 2

_TOO_MANY_REQUESTS = 429
_FIRST_SERVER_ERROR = 500


@dataclass(slots=True)
class _Record:
    failures: int = 0
    last_at: float = 0.0
    left_out: int = 0
    until: float = 0.0


class Outliers:
    """The endpoints that failed lately. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._requests = 0

    def wants_status(self) -> bool:
        """Whether the next request's response is worth a look: one in a few, or all in doubt."""
        self._requests += 1
        return bool(self._records) or self._requests % REQUESTS_A_LOOK == 0

    def answered(self, endpoint: str, status: int, now: float) -> float | None:
        """Takes a response's status: 429 and 5xx are failures, any other comes of a sound worker.

        For how many seconds its endpoint is left out from now on; 0 if it was, and is no more; None
        if nothing changed.
        """
        if status < _FIRST_SERVER_ERROR and status != _TOO_MANY_REQUESTS:
            known = self._records.pop(endpoint, None)
            return 0.0 if known is not None and known.left_out else None
        record = self._records.setdefault(endpoint, _Record())
        record.failures += 1
        record.last_at = now
        if record.failures < FAILURES_UNTIL_LEFT_OUT or now < record.until:
            return None
        seconds = min(MAX_LEFT_OUT_SECONDS, LEFT_OUT_SECONDS * 2.0**record.left_out)
        record.left_out += 1
        record.until = now + seconds
        return seconds

    def left_out(self, now: float) -> Collection[str]:
        """The endpoints that are left out now."""
        if not self._records:
            return ()
        for endpoint in [one for one, record in self._records.items() if _is_over(record, now)]:
            del self._records[endpoint]
        return [one for one in self._records if self.is_left_out(one, now)]

    def is_left_out(self, endpoint: str, now: float) -> bool:
        """Whether this one is."""
        record = self._records.get(endpoint)
        return record is not None and now < record.until

    def is_doubted(self, endpoint: str) -> bool:
        """Whether its last answer that was looked at was a failure."""
        return endpoint in self._records

    def remove(self, endpoint: str) -> None:
        """A worker is gone, and all that is known of it."""
        self._records.pop(endpoint, None)


def _is_over(record: _Record, now: float) -> bool:
    return now - record.last_at > FORGET_SECONDS


class Pulse(NamedTuple):
    """What shows whether a worker lives.

    is_cut: its feed has no connection. batches: that came of its feed so far. in_flight: requests
    under way. is_doubted: its answers fail, or others answer in its place.
    """

    is_cut: bool = False
    batches: int = 0
    in_flight: int = 0
    is_doubted: bool = False


@dataclass(slots=True)
class _Vital:
    alive_at: float
    batches: int
    due_at: float = 0.0
    failures: int = 0
    is_asked: bool = False
    is_dead: bool = False


class Vitals:
    """Which endpoints are to be asked whether they live, and which do not.

    A worker is asked only for a reason, so a sound fleet is asked nothing. Times are seconds of one
    monotonic clock.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Vital] = {}

    def __len__(self) -> int:
        """Endpoints of which something is known."""
        return len(self._known)

    def is_due(self, endpoint: str, pulse: Pulse, now: float) -> bool:
        """Whether it is to be asked now; then `alive` or `failed` is to follow."""
        known = self._known.get(endpoint)
        if known is None:
            known = self._known[endpoint] = _Vital(now, pulse.batches)
        if not pulse.in_flight or pulse.batches != known.batches:
            known.alive_at, known.batches = now, pulse.batches
        is_silent = now - known.alive_at > SILENT_SECONDS
        has_reason = known.is_dead or pulse.is_cut or pulse.is_doubted or is_silent
        if known.is_asked or now < known.due_at or not has_reason:
            return False
        known.is_asked = True
        return True

    def alive(self, endpoint: str, now: float) -> bool:
        """It answered; whether it was taken for dead."""
        known = self._known.get(endpoint)
        if known is None:  # it is gone meanwhile
            return False
        was_dead, known.is_dead = known.is_dead, False
        known.is_asked, known.failures = False, 0
        known.alive_at, known.due_at = now, now + ASKED_AGAIN_SECONDS
        return was_dead

    def failed(self, endpoint: str, now: float, *, is_certain: bool) -> bool:
        """It did not answer as it should; whether it is taken for dead from now on.

        is_certain: this one failure proves it.
        """
        known = self._known.get(endpoint)
        if known is None:
            return False
        known.is_asked, known.due_at = False, now + RETRY_SECONDS
        known.failures += 1
        if known.is_dead or not (is_certain or known.failures >= FAILURES_UNTIL_DEAD):
            return False
        known.is_dead = True
        return True

    def keep(self, endpoints: Collection[str]) -> None:
        """Forgets all others."""
        for endpoint in self._known.keys() - set(endpoints):
            del self._known[endpoint]


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
        self._rules = policy
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
