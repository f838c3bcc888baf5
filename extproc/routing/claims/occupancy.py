"""How much of the caches live conversations fill, where all of that is known."""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from extproc.routing.claims.claim_table import Holdings


class Occupancy(NamedTuple):
    """The live contexts of some workers, in tokens.

    live: what they hold, shared prefixes once. room: what the caches have room for. usual: what is
    a conversation's own on average, of those that returned; 0 if none has.
    """

    live: float
    room: float
    usual: float

    def missing_workers(self, workers: int) -> int:
        """Returns how many more workers, with caches like these, would hold all that lives.

        workers: how many there are.
        """
        return max(0, ceil(self.live * workers / self.room) - workers)


def occupancy_of(records: Iterable[Holdings], now: float) -> Occupancy | None:
    """Returns what live conversations fill; None if a worker did not say how large its cache is."""
    live = room = own = returned = 0.0
    for one in records:
        if not one.capacity_tokens:
            return None
        contexts = one.contexts
        contexts.expire(now)
        live += contexts.tokens
        room += one.capacity_tokens
        own += contexts.own_returned
        returned += contexts.returned
    if not room:
        return None
    return Occupancy(live, room, own / returned if returned >= 1.0 else 0.0)
