"""Cells of stores: engines that copy what they compute to a common store, and load from it.

Today's router does not know the store, though its engines use it. A store that does not tell of
removals is believed for some time after a block was last stored.
"""

from collections.abc import Callable, Mapping, Sequence

from measure import Figure, Row
from routing_cells import CACHE_TOKENS, Cell
from routing_compare import again, not_worse
from routing_pulls import crowds, documents
from routing_workloads import long_document, mixed, multi_turn, shared_prefix, single_shot

from extproc.config.sections import StoreSettings
from kvtools.whatif.engines import BLOCK_TOKENS, ModelledStore, Result
from kvtools.whatif.routers import Contestant, Stage

# Tokens a second that each engine loads: of a model with 128 KiB a token, 4 GB/s.
LOAD_RATE = 30_000.0

# Large enough that nothing is ever removed; and half of what one engine caches.
ROOMY_TOKENS, TIGHT_TOKENS = 50_000_000, CACHE_TOKENS // 2

TODAY = "cost"  # the store is not known
KNOWN, LESS, MORE = "cost, stores", "cost, stores at 20 %", "cost, stores at 80 %"
PERCENT = StoreSettings("store").worth_percent
MAX_AGE_SECONDS = 60.0


def _contestant(name: str, percent: int) -> Contestant:
    return Contestant(
        name,
        "cost",
        expects=True,
        learns=True,
        store_percent=percent,
        max_age_seconds=MAX_AGE_SECONDS,
    )


_TODAY = _contestant(TODAY, 0)

CONTESTANTS = (
    _TODAY,
    again(_TODAY),
    _contestant(KNOWN, PERCENT),
    _contestant(LESS, 20),
    _contestant(MORE, 80),
)

Results = Mapping[str, Sequence[Result]]


class StoreCell(Cell):
    """A cell whose engines share a store.

    mounted: how many of the engines mount it. store_tokens: its capacity. tells: whether it tells
    of removals. failing: how many of the engines mount it, but load nothing.
    """

    mounted: float = 1.0
    store_tokens: int = ROOMY_TOKENS
    tells: bool = True
    failing: float = 0.0

    @property
    def stage(self) -> Stage:
        """The engines, their faults, and their store."""
        return super().stage._replace(store=self._maker())

    def _maker(self) -> Callable[[], ModelledStore]:
        blocks = self.store_tokens // BLOCK_TOKENS
        engines = frozenset(range(round(self.mounted * self.workers)))
        failing = frozenset(range(round(self.failing * self.workers)))
        tells = self.tells

        def make() -> ModelledStore:
            return ModelledStore(blocks, engines, LOAD_RATE, tells_removals=tells, failing=failing)

        return make


class HalfCell(StoreCell):
    """Half of its engines mount the store."""

    mounted = 0.5


class SilentCell(StoreCell):
    """Its store is small, and tells of no removal."""

    store_tokens = TIGHT_TOKENS
    tells = False


class HalfFailsCell(StoreCell):
    """Half of its engines load nothing of what the store offers them."""

    failing = 0.5


class FailsCell(StoreCell):
    """None of its engines loads anything of what the store offers them."""

    failing = 1.0


_SMALL = CACHE_TOKENS // 2

STORE_CELLS = (
    StoreCell("by all: hot documents", crowds(0.25, 90, 300, 24_000, 5.0)),
    StoreCell("by all: shared prefix, evictions", shared_prefix(12, 90), cache_tokens=_SMALL),
    StoreCell("by all: 40 documents of 16k", documents(60, 40, 40, 16_000)),
    HalfCell("by half: hot documents", crowds(0.25, 90, 300, 24_000, 5.0)),
    HalfCell("by half: shared prefix, evictions", shared_prefix(12, 90), cache_tokens=_SMALL),
    SilentCell("no removals told: hot documents", crowds(0.25, 90, 300, 24_000, 5.0)),
    SilentCell("no removals told: shared prefix", shared_prefix(12, 90), cache_tokens=_SMALL),
    HalfFailsCell("gives half nothing: hot documents", crowds(0.25, 90, 300, 24_000, 5.0)),
    HalfFailsCell("gives half nothing: 40 documents of 16k", documents(60, 40, 40, 16_000)),
    HalfFailsCell("gives half nothing: shared prefix", shared_prefix(12, 90), cache_tokens=_SMALL),
    FailsCell("gives nothing: hot documents", crowds(0.25, 90, 300, 24_000, 5.0)),
    FailsCell("gives nothing: 40 documents of 16k", documents(60, 40, 40, 16_000)),
    FailsCell("gives nothing: shared prefix", shared_prefix(12, 90), cache_tokens=_SMALL),
)
OTHER_CELLS = (
    StoreCell("shared prefix, 12/s", shared_prefix(12, 90)),
    StoreCell("shared prefix, 24/s", shared_prefix(24, 60)),
    StoreCell("multi-turn, busy", multi_turn(6, 60)),
    StoreCell("long document, busy", long_document(1.2, 90)),
    StoreCell("single shot, busy", single_shot(28, 60)),
    StoreCell("mixed", mixed(shared_prefix(8, 60), multi_turn(2, 60), single_shot(6, 60))),
)
CELLS = (*STORE_CELLS, *OTHER_CELLS)


def rows(cell: Cell, results: Results) -> list[Row]:
    """Returns the rows of TTFT relative to a router that does not know the store."""
    made: list[Row] = []
    for what in ("p50", "p90"):
        ours, today, other_draws = (
            _times(results[one], what) for one in (KNOWN, TODAY, again(_TODAY).name)
        )
        name = f"{cell.name}: {what} / store not known"
        made.append(not_worse(name, ours, today, other_draws))
        for other in (LESS, MORE):  # what another worth would bring
            name = f"{cell.name}: {what} of {other.rpartition('at ')[2]} / store not known"
            made.append(Row(name, _times(results[other], what), today))
    return made


def _times(results: Sequence[Result], what: str) -> Figure:
    return Figure([max(1e-6, getattr(one, what)) for one in results])
