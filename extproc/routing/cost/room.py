"""Room: what a request's new blocks cost the conversations that live on each worker.

A token that a worker does not hold is computed there, and stored: once the live contexts fill the
cache, it evicts one of theirs, which has to be computed again. So each token that would be new on a
worker costs as many more as its cache is likely to be full of live contexts. This one price places
conversations that begin, and those that lost their cache, where there is room; and it is a part of
the price of moving one that is held, whose whole context would be new elsewhere.

A conversation that begins is also work to come. While there is room, those of other conversations
that live on a worker count, so that a prefix that all of them share, which each worker computes
once, does not gather them on the first worker that holds it.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from operator import add, mul

from extproc.routing.claims.homes import HOME_TOKENS
from extproc.routing.claims.live_contexts import Occupancy
from extproc.routing.cost.survey import Survey
from extproc.routing.cost.term import Charge
from extproc.routing.savings.savings import Savings

# A conversation that lives on a worker is at least so much work to come there, in tokens.
CONVERSATION_TOKENS = 1_024.0

# The name of the term, as POST /explain shows it.
CONVERSATIONS = "conversations"


def evicted(occupied: float, added: float, capacity: int | None) -> float:
    """Returns how many live tokens added ones are expected to evict from a cache.

    occupied: the live tokens that are there. capacity: the size of the cache in tokens, None if it
    is not known, when nothing is expected.

    A cache is never filled evenly, so an added token evicts a live one with the square of the share
    that is occupied as the chance, and always once all of it is.
    """
    if not capacity:
        return 0.0
    return capacity * (_evicted(occupied + added, capacity) - _evicted(occupied, capacity))


def _evicted(occupied: float, capacity: int) -> float:
    """Returns the integral of that chance, from an empty cache to one that is so full."""
    share = occupied / capacity
    return share**3 / 3 if share < 1.0 else share - 2 / 3


class Room:
    """The term of a request whose conversation begins, lost its cache, or would leave its worker.

    occupancy: returns how full of live contexts a worker's cache is, by its name. ejected: failing
    endpoints.
    """

    def __init__(self, occupancy: Callable[[str], Occupancy], ejected: Mapping[str, str]) -> None:
        self._occupancy = occupancy
        self._ejected = ejected

    def charge(self, survey: Survey, savings: Savings) -> Charge | None:
        """Returns by how much more than the best one each worker costs."""
        belonging = savings.belonging
        names = [one.name for one in survey.workers]
        home = names.index(belonging.home) if belonging.home in names else -1
        if not belonging.begins and (home < 0 or survey.costs[home] <= min(survey.costs)):
            return None
        there = list(map(self._occupancy, names))
        if home >= 0:
            there[home] = there[home].without(belonging.before)
        tokens = _new_tokens(names, there, savings)
        slow = [one.slowness for one in survey.loads]
        if not belonging.begins and not belonging.credit:
            tokens[home] -= HOME_TOKENS
        cost = list(map(mul, tokens, slow))
        if belonging.begins:
            cost = list(map(add, cost, self._work_to_come(survey, there, slow, savings)))
        least = min(cost, default=0.0)
        if max(cost, default=0.0) == least:
            return None
        return Charge(CONVERSATIONS, [survey.affinity * (each - least) for each in cost])

    def _work_to_come(
        self,
        survey: Survey,
        there: Sequence[Occupancy],
        slow: Sequence[float],
        savings: Savings,
    ) -> Sequence[float]:
        """Returns by how many tokens a conversation that begins avoids each worker.

        Each conversation that a worker has beyond the sound one with the least to do counts half of
        what the request could save anywhere, and a little more. So a shared prefix is worth one of
        them and never two, however long it is. All of that counts as much as the conversation is
        likely to return, and as there is room: evictions that must be are better gathered than
        spread.
        """
        live = [one.conversations * slower for one, slower in zip(there, slow, strict=True)]
        sound = [one.endpoint not in self._ejected for one in survey.workers]
        least = min(compress(live, sound), default=min(live, default=0.0))
        full = min(compress([one.share for one in there], sound), default=0.0)
        each = CONVERSATION_TOKENS + max(savings.saved.values(), default=0.0) / 2
        each *= (1.0 - full**2) * max([one.returning for one in there], default=0.0)
        return [each * max(0.0, one - least) for one in live]


def _new_tokens(names: Sequence[str], there: Sequence[Occupancy], savings: Savings) -> list[float]:
    """Returns how many live tokens a request's new ones are expected to evict on each worker."""
    saved, weighed = savings.saved, savings.weighed_tokens
    shared = savings.belonging.turn.context.shared
    found = []
    for name, one in zip(names, there, strict=True):
        held = min(saved.get(name, 0.0), weighed)
        occupied = one.tokens + max(0.0, held - shared)
        found.append(evicted(occupied, weighed - held, one.capacity))
    return found
