"""Patience: how long a conversation waits at its worker before it goes to another one.

While tokens are not known, so is the queue: its tokens are estimated from texts, and nothing tells
when they are computed. Conversations of one agent share a long system, so by its texts any worker
looks nearly as good as its own, and each new one that begins at its worker would move it. So it
does not mind the queue there up to a limit: what exceeds that, and requests in flight, may move it.
"""

from extproc.config.schema import Cost
from extproc.routing.load import Load
from extproc.routing.survey import Survey

# Eight conversations of each of four agents, all begun at once, make queues of seven seconds on
# three workers (tests/extproc/routing/test_many_agents.py).
PATIENCE_SECONDS = 6.0


def unminded(load: Load, cost: Cost) -> float:
    """Returns how much of a worker's queue a conversation does not mind there, in tokens of cost.

    Tokens of a slow worker count as many times as it is slower.
    """
    most = PATIENCE_SECONDS * cost.prefill_tokens_per_second
    return min(load.backlog_tokens * load.slowness, most)


def wait_at_home(survey: Survey, home: str, cost: Cost) -> float:
    """Lowers the cost of a conversation's worker by the queue that it does not mind.

    Returns by how many tokens; 0 if that worker is not compared.
    """
    for at, worker in enumerate(survey.workers):
        if worker.name == home:
            tokens = unminded(survey.loads[at], cost)
            survey.costs[at] -= tokens
            return tokens
    return 0.0
