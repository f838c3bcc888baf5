"""Room: what a request's new blocks cost the conversations that live on each worker.

A token that a worker does not hold is computed there, and stored: once the live contexts fill the
cache, it evicts one of theirs, which has to be computed again. So each token that would be new on a
worker costs as many more as it is likely to evict: a cache is never filled evenly, so the chance is
the square of the share that is full of live contexts (`evicted`). This one price places
conversations that begin, and those that lost their cache, where there is room; and it is a part of
the price of moving one that is held, whose whole context would be new elsewhere.

A conversation that begins is also work to come. While there is room, other conversations that live
on a worker count, so that a prefix that all of them share, which each worker computes once, does
not gather them on the first worker that holds it.

How fast a worker is does not count here: a fast one's cache is no larger, its queue and what it has
to compute are priced by its speed already, and while little is known of speeds, whoever computed
the first prompts would seem fast, and get all others.
"""

from collections.abc import Collection, Sequence
from itertools import compress

from extproc._core import evicted
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


def is_concerned(belonging: Belonging, survey: Survey) -> bool:
    """Returns whether a request's conversation begins, lost its cache, or may leave its worker.

    Any other is cheapest there alone: a price of moving it would change nothing.
    """
    costs = survey.costs
    if belonging.begins or not belonging.home or not costs:
        return belonging.begins and len(costs) > 1
    least = min(costs)
    return survey.workers[costs.index(least)].name != belonging.home or costs.count(least) > 1


class Room:
    """The term of a request that `is_concerned`.

    records: what was sent to each worker, in the order of the snapshot. returning: the share of the
    conversations that return after their first request; those that had one count as much. unsure:
    endpoints that fail, or for which others answer.
    """

    def __init__(
        self,
        records: Sequence[Holdings],
        returning: float,
        unsure: Collection[str],
        now: float,
    ) -> None:
        self._records = records
        self._returning = returning
        self._unsure = unsure
        self._now = now

    def charge(self, survey: Survey, savings: Savings) -> Charge | None:
        """Returns by how much more than the best one each worker costs."""
        belonging = savings.belonging
        there = [self._records[place] for place in survey.places]
        live, occupied = self._occupancy(there, survey, belonging)
        capacities = [float(one.capacity_tokens or 0) for one in there]
        weighed, shared = savings.weighed_tokens, belonging.turn.context.shared
        costs = evicted(survey.workers, savings.saved, occupied, capacities, weighed, shared)
        if belonging.begins:
            full = [
                min(1.0, tokens / capacity) if capacity else 0.0
                for tokens, capacity in zip(occupied, capacities, strict=True)
            ]
            self._add_work_to_come(costs, survey, live, full, savings)
        elif not belonging.credit:
            costs = [
                cost if worker.name == belonging.home else cost + HOME_TOKENS
                for cost, worker in zip(costs, survey.workers, strict=True)
            ]
        least = min(costs)
        if max(costs) == least:
            return None
        affinity = survey.affinity
        return Charge(CONVERSATIONS, [affinity * (each - least) for each in costs])

    def _occupancy(
        self, there: Sequence[Holdings], survey: Survey, belonging: Belonging
    ) -> tuple[list[float], list[float]]:
        """Returns how many conversations live on each worker, and the tokens of their contexts.

        The request's own is left out.
        """
        counts, tokens, returning, now = [], [], self._returning, self._now
        for one in there:
            live = one.contexts
            if now >= live.expires_at:
                live.expire(now)
            counts.append(live.returned + returning * live.once)
            tokens.append(live.own_returned + returning * live.own_once + live.shared)
        own = belonging.counted
        if own is not None:
            weight = 1.0 if own.has_returned else returning
            for at, worker in enumerate(survey.workers):
                if worker.name == belonging.home:
                    counts[at] = max(0.0, counts[at] - weight)
                    tokens[at] = max(0.0, tokens[at] - weight * own.own)
        return counts, tokens

    def _add_work_to_come(
        self,
        costs: list[float],
        survey: Survey,
        work: Sequence[float],
        full: Sequence[float],
        savings: Savings,
    ) -> None:
        """Adds by how many tokens a conversation that begins avoids each worker.

        work: the conversations that live on each. full: the share of its cache that their contexts
        fill.

        Each conversation that a worker has beyond the sound one with the least to do counts half of
        what the request could save anywhere, and a little more. So a shared prefix is worth one of
        them and never two, however long it is. All of that counts as much as the conversation is
        likely to return, and as there is room: evictions that must be are better gathered than
        spread. On a busy fleet the queues of now count for more, and work to come for less.
        """
        able = work
        if self._unsure:
            sound = [worker.endpoint not in self._unsure for worker in survey.workers]
            able, full = list(compress(work, sound)) or work, list(compress(full, sound)) or full
        least = min(able)
        each = CONVERSATION_TOKENS + max(savings.saved.values(), default=0.0) / 2
        each *= self._returning * (1.0 - min(full) ** 2) / survey.affinity**2
        for at, one in enumerate(work):
            if one > least:
                costs[at] += each * (one - least)
