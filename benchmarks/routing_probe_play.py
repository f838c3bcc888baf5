"""Two fleets of engines, each behind a KVSteer of its own, and a router above that chooses one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple, cast

import xxhash
from routing_closed_cells import Loop
from routing_closed_play import LoopResult, play_with

from kvstate.overlap import Overlap
from kvtools.whatif.engines import ModelledFleet, Request
from kvtools.whatif.routers import (
    Arrivals,
    Contestant,
    Proxy,
    SimulatedRouter,
    Stage,
    View,
    proxy_of,
)

RANDOM, LEAST_REQUEST, PROBE, ONE = "random", "least_request", "probe", "one"
SESSION, WEIGHTED_SESSION = "session", "weighted_session"


class Above(NamedTuple):
    """A router above. choice: how it chooses a fleet. shares: of the engines, each fleet's."""

    name: str
    choice: str
    below: Contestant
    shares: Sequence[float] = (0.5, 0.5)


class _OwnEngines:
    """The engines of one fleet, as its router sees them."""

    def __init__(self, fleet: ModelledFleet, numbers: range) -> None:
        self.engines = fleet.engines[numbers.start : numbers.stop]
        self.delay_seconds = fleet.delay_seconds
        self.block_tokens = fleet.block_tokens
        self.store = None


class _OwnView:
    """What the engines of one fleet hold; they are numbered from 0."""

    def __init__(self, view: View, numbers: range) -> None:
        self._view = view
        self._numbers = numbers

    def update(self, now: float) -> None:
        self._view.update(now)

    def holds(self, number: int, block: int) -> bool:
        return self._view.holds(self._numbers[number], block)

    def overlaps(self, blocks: Sequence[int]) -> dict[str, Overlap]:
        held, first = self._view.overlaps(blocks), self._numbers.start
        return {str(n - first): held[str(n)] for n in self._numbers if str(n) in held}

    def stored(self, _: Sequence[int], __: float) -> int:
        return 0


class _Below(NamedTuple):
    """One fleet: its router, and the numbers of its engines."""

    router: SimulatedRouter
    numbers: range


class TwoFleets:
    """Sends each request to the fleet that the router above chooses, and there to the pick."""

    def __init__(self, stage: Stage, above: Above, seed: int) -> None:
        self.fleet = stage.fleet()
        self.requests: Sequence[Request] = ()
        view = View(self.fleet)
        self._below = [
            _Below(
                _router(stage, above.below, self.fleet, view, numbers, seed + 13 * number), numbers
            )
            for number, numbers in enumerate(_parts(len(stage.speeds), above.shares))
        ]
        self._chance = Random(seed + 31)
        self._choose = _CHOICES[above.choice]
        self._chosen: dict[int, int] = {}

    def in_flight(self) -> Sequence[int]:
        """Returns the requests under way, by fleet."""
        chosen = [*self._chosen.values()]
        return [chosen.count(number) for number in range(len(self._below))]

    def fleet_of(self, engine: int) -> int:
        """Returns the fleet that has an engine, by their numbers."""
        return [engine in one.numbers for one in self._below].index(True)

    def seconds(self, request: Request, now: float) -> Sequence[float]:
        """Returns the time to the first token that each fleet's probe answers."""
        found = [one.router.probe(request, now) for one in self._below]
        return [one.queue_seconds + one.prefill_seconds for one in found]

    def pick(self, request: Request, now: float) -> int:
        number = self._choose(self, request, now, self._chance)
        self._chosen[id(request)] = number
        below = self._below[number]
        return below.numbers[below.router.pick(request, now)]

    def over(self, request: Request, now: float) -> None:
        self._below[self._chosen.pop(id(request))].router.over(request, now)

    def must_wait(self, _request: Request, _now: float) -> bool:
        return False

    def let_in(self, _now: float) -> Iterator[tuple[Request, bool]]:
        return iter(())

    def filled(self, now: float) -> float:
        return max(one.router.filled(now) for one in self._below)


def _parts(engines: int, shares: Sequence[float]) -> Iterator[range]:
    begin = 0
    for number, share in enumerate(shares):
        is_last = number == len(shares) - 1
        end = engines if is_last else begin + round(engines * share)
        yield range(begin, end)
        begin = end


def _router(
    stage: Stage,
    contestant: Contestant,
    fleet: ModelledFleet,
    view: View,
    numbers: range,
    seed: int,
) -> SimulatedRouter:
    own = stage._replace(speeds=stage.speeds[numbers.start : numbers.stop])
    engines = cast("ModelledFleet", _OwnEngines(fleet, numbers))
    return SimulatedRouter(own, contestant, engines, _OwnView(view, numbers), 0, seed)


def _least(values: Sequence[float], chance: Random) -> int:
    """Returns the place of the least value, one of them by chance."""
    least = min(values)
    return chance.choice([at for at, value in enumerate(values) if value == least])


def _by_chance(fleets: TwoFleets, _: Request, __: float, chance: Random) -> int:
    return chance.randrange(len(fleets.in_flight()))


def _by_requests(fleets: TwoFleets, _: Request, __: float, chance: Random) -> int:
    return _least(fleets.in_flight(), chance)


def _by_session(fleets: TwoFleets, request: Request, _: float, __: Random) -> int:
    return _hash_of(request) % len(fleets.in_flight())


def _by_weighted_session(fleets: TwoFleets, request: Request, _: float, __: Random) -> int:
    return fleets.fleet_of(_hash_of(request) % len(fleets.fleet.engines))


def _hash_of(request: Request) -> int:
    return xxhash.xxh3_64_intdigest(request.session.encode())


def _by_probe(fleets: TwoFleets, request: Request, now: float, chance: Random) -> int:
    return _least(fleets.seconds(request, now), chance)


_CHOICES: Mapping[str, Callable[[TwoFleets, Request, float, Random], int]] = {
    RANDOM: _by_chance,
    LEAST_REQUEST: _by_requests,
    SESSION: _by_session,
    WEIGHTED_SESSION: _by_weighted_session,
    PROBE: _by_probe,
}


def play(loop: Loop, above: Above, seed: int) -> LoopResult:
    """Returns what a router above makes of a loop; of one fleet, what its router does."""
    proxy: Proxy
    if above.choice == ONE:
        proxy = proxy_of(loop.stage, above.below, Arrivals([]), seed)
    else:
        proxy = TwoFleets(loop.stage, above, seed)
    return play_with(loop, proxy, seed)
