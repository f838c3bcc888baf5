"""The order of the candidates, the best first, by the policy of a snapshot."""

from collections.abc import Sequence
from operator import attrgetter

from extproc._core import lowest
from extproc.config.policies import POLICIES, Order, PolicyInput, by_cost
from extproc.requests.request import RoutingRequest
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.candidates.sampling import Chance
from extproc.routing.cost.survey import Survey
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.policy_choice import endpoints_named
from extproc.routing.savings.savings import Savings

_endpoint_of = attrgetter("endpoint")


def order_of(
    request: RoutingRequest,
    query: Query,
    candidates: Sequence[int],
    survey: Survey,
    savings: Savings,
    snapshot: Snapshot,
    rng: Chance,
) -> list[Candidate]:
    """Returns the best candidates, as many as are named to the proxy, or all if they are fewer."""
    workers, costs = survey.workers, survey.costs
    if len(candidates) != len(workers):
        workers = [workers[at] for at in candidates]
        costs = [costs[at] for at in candidates]
    ranks = costs
    if POLICIES[snapshot.policy].rank is not by_cost:  # the usual one needs nothing more
        ranks = _ranks(request, query, candidates, survey, workers, costs, savings, snapshot)
    count = endpoints_named(snapshot.rules, is_duplex=False)
    return list(map(workers.__getitem__, lowest(ranks, count, rng.random)))


def _ranks(
    request: RoutingRequest,
    query: Query,
    candidates: Sequence[int],
    survey: Survey,
    workers: Sequence[Candidate],
    costs: list[float],
    savings: Savings,
    snapshot: Snapshot,
) -> Order:
    """Returns the ranks of candidates by the snapshot's policy."""
    ranking = POLICIES[snapshot.policy]

    def requests() -> list[float]:
        each = survey.loads.requests()
        return [each[at] for at in candidates]

    columns = PolicyInput(
        rules=snapshot.rules,
        prompt_tokens=savings.weighed_tokens,
        costs=costs,
        saved=lambda: [savings.saved.get(worker.name, 0.0) for worker in workers],
        in_flight=requests,
        endpoints=lambda: list(map(_endpoint_of, workers)),
        turn=snapshot.turn,
        session=request.head.session or query.session,
        header=request.policy_headers.get(ranking.reads_header, b""),
    )
    return ranking.rank(columns)
