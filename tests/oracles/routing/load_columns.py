"""The loads of compared workers and what they cost, as extproc/native/survey.c computes them."""

from collections.abc import Iterator, Mapping, Sequence
from math import exp, inf

from extproc.config.schema import Cost
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.load.loads import Load, Loads

# From this utilization on, the delay of later requests counts in full.
FULL_WEIGHT_UTILIZATION = 0.25

# If even the idlest worker has a queue, a token delays this many more requests for each second of
# it, up to a maximum.
WAITING_A_SECOND = 1.0
MAX_WAITING = 10.0


def load_of(loads: Loads, endpoint: str, now: float) -> Load:
    """Returns the load of an endpoint at a time."""
    state = loads.endpoints.get(endpoint)
    if state is None:
        return Load()
    rate, capacity_tokens, common_slowness, window, report_seconds = loads.rates
    speed, numbers = state.speed, state.numbers
    slowness = common_slowness if speed.is_even else speed.slowness
    backlog, lately = numbers.backlog_tokens, numbers.lately_tokens
    passed = now - numbers.backlog_at
    if passed > 0.0:
        if backlog:
            backlog -= passed * rate * speed.pace
            if backlog < 0.0:
                backlog = 0.0
        if lately:
            lately *= exp(-passed / window)
    utilization = lately * slowness / capacity_tokens
    in_flight, shared, report = numbers.in_flight, numbers.shared, state.report
    if report is None:
        return Load(in_flight, backlog, shared, utilization, None, 0.0, slowness)
    age = max(0.0, now - report.asked_at)
    share = 1.0 - age / report_seconds
    if share <= 0.0:
        return Load(in_flight, backlog, shared, utilization, None, 0.0, slowness)
    backlog += share * numbers.excess_tokens
    others = shared + share * numbers.others
    return Load(in_flight, backlog, others, utilization, report, age, slowness)


def affinity_of(cost: Cost, utilization: float, queued_seconds: float = 0.0) -> float:
    """Returns the weight of an uncached token, relative to a token queued before the request.

    utilization: u, 0 to 1, the mean of the fleet's workers. Each token delays later requests in
    proportion to u / (1 - u). The weight is bounded, since u is a rough estimate, and lower at a
    low u: one burst does not make a busy fleet. queued_seconds: how long the idlest worker's queue
    takes. All requests within that time wait for each token, wherever they go.
    """
    waiting = 1.0
    if utilization < 0.5:
        waiting = utilization / (1.0 - utilization)
        if utilization < FULL_WEIGHT_UTILIZATION:
            waiting *= utilization / FULL_WEIGHT_UTILIZATION
    if queued_seconds > 0.0:
        waiting += min(MAX_WAITING, WAITING_A_SECOND * queued_seconds)
    return (cost.affinity_percent + cost.busy_affinity_percent * waiting) / 100


def evicted_from(occupied: float, added: float, capacity: float) -> float:
    """Returns how many live tokens added ones are expected to evict from a cache."""
    before, after = occupied / capacity, (occupied + added) / capacity
    below = before * before * before / 3 if before < 1.0 else before - 2 / 3
    above = after * after * after / 3 if after < 1.0 else after - 2 / 3
    return capacity * (above - below)


def plain_evicted(
    workers: Sequence[Candidate],
    saved: Mapping[str, float],
    occupied: list[float],
    capacities: list[float],
    weighed: float,
    shared: float,
) -> list[float]:
    """Returns how many live tokens the new ones of a prompt are expected to evict on each."""
    costs = []
    for worker, live, capacity in zip(workers, occupied, capacities, strict=True):
        held = min(saved.get(worker.name, 0.0), weighed)
        there = live + max(0.0, held - shared)
        costs.append(evicted_from(there, weighed - held, capacity) if capacity else 0.0)
    return costs


class PlainColumns:
    """The columns in Python."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self._loads = loads

    def __len__(self) -> int:
        return len(self._loads)

    def __getitem__(self, at: int) -> Load:
        return self._loads[at]

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads)

    def affinity(self, count: int, cost: Cost) -> float:
        """Returns the weight of an uncached token."""
        if not count:
            return affinity_of(cost, 0.0)
        used, least = 0.0, inf
        for one in self._loads[:count]:
            used += one.utilization
            least = min(least, one.backlog_tokens * one.slowness)
        return affinity_of(cost, used / count, least / cost.prefill_tokens_per_second)

    def costs(
        self,
        workers: Sequence[Candidate],
        saved: Mapping[str, float],
        weighed: float,
        affinity: float,
        running: float,
    ) -> list[float]:
        """Returns what each of the workers costs, in tokens."""
        uncached = affinity * weighed
        costs = [
            (uncached + one.backlog_tokens + running * (one.in_flight + one.others)) * one.slowness
            for one in self._loads
        ]
        for at, worker in enumerate(workers if saved else ()):
            if worker.name in saved:
                costs[at] -= affinity * saved[worker.name] * self._loads[at].slowness
        return costs

    def slowness(self) -> list[float]:
        """Returns how many times slower than configured each is."""
        return [load.slowness for load in self._loads]

    def requests(self) -> list[float]:
        """Returns the requests on each."""
        return [float(one.in_flight + one.others) for one in self._loads]
