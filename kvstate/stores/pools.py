"""A pool that publishes its own events: a store whose blocks are known by their hashes alone.

Mooncake's master tells which objects its pool has (`kvstate.wire.mooncake_wire`), without tokens.
A block is the one that a worker which mounts the store holds under this hash, so with its adapter,
salt and media. If none does yet, the hash waits for a while: the worker's own event may be late.
A removal, of any rank's part of a block, removes it for all.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from kvstate.events import ALL_TAKEN, BatchResult, Body
from kvstate.index.core import Core
from kvstate.index.owner import Owner
from kvstate.index.store_gate import StoreGate
from kvstate.steps import Steps
from kvstate.wire.mooncake_wire import PoolBlock, decoding_pool

# Hashes that wait for a worker to name them, and how many later messages look for each.
MAX_WAITING = 65_536
MAX_LOOKS = 3
_LOOKS_AT_ONCE = 64


class Pool:
    """The sink of a pool's feed (`kvstate.feeds.effects.Sink`).

    owners: returns, for each model, the owner of the store's blocks and the ranks that mount it.
    gate: is passed by whatever changes them.
    counts: of events, by name: stored, removed, unknown_block, and the names of those skipped.
    """

    def __init__(
        self,
        core: Core,
        owners: Callable[[], Iterable[tuple[Owner, list[Owner]]]],
        gate: StoreGate,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._core = core
        self._owners = owners
        self._gate = gate
        self._waiting: OrderedDict[PoolBlock, int] = OrderedDict()
        self._last_lender: Owner | None = None

    def applying(self, body: Body) -> Steps[BatchResult]:
        """Applies one message.

        Raises:
            WireError: it is not an event batch; nothing was changed.
        """
        return (yield from self._gate.passing(self._applying(body)))

    def _applying(self, body: Body) -> Steps[BatchResult]:
        if not isinstance(body, bytes):
            return ALL_TAKEN
        blocks, faults = yield from decoding_pool(body)
        self.counts.update(faults)
        yield from self._looking_again()
        for block in blocks:
            if not block.is_stored:
                self._remove(block)
            elif not self._lend(block):
                self._wait(block)
            yield
        return BatchResult(faults=faults) if faults else ALL_TAKEN

    def forgetting(self) -> Steps[None]:
        """Forgets all blocks: the master restarted, and its pool is empty."""
        yield from self._gate.passing(self._forgetting())

    def _forgetting(self) -> Steps[None]:
        self._waiting.clear()
        for store, _ in self._owners():
            yield from store.forgetting()

    def demoting(self) -> Steps[None]:
        """Leaves the blocks as they are: none of a store's is certain, and each is forgotten."""
        yield from ()

    def trust(self, *, trusted: bool) -> None:
        """Part of `Sink`; changes nothing, since blocks of stores count as uncertain anyway."""

    def _looking_again(self) -> Steps[None]:
        """Looks again for blocks that no worker had named."""
        for block in list(self._waiting)[:_LOOKS_AT_ONCE]:
            looks = self._waiting.pop(block)
            if not self._lend(block):
                if looks + 1 < MAX_LOOKS:
                    self._waiting[block] = looks + 1
                else:
                    self.counts["unknown_block"] += 1
            yield

    def _wait(self, block: PoolBlock) -> None:
        self._waiting[block] = 0
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)
            self.counts["unknown_block"] += 1

    def _lend(self, block: PoolBlock) -> bool:
        """Has the store hold a block as a rank knows it; returns whether any does."""
        for store, ranks in self._owners():
            last = self._last_lender
            lenders = ranks if last is None or last not in ranks else [last, *ranks]
            for rank in lenders:
                for one in block.hashes:
                    if self._core.lend(store.number, rank.number, [one], block.medium, block.group):
                        self._last_lender = rank
                        self.counts["stored"] += 1
                        return True
        return False

    def _remove(self, block: PoolBlock) -> None:
        self._waiting.pop(block._replace(is_stored=True), None)
        for store, _ in self._owners():
            for one in block.hashes:
                if self._core.remove(store.number, one, block.medium, block.group, 0):
                    self.counts["removed"] += 1
