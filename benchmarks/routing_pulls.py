"""Cells of pulls: engines that pull blocks from each other, named after the pick or priced in it.

Hot documents, a worker that joins, and a document with three times the load of its holder. An
engine sends to one other at a time, so many pulls from one holder wait for each other.
"""

import itertools
from collections.abc import Mapping, Sequence
from random import Random

from measure import Figure, Row
from routing_cells import CACHE_TOKENS, Cell
from routing_compare import NOT_WORSE, PairedRow, again, not_worse
from routing_workloads import (
    Workload,
    arrivals_of,
    blocks_of,
    long_document,
    mixed,
    multi_turn,
    request_of,
    shared_prefix,
    single_shot,
    take,
)

from extproc.config.sections import Disaggregation
from kvtools.whatif.engines import ModelledSpeed, Request, Result
from kvtools.whatif.routers import Contestant, Stage

# Tokens a second that an engine sends: of a model with 128 KiB a token, 6.5 GB/s.
TRANSFER_RATE = 50_000
LEAST_TOKENS = 1_024

# The time in which documents become known.
WARM_SECONDS = 30.0

NO_PULLS = "cost, no pulls"
AFTER = "cost"  # pulls are named after the pick
PRICED = "cost, pulls priced"
HALF, DOUBLE = "cost, pulls priced, half the speed", "cost, pulls priced, double"


def _rules(rate: int = TRANSFER_RATE, *, prices: bool = True) -> Disaggregation:
    return Disaggregation(
        connector="offloading",
        transfer_tokens_per_second=rate,
        min_pulled_tokens=LEAST_TOKENS,
        price_pulls=prices,
    )


_AFTER = Contestant(AFTER, "cost", expects=True, learns=True, transfers=_rules(prices=False))

CONTESTANTS = (
    _AFTER,
    again(_AFTER),
    Contestant(NO_PULLS, "cost", expects=True, learns=True),
    Contestant(PRICED, "cost", expects=True, learns=True, transfers=_rules()),
    Contestant(HALF, "cost", expects=True, learns=True, transfers=_rules(TRANSFER_RATE // 2)),
    Contestant(DOUBLE, "cost", expects=True, learns=True, transfers=_rules(TRANSFER_RATE * 2)),
)

Results = Mapping[str, Sequence[Result]]


class PullCell(Cell):
    """A cell whose engines pull from each other.

    joins_at: the seconds until which the last engine is not there.
    """

    joins_at: float = 0.0
    transfer_rate: float = TRANSFER_RATE

    @property
    def stage(self) -> Stage:
        """The engines and their faults."""
        return super().stage._replace(joins_at=self.joins_at, transfer_rate=self.transfer_rate)


def documents(rate: float, seconds: float, count: int, tokens: int) -> Workload:
    """Questions about a few long documents, each with a new question of 256 tokens.

    In the first half minute each document comes once, at even intervals.
    """

    def make(rng: Random) -> list[Request]:
        numbers = itertools.count()
        known = [take(numbers, blocks_of(tokens)) for _ in range(count)]
        times = [(WARM_SECONDS * at / count, known[at]) for at in range(count)]
        times += [
            (WARM_SECONDS + 5.0 + at, known[rng.randrange(count)])
            for at in arrivals_of(rng, rate, seconds)
        ]
        made = []
        for at, document in times:
            prompt = document + take(numbers, blocks_of(256))
            made.append(request_of(at, prompt, take(numbers, blocks_of(200)), 200))
        return made

    return make


def crowds(rate: float, seconds: float, count: int, tokens: int, within: float) -> Workload:
    """New documents, each with many questions within some seconds; rate: documents a second.

    The first question comes as long before the others as its document takes to be computed.
    """

    def make(rng: Random) -> list[Request]:
        numbers = itertools.count()
        made = []
        for begin in arrivals_of(rng, rate, seconds):
            document = take(numbers, blocks_of(tokens))
            first = begin + 1.2 * tokens / ModelledSpeed().prefill_rate
            times = [begin, *(first + rng.uniform(0, within) for _ in range(count - 1))]
            for at in times:
                prompt = document + take(numbers, blocks_of(256))
                made.append(request_of(at, prompt, take(numbers, 2), 200))
        return sorted(made, key=lambda one: one.at)

    return make


class Joining(PullCell):
    """Its last engine joins when all documents are known, and ten seconds later."""

    joins_at = WARM_SECONDS + 15.0


class SlowTransfers(PullCell):
    """Its engines send more slowly than they compute."""

    transfer_rate = 4_000.0


PULL_CELLS = (
    PullCell("hot documents of 24k", crowds(0.25, 90, 300, 24_000, 5.0)),
    PullCell("hot documents of 8k", crowds(0.5, 60, 200, 8_000, 4.0)),
    Joining("one new worker", documents(64, 45, 16, 16_000), workers=4),
    PullCell("a holder at three times its load", crowds(0.05, 90, 500, 24_000, 5.0)),
)
OTHER_CELLS = (
    PullCell("shared prefix, 12/s", shared_prefix(12, 90)),
    PullCell("shared prefix, 24/s", shared_prefix(24, 60)),
    PullCell("multi-turn, busy", multi_turn(6, 60)),
    PullCell("long document, light", long_document(0.3, 150)),
    PullCell("long document, busy", long_document(1.2, 90)),
    PullCell("single shot, busy", single_shot(28, 60)),
    PullCell("mixed", mixed(shared_prefix(8, 60), multi_turn(2, 60), single_shot(6, 60))),
    PullCell("evictions", shared_prefix(10, 90, answer_tokens=300), cache_tokens=CACHE_TOKENS // 4),
    PullCell("24 documents of 16k", documents(60, 30, 24, 16_000)),
    SlowTransfers("hot documents, slow transfers", crowds(0.3, 60, 40, 24_000, 8.0)),
    SlowTransfers("shared prefix, slow transfers", shared_prefix(12, 60)),
)
CELLS = (*PULL_CELLS, *OTHER_CELLS)


def rows(cell: Cell, results: Results) -> list[Row]:
    """Returns the rows of TTFT: priced pulls relative to those named after the pick."""
    made: list[Row] = []
    for what in ("p50", "p90", "p99"):
        ours, today, other_draws = (
            _times(results[one], what) for one in (PRICED, AFTER, again(_AFTER).name)
        )
        name = f"{cell.name}: {what} / pulls named after the pick"
        made.append(not_worse(name, ours, today, other_draws))
    name, without = f"{cell.name}: p90 / no pulls", _times(results[NO_PULLS], "p90")
    made.append(PairedRow(name, _times(results[PRICED], "p90"), without, NOT_WORSE))
    return made


def _times(results: Sequence[Result], what: str) -> Figure:
    return Figure([max(1e-6, getattr(one, what)) for one in results])
