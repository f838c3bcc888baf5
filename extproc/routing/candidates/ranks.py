"""Data-parallel ranks: which of its worker's ranks a request names.

If a worker's ranks share one HTTP port, a request may name one of them
(`extproc.routing.candidates.pins`).
vLLM and SGLang refuse a rank that they do not have, so it is named only if every worker that the
request may reach has it. An engine does not balance requests that name a rank, so a request names
one only if the rank's cache saves more than its load exceeds that of the idlest rank.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from extproc.routing.candidates.pins import RankChoice
from kvstate.overlap import Overlap, of_any_rank, worth_tokens


class Ranks(NamedTuple):
    """The ranks of workers, for a request on a path.

    count: returns a worker's number of ranks, by name; 0 if unknown. work: returns the load in
    tokens of the requests in flight that named a rank, by rank; given the endpoint, the time, and
    the tokens that each request counts for. choice: returns how the request may name a rank of a
    worker, by its name.
    """

    count: Callable[[str], int]
    work: Callable[[str, float, float], Mapping[int, float]]
    choice: Callable[[str], RankChoice]
    path: str

    def held(self, overlaps: Mapping[str, Overlap]) -> Mapping[str, Overlap]:
        """Returns overlaps by worker, certain only where the engine will compute on that rank."""
        unsure = [
            name for name in overlaps if self.count(name) > 1 and not self.choice(name).is_certain
        ]
        if not unsure:
            return overlaps
        return {**overlaps, **{name: of_any_rank(overlaps[name]) for name in unsure}}


def rank_of(
    overlaps: Sequence[Overlap], counts: Sequence[int], count: int, work: Mapping[int, float]
) -> int | None:
    """Returns the data-parallel rank that a request should name, None for none.

    overlaps: its prompts' on the picked worker. counts: numbers of ranks of all workers that it may
    reach. count, work: the picked worker's number of ranks, and their load.
    """
    ranks = {overlap.rank for overlap in overlaps}
    if len(ranks) != 1:
        return None
    rank = ranks.pop()
    if count == 1 or min(counts) <= rank:
        return None
    idlest = min([work.get(other, 0.0) for other in range(count)])
    saved = sum([worth_tokens(overlap) for overlap in overlaps])
    return rank if saved > work.get(rank, 0.0) - idlest else None
