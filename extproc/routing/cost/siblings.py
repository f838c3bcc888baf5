"""Siblings: requests that begin with one long prefix, sent within moments of each other.

An agent that starts several others at once sends them. Until the first one's prefix is computed,
its tokens are the queue of its worker: the next one would wait there as long as it takes to compute
them elsewhere, and an idle fleet would compute them once for each. So these tokens, which are in
the queue and claimed at once, are credited once more, by a part: the wait may be longer by so much.
"""

from collections.abc import Mapping
from math import inf

from extproc.routing.cost.survey import Survey
from extproc.routing.cost.term import Charge
from extproc.routing.savings.claims import Claims
from extproc.routing.savings.savings import Savings

# How many more requests may come is not known, and a large herd is served sooner if every worker
# has the prefix. What comes later than this is no sibling, so that the others of a herd are delayed
# by no more. Shorter prefixes do not take long enough to be worth the delay.
WITHIN_SECONDS = 0.06
LEAST_TOKENS = 12_000

SIBLINGS = "siblings"


def siblings_of(
    claims: Mapping[str, Claims], begun_at: Mapping[str, float], now: float
) -> dict[str, int]:
    """Returns how many of a request's tokens its siblings just sent to workers, by name.

    begun_at: when the prefix was first sent to each worker, of requests under way. Without long
    ones the result is empty: the request has no sibling. So it is if the first of them was sent to
    any worker too long ago.
    """
    most = max([one.speculative for one in claims.values()], default=0)
    if most < LEAST_TOKENS:
        return {}
    found = {name: one.speculative for name, one in claims.items() if 2 * one.speculative > most}
    first = min([begun_at.get(name, -inf) for name in found])
    return found if now - first <= WITHIN_SECONDS else {}


class Siblings:
    """The term of a request with siblings: a credit for their tokens in a worker's queue.

    tokens: the siblings', by the worker's name. percent: the part of them that is credited.
    """

    def __init__(self, tokens: Mapping[str, int], percent: int) -> None:
        self._tokens = tokens
        self._part = percent / 100

    def charge(self, survey: Survey, _: Savings) -> Charge | None:
        """Returns the credit of each worker, negative."""
        charged = [0.0] * len(survey.workers)
        for at, worker in enumerate(survey.workers):
            tokens = self._tokens.get(worker.name, 0)
            if tokens:
                load = survey.loads[at]
                credit = self._part * min(float(tokens), load.backlog_tokens) * load.slowness
                charged[at] = -credit
        return Charge(SIBLINGS, charged)
