"""Many agents at once whose tokens are not known: every turn stays with its conversation's worker.

Eight conversations of each of four agents, in simulated time: the sizes and times of the real ones
that tests/clients runs. Conversations of one agent share all but a little of their prompts.
"""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import NamedTuple

import msgspec
import pytest

from extproc._core import LoadColumns
from extproc.requests.outline import Outline, outline_of
from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.cost.patience import PATIENCE_SECONDS, Patience, unminded
from extproc.routing.cost.survey import Survey
from extproc.routing.explain import explanation
from extproc.routing.inputs.query import Query
from extproc.routing.ledger import Ledger
from extproc.routing.load.endpoint_load import Ticket
from extproc.routing.load.loads import Load
from extproc.routing.savings.belonging import NOWHERE
from extproc.routing.savings.savings import Savings
from tests.agents import prose
from tests.extproc.routing.books import WORKERS, decided, ledger

CONVERSATIONS, TURNS = 8, 4


class Agent(NamedTuple):
    """An agent's system and the text of a turn in words, and when its conversations begin."""

    name: str
    system: int
    turn: int
    begins: float


AGENTS = (
    Agent("codex", 9_000, 130, 0.0),
    Agent("claude-code", 18_000, 110, 7.0),
    Agent("qwen-code", 19_000, 150, 20.0),
    Agent("opencode", 7_200, 115, 34.0),
)
Conversation = tuple[str, int]


def outlines() -> Mapping[Conversation, Sequence[Outline]]:
    """Returns the outlines of all turns of each conversation."""
    found: dict[Conversation, list[Outline]] = {}
    for agent in AGENTS:
        system = {"role": "system", "content": prose(agent.system, agent.name)}
        for number in range(CONVERSATIONS):
            key = (agent.name, number)
            texts = [prose(agent.turn, (key, at)) for at in range(TURNS)]
            said = [{"role": "user", "content": text} for text in texts]
            bodies = [{"messages": [system, *said[: at + 1]]} for at in range(TURNS)]
            found[key] = [outline_of(msgspec.json.encode(one)) for one in bodies]
    return found


OUTLINES = outlines()


def workers_of(one: Ledger, rng: Random, begins: Mapping[str, float]) -> dict[Conversation, str]:
    """Returns the workers that answer each conversation, such as "aaab": the last turn left."""
    found = dict.fromkeys(OUTLINES, "")
    events: list[tuple[float, int, Conversation, Ticket | None]] = []
    order = count()
    for key in OUTLINES:
        heappush(events, (begins[key[0]] + rng.uniform(0, 2), next(order), key, None))
    while events:
        now, _, key, ended = heappop(events)
        if ended is not None:
            one.release(ended, now)
            if len(found[key]) < TURNS:
                heappush(events, (now + rng.uniform(0, 3), next(order), key, None))
            continue
        asked = Query("m", reason="no_tokenizer", outline=OUTLINES[key][len(found[key])])
        made = decided(one, asked, now, "unsupported")
        found[key] += made.worker
        heappush(events, (now + rng.uniform(1, 3), next(order), key, one.book(made, now)))
    return found


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_every_turn_stays_while_others_begin(*, seed: int, at_once: bool) -> None:
    rng = Random(seed)
    begins = {one.name: 0.0 if at_once else one.begins * rng.uniform(0.3, 1.2) for one in AGENTS}
    found = workers_of(ledger(), rng, begins)
    assert {key: workers for key, workers in found.items() if len(set(workers)) > 1} == {}
    assert {len(workers) for workers in found.values()} == {TURNS}
    homes = [workers[0] for workers in found.values()]
    assert max(map(homes.count, "abc")) <= len(homes) // 2


def test_conversation_leaves_a_queue_longer_than_its_patience() -> None:
    for seconds, stays in ((PATIENCE_SECONDS, True), (PATIENCE_SECONDS + 3, False)):
        one = ledger()
        turns = OUTLINES["codex", 0]
        first = decided(one, Query("m", reason="x", outline=turns[0]))
        ticket = one.book(first, 0.0)
        assert ticket is not None
        one.release(ticket, 1.0)
        one.loads.begin(first.pick[0], seconds * 8_000, 1.0)
        after = decided(one, Query("m", reason="x", outline=turns[1]), 1.0)
        assert (after.worker == first.worker) is stays
        told = explanation(after, lambda _: "stale")
        terms = {each["name"]: each["cost_terms"]["patience"] for each in told["candidates"]}
        assert terms.pop(first.worker) == PATIENCE_SECONDS * 8_000
        assert set(terms.values()) == {0.0}
        costs = [each["cost"] for each in told["candidates"]]
        assert costs == pytest.approx(list(after.basis.costs), abs=0.01)


NOTHING_SAVED = Savings(0, 0.0, (), {}, NOWHERE, {})


def test_patience_is_in_time_whatever_the_worker_s_speed() -> None:
    cost = ledger().snapshot(PLAIN_REQUEST, Query("m"), (), (), str, 0.0).rules.cost
    assert unminded(Load(0, 10_000.0, slowness=2.0), cost) == 20_000
    nobody = Survey((), (), LoadColumns(()), [], 1.0)
    assert Patience("a", cost).charge(nobody, NOTHING_SAVED) is None
    others = Survey((0,), WORKERS[:1], LoadColumns([Load(0, 10.0)]), [10.0], 1.0)
    assert Patience("b", cost).charge(others, NOTHING_SAVED) is None
    assert unminded(Load(0, 40_000.0, slowness=2.0), cost) == PATIENCE_SECONDS * 8_000
