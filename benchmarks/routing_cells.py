"""The cells of the routing benchmark: workload, load, fleet and what goes wrong.

Fixed before the default's weights were tuned, and not changed since. Tuning uses other seeds.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from routing_fleet import BLOCK_TOKENS, Speed
from routing_workloads import (
    Workload,
    herd,
    long_document,
    mixed,
    multi_turn,
    shared_prefix,
    single_shot,
)

# Tokens of KV cache of an engine.
CACHE_TOKENS = 400_000

# Seeds of the published table, and those that weights are tuned on.
SEEDS = tuple(range(1000, 1020))
TUNING_SEEDS = tuple(range(6))


# How long it takes until a worker that refuses connections is left out: three scrapes.
UNFIT_SECONDS = 3.0


class Cell(NamedTuple):
    """One case.

    slow: how many times slower the first engine is. lost_at: seconds from which on it takes no new
    request: the proxy goes on to the next one that is named, and the router knows
    `UNFIT_SECONDS` later.
    """

    name: str
    workload: Workload
    workers: int = 8
    cache_tokens: int = CACHE_TOKENS
    delay_seconds: float = 0.02
    slow: float = 1.0
    lost_at: float = math.inf

    @property
    def speeds(self) -> Sequence[Speed]:
        """Of the engines."""
        usual = Speed()
        return [usual.slower(self.slow) if number == 0 else usual for number in range(self.workers)]

    @property
    def cache_blocks(self) -> int:
        """Of one engine."""
        return self.cache_tokens // BLOCK_TOKENS


CELLS = (
    Cell("shared prefix, 4/s", shared_prefix(4, 120)),
    Cell("shared prefix, 12/s", shared_prefix(12, 90)),
    Cell("shared prefix, 24/s", shared_prefix(24, 60)),
    Cell("shared prefix, 40/s", shared_prefix(40, 45)),
    Cell("shared prefix, 4 workers, 10/s", shared_prefix(10, 90, groups=75), workers=4),
    Cell("shared prefix, 64 workers, 150/s", shared_prefix(150, 25, groups=600), workers=64),
    Cell("multi-turn, light", multi_turn(1.5, 120)),
    Cell("multi-turn, busy", multi_turn(6, 60)),
    Cell("multi-turn, saturated", multi_turn(12, 40)),
    Cell("long document, light", long_document(0.3, 150)),
    Cell("long document, busy", long_document(1.2, 90)),
    Cell("single shot, light", single_shot(8, 90)),
    Cell("single shot, busy", single_shot(28, 60)),
    Cell("single shot, saturated", single_shot(45, 40)),
    Cell("mixed", mixed(shared_prefix(8, 60), multi_turn(2, 60), single_shot(6, 60))),
    Cell("evictions", shared_prefix(10, 90, answer_tokens=300), cache_tokens=100_000),
    Cell("straggler, shared prefix", shared_prefix(12, 90), slow=4.0),
    Cell("straggler, single shot", single_shot(18, 60), slow=4.0),
    Cell("events 2 s late", shared_prefix(12, 90), delay_seconds=2.0),
    Cell("herd of 64", herd(6, 64)),
)
