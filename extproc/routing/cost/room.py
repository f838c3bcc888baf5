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

import msgspec

from extproc.routing.claims.claim_table import Holdings
from extproc.routing.claims.homes import HOME_TOKENS
from extproc.routing.cost.survey import Survey
from extproc.routing.cost.term import Charge
from extproc.routing.savings.belonging import Belonging
from extproc.routing.savings.savings import Savings

# A conversation that lives on a worker is at least so much work to come there, in tokens.
CONVERSATION_TOKENS = 1_024.0

# The name of the term, as POST /explain shows it.
CONVERSATIONS = "conversations"


class Occupancy(msgspec.Struct, frozen=True, gc=False):
    """How full of live contexts a worker's cache is.

    conversations: how many live there. tokens: of their contexts, a shared prefix once. In both,
    one that had only one request counts as much as it is likely to return. capacity: the size of
    the cache in tokens, None if it is not known.
    """

    conversations: float
    tokens: float
    capacity: int | None = None

    @property
    def share(self) -> float:
        """The share of the cache that is full of them, at most 1; 0 if its size is not known."""
        return min(1.0, self.tokens / self.capacity) if self.capacity else 0.0


def occupancy_of(holdings: Holdings, returning: float, now: float) -> Occupancy:
    """Returns how full a worker's cache is.

    returning: the share of the conversations that return after their first request.
    """
    live = holdings.contexts
    if now >= live.expires_at:
        live.expire(now)
    return Occupancy(
        live.returned + returning * live.once,
        live.own_returned + returning * live.own_once + live.shared,
        holdings.capacity_tokens,
    )


def evicted(occupied: float, added: float, capacity: int | None) -> float:
    """Returns how many live tokens added ones are expected to evict from a cache.

    occupied: the live tokens that are there. capacity: the size of the cache in tokens, None if it
    is not known, when nothing is expected.

    A cache is never filled evenly, so an added token evicts a live one with the square of the share
    that is occupied as the chance, and certainly once all of it is. This is the integral of that.
    """
    if not capacity:
        return 0.0
    before, after = occupied / capacity, (occupied + added) / capacity
    below = before**3 / 3 if before < 1.0 else before - 2 / 3
    above = after**3 / 3 if after < 1.0 else after - 2 / 3
    return capacity * (above - below)


def is_concerned(belonging: Belonging, survey: Survey) -> bool:
    """Returns whether a request's conversation begins, lost its cache, or would leave its worker.

    Any other stays where it is: a price of moving it would change nothing.
    """
    costs = survey.costs
    if belonging.begins or not belonging.home or not costs:
        return belonging.begins and len(costs) > 1
    return survey.workers[costs.index(min(costs))].name != belonging.home


class Room:
    """The term of a request that `is_concerned`.

    holdings: returns the record of what was sent to a worker, by its name. returning: the share of
    the conversations that return after their first request. ejected: failing endpoints.
    """

    def __init__(
        self,
        holdings: Callable[[str], Holdings],
        returning: float,
        ejected: Mapping[str, str],
        now: float,
    ) -> None:
        self._holdings = holdings
        self._returning = returning
        self._ejected = ejected
        self._now = now

    def charge(self, survey: Survey, savings: Savings) -> Charge | None:
        """Returns by how much more than the best one each worker costs."""
        belonging, slow = savings.belonging, [one.slowness for one in survey.loads]
        there = self._there(survey, belonging)
        costs = self._new(survey, there, slow, savings)
        if belonging.begins:
            self._add_work_to_come(costs, survey, there, slow, savings)
        elif not belonging.credit:
            costs = [
                cost if worker.name == belonging.home else cost + HOME_TOKENS * slower
                for cost, worker, slower in zip(costs, survey.workers, slow, strict=True)
            ]
        least = min(costs)
        if max(costs) == least:
            return None
        affinity = survey.affinity
        return Charge(CONVERSATIONS, [affinity * (each - least) for each in costs])

    def _there(self, survey: Survey, belonging: Belonging) -> list[Occupancy]:
        """Returns how full each worker's cache is without the request's own conversation."""
        there, holdings = [], self._holdings
        for worker in survey.workers:
            found = occupancy_of(holdings(worker.name), self._returning, self._now)
            if worker.name == belonging.home:
                others = max(0.0, found.conversations - 1)
                tokens = max(0.0, found.tokens - belonging.before.own)
                found = Occupancy(others, tokens, found.capacity)
            there.append(found)
        return there

    def _new(
        self,
        survey: Survey,
        there: Sequence[Occupancy],
        slow: Sequence[float],
        savings: Savings,
    ) -> list[float]:
        """Returns what the request's new tokens are expected to evict on each worker."""
        saved, weighed = savings.saved, savings.weighed_tokens
        shared = savings.belonging.turn.context.shared
        costs = []
        for worker, one, slower in zip(survey.workers, there, slow, strict=True):
            held = min(saved.get(worker.name, 0.0), weighed)
            occupied = one.tokens + max(0.0, held - shared)
            costs.append(slower * evicted(occupied, weighed - held, one.capacity))
        return costs

    def _add_work_to_come(
        self,
        costs: list[float],
        survey: Survey,
        there: Sequence[Occupancy],
        slow: Sequence[float],
        savings: Savings,
    ) -> None:
        """Adds by how many tokens a conversation that begins avoids each worker.

        Each conversation that a worker has beyond the sound one with the least to do counts half of
        what the request could save anywhere, and a little more. So a shared prefix is worth one of
        them and never two, however long it is. All of that counts as much as the conversation is
        likely to return, and as there is room: evictions that must be are better gathered than
        spread.
        """
        live = [one.conversations * slower for one, slower in zip(there, slow, strict=True)]
        able, full = live, [one.share for one in there]
        if self._ejected:
            sound = [worker.endpoint not in self._ejected for worker in survey.workers]
            able, full = list(compress(live, sound)) or live, list(compress(full, sound)) or full
        least = min(able)
        each = CONVERSATION_TOKENS + max(savings.saved.values(), default=0.0) / 2
        each *= self._returning * (1.0 - min(full) ** 2)
        for at, one in enumerate(live):
            if one > least:
                costs[at] += each * (one - least)
