"""One rank of the index: applies the batches of its feed, and counts what it holds.

Batches that the core cannot apply in one call fall back to typed events, which are applied one by
one and whose decoder names faults. A block whose parent is unknown has no key: it waits as an
orphan and earns no credit until the parent arrives.

A rank's blocks are bounded: a store beyond the limit is rejected, so that the existing credit stays
correct.
"""

import logging
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvstate.core import BYTES_PER_TOKEN, WORK, Core, Outcome, OwnerStatus, Pool, StoreResult
from kvstate.events import (
    ALL_TAKEN,
    BlockHash,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    Body,
    Event,
    OtherGroupStored,
    Taken,
)
from kvstate.overlap import encoded
from kvstate.wire.extras import ADMISSION_FAULTS, DOUBTFUL_GROUP, Admission, missed_of
from kvstate.wire.zmq_wire import decoding

# Memory of an orphan besides its bytes: the object, its names, and its share of both tables.
ORPHAN_OVERHEAD_BYTES = 600


class Name(NamedTuple):
    """The name by which a removal identifies a block."""

    medium: str
    group: int | None
    block: BlockHash


@dataclass(slots=True)
class Orphan:
    """One stored block that waits for its parent.

    tokens: its uint32 ids as bytes. extra: its encoded extra keys.
    """

    parent: BlockHash
    pool: Pool
    block: BlockHash
    tokens: bytes
    extra: bytes | None
    copies: int = 1

    @property
    def content(self) -> tuple[BlockHash, bytes, bytes | None]:
        """The parts from which its key is computed."""
        return self.parent, self.tokens, self.extra

    @property
    def size_bytes(self) -> int:
        """Its memory, including both hashes if they are bytes, and its share of the tables."""
        return (
            ORPHAN_OVERHEAD_BYTES
            + len(self.tokens)
            + len(self.extra or b"")
            + sum(len(one) for one in (self.parent, self.block) if isinstance(one, bytes))
        )

    @property
    def name(self) -> Name:
        """The name by which it is removed."""
        return Name(self.pool.medium, self.pool.group, self.block)


def orphans_of(event: BlocksStored) -> Iterator[Orphan]:
    """Yields the blocks of a chain whose parent is unknown, each the parent of the next."""
    pool = Pool.of(event.medium, event.group, event.block_size)
    step = event.block_size * BYTES_PER_TOKEN
    view = memoryview(event.tokens).cast("B")
    parents = [event.parent, *event.hashes]
    for position, (parent, block) in enumerate(zip(parents, event.hashes, strict=False)):
        tokens = bytes(view[position * step : (position + 1) * step])
        extra = encoded(event.extras[position]) if event.extras else None
        if parent is not None:  # the first block of a prompt is never an orphan
            yield Orphan(parent, pool, block, tokens, extra)


class Orphanage:
    """The orphans of one rank."""

    def __init__(self) -> None:
        self.bytes = 0  # their memory in all
        self._orphans: dict[Name, Orphan] = {}
        self._children: dict[BlockHash, dict[Name, None]] = {}

    def __len__(self) -> int:
        return len(self._orphans)

    def park(self, orphan: Orphan) -> None:
        """Keeps a block; if it waits already, adds a copy, or replaces one of other content."""
        known = self._orphans.get(orphan.name)
        if known is not None:
            if known.content == orphan.content:
                known.copies += 1
                return
            self._drop(known)
        self._orphans[orphan.name] = orphan
        self.bytes += orphan.size_bytes
        self._children.setdefault(orphan.parent, {})[orphan.name] = None

    def take(self, parent: BlockHash) -> list[Orphan]:
        """Removes and returns the children of a block that arrived."""
        taken = [self._orphans.pop(name) for name in self._children.pop(parent, {})]
        self.bytes -= sum(orphan.size_bytes for orphan in taken)
        return taken

    def remove(self, medium: str, group: int | None, block: BlockHash) -> bool:
        """Drops one copy of a waiting block; returns False if there was none."""
        orphan = self._orphans.get(Name(medium, group, block))
        if orphan is None:
            return False
        orphan.copies -= 1
        if orphan.copies == 0:
            self._drop(orphan)
        return True

    def clear(self) -> None:
        """Drops everything."""
        self.bytes = 0
        self._orphans.clear()
        self._children.clear()

    def _drop(self, orphan: Orphan) -> None:
        del self._orphans[orphan.name]
        self.bytes -= orphan.size_bytes
        children = self._children[orphan.parent]
        del children[orphan.name]
        if not children:
            del self._children[orphan.parent]


