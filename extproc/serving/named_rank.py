"""Tells the engine which data-parallel rank a request names: in a header, or in its body."""

from extproc.requests.added_fields import Body, with_fields
from extproc.routing.candidates.pins import PinnedRank

# The header to set, and the body that replaces the client's; None for each that there is not.
Named = tuple[tuple[str, str] | None, Body | None]

UNNAMED: Named = (None, None)


def named_rank(rank: PinnedRank | None, body: Body | None) -> Named:
    """Returns what names a rank. body: the client's; None if it must not be changed."""
    if rank is None:
        return UNNAMED
    if not rank.pin.in_body:
        return (rank.pin.name, str(rank.rank)), None
    return None, None if body is None else with_fields(body, {rank.pin.name: rank.rank})
