"""Holding: requests wait inside the router while live conversations fill the caches.

`extproc.features.holding.hold` decides who waits; here are the tasks that wait, and the clock.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import inf

from prometheus_client.registry import Collector

from extproc.base.logs import log_fault
from extproc.config.schema import Config
from extproc.features.feature import AskForTime, Feature, Wait
from extproc.features.holding.hold import REFUSED, Hold
from extproc.features.holding.hold_figures import FULL, LEFT, UNHELD, HoldFigures
from extproc.features.router_parts import RouterParts
from extproc.fleet.workers import Workers
from extproc.http2.limits import MIB
from extproc.requests.request import RoutingRequest
from extproc.routing.claims.claim_table import Holdings
from extproc.routing.claims.line import NO_PLACE, Place
from extproc.routing.decision import Decision

log = logging.getLogger("kvsteer.decision")

# How often it is checked whether there is room.
STEP_SECONDS = 0.1

# How often it is looked at which workers may answer.
LOOK_SECONDS = 0.25

# When the router stops, those that wait go on within this share of the time that is left.
STOP_SHARE = 0.8

# Most bytes of the bodies of those that wait; of one tenant's, where tenants are kept apart, half.
MOST_BYTES = 256 * MIB


class Holding(Feature):
    """Has requests wait for room in the caches.

    clock: that of the hold, in seconds. asked_seconds: for which the proxy is asked. tenants:
    whether they are kept apart.
    """

    def __init__(
        self, hold: Hold, asked_seconds: float, clock: Callable[[], float], *, tenants: bool = False
    ) -> None:
        self._hold = hold
        self._asked_seconds = asked_seconds
        self._clock = clock
        self._waits: dict[Place, asyncio.Future[bool]] = {}
        self._held_bytes = Counter[int]()  # by tenant
        self._tenants = tenants
        self._step_due: asyncio.TimerHandle | None = None
        self._stops_at = inf
        self._figures = HoldFigures(hold.waiting)

    def collectors(self) -> Sequence[Collector]:
        """Returns what shows who waits."""
        return (self._figures,)

    def must_wait(self, request: RoutingRequest, decision: Decision, now: float) -> Wait | None:
        """Returns the wait of a request, None if it goes on at once."""
        if self._stops_at < inf:
            return None
        place = self._hold.place_of(decision, now)
        if place is None:
            return None
        model, size = decision.model or "", len(request.body or b"")
        if place is not NO_PLACE and not self._have_room(place, size):
            self._hold.leave(model, place, now)
            place = NO_PLACE
        return _Wait(self, model, place, size)

    def _have_room(self, place: Place, size_bytes: int) -> bool:
        """Returns whether a body of this size may wait."""
        held = self._held_bytes
        of_tenant = MOST_BYTES // 2 if self._tenants else MOST_BYTES
        return (
            held.total() + size_bytes <= MOST_BYTES and held[place.tenant] + size_bytes <= of_tenant
        )

    async def wait(
        self, model: str, place: Place, size_bytes: int, ask_for_time: AskForTime
    ) -> bool:
        """Waits at a place; returns whether the request goes on. size_bytes: of its body."""
        if place is NO_PLACE:
            self._figures.end(model, FULL, 0.0)
            return False
        is_granted = False
        try:
            is_granted = ask_for_time(self._asked_seconds)
        finally:
            if not is_granted:
                self._hold.give_up(model, place)
                self._figures.end(model, UNHELD, 0.0)
        if not is_granted:
            return True
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waits[place] = waiting
        self._held_bytes[place.tenant] += size_bytes
        self._step_later()
        try:
            await asyncio.sleep(0)  # makes a task of the call
            return await waiting
        finally:
            self._held_bytes[place.tenant] -= size_bytes
            self._held_bytes += Counter()  # without those that have none
            if self._waits.pop(place, None) is not None:  # nobody ended it, so the client left
                now = self._clock()
                self._hold.leave(model, place, now)
                self._figures.end(model, LEFT, now - place.since)

    def note_stop(self, seconds: float) -> None:
        """Has those that wait go on in turn, in most of the time that is left."""
        self._stops_at = self._clock() + STOP_SHARE * seconds

    def _step_later(self) -> None:
        if self._step_due is None:
            loop = asyncio.get_running_loop()
            self._step_due = loop.call_later(STEP_SECONDS, self._step)

    def _step(self) -> None:
        """Ends the waits that are over; an error ends them all, so that nobody is forgotten."""
        self._step_due = None
        now = self._clock()
        try:
            for model, place, outcome in self._ended(now):
                self._figures.end(model, outcome, now - place.since)
                self._finish(place, goes_on=outcome != REFUSED)
        except Exception as error:  # noqa: BLE001 - whatever it is, requests must go on
            log_fault(log, "holding requests failed with %s", error)
            self._hold.clear()
            for place in list(self._waits):
                self._finish(place, goes_on=True)
        if len(self._hold):
            self._step_later()

    def _ended(self, now: float) -> Iterator[tuple[str, Place, str]]:
        """Yields each wait that ends now, as `Hold.step` does."""
        yield from self._hold.step(now)
        if self._stops_at < inf:
            left = max(0.0, self._stops_at - now)
            yield from self._hold.go_on(STEP_SECONDS / (STEP_SECONDS + left))

    def _finish(self, place: Place, *, goes_on: bool) -> None:
        waiting = self._waits.pop(place, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(goes_on)


class _Wait(Wait):
    """The wait of one request."""

    def __init__(self, holding: Holding, model: str, place: Place, size_bytes: int) -> None:
        self._holding = holding
        self._model = model
        self._place = place
        self._size_bytes = size_bytes

    async def end(self, ask_for_time: AskForTime) -> bool:
        """Waits; returns whether the request goes on."""
        return await self._holding.wait(self._model, self._place, self._size_bytes, ask_for_time)


class LatestRecords:
    """The records of the workers that may answer, by model, as they were a moment ago.

    To look at a thousand workers takes some milliseconds, which each request that begins would pay.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._known: dict[str, tuple[float, Sequence[Holdings] | None]] = {}

    def __call__(self, model: str) -> Sequence[Holdings] | None:
        """Returns the same as `records_of`, of `LOOK_SECONDS` ago at most."""
        now = self._workers.monotonic()
        looked_at, records = self._known.get(model, (-inf, None))
        if now - looked_at >= LOOK_SECONDS:
            records = records_of(self._workers, model)
            self._known[model] = now, records
        return records


def records_of(workers: Workers, model: str) -> Sequence[Holdings] | None:
    """Returns the records of a model's workers that may answer; None if a feed is not live."""
    candidates, names = workers.candidates, []
    draining = candidates.draining()
    for one in candidates.list_for(model):
        if one.excluded or one.endpoint in draining or workers.states.down(one.endpoint):
            continue
        if candidates.state(one.name) != "live":
            return None
        names.append(one.name)
    return [*map(candidates.holdings, names)] or None


def holding(config: Config, parts: RouterParts) -> Holding | None:
    """Returns the feature if requests may wait for room."""
    rules, workers = config.policy.hold, parts.workers
    if not rules.enabled:
        return None
    hold = Hold(rules, LatestRecords(workers), parts.homes, parts.lines)
    tenants = config.isolation is not None
    return Holding(hold, float(rules.envoy_seconds), workers.monotonic, tenants=tenants)
