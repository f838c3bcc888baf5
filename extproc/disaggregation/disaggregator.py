"""The step after the pick: decides the legs of requests, and accounts for the second ones.

A request of one leg is the placing's alone. Of two legs, the placing books the answering worker's,
and this step the prefill worker's, which ends with the other one, or before: when the prompt must
be computed by now, since nothing announces that.
"""

import heapq
import itertools
from collections.abc import Callable, Mapping

from extproc.config.schema import Config
from extproc.disaggregation.legs import decide_legs, with_source
from extproc.disaggregation.pulling import (
    IDLE_TOKENS,
    Pull,
    Pulling,
    nothing_on_host,
    with_priced_source,
)
from extproc.routing.decision import Decision, decide
from extproc.routing.load import Booking
from extproc.routing.placing import Placing
from extproc.routing.query import Query, Snapshot
from extproc.routing.sampling import Chance
from extproc.routing.statuses import FIRST_SERVER_ERROR, is_uncomputed
from extproc.routing.upstreams import Upstreams
from kvstate.overlap import Prompt

# A prompt counts as a prefill worker's load for this multiple of its expected time.
LEG_SLACK = 2.0


class Disaggregator:
    """The second legs of one router's requests. Times are seconds of one monotonic clock.

    on_host: returns how many first tokens of a prompt each worker has in host memory, by name.

    pulls: whether a worker may pull a part of a prompt from another one. legs: the bookings of
    prefill workers, by those of the workers that answer.
    """

    def __init__(
        self,
        config: Config,
        placing: Placing,
        upstreams: Upstreams,
        on_host: Callable[[Prompt], Mapping[str, int]] = nothing_on_host,
    ) -> None:
        self._rules = config.disaggregation
        self._rate = config.policy.cost.prefill_tokens_per_second
        self._placing = placing
        self._upstreams = upstreams
        self.pulls = self._rules.min_pulled_tokens is not None
        prices = self._rules.price_pulls
        self._pulling = Pulling(config, placing.loads, on_host) if prices else None
        self.legs: dict[Booking, Booking] = {}
        self._numbers = itertools.count()
        self._over: list[tuple[float, int, Booking]] = []

    def decide(
        self, query: Query, snapshot: Snapshot, now: float, rng: Chance, *, has_roles: bool
    ) -> Decision:
        """Decides where a query goes, and which other workers take part.

        has_roles: whether any worker takes only a part of requests.
        """
        pulling = None if has_roles else self._pulling
        if pulling is not None:
            return with_priced_source(decide(query, pulling.offer(query, snapshot, now), now, rng))
        if has_roles:
            made = decide_legs(query, snapshot, self._rules, now, rng)
        else:
            made = decide(query, snapshot, now, rng)
        least = self._rules.min_pulled_tokens
        return made if least is None else with_source(query, made, least, snapshot.ejected)

    def book(self, decision: Decision, now: float, prompt: Prompt | None = None) -> Booking | None:
        """Counts a request on its first pick, and on its prefill worker if it has one.

        Arguments and result are those of `Placing.book`; a prefill worker's feed announces the
        prompt. There it counts for at most twice the expected time of the prompt.
        """
        self._end_computed(now)
        prefill = decision.prefill
        if prefill is None:
            return self._placing.book(decision, now, prompt)
        booking = self._placing.book(decision, now, None, uncached_tokens=0.0)
        if booking is None:
            return None
        leg = self._placing.begin(prefill, prefill.uncached_tokens, now, prompt)
        self.legs[booking] = leg
        load = self._placing.loads.load(leg.endpoint, now)
        seconds = LEG_SLACK * load.backlog_tokens * load.slowness / self._rate
        heapq.heappush(self._over, (now + seconds, next(self._numbers), leg))
        return booking

    def begin_pull(self, decision: Decision, now: float) -> Pull | None:
        """Notes the pull of a request that will be booked next.

        Returns it if it can be measured.
        """
        source, pulling = decision.source, self._pulling
        if source is None or pulling is None:
            return None
        queue = self._placing.loads.load(decision.pick[0], now).backlog_tokens
        pull = pulling.begin(source, decision.pick[0], now)
        return None if queue > IDLE_TOKENS else pull

    def _end_computed(self, now: float) -> None:
        """Ends the load of prompts that are assumed to be computed."""
        while self._over and self._over[0][0] <= now:
            self._placing.loads.end(heapq.heappop(self._over)[2], now)

    def note_answer(self, booking: Booking, status: int, now: float) -> None:
        """Notes that a response began: if one of two workers is failing, nobody knows which."""
        leg = self.legs.get(booking)
        if leg is None:
            return
        if is_uncomputed(status):
            self._placing.disclaim(leg)
        self._upstreams.note_answer(leg.endpoint, status, now)
        if status >= FIRST_SERVER_ERROR:
            # only its health check clears it: an answer may be older than the fault
            self._upstreams.doubt(leg.endpoint, is_doubted=True)
            for endpoint in (leg.endpoint, booking.endpoint):
                self._upstreams.note_failed_half(endpoint)

    def disclaim(self, booking: Booking) -> None:
        """Withdraws the claim that the prefill worker holds the request's prompt."""
        leg = self.legs.get(booking)
        if leg is not None:
            self._placing.disclaim(leg)

    def release(self, booking: Booking, now: float) -> None:
        """Releases the second leg of an ended request; a second call changes nothing."""
        leg = self.legs.pop(booking, None)
        if leg is not None:
            self._placing.release(leg, now)
