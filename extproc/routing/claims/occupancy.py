"""How much of the caches live conversations fill, where all of that is known."""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from extproc.routing.claims.claim_table import Holdings

# How much larger caches have to be than what is needed on average, as simulated: the need varies,
# some workers are fuller than others, and what has ended goes only once it is the least recent.
MARGIN = 1.15


class Occupancy(NamedTuple):
    """The live contexts of some workers, in tokens.

    live: what they hold, shared prefixes once. room: what the caches have room for. usual: what is
    a conversation's own on average, of those that returned; 0 if none has. needed: what those that
    returned in the last minutes held until then, on average: also those that paused for long, and
    none that have ended.
    """

    live: float
    room: float
    usual: float
    needed: float = 0.0

    def missing_workers(self, workers: int) -> int:
        """Returns how many more workers, with caches like these, would hold what is needed.

        workers: how many there are.
        """
        return max(0, ceil(MARGIN * self.needed * workers / self.room) - workers)


def occupancy_of(records: Iterable[Holdings], now: float) -> Occupancy | None:
    """Returns what live conversations fill; None if a worker did not say how large its cache is."""
    live = room = own = returned = needed = 0.0
    for one in records:
        if not one.capacity_tokens:
            return None
        contexts = one.contexts
        contexts.expire(now)
        live += contexts.tokens
        room += one.capacity_tokens
        own += contexts.own_returned
        returned += contexts.returned
        needed += contexts.needed(now)
    if not room:
        return None
    return Occupancy(live, room, own / returned if returned >= 1.0 else 0.0, needed)