log = logging.getLogger("kvsteer.feed")

# The most memory that a block uses in the compiled core, including partly filled tables.
BYTES_PER_BLOCK = 64

# The least memory for each rank, however many ranks the worker is configured with.
MIN_BYTES_OF_RANK = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory limits of one worker, against a faulty publisher."""

    bytes: int = 256 * 1024 * 1024
    orphans: int = 65_536
    orphan_bytes: int = 32 * 1024 * 1024

    @property
    def blocks(self) -> int:
        """The most blocks of the worker."""
        return self.bytes // BYTES_PER_BLOCK

    def share(self, ranks: int) -> "Limits":
        """Returns the share of each of the worker's ranks."""
        least = min(self.bytes, MIN_BYTES_OF_RANK)
        return Limits(
            max(self.bytes // ranks, least), self.orphans // ranks, self.orphan_bytes // ranks
        )


# The largest piece of a store that is applied at once; it has at least one block, however large.
PIECE_TOKENS = 16_384
PIECE_BLOCKS = 1_024

# The most blocks copied at once.
_COPIES = 32


# The most adapters that one rank may name by number alone: each costs one more lookup for requests
# with an adapter.
MAX_NUMBERED_ADAPTERS = 16


class Stored:
    """Kinds of blocks that ranks have stored and that need lookups of their own.

    bigrams: the models for which a rank stored pages of bigrams. numbered: for each rank, the
    numbers of adapters for which it stored blocks without naming them.
    """

    def __init__(self) -> None:
        self.bigrams: set[str] = set()
        self.numbered: dict[Owner, set[int]] = {}

    def note(self, owner: "Owner", event: BlocksStored) -> None:
        """Notes the kinds of a store's blocks."""
        if event.bigrams:
            self.bigrams.add(owner.model)
        if isinstance(event.lora, int):
            numbers = self.numbered.setdefault(owner, set())
            if len(numbers) < MAX_NUMBERED_ADAPTERS:
                numbers.add(event.lora)


class Owner:
    """A rank: its identity, counters and orphans; the core has its blocks.

    A sink of its feed (`kvstate.feeds.subscriber`). Long operations are iterators of short steps;
    if they are stopped early, the rest stays undone.

    stored: shared by the index. block_size: tokens per block in its last store, read at every pick.
    """

    def __init__(
        self,
        core: Core,
        number: int,
        worker: str,
        rank: int,
        model: str,
        limits: Limits,
        stored: Stored,
    ) -> None:
        self.limits = limits
        self.number = number
        self.worker = worker
        self.rank = rank
        self.model = model
        self.orphans = Orphanage()
        self.block_size: int | None = None
        self._core = core
        self._stored = stored
        self._trusted = False
        self._over_limit = 0  # the core's count, when last read
        self._block_sizes = 0  # how often a block size was learned
        self._may_be_uncertain = False  # whether any of its blocks may be uncertain
        self._counts: Counter[str] = Counter()
        self._names_salts: bool | None = None
        self._names_loras: bool | None = None

    @property
    def trusted(self) -> bool:
        """Whether its certain blocks count as certain now."""
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
    def blocks(self) -> int:
        """Block hashes held, over all media."""
        return self.status["blocks"]

    @property
    def uncertain_blocks(self) -> int:
        """Blocks stored before a hole."""
        return sum(self._core.tiers(self.number, True))  # noqa: FBT003 - compiled, positional

    @property
    def doubted_blocks(self) -> int:
        """Blocks stored since the last hole, but on tiers with a doubted medium."""
        doubted = self.status["doubted"]
        held = self._core.tiers(self.number, False)  # noqa: FBT003 - compiled, positional
        return sum(count for tier, count in enumerate(held) if doubted >> tier & 1)

    @property
    def counts(self) -> Counter[str]:
        """The counters, by name."""
        status = self.status
        core = Counter(
            removed_unknown=status["removed_unknown"],
            restored_with_other_tokens=status["restored_with_other_tokens"],
            over_limit=status["over_limit"],
            copied_unknown=status["copied_unknown"],
        )
        return +(self._counts + core)

    def count(self, name: str) -> None:
        """Adds one to a counter."""
        self._counts[name] += 1

    @property
    def names_salts(self) -> bool | None:
        """Whether its stores would name a cache salt; None before it is known.

        If they would not, a salted block looks like an unsalted one.
        """
        return _either(self._core.layout(self.number)[0], self._names_salts)

    @property
    def names_loras(self) -> bool | None:
        """Whether its stores would name an adapter; None before it is known."""
        return _either(self._core.layout(self.number)[1], self._names_loras)

    def trust(self, trusted: bool) -> None:  # noqa: FBT001 - as a sink of a feed has it
        """Sets whether its certain blocks count as certain now."""
        self.trusted = trusted

    def applying(self, body: Body) -> Generator[None, None, Taken]:
        """Applies one message of the feed in steps, by the core if its format is as expected.

        Raises:
            WireError: it is not an event batch; nothing was changed.
        """
        fast: Outcome | bool = False
        if isinstance(body, bytes) and not self.orphans.bytes:  # no orphan waits
            fast = self._core.start(self.number, body, WORK)
            if fast is True:
                fast = yield from self._proceeding()
        done, events, clears, faults = (0, -1, False, ()) if isinstance(fast, bool) else fast
        removal_lost = False
        if done != events:
            batch = (yield from decoding(body, done)) if isinstance(body, bytes) else body
            faults += batch.faults + (yield from self.applying_events(batch.events))
            clears, removal_lost = clears or batch.clears, batch.removal_lost
            if removal_lost:
                yield from self.demoting()
        return self._taken(clears, faults, removal_lost)

    def applying_events(self, events: Iterable[Event]) -> Generator[None, None, tuple[str, ...]]:
        """Applies events in order, in steps; returns the names of those skipped.

        If group_without_kind is among them, everything the rank holds is uncertain now.
        """
        faults: list[str] = []
        for event in events:
            fault = yield from self._applying(event)
            if fault:
                faults.append(fault)
            yield
        if DOUBTFUL_GROUP in faults:
            yield from self.demoting()
        return tuple(faults)

    def forgetting(self) -> Generator[None, None, None]:
        """Forgets its blocks and formats, in steps: it may be another engine now."""
        self._names_salts = self._names_loras = None
        self._stored.numbered.pop(self, None)
        self._core.forget_layout(self.number)
        yield from self._clearing()

    def demoting(self) -> Generator[None, None, None]:
        """Makes all its blocks uncertain, in steps: its feed has a hole here.

        Until it is done, some still count as certain, unless the rank is not trusted.
        """
        self._may_be_uncertain |= self.blocks > 0
        self.orphans.clear()
        while not self._core.demote_some(self.number, WORK):
            yield

    def _proceeding(self) -> Generator[None, None, Outcome | bool]:
        """Continues a long message in the core; gives it up if the steps are stopped early."""
        fast: Outcome | bool = True
        try:
            while fast is True:
                yield
                fast = self._core.proceed(self.number, WORK)
        finally:
            if fast is True:
                self._core.abandon(self.number)
        return fast

    def _taken(self, clears: bool, faults: tuple[str, ...], removal_lost: bool) -> Taken:  # noqa: FBT001 - facts, not modes
        """Reports the result of an applied message."""
        status = self.status
        if status["block_size"] != (self.block_size or 0):
            self._learn_block_size(status["block_size"])
        over_limit, self._over_limit = status["over_limit"] > self._over_limit, status["over_limit"]
        had_uncertain = self._may_be_uncertain
        if had_uncertain:
            self._may_be_uncertain = self.uncertain_blocks > 0
        if not (clears or had_uncertain or faults or removal_lost or over_limit):
            return ALL_TAKEN
        missed = missed_of(faults, removal_lost=removal_lost)
        if over_limit and not missed:
            missed = "it holds more blocks than the index keeps for one rank"
        healed = not (missed or self._may_be_uncertain) and (clears or had_uncertain)
        return Taken(healed, missed, faults, clears)

    def _learn_block_size(self, block_size: int) -> None:
        """Logs the 1st, 2nd, 4th ... change: a publisher may alternate between two sizes."""
        self.block_size = block_size or None
        self._block_sizes += 1
        if self._block_sizes & (self._block_sizes - 1) == 0:
            log.info("%s: block size learned: %s", self.worker, block_size)

    def _clearing(self) -> Generator[None, None, None]:
        """Forgets its blocks."""
        self.orphans.clear()
        while not self._core.clear_some(self.number, WORK):
            yield
        self._may_be_uncertain = False

    def _applying(self, event: Event) -> Generator[None, None, str]:
        """Applies one event; returns the name under which it was skipped, "" if it was not."""
        admission: int = Admission.INDEXED
        match event:
            case BlocksStored():
                holds_prefix = None if event.kind is None else True
                admission = self._core.admit(self.number, event.group, holds_prefix)
                if admission == Admission.INDEXED:
                    yield from self._storing(event)
            case OtherGroupStored():
                admission = self._core.admit(self.number, event.group, False)  # noqa: FBT003
            case BlocksCopied():
                admission = self._core.admission(self.number, event.group)
                if admission == Admission.INDEXED:
                    yield from self._copying(event)
            case BlocksRemoved():
                yield from self._removing(event)
            case _:  # everything was cleared
                yield from self._clearing()
        return ADMISSION_FAULTS.get(admission, "")

    def _note_layout(self, event: BlocksStored) -> None:
        """Notes the layout of a store."""
        self._names_salts = _either(event.names_salts, self._names_salts)
        self._names_loras = _either(event.names_loras, self._names_loras)

    def _storing(self, event: BlocksStored) -> Generator[None, None, None]:
        self._note_layout(event)
        self._stored.note(self, event)
        for piece in self._pieces(event):
            result = self._store(piece)
            if result == StoreResult.UNKNOWN_PARENT:
                yield from self._parking(event)
            if result != StoreResult.STORED:
                return
            yield
            if self.orphans:
                for block in piece.hashes:
                    yield from self._attaching(block)

    def _pieces(self, event: BlocksStored) -> Iterator[BlocksStored]:
        """Splits a long chain into several, unless it will be rejected, which costs nothing."""
        size, count = event.block_size, len(event.hashes)
        most = max(1, min(PIECE_TOKENS // size, PIECE_BLOCKS))
        if count <= most or self.blocks + count > self.limits.blocks:
            yield event
            return
        for begin in range(0, count, most):
            end = begin + most
            yield msgspec.structs.replace(
                event,
                hashes=event.hashes[begin:end],
                parent=event.hashes[begin - 1] if begin else event.parent,
                tokens=event.tokens[begin * size : end * size],
                extras=event.extras and event.extras[begin:end],
            )

    def _store(self, event: BlocksStored) -> int:
        extras = [encoded(extra) for extra in event.extras] if event.extras else None
        return self._core.store(
            self.number,
            event.hashes,
            event.parent,
            event.tokens,
            event.block_size,
            event.lora,
            extras,
            event.medium,
            event.group,
        )

    def _copying(self, event: BlocksCopied) -> Generator[None, None, None]:
        before = self._core.status(self.number)["over_limit"]
        for begin in range(0, len(event.hashes), _COPIES):
            some = event.hashes[begin : begin + _COPIES]
            self._core.copy(self.number, some, event.medium, event.group)
            if self._core.status(self.number)["over_limit"] > before:
                return
            yield

    def _parking(self, event: BlocksStored) -> Generator[None, None, None]:
        for orphan in orphans_of(event):
            self.count("orphaned")
            if self._is_full():
                self.count("orphans_over_limit")
                return
            self.orphans.park(orphan)
            yield

    def _attaching(self, block: BlockHash) -> Generator[None, None, None]:
        """Stores the orphans of a block that arrived, and then the orphans of each of those."""
        turned_up = [block]
        while turned_up:
            parent = turned_up.pop()
            for orphan in self.orphans.take(parent):
                for _ in range(orphan.copies):
                    self._store_orphan(parent, orphan)
                turned_up.append(orphan.block)
                yield

    def _store_orphan(self, parent: BlockHash, orphan: Orphan) -> None:
        self._core.store(
            self.number,
            [orphan.block],
            parent,
            memoryview(orphan.tokens).cast("I"),
            orphan.pool.block_size,
            None,  # the adapter is in the parent's key
            None if orphan.extra is None else [orphan.extra],
            orphan.pool.medium,
            orphan.pool.group,
        )

    def _removing(self, event: BlocksRemoved) -> Generator[None, None, None]:
        for block in event.hashes:
            yield
            held = self._core.remove(self.number, block, event.medium, event.group)
            if held or self.orphans.remove(event.medium, event.group, block):
                continue
            if self._core.admission(self.number, event.group) == Admission.INDEXED:
                self.count("removed_unknown")

    def _is_full(self) -> bool:
        """Whether there is no room for more orphans."""
        orphans, limits = self.orphans, self.limits
        return len(orphans) >= limits.orphans or orphans.bytes >= limits.orphan_bytes


def _either(one: bool | None, other: bool | None) -> bool | None:  # noqa: FBT001 - facts, not modes
    return other if one is None else one or bool(other)
