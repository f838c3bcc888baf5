"""The block index: which ranks hold the leading blocks of a prompt, exactly.

Names, orphans and counters are here; the blocks themselves are in a core (`kvstate.core`), compiled
or plain. What a core cannot do in one call falls back to typed events, whose decoder names faults.

A block whose parent is unknown has no key: it waits as an orphan, bounded, and counts for nothing
until the parent turns up. A rank's blocks are bounded too: a store that would go beyond is refused,
newest first, so that what is credited stays true.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvstate.core import Core, OwnerStatus, StoreResult
from kvstate.core_choice import make_core
from kvstate.events import BlockHash, BlocksRemoved, BlocksStored, Event, Extra
from kvstate.keys import BYTES_PER_TOKEN
from kvstate.orphans import Orphan, Orphanage
from kvstate.overlap import Overlap, Prompt
from kvstate.segment import Pool
from kvstate.zmq_wire import decode_batch

# What a block takes in the compiled core at the most, tables half grown and all.
BYTES_PER_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rank may make us remember: a publisher gone wrong must not take the memory."""

    bytes: int = 256 * 1024 * 1024
    orphans: int = 65_536
    orphan_bytes: int = 32 * 1024 * 1024

    @property
    def blocks(self) -> int:
        """The most blocks of one rank."""
        return self.bytes // BYTES_PER_BLOCK


class Applied(NamedTuple):
    """What became of a message.

    clears: it emptied the cache. faults: names of what was skipped. removal_lost: a skipped event
    may have been a removal, and everything before it is uncertain now.
    """

    clears: bool
    faults: tuple[str, ...] = ()
    removal_lost: bool = False


class Owner:
    """What the index knows of one rank."""

    def __init__(self, core: Core, number: int, worker: str, rank: int, model: str) -> None:
        self.number = number
        self.worker = worker
        self.rank = rank
        self.model = model
        self.orphans = Orphanage()
        self._core = core
        self._trusted = False
        self._counts: Counter[str] = Counter()

    @property
    def trusted(self) -> bool:
        """Whether its certain blocks count as such now."""
        return self._trusted

    @trusted.setter
    def trusted(self, trusted: bool) -> None:
        if trusted != self._trusted:
            self._trusted = trusted
            self._core.trust(self.number, trusted)

    @property
    def status(self) -> OwnerStatus:
        """Counts of its blocks."""
        return self._core.status(self.number)

    @property
    def block_size(self) -> int | None:
        """Tokens in a block, as its last store had it."""
        return self.status["block_size"] or None

    @property
    def blocks(self) -> int:
        """Block hashes held, over all media."""
        return self.status["blocks"]

    @property
    def uncertain_blocks(self) -> int:
        """Those of them that were stored before a hole."""
        return sum(self._core.tiers(self.number, True))  # noqa: FBT003 - compiled, positional

    @property
    def counts(self) -> Counter[str]:
        """What was counted, by name."""
        status = self.status
        core = Counter(
            removed_unknown=status["removed_unknown"],
            restored_with_other_tokens=status["restored_with_other_tokens"],
            over_limit=status["over_limit"],
        )
        return +(self._counts + core)

    def count(self, name: str) -> None:
        """Counts one under this name."""
        self._counts[name] += 1


