"""Tells the engine which data-parallel rank a request names: in a header, or in its body."""

from extproc.features.feature import NOTHING_WRITTEN, Written
from extproc.requests.added_fields import Body, with_fields
from extproc.routing.candidates.pins import PinnedRank


def named_rank(rank: PinnedRank | None, body: Body | None) -> Written:
    """Returns what names a rank. body: the client's; None if it must not be changed."""
    if rank is None:
        return NOTHING_WRITTEN
    if not rank.pin.in_body:
        return Written(((rank.pin.name, str(rank.rank)),))
    if body is None:
        return NOTHING_WRITTEN
    return Written(body=with_fields(body, {rank.pin.name: rank.rank}))
