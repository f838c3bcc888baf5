"""Data-parallel ranks: which of its worker's ranks a request names, and by which header.

If a worker's ranks share one HTTP port, a request may name one of them. vLLM and SGLang read it
from the header `X-data-parallel-rank` and refuse a rank that they do not have, so it is named only
if every worker that the request may reach has it. An engine does not balance requests that name a
rank, so a request names one only if the rank's cache saves more than its load exceeds that of the
idlest rank.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from extproc.config.schema import AUTO
from kvstate.overlap import Overlap, worth_tokens


class Ranks(NamedTuple):
    """The ranks of workers.

    count: returns a worker's number of ranks, by name; 0 if unknown. work: returns the load in
    tokens of the requests in flight that named a rank, by rank; given the endpoint, the time, and
    the tokens that each request counts for.
    """

    count: Callable[[str], int]
    work: Callable[[str, float, float], Mapping[int, float]]


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


# The header of vLLM and SGLang.
RANK_HEADER = "x-data-parallel-rank"


def rank_header(name: str | None, rank: int | None) -> tuple[str, str] | None:
    """Returns the request header that names a rank, None if there is none to name.

    name: the configured header.
    """
    named = rank_name(name)
    return None if named is None or rank is None else (named, str(rank))


def rank_name(name: str | None) -> str | None:
    """Returns the name of that header in lower case, None if there is none. name: as configured."""
    return RANK_HEADER if name == AUTO else name and name.lower()
