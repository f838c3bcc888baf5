"""The cells of closed loops: clients, fleet and faults.

The share of the caches that a cell fills is the sum over its clients of the mean context of their
kind (`routing_clients.mean_context`), by what the caches of all workers have room for beside one
common prompt each.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from routing_cells import CACHE_TOKENS
from routing_clients import (
    AGENT,
    CHAT,
    ENDLESS,
    FORKING,
    Kind,
    clients_that_fill,
    mean_context,
)

from kvtools.whatif.engines import BLOCK_TOKENS, ModelledSpeed
from kvtools.whatif.routers import Stage

SECONDS, WARM_SECONDS = 4_000.0, 1_000.0

# When a worker joins or stops, where one does.
CHANGE_SECONDS = 2_000.0

WORKERS = 8


class Loop(NamedTuple):
    """A cell of clients that wait for their answers.

    clients: how many of each kind. seconds: how long, of which `warm_seconds` do not count. rates:
    prompt tokens a second, assigned to the workers in rotation. lost_at, joins_at: as in a stage.
    routers: in front of the workers. named_share: of the clients, those that name their session.
    """

    name: str
    clients: Sequence[tuple[Kind, int]]
    seconds: float = SECONDS
    warm_seconds: float = WARM_SECONDS
    workers: int = WORKERS
    rates: Sequence[float] = (ModelledSpeed().prefill_rate,)
    lost_at: float = math.inf
    joins_at: float = 0.0
    routers: int = 1
    named_share: float = 1.0

    @property
    def stage(self) -> Stage:
        """The engines, and what happens to them."""
        usual, rates = ModelledSpeed(), self.rates
        speeds = [
            usual.slower(usual.prefill_rate / rates[number % len(rates)])
            for number in range(self.workers)
        ]
        blocks = CACHE_TOKENS // BLOCK_TOKENS
        return Stage(speeds, blocks, lost_at=self.lost_at, joins_at=self.joins_at)

    @property
    def fill(self) -> float:
        """The share of the caches that the clients' contexts fill on average."""
        context = sum(count * mean_context(kind) for kind, count in self.clients)
        return context / _room(self.clients[0][0], self.workers)


def _room(kind: Kind, workers: int) -> float:
    return workers * (CACHE_TOKENS - kind.system_tokens)


def agents(count: int, seconds: float = SECONDS, warm_seconds: float = WARM_SECONDS) -> Loop:
    """Returns a cell of so many agents."""
    return Loop(f"{count} agents", [(AGENT, count)], seconds, warm_seconds)


def filled(kind: Kind, share: float, workers: int = WORKERS) -> Loop:
    count = clients_that_fill(kind, share, _room(kind, workers))
    return Loop(f"{kind.name}, {share:g} of the caches", [(kind, count)], workers=workers)


def _small(workers: int, share: float) -> Loop:
    made = filled(AGENT, share, workers)
    return made._replace(name=f"{workers} workers, {share:g} of the caches")


def mixed(share: float) -> Loop:
    """Half of the contexts are agents', a quarter those of agents with sub-agents, a quarter
    people's."""
    parts = ((AGENT, 0.5), (FORKING, 0.25), (CHAT, 0.25))
    room = _room(AGENT, WORKERS)
    clients = [(kind, clients_that_fill(kind, share * part, room)) for kind, part in parts]
    return Loop(f"mix, {share:g} of the caches", clients)


# By how many agents a fleet carries.
AGENT_COUNTS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 200)
AGENT_LOOPS = tuple(map(agents, AGENT_COUNTS))

_BUSY = agents(96)
_UNEVEN_RATES = (6_000, 12_000, 18_000, 12_000)

LOOPS = (
    *AGENT_LOOPS,
    *(filled(FORKING, share) for share in (0.3, 0.6, 1.0, 1.3)),
    *(filled(CHAT, share) for share in (0.5, 1.0, 1.3)),
    *(mixed(share) for share in (0.5, 0.8, 1.0, 1.3, 1.6)),
    *(filled(ENDLESS, share) for share in (0.3, 0.6, 1.0, 1.3)),
    _BUSY._replace(name="96 agents, a worker joins", joins_at=CHANGE_SECONDS),
    agents(80)._replace(name="80 agents, a worker stops", lost_at=CHANGE_SECONDS),
    *(
        agents(count)._replace(name=f"{count} agents, workers 1:2:3:2", rates=_UNEVEN_RATES)
        for count in (64, 96)
    ),
    _BUSY._replace(name="96 agents, half without a session header", named_share=0.5),
    _BUSY._replace(name="96 agents without session headers", named_share=0.0),
    agents(64)._replace(name="64 agents, eight routers", routers=8),
    _BUSY._replace(name="96 agents, eight routers", routers=8),
    *(_small(2, share) for share in (0.6, 1.0, 1.3)),
    *(_small(3, share) for share in (0.6, 1.0, 1.3)),
)

# Shorter cells for a first impression. In less time all clients' first conversations, which are
# longer, would still fill the caches; and RING_HASH's queues need longer to show.
QUICK_SECONDS = 2_000.0
QUICK_LOOPS = tuple(
    agents(count, QUICK_SECONDS)._replace(name=f"{count} agents, {QUICK_SECONDS:.0f} s")
    for count in (64, 96, 112)
)
