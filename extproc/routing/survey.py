"""Surveys the workers that a decision compares: their loads, and what each would cost."""

from collections.abc import Mapping, Sequence
from itertools import compress

import msgspec

from extproc._core import LoadColumns
from extproc.config.schema import Cost
from extproc.requests.request_class import RequestClass
from extproc.routing.eligibility import Candidate
from extproc.routing.load import Load
from extproc.routing.query import Snapshot
from extproc.routing.spread import Rows, Spread

# A conversation of its own that lives on a worker is as much work to be expected as so many tokens.
CONVERSATION_TOKENS = 1_024.0


class Survey(msgspec.Struct, frozen=True, gc=False):
    """What is known of the workers that are compared, in columns.

    places: their indices among all workers. affinity: the weight of an uncached token. crowding:
    the tokens by which a new conversation avoids each for those that live there, empty if the
    request begins none.
    """

    places: Sequence[int]
    workers: Sequence[Candidate]
    loads: LoadColumns
    costs: list[float]
    affinity: float
    crowding: Sequence[float] = ()

    def columns(
        self, count: int
    ) -> tuple[Rows[Load | None], Rows[float | None], Rows[float | None]]:
        """Returns loads, costs and crowding of all workers, None for those that were not compared.

        count: of all workers.
        """
        places, crowding = self.places, self.crowding
        if isinstance(places, range):  # all of them
            return self.loads, self.costs, crowding
        loads, costs = Spread(places, self.loads, count), Spread(places, self.costs, count)
        return loads, costs, Spread(places, crowding, count) if crowding else ()


def survey_of(
    eligible: Sequence[int],
    sampled: Sequence[int] | None,
    snapshot: Snapshot,
    saved: Mapping[str, float],
    weighed: float,
    now: float,
    *,
    is_new: bool = False,
) -> Survey:
    """Returns the survey of the eligible workers, or of the sampled ones of them.

    saved: the tokens by which workers are preferred, by name. weighed: those of the whole prompt.
    is_new: whether the request may begin a conversation.
    """
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
    costs = loads.costs(workers, saved, weighed, affinity, cost.running_tokens)
    crowding = _crowding(workers, saved, snapshot, now) if is_new else ()
    for at, tokens in enumerate(crowding):
        costs[at] += affinity * tokens * loads[at].slowness
    return Survey(places, workers, loads, costs, affinity, crowding)


def _crowding(
    workers: Sequence[Candidate], saved: Mapping[str, float], snapshot: Snapshot, now: float
) -> Sequence[float]:
    """Returns by how many tokens a new conversation avoids each worker.

    Each conversation that a worker has beyond the sound one with the fewest counts half of what
    the request could save anywhere, and a little more. So a shared prefix is worth one of them
    and never two, however long it is.
    """
    if not workers:
        return ()
    live = [snapshot.conversations(one.name, now) for one in workers]
    sound = [one.endpoint not in snapshot.ejected for one in workers]
    least = min(compress(live, sound), default=min(live))
    most_saved = max([saved.get(one.name, 0.0) for one in workers])
    each = CONVERSATION_TOKENS + most_saved / 2
    return [each * max(0, count - least) for count in live]


def _affinity_of_sound(
    cost: Cost, loads: LoadColumns, workers: Sequence[Candidate], ejected: Mapping[str, str]
) -> float:
    """Returns the weight of an uncached token by the sound workers, or by all if none is sound.

    Failing workers are idle, which says nothing about the others.
    """
    sound = list(compress(loads, [one.endpoint not in ejected for one in workers]))
    columns = LoadColumns(sound) if sound else loads
    return columns.affinity(len(columns), cost)


def is_full(survey: Survey, limit: int | None, of_class: RequestClass | None) -> bool:
    """Returns whether all compared workers are at their limit of requests, or of its class."""
    if limit is not None and all(one.counted >= limit for one in survey.loads):
        return True
    own = None if of_class is None else of_class.max_in_flight
    return own is not None and all(one.peers >= own for one in survey.loads)
