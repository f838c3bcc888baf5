"""Overtaking: requests that wait for KV blocks while their worker computes what came later.

A worker computes other prompts while it fetches a request's blocks, so fetching is no part of its
queue, and it looks idle. But a long prompt that begins meanwhile is computed first, and the request
waits for it. So a worker costs as many tokens more as it would still have to compute of the prompt
when such blocks arrive, for each request that waits for them. Whatever is in the queue by then
keeps its place, and is not overtaken.
"""

from collections.abc import Mapping

from extproc.config.schema import Cost
from extproc.routing.arrivals import Arrivals
from extproc.routing.fetching import NOTHING, Fetch
from extproc.routing.survey import Survey


def charge_overtaking(
    survey: Survey,
    arrivals: Arrivals,
    fetches: Mapping[str, Fetch],
    saved: Mapping[str, float],
    weighed: float,
    cost: Cost,
    now: float,
) -> dict[str, float]:
    """Raises the costs of workers where a request would overtake others; returns by how much.

    The result has the names of such workers, and tokens. fetches, saved: what each worker would
    fetch of the prompt, and the tokens that it holds, by name. weighed: all of the prompt's.
    """
    charged: dict[str, float] = {}
    for at, worker in enumerate(survey.workers):
        expected = arrivals.of(worker.endpoint, now)
        if not expected:
            continue
        load, fetch = survey.loads[at], fetches.get(worker.name, NOTHING)
        work = weighed - saved.get(worker.name, 0.0) - fetch.tokens * fetch.share
        begins = max(load.backlog_tokens, fetch.delay) * load.slowness
        ends = begins + max(0.0, work) * load.slowness
        due = [(each - now) * cost.prefill_tokens_per_second for each in expected]
        tokens = sum([ends - each for each in due if begins < each < ends])
        if tokens:
            charged[worker.name] = tokens
            survey.costs[at] += tokens
    return charged
