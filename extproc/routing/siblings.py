"""Siblings: requests that begin with one long prefix, sent within moments of each other.

An agent that starts several others at once sends them. Until the first one's prefix is computed,
its tokens are the queue of its worker: the next one would wait there as long as it takes to compute
them elsewhere, and an idle fleet would compute them once for each. So these tokens, which are in
the queue and claimed at once, are credited once more, by a part: the wait may be longer by so much.
"""

from collections.abc import Mapping

from extproc.config.schema import Cost
from extproc.routing.claims import Claims
from extproc.routing.survey import Survey

# Shorter claims are not worth a longer wait.
LEAST_TOKENS = 1_024


def siblings_of(claims: Mapping[str, Claims], cost: Cost) -> dict[str, int]:
    """Returns how many of a request's tokens are under way on workers, by name; {} if that is off.

    Without long ones there are none: the request has no sibling.
    """
    if not cost.siblings_percent:
        return {}
    found = {name: one.speculative for name, one in claims.items() if one.speculative}
    return found if max(found.values(), default=0) >= LEAST_TOKENS else {}


def prefer_siblings(survey: Survey, siblings: Mapping[str, int], cost: Cost) -> None:
    """Lowers the costs of workers in whose queue the tokens of a request's siblings are."""
    part = cost.siblings_percent / 100
    for at, worker in enumerate(survey.workers):
        tokens = siblings.get(worker.name, 0)
        if tokens:
            load = survey.loads[at]
            survey.costs[at] -= part * min(float(tokens), load.backlog_tokens) * load.slowness