class Index:
    """Blocks of all ranks of all workers.

    secret: 64 random bits, from which block keys are made. core: for tests; by default the compiled
    one where it was built.
    """

    def __init__(
        self, secret: int, limits: Limits | None = None, *, compiled: bool | None = None
    ) -> None:
        self._limits = limits or Limits()
        self._core = make_core(secret, self._limits.blocks, compiled=compiled)
        self._models: dict[str, int] = {}
        self._workers: list[str] = []  # by number; "" where a number is free
        self._owners: dict[int, Owner] = {}

    def add(self, worker: str, rank: int, model: str) -> Owner:
        """Makes room for a rank; it holds nothing and is not trusted yet."""
        number = self._core.add_owner(self._worker(worker), self._model(model))
        owner = self._owners[number] = Owner(self._core, number, worker, rank, model)
        return owner

    def remove(self, owner: Owner) -> None:
        """Forgets a rank and frees all it had."""
        self._core.remove_owner(owner.number)
        del self._owners[owner.number]
        if all(other.worker != owner.worker for other in self._owners.values()):
            self._workers[self._workers.index(owner.worker)] = ""

    def clear(self, owner: Owner) -> None:
        """Forgets everything a rank holds."""
        self._core.clear(owner.number)
        owner.orphans.clear()

    def demote(self, owner: Owner) -> None:
        """Makes everything a rank holds uncertain: its feed has a hole here."""
        self._core.demote(owner.number)
        owner.orphans.clear()

    def apply_message(self, owner: Owner, payload: bytes) -> Applied:
        """Applies one message of a feed, in one call of the core where it is as expected.

        Raises:
            WireError: it is no event batch; nothing has happened.
        """
        done = 0
        if not owner.orphans:
            fast = self._core.apply(owner.number, payload)
            if fast is not None:
                done, events, clears = fast
                if done == events:
                    return Applied(clears)
        batch = decode_batch(payload)
        self.apply(owner, batch.events[done:])
        if batch.removal_lost:
            self.demote(owner)
        return Applied(batch.clears, batch.faults, batch.removal_lost)

    def apply(self, owner: Owner, events: Iterable[Event]) -> None:
        """Applies events in their order."""
        for event in events:
            match event:
                case BlocksStored():
                    self._store(owner, event)
                case BlocksRemoved():
                    self._remove_blocks(owner, event)
                case _:  # everything was cleared
                    self.clear(owner)

    def overlaps(self, prompt: Prompt) -> dict[str, Overlap]:
        """The overlap of every worker that holds the prompt's first block, its best rank's.

        At most (tokens - 1) // block size blocks count: an engine always computes the last token.
        """
        model = self._models.get(prompt.model)
        if model is None:
            return {}
        first = None if prompt.salt is None else _encoded((prompt.salt,))
        return self._core.overlaps(model, prompt.tokens, prompt.lora, first, self._workers)

    def blocks_by_tier(self, worker: str) -> tuple[int, int, int, int]:
        """Block hashes that a worker's ranks hold on each tier, certain or not."""
        counts = [0, 0, 0, 0]
        for owner in self._owners.values():
            if owner.worker == worker:
                for uncertain in (False, True):
                    for tier, count in enumerate(self._core.tiers(owner.number, uncertain)):
                        counts[tier] += count
        return counts[0], counts[1], counts[2], counts[3]

    def memory(self) -> int:
        """Memory of all blocks, in bytes."""
        return self._core.memory()

    def check(self) -> None:
        """Raises AssertionError where an invariant of the core does not hold; slow."""
        self._core.check()

    def _worker(self, name: str) -> int:
        if name in self._workers:
            return self._workers.index(name)
        if "" not in self._workers:
            self._workers.append("")
        number = self._workers.index("")
        self._workers[number] = name
        return number

    def _model(self, name: str) -> int:
        if name not in self._models:
            self._models[name] = self._core.add_model(name.encode())
        return self._models[name]

    def _store(self, owner: Owner, event: BlocksStored) -> None:
        extras = [_encoded(extra) for extra in event.extras] if event.extras else None
        result = self._core.store(
            owner.number,
            event.hashes,
            event.parent,
            event.tokens,
            event.block_size,
            event.lora,
            extras,
            event.medium,
            event.group,
        )
        if result == StoreResult.UNKNOWN_PARENT:
            self._park(owner, event)
        elif owner.orphans:
            for block in event.hashes:
                self._attach(owner, block)

    def _park(self, owner: Owner, event: BlocksStored) -> None:
        parent = event.parent
        pool = Pool.of(event.medium, event.group, event.block_size)
        for block, tokens, extra in _blocks(event):
            owner.count("orphaned")
            if parent is None or self._is_full(owner.orphans):
                owner.count("orphans_over_limit")
                return
            owner.orphans.park(Orphan(parent, pool, block, bytes(tokens), _encoded(extra)))
            parent = block

    def _is_full(self, orphans: Orphanage) -> bool:
        return len(orphans) >= self._limits.orphans or orphans.bytes >= self._limits.orphan_bytes

    def _attach(self, owner: Owner, block: BlockHash) -> None:
        """Gives the orphans of a block that turned up their keys, and theirs in turn."""
        turned_up = [block]
        while turned_up:
            parent = turned_up.pop()
            for orphan in owner.orphans.take(parent):
                for _ in range(orphan.copies):
                    self._store_orphan(owner, parent, orphan)
                turned_up.append(orphan.block)

    def _store_orphan(self, owner: Owner, parent: BlockHash, orphan: Orphan) -> None:
        self._core.store(
            owner.number,
            [orphan.block],
            parent,
            memoryview(orphan.tokens).cast("I"),
            orphan.pool.block_size,
            None,  # the adapter is in the parent's key
            None if orphan.extra is None else [orphan.extra],
            orphan.pool.medium,
            orphan.pool.group,
        )

    def _remove_blocks(self, owner: Owner, event: BlocksRemoved) -> None:
        for block in event.hashes:
            held = self._core.remove(owner.number, block, event.medium, event.group)
            if not held and not owner.orphans.remove(event.medium, event.group, block):
                owner.count("removed_unknown")


def _encoded(extra: Extra) -> bytes | None:
    return msgspec.msgpack.encode(extra) if extra else None


def _blocks(event: BlocksStored) -> Iterator[tuple[BlockHash, memoryview, Extra]]:
    step = event.block_size * BYTES_PER_TOKEN
    view = memoryview(event.tokens).cast("B")
    extras = event.extras or [()] * len(event.hashes)
    for position, (block, extra) in enumerate(zip(event.hashes, extras, strict=True)):
        yield block, view[position * step : (position + 1) * step], extra
