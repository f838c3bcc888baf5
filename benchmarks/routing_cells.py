"""The cells of the routing benchmark: workload, load, fleet and faults.

Fixed before the default's weights were tuned, and not changed since. Tuning uses other seeds.
"""

import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from routing_workloads import (
    Workload,
    herd,
    long_document,
    mixed,
    multi_turn,
    shared_prefix,
    single_shot,
)

from kvtools.whatif.engines import BLOCK_TOKENS, ModelledSpeed
from kvtools.whatif.routers import Arrivals, Stage

# Tokens of KV cache of an engine.
CACHE_TOKENS = 400_000

# Seeds of the published table, and seeds for tuning weights.
SEEDS = tuple(range(1000, 1020))
TUNING_SEEDS = tuple(range(6))


class Cell(NamedTuple):
    """One case: a stage and its workload.

    slow: how many times slower the first engine is; slow_from, slow_until: between which seconds.
    rates: prompt tokens a second, assigned to the engines in rotation. strangers: requests of
    another router to the same engines, each to a random one. lost_at: as in a stage.
    """

    name: str
    workload: Workload
    workers: int = 8
    cache_tokens: int = CACHE_TOKENS
    delay_seconds: float = 0.02
    slow: float = 1.0
    lost_at: float = math.inf
    slow_from: float = 0.0
    slow_until: float = math.inf
    rates: Sequence[float] = (ModelledSpeed().prefill_rate,)
    strangers: Workload | None = None

    @property
    def stage(self) -> Stage:
        """The engines and their faults."""
        blocks = self.cache_tokens // BLOCK_TOKENS
        return Stage(self._speeds, blocks, self.delay_seconds, self._turns, self.lost_at)

    @property
    def _speeds(self) -> Sequence[ModelledSpeed]:
        speeds = self._usual
        if not self.slow_from:
            speeds[0] = speeds[0].slower(self.slow)
        return speeds

    @property
    def _turns(self) -> Sequence[tuple[float, int, ModelledSpeed]]:
        first = self._usual[0]
        turns = []
        if self.slow_from:
            turns.append((self.slow_from, 0, first.slower(self.slow)))
        if self.slow_until < math.inf:
            turns.append((self.slow_until, 0, first))
        return turns

    @property
    def _usual(self) -> list[ModelledSpeed]:
        usual = ModelledSpeed()
        rates = [self.rates[number % len(self.rates)] for number in range(self.workers)]
        return [usual.slower(usual.prefill_rate / rate) for rate in rates]


def arrivals(cell: Cell, seed: int) -> Arrivals:
    """Returns the arrivals of a cell, the same for every contestant."""
    requests = cell.workload(Random(seed))
    if cell.strangers is not None:
        others = cell.strangers(Random(seed + 500_000))
        for one in others:  # give them their own blocks
            one.is_own = False
            one.blocks = [~block for block in one.blocks]
            one.answer_blocks = [~block for block in one.answer_blocks]
        requests = sorted([*requests, *others], key=lambda one: one.at)
    return Arrivals(requests)


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

_HALF, _DOUBLE, _MIXED = (4_000.0,), (16_000.0,), (4_000.0, 8_000.0, 16_000.0)


def _slow_for_30_s(name: str, workload: Workload) -> Cell:
    return Cell(name, workload, slow=4.0, slow_from=30.0, slow_until=60.0)


# Cells with engines that are not as fast as configured, or only at times, or are shared with other
# senders.
SPEED_CELLS = (
    Cell("half speed, shared prefix", shared_prefix(5, 120), rates=_HALF),
    Cell("half speed, single shot", single_shot(9, 90), rates=_HALF),
    Cell("half speed, long document", long_document(0.5, 120), rates=_HALF),
    Cell("double speed, shared prefix", shared_prefix(18, 60), rates=_DOUBLE),
    Cell("double speed, single shot", single_shot(36, 60), rates=_DOUBLE),
    Cell("double speed, long document", long_document(1.6, 90), rates=_DOUBLE),
    Cell("1:2:4, shared prefix", shared_prefix(12, 90), workers=9, rates=_MIXED),
    Cell("1:2:4, single shot", single_shot(22, 60), workers=9, rates=_MIXED),
    Cell("1:2:4, multi-turn", multi_turn(4, 60), workers=9, rates=_MIXED),
    Cell("1:2:4, long document", long_document(1, 90), workers=9, rates=_MIXED),
    _slow_for_30_s("slow for 30 s, shared prefix", shared_prefix(12, 90)),
    _slow_for_30_s("slow for 30 s, single shot", single_shot(18, 90)),
    Cell("strangers, shared prefix", shared_prefix(8, 90), strangers=single_shot(8, 90)),
    Cell("strangers, single shot", single_shot(16, 60), strangers=single_shot(8, 60)),
)
