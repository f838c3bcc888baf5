"""Decides who waits for room in the caches, and who goes on; without clock, tasks or sockets.

Once the contexts of live conversations exceed the caches, each turn evicts another conversation,
and all of them compute their whole prompts again. Fewer at a time finish sooner, all of them: so a
request of which no worker holds half of what is its own waits until there is room, and what is
resident goes on at once. `extproc.routing.claims.line` has the order.

Nobody waits where it is not known what lives: the tokens of a request, the feeds of all workers of
its model, or the size of a cache. Nor does what would fill little, such as a sub-agent that goes on
from a prompt that is held: its parent may wait for it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import ceil, inf

from extproc.config.sections import HoldSettings
from extproc.features.holding.limit import Limit
from extproc.requests.request_class import RequestClass
from extproc.routing.claims.claim_table import Holdings
from extproc.routing.claims.homes import Homes
from extproc.routing.claims.line import Line, Place
from extproc.routing.claims.lines import Lines
from extproc.routing.claims.occupancy import Occupancy, occupancy_of
from extproc.routing.decision import Decision, Verdict
from extproc.routing.recomputed import EVICTED, recomputed_tokens

# What fills less of a cache goes on at once.
LEAST_TOKENS = 1_024.0

# Once this share of what live conversations may fill is free, the first goes on, however much it
# needs: that much may not be free as long as others come and go.
ENOUGH_SHARE = 0.5

# Of the conversations that fit into the caches, the share that goes on once in `bound_seconds`
# although there is no room, because it has waited for as long.
OVERFLOW_SHARE = 0.1

# For so long what is known counts although a feed, or another router, is not heard: a worker that
# died is left out by then, and a feed that was cut is live again.
BRIEF_SECONDS = 10.0

# How waits end: there was room; the request went on without, at the bound or since the router
# stops; or it is refused.
LET_IN, PLACED, REFUSED = "let_in", "placed", "refused"

# Returns the records of a model's workers that may answer; None if a feed of theirs is not live.
Records = Callable[[str], Iterable[Holdings] | None]


class Hold:
    """Those who wait, by model; times are seconds of the ledger's clock.

    records: of the workers. homes: where conversations are. lines: who waits, of all routers.
    """

    def __init__(self, rules: HoldSettings, records: Records, homes: Homes, lines: Lines) -> None:
        self._rules = rules
        self._classes = frozenset(rules.classes)
        self._records = records
        self._homes = homes
        self._lines = lines
        self._limits: dict[str, Limit] = {}
        self._known: dict[str, tuple[Occupancy, float]] = {}  # the last, and when it was known
        self._entering: defaultdict[str, float] = defaultdict(float)  # let in, not booked yet
        self._overflow: dict[str, tuple[float, float]] = {}  # how many may go on, and since when

    def __len__(self) -> int:
        """Returns how many places there are, empty ones included."""
        return len(self._lines)

    def waiting(self) -> dict[str, int]:
        """Returns how many wait at this router, by model."""
        found = {model: self._lines.find(model) for model in self._limits}
        return {model: 0 if line is None else len(line) for model, line in found.items()}

    def place_of(self, decision: Decision, now: float) -> Place | None:
        """Returns the place of a request that has to wait, None if it goes on at once.

        `NO_PLACE` if too many wait.
        """
        model, belonging = decision.model or "", decision.basis.belonging
        if belonging.turn.end is None:  # its tokens are not known, and its model may be none
            return None
        why, tokens = recomputed_tokens(decision)
        evicted = tokens if why == EVICTED else 0.0
        self.limit(model).note(decision.basis.weighed_tokens, evicted, now)
        own = self._own_tokens(decision)
        if own < LEAST_TOKENS or not self._may_wait(decision.of_class):
            return None
        occupancy = self._occupancy(model, now)
        if occupancy is None:
            return None
        need, counted = max(own, occupancy.usual), belonging.counted
        free = self._free(model, occupancy)
        names = self._names(model)
        if counted is not None and (not names or belonging.home in names):
            free += counted.own
        if need <= free and not self._is_awaited(model):
            return None
        line = self._lines.of(model)
        level = 0 if decision.of_class is None else decision.of_class.level
        tenant = self._lines.tenant_key(str(decision.tenant or ""))
        key, follows = belonging.turn.keys[0], belonging.turn.follows
        self._homes.pause(follows)  # what it held is lost
        return line.join(key, need, level, tenant, now, follows)

    def step(self, now: float) -> Iterator[tuple[str, Place, str]]:
        """Yields each wait that ends now: model, place, and how it ends.

        To be called ten times a second or so; requests that were let in have been booked by the
        next call.
        """
        self._entering.clear()
        for model, line in self._lines.each():
            occupancy = self._occupancy(model, now)
            # where it is not known any more what lives, nobody waits
            free = most = inf
            if occupancy is not None:
                free = self._free(model, occupancy)
                most = ENOUGH_SHARE * self._lines.limit(model) * occupancy.room
            for place in line.let_in(free, most):
                self._entering[model] += place.tokens
                yield model, place, LET_IN
            for place in line.overdue(now):
                yield model, place, self._ended(model, line, place, occupancy, now)
        self._lines.tidy()

    def _ended(
        self, model: str, line: Line, place: Place, occupancy: Occupancy | None, now: float
    ) -> str:
        """Ends a wait at its bound: a few go on, the others are refused, and keep their places."""
        if occupancy is None or self._may_overflow(model, occupancy, now):
            line.remove(place)
            return PLACED
        line.leave(place, now)
        return REFUSED

    def go_on(self, share: float) -> Iterator[tuple[str, Place, str]]:
        """Yields what `step` does, for the first of each line, whatever room there is.

        share: of those that wait, rounded up.
        """
        for model, line in self._lines.each():
            for place in list(islice(line.waiting(), ceil(share * len(line)))):
                line.remove(place)
                yield model, place, PLACED

    def clear(self) -> None:
        """Gives up all places."""
        self._lines.clear()

    def leave(self, model: str, place: Place, now: float) -> None:
        """Notes that nobody waits at a place any more; it is kept for a while."""
        line = self._lines.find(model)
        if line is not None and place in line:
            line.leave(place, now)

    def give_up(self, model: str, place: Place) -> None:
        """Gives up the place of a request that does not wait."""
        line = self._lines.find(model)
        if line is not None and place in line:
            line.remove(place)

    def _is_awaited(self, model: str) -> bool:
        """Returns whether anybody waits, at any router."""
        line = self._lines.find(model)
        return line is not None and line.is_awaited

    def _own_tokens(self, decision: Decision) -> float:
        """Returns what a request would fill of a cache and no worker holds; 0 if it goes nowhere.

        Workers that may not answer, since they drain for instance, hold nothing of use.
        """
        basis = decision.basis
        if not decision.is_steered or decision.verdict is not Verdict.STEER:
            return 0.0
        context, begins = basis.belonging.turn.context, basis.belonging.begins
        names = self._names(decision.model or "")
        if names and not begins and any(basis.excluded):
            common = context.begun_with
            most = max(
                [one.saved for name, one in basis.claims.items() if name in names], default=0
            )
            begins = most - common < (basis.weighed_tokens - common) / 2
        return context.own if begins else 0.0

    def _names(self, model: str) -> frozenset[str]:
        """Returns the names of a model's workers that may answer; none if a feed is not live."""
        return frozenset(one.worker for one in self._records(model) or ())

    def _may_wait(self, of_class: RequestClass | None) -> bool:
        """Returns whether requests of a class may wait."""
        named = self._classes
        return not named or (of_class is not None and of_class.name in named)

    def _free(self, model: str, occupancy: Occupancy) -> float:
        """Returns how many tokens of the caches live conversations may still fill."""
        return self._lines.limit(model) * occupancy.room - occupancy.live - self._entering[model]

    def limit(self, model: str) -> Limit:
        """Returns the limit of a model's caches."""
        if model not in self._limits:
            self._limits[model] = Limit()
        return self._limits[model]

    def _occupancy(self, model: str, now: float) -> Occupancy | None:
        """Returns what live conversations fill, by which the limit changes; None if not known.

        For a moment, what was known last counts.
        """
        found = self._look(model, now)
        if found is None:
            last, at = self._known.get(model, (None, 0.0))
            return last if now - at < BRIEF_SECONDS else None
        self._known[model] = found, now
        limit = self.limit(model)
        limit.step(found.live / found.room, now, is_awaited=self._is_awaited(model))
        self._lines.note_limit(model, limit.share)
        return found

    def _look(self, model: str, now: float) -> Occupancy | None:
        """Returns what live conversations fill now, None if it is not known."""
        records = list((self._records(model) if self._lines.is_current else None) or ())
        # without events nobody knows what a worker evicts
        is_known = not any(one.is_blind for one in records)
        return occupancy_of(records, now) if is_known else None

    def _may_overflow(self, model: str, occupancy: Occupancy, now: float) -> bool:
        """Returns whether one more may go on without room, and counts it."""
        fitting = occupancy.room / max(occupancy.usual, LEAST_TOKENS)
        rate = OVERFLOW_SHARE * fitting / self._rules.bound_seconds / self._lines.routers
        allowed, since = self._overflow.get(model, (1.0, now))
        allowed = min(1.0, allowed + rate * (now - since))
        may = allowed >= 1.0
        self._overflow[model] = allowed - may, now
        return may
