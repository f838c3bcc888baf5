"""Cells of siblings: requests that begin with one long new prefix, all within 50 ms.

An agent that starts several others at once sends them. Today's decision is compared with
`policy.cost.siblings_percent`.
"""

import itertools
from collections.abc import Mapping, Sequence
from random import Random

from measure import Figure, Goal, Row
from routing_cells import CELLS as USUAL_CELLS
from routing_cells import Cell
from routing_compare import NOT_WORSE, PairedRow
from routing_workloads import Workload, arrivals_of, blocks_of, request_of, take

from extproc.config.schema import Cost, Policy
from kvtools.whatif.engines import Request, Result
from kvtools.whatif.routers import Contestant

WITHIN_SECONDS = 0.05
OWN_TOKENS, ANSWER_TOKENS = 256, 300

TODAY = "cost"
TOGETHER = "cost, siblings together"
PERCENT = 60

CONTESTANTS = (
    Contestant(TODAY, "cost", expects=True, learns=True),
    Contestant(
        TOGETHER, "cost", Policy(cost=Cost(siblings_percent=PERCENT)), expects=True, learns=True
    ),
)

Results = Mapping[str, Sequence[Result]]

# A sibling waits for the own tokens of those before it.
HARDLY_LATER = Goal(1.05, "<= 1.05")


def siblings(count: int, tokens: int, rate: float, seconds: float) -> Workload:
    """Groups of requests with a new prefix each; rate: groups a second."""

    def make(rng: Random) -> list[Request]:
        numbers = itertools.count()
        made = []
        for begin in arrivals_of(rng, rate, seconds):
            shared = take(numbers, blocks_of(tokens))
            for _ in range(count):
                prompt = shared + take(numbers, blocks_of(OWN_TOKENS))
                answer = take(numbers, blocks_of(ANSWER_TOKENS))
                at = begin + rng.uniform(0, WITHIN_SECONDS)
                made.append(request_of(at, prompt, answer, ANSWER_TOKENS))
        return sorted(made, key=lambda one: one.at)

    return make


# Fleets that are idle but for the siblings, and a busy one.
SIBLING_CELLS = (
    *(
        Cell(f"{count} siblings of {tokens // 1_000}k", siblings(count, tokens, 0.1, 300))
        for tokens in (16_000, 32_000)
        for count in (4, 8, 16)
    ),
    Cell("8 siblings of 16k, busy", siblings(8, 16_000, 1.0, 60)),
)
CELLS = (*SIBLING_CELLS, *USUAL_CELLS)


def rows(cell: Cell, results: Results) -> list[Row]:
    """Returns the rows of the fleet's work and of TTFT, relative to today's decision."""
    ours, today = results[TOGETHER], results[TODAY]
    are_siblings = cell in SIBLING_CELLS
    made: list[Row] = []
    if are_siblings:
        name = f"{cell.name}: computed tokens / today's"
        made.append(PairedRow(name, _computed(ours), _computed(today), NOT_WORSE))
    for what in ("p50", "p90"):
        name = f"{cell.name}: {what} / today's"
        goal = HARDLY_LATER if are_siblings else NOT_WORSE
        made.append(PairedRow(name, _times(ours, what), _times(today, what), goal))
    return made


def _times(results: Sequence[Result], what: str) -> Figure:
    return Figure([max(1e-6, getattr(one, what)) for one in results])


def _computed(results: Sequence[Result]) -> Figure:
    """Returns the share of the prompt tokens that the fleet computed."""
    return Figure([1.0 - one.hit_rate for one in results])
