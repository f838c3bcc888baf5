"""Surveys the workers that a decision compares: their loads, and what each would cost."""

from collections.abc import Mapping, Sequence
from itertools import compress

import msgspec

from extproc._core import LoadColumns
from extproc.config.schema import Cost, Policy
from extproc.requests.request_class import RequestClass
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.cost.spread import Rows, Spread
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from extproc.routing.savings.savings import Savings


class Survey(msgspec.Struct, frozen=True, gc=False):
    """What is known of the workers that are compared, in columns.

    places: their indices among all workers. affinity: the weight of an uncached token. sampled: the
    same as places if only some of the eligible workers are compared, else None.
    """

    places: Sequence[int]
    workers: Sequence[Candidate]
    loads: LoadColumns
    costs: list[float]
    affinity: float
    sampled: Sequence[int] | None = None

    def add(self, tokens: Sequence[float]) -> None:
        """Adds tokens to the costs, one for each worker."""
        for at, more in enumerate(tokens):
            self.costs[at] += more

    def columns(self, count: int) -> tuple[Rows[Load | None], Rows[float | None]]:
        """Returns loads and costs of all workers, None for those that were not compared.

        count: of all workers.
        """
        if isinstance(self.places, range):  # all of them
            return self.loads, self.costs
        return Spread(self.places, self.loads, count), Spread(self.places, self.costs, count)

    def column(self, tokens: Sequence[float], count: int) -> Rows[float | None]:
        """Returns figures of all workers, None for those that were not compared."""
        return tokens if isinstance(self.places, range) else Spread(self.places, tokens, count)


def survey_of(
    eligible: Sequence[int],
    sampled: Sequence[int] | None,
    snapshot: Snapshot,
    savings: Savings,
    now: float,
) -> Survey:
    """Returns the survey of the eligible workers, or of the sampled ones of them."""
    load, workers = snapshot.load, snapshot.workers
    places = eligible if sampled is None else sampled
    if not isinstance(places, range):
        workers = list(map(workers.__getitem__, places))
    columns = snapshot.columns
    if columns is None:
        loads = LoadColumns([load(worker.endpoint, now) for worker in workers])
    else:
        loads = columns(workers, now)
    cost = snapshot.rules.cost
    if sampled is not None:
        affinity = loads.affinity(min(len(loads), snapshot.sample), cost)
    elif snapshot.ejected:
        affinity = _affinity_of_sound(cost, loads, workers, snapshot.ejected)
    else:
        affinity = loads.affinity(len(loads), cost)
    weighed = savings.weighed_tokens
    costs = loads.costs(workers, savings.saved, weighed, affinity, cost.running_tokens)
    return Survey(places, workers, loads, costs, affinity, sampled)


def _affinity_of_sound(
    cost: Cost, loads: LoadColumns, workers: Sequence[Candidate], ejected: Mapping[str, str]
) -> float:
    """Returns the weight of an uncached token by the sound workers, or by all if none is sound.

    Failing workers are idle, which says nothing about the others.
    """
    sound = list(compress(loads, [one.endpoint not in ejected for one in workers]))
    columns = LoadColumns(sound) if sound else loads
    return columns.affinity(len(columns), cost)


def is_full(survey: Survey, rules: Policy, of_class: RequestClass | None) -> bool:
    """Returns whether all compared workers are at their limit of requests, or of its class."""
    limit = rules.max_in_flight
    if limit is not None and all(one.counted >= limit for one in survey.loads):
        return True
    own = None if of_class is None else of_class.max_in_flight
    return own is not None and all(one.peers >= own for one in survey.loads)
