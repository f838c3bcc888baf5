"""The step after the pick: decides the legs of requests, and accounts for the second ones.

A request of one leg is the ledger's alone. Of two legs, the ledger books the answering worker's,
and this step the prefill worker's, which ends with the other one, or before: when the prompt must
be computed by now, since nothing announces that.
"""

import heapq
import itertools
from collections.abc import Sequence

from extproc.config.schema import Config
from extproc.disaggregation.legs import decide_legs, with_source
from extproc.disaggregation.transfer_fields import may_split
from extproc.requests.request import RoutingRequest
from extproc.routing.candidates.sampling import Chance
from extproc.routing.cost.term import Term
from extproc.routing.decide import decide
from extproc.routing.decision import Decision
from extproc.routing.health.statuses import FIRST_SERVER_ERROR, is_uncomputed
from extproc.routing.health.upstreams import Upstreams
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.ledger import Ledger
from extproc.routing.load.endpoint_load import Ticket
from kvstate.overlap import Prompt

# A prompt counts as a prefill worker's load for this multiple of its expected time.
LEG_SLACK = 2.0


class Disaggregator:
    """The second legs of one router's requests. Times are seconds of one monotonic clock.

    changes_bodies: whether a request's body has to say which other worker takes part.
    """

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        upstreams: Upstreams,
    ) -> None:
        self._rules = config.disaggregation
        self.changes_bodies = self._rules.changes_bodies
        self._rate = config.policy.cost.prefill_tokens_per_second
        self._ledger = ledger
        self._upstreams = upstreams
        self._numbers = itertools.count()
        self._over: list[tuple[float, int, Ticket]] = []

    def decide(
        self,
        request: RoutingRequest,
        query: Query,
        snapshot: Snapshot,
        now: float,
        rng: Chance,
        terms: Sequence[Term] = (),
        *,
        has_roles: bool,
    ) -> Decision:
        """Decides where a request goes, and which other workers take part.

        terms: those of enabled features. has_roles: whether any worker takes only a part of
        requests. Where pulls have a price, their source is the feature's to name.
        """
        if has_roles:
            made = decide_legs(request, query, snapshot, self._rules, now, rng, terms)
        else:
            made = decide(request, query, snapshot, now, rng, terms)
        least = self._rules.min_pulled_tokens
        if least is None or self._rules.prices_pulls(has_roles=has_roles):
            return made
        return with_source(query, made, least, snapshot)

    def may_split(self, request: RoutingRequest) -> bool:
        """Returns whether the body of a request can say which other worker takes part."""
        body = None if request.wants_endpoint else request.body
        return may_split(self._rules.connector, request.head.path, body)

    def book(self, decision: Decision, now: float, prompt: Prompt | None = None) -> Ticket | None:
        """Counts a request on its first pick, and on its prefill worker if it has one.

        Arguments and result are those of `Ledger.book`; a prefill worker's feed announces the
        prompt. There it counts for at most twice the expected time of the prompt.
        """
        self._end_computed(now)
        prefill = decision.prefill
        if prefill is None:
            return self._ledger.book(decision, now, prompt)
        ticket = self._ledger.book(decision, now, None, uncached_tokens=0.0)
        if ticket is None:
            return None
        try:
            leg = self._ledger.begin(prefill, prefill.uncached_tokens, now, prompt)
        except BaseException:  # nobody gets the ticket that would release it
            self._ledger.lose(ticket, now)
            raise
        ticket.leg = leg
        load = self._ledger.loads.load(leg.endpoint, now)
        seconds = LEG_SLACK * load.backlog_tokens * load.slowness / self._rate
        heapq.heappush(self._over, (now + seconds, next(self._numbers), leg))
        return ticket

    def _end_computed(self, now: float) -> None:
        """Ends the load of prompts that are assumed to be computed."""
        while self._over and self._over[0][0] <= now:
            self._ledger.loads.end(heapq.heappop(self._over)[2], now)

    def note_answer(self, ticket: Ticket, status: int, now: float) -> None:
        """Notes that a response began: if one of two workers is failing, nobody knows which."""
        leg = ticket.leg
        if leg is None:
            return
        if is_uncomputed(status):
            self._ledger.disclaim(leg)
        self._upstreams.note_answer(leg.endpoint, status, now)
        if status >= FIRST_SERVER_ERROR:
            # only its health check clears it: an answer may be older than the fault
            self._upstreams.doubt(leg.endpoint, is_doubted=True)
            for endpoint in (leg.endpoint, ticket.endpoint):
                self._upstreams.note_failed_half(endpoint)

    def disclaim(self, ticket: Ticket) -> None:
        """Withdraws the claim that the prefill worker holds the request's prompt."""
        leg = ticket.leg
        if leg is not None:
            self._ledger.disclaim(leg)

    def release(self, ticket: Ticket, now: float) -> None:
        """Releases the second leg of an ended request; a second call changes nothing."""
        leg, ticket.leg = ticket.leg, None
        if leg is not None:
            self._ledger.release(leg, now)
