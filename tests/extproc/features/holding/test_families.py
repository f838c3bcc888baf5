"""Nobody waits for ever: conversations that wait for their sub-agents, in caches that evict."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.features.holding.hold import REFUSED
from extproc.features.holding.limit import Limit
from extproc.routing.claims.line import NO_PLACE
from tests.extproc.features.holding.fleets import BOUND, HeldFleet

CAPACITY = 8_000
BEGUN, GROWN = 1_500, 700
RETRY_SECONDS, ANSWER_SECONDS, STEP_SECONDS = 5.0, 2.0, 1.0

# Far more than the conversations below need one after the other, waits up to the bound included.
ENDLESS_SECONDS = 20_000.0


@dataclass
class Agent:
    """A conversation. turns: how many are left. parent: who waits for it.

    families: after each turn, the sub-agents for which it waits: the turns of each, and whether it
    goes on from its parent's prompt.
    """

    tokens: Sequence[int]
    turns: int
    families: Sequence[Sequence[tuple[int, bool]]] = ()
    parent: "Agent | None" = None
    children: int = field(default=0)


class Evicting(HeldFleet):
    """A fleet whose caches drop the prompts that were used least recently."""

    def __init__(self) -> None:
        super().__init__()
        self.limit.share = Limit().share
        for each in self.holdings.values():
            each.capacity_tokens = CAPACITY

    def serve(self, tokens: Sequence[int]) -> None:
        now = self.now
        held = self.sent[self.send(tokens)]
        self.now = now
        while sum(map(len, held)) > CAPACITY and len(held) > 1:
            held.pop(0)


class Loop:
    """Agents who ask until all have ended."""

    def __init__(self, families: Sequence[Sequence[Sequence[tuple[int, bool]]]]) -> None:
        self.fleet, self.ended, self.longest = Evicting(), 0, 0.0
        self._numbers = count(1)
        self._due: list[tuple[float, int, Agent]] = []
        self._waiting: dict[int, list[Agent]] = {}
        for each in families:
            self._later(0.0, Agent(self._new(), len(each), each))

    def _new(self) -> Sequence[int]:
        start = 100_000 * next(self._numbers)
        return range(start, start + BEGUN)

    def _later(self, seconds: float, agent: Agent) -> None:
        heapq.heappush(self._due, (self.fleet.now + seconds, next(self._numbers), agent))

    def run(self) -> None:
        while self._due or self._waiting:
            assert self.fleet.now < ENDLESS_SECONDS
            for _, place, outcome in self.fleet.hold.step(self.fleet.now):
                self.longest = max(self.longest, self.fleet.now - place.since)
                agent = self._waiting[place.key].pop()
                if not self._waiting[place.key]:
                    del self._waiting[place.key]
                if outcome == REFUSED:
                    self._later(RETRY_SECONDS, agent)
                else:
                    self._serve(agent)
            while self._due and self._due[0][0] <= self.fleet.now:
                self._ask(heapq.heappop(self._due)[2])
            self.fleet.now += STEP_SECONDS

    def _ask(self, agent: Agent) -> None:
        if agent.children:
            return
        place = self.fleet.ask(agent.tokens)
        if place is None:
            self._serve(agent)
        elif place is NO_PLACE:
            self._later(RETRY_SECONDS, agent)
        else:
            self._waiting.setdefault(place.key, []).append(agent)

    def _serve(self, agent: Agent) -> None:
        self.fleet.serve(agent.tokens)
        agent.turns -= 1
        forks = agent.families[-agent.turns - 1] if agent.families else ()
        for turns, goes_on in forks:
            own = self._new()
            tokens = [*agent.tokens, *own[:GROWN]] if goes_on else own
            self._later(ANSWER_SECONDS, Agent(tokens, turns, parent=agent))
        agent.children = len(forks)
        if not forks:
            self._go_on(agent)

    def _go_on(self, agent: Agent) -> None:
        if agent.turns:
            start = 100_000 * next(self._numbers)
            agent.tokens = [*agent.tokens, *range(start, start + GROWN)]
            self._later(ANSWER_SECONDS, agent)
            return
        self.ended += 1
        if agent.parent is not None:
            agent.parent.children -= 1
            if not agent.parent.children:
                self._go_on(agent.parent)


FORKS = st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=3)


@settings(max_examples=20)
@given(st.lists(st.lists(FORKS, min_size=1, max_size=3), min_size=1, max_size=12))
def test_all_conversations_end_though_they_wait_for_their_sub_agents(
    families: list[list[list[tuple[int, bool]]]],
) -> None:
    loop = Loop(families)
    loop.run()
    assert loop.ended == sum(1 + sum(map(len, each)) for each in families)
    assert loop.longest <= BOUND + STEP_SECONDS
    loop.fleet.now += BOUND
    assert (loop.fleet.steps(), len(loop.fleet.hold)) == ([], 0)


def test_families_that_fill_the_caches_wait_and_end() -> None:
    loop = Loop([[[(2, True), (3, False), (1, False)], [(2, False)]]] * 12)
    loop.run()
    assert (loop.ended, loop.longest) == (60, BOUND)
