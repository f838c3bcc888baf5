"""Patience: how long a conversation waits at its worker before it goes to another one.

While tokens are not known, so is the queue: its tokens are estimated from texts, and nothing tells
when they are computed. Conversations of one agent share a long system, so by its texts any worker
looks nearly as good as its own, and each new one that begins at its worker would move it. So it
does not mind the queue there up to a limit: what exceeds that, and requests in flight, may move it.
"""

from extproc.config.schema import Cost
from extproc.routing.cost.survey import Survey
from extproc.routing.cost.term import Charge
from extproc.routing.load.loads import Load
from extproc.routing.savings.savings import Savings

# Eight conversations of each of four agents, all begun at once, make queues of seven seconds on
# three workers (tests/extproc/routing/savings/test_many_agents.py).
PATIENCE_SECONDS = 6.0

PATIENCE = "patience"


def unminded(load: Load, cost: Cost) -> float:
    """Returns how much of a worker's queue a conversation does not mind there, in tokens of cost.

    Tokens of a slow worker count as many times as it is slower.
    """
    most = PATIENCE_SECONDS * cost.prefill_tokens_per_second
    return min(load.backlog_tokens * load.slowness, most)


class Patience:
    """The term of a request whose conversation has a worker.

    home: that worker's name. cost: the weights.
    """

    def __init__(self, home: str, cost: Cost) -> None:
        self._home = home
        self._cost = cost

    def charge(self, survey: Survey, _: Savings) -> Charge | None:
        """Returns the queue that the conversation does not mind, negative, for its worker."""
        for at, worker in enumerate(survey.workers):
            if worker.name == self._home:
                charged = [0.0] * len(survey.workers)
                charged[at] = -unminded(survey.loads[at], self._cost)
                return Charge(PATIENCE, charged)
        return None
