"""Who is left of the compared workers: failing ones, and those over a limit, are left out.

If that would leave out all workers, it is ignored, unless the rules shed. Why a worker is left out
is entered in the column `excluded` of the decision.
"""

from collections.abc import Mapping, Sequence

from extproc.requests.request import RoutingRequest
from extproc.routing.cost.survey import Survey
from extproc.routing.decision import OVER_LIMIT, Verdict
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot

OVER_CLASS_LIMIT = "over its limit of requests of this class"

# Naming a member through its class is a search, which every request would make several times.
_STEER = Verdict.STEER


def candidates_of(
    request: RoutingRequest, query: Query, survey: Survey, excluded: list[str], snapshot: Snapshot
) -> tuple[Verdict, Sequence[int]]:
    """Returns the verdict, and the workers to choose among, by index in the survey.

    If ejections or the limit would leave out all workers, they are ignored, unless the rules shed.
    """
    rules, ejected = snapshot.rules, snapshot.ejected
    candidates: Sequence[int] = range(len(survey.places))
    if query.proxy_reason:
        return Verdict.NO_OVERRIDE, ()
    if not candidates:
        return (Verdict.UNAVAILABLE if rules.refuse else Verdict.NO_OVERRIDE), ()
    if ejected:
        failing = {
            at: ejected[survey.workers[at].endpoint]
            for at in candidates
            if survey.workers[at].endpoint in ejected
        }
        candidates = _without_bad(candidates, failing, survey, excluded)
    if request.of_class is not None and request.of_class.max_in_flight is not None:
        candidates = _within_class(candidates, request.of_class.max_in_flight, survey, excluded)
        if not candidates:
            return Verdict.SHED, ()
    limit = rules.max_in_flight
    if limit is None:
        return _STEER, candidates
    loads = survey.loads
    full = {at: OVER_LIMIT for at in candidates if loads[at].counted >= limit}
    if rules.shed and len(full) == len(candidates):
        for at in full:
            excluded[survey.places[at]] = OVER_LIMIT
        return Verdict.SHED, ()
    return Verdict.STEER, _without_bad(candidates, full, survey, excluded)


def _within_class(
    candidates: Sequence[int], limit: int, survey: Survey, excluded: list[str]
) -> Sequence[int]:
    """Returns the candidates with fewer requests of the class than its limit; enters the others."""
    full = [at for at in candidates if survey.loads[at].peers >= limit]
    for at in full:
        excluded[survey.places[at]] = OVER_CLASS_LIMIT
    return [at for at in candidates if survey.loads[at].peers < limit] if full else candidates


def _without_bad(
    candidates: Sequence[int], bad: Mapping[int, str], survey: Survey, excluded: list[str]
) -> Sequence[int]:
    """Returns the candidates that are not bad, or all of them if all are bad.

    bad: the reason for each bad one; entered in `excluded` unless all are bad.
    """
    if not bad or len(bad) == len(candidates):
        return candidates
    for at, why in bad.items():
        excluded[survey.places[at]] = why
    return [at for at in candidates if not excluded[survey.places[at]]]


def sole_of(candidates: Sequence[int], survey: Survey, sole: str) -> Sequence[int]:
    """Returns the only candidate that can answer, or all if it is none of them."""
    return [at for at in candidates if survey.workers[at].name == sole] or candidates
