"""Which data-parallel rank of a worker a request is to name, where its ranks share one HTTP port.

vLLM and SGLang read a rank from the request header `X-data-parallel-rank` and refuse one that they
do not have, so it is named only where every worker that the request may reach has it. A request
that names a rank is not balanced over the ranks by its engine: so it names one only while what the
rank saves is more than what it has to do beyond the idlest one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from extproc.config import AUTO
from extproc.picking.pick import worth_tokens
from kvstate.overlap import Overlap


class Ranks(NamedTuple):
    """What is known of the ranks of workers.

    may_name: whether requests may name one now. count: of a worker, by name; 0 where that is not
    known. work: in tokens, of the requests under
    way at an endpoint that named a rank, by that rank; given the endpoint, the time, and the tokens
    that a request counts for.
    """

    may_name: Callable[[], bool]
    count: Callable[[str], int]
    work: Callable[[str, float, float], Mapping[int, float]]


def rank_of(
    overlaps: Sequence[Overlap], counts: Sequence[int], count: int, work: Mapping[int, float]
) -> int | None:
    """The rank that a request is to name; None for none.

    overlaps: of its prompts on the picked worker. counts: ranks of every worker that it may reach.
    count, work: ranks of the picked one, and what they have to do.
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


# Of vLLM and SGLang.
RANK_HEADER = "x-data-parallel-rank"


def rank_header(name: str | None, rank: int | None) -> tuple[str, str] | None:
    """The request header that names a rank; None where there is none to name.

    name: as it is configured.
    """
    if name is None or rank is None:
        return None
    return (RANK_HEADER if name == AUTO else name.lower()), str(rank)
