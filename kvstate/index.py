"""The block index: which ranks hold the leading blocks of a prompt, exactly.

Names are here; the blocks themselves are in a core (`kvstate.core`), compiled or plain. What a core
cannot do in one call falls back to typed events, which are applied one by one and whose decoder
names faults. A block whose parent is unknown has no key: it waits as an orphan (`kvstate.orphans`)
and counts for nothing until the parent turns up.

A rank's blocks are bounded: a store that would go beyond is refused, newest first, so that what is
credited stays true.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvstate.core import WORK, Core, OwnerStatus, StoreResult, encoded, finished
from kvstate.core_choice import make_core
from kvstate.events import (
    BlockHash,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
    OtherGroupStored,
)
from kvstate.orphans import Orphan, Orphanage, orphans_of
from kvstate.overlap import Overlap, Prompt, of_any_rank
from kvstate.wire.extras import Admission
from kvstate.wire.zmq_wire import decoding

# What a block takes in the compiled core at the most, tables half grown and all.
BYTES_PER_BLOCK = 64

# Ranks that a worker really has are never given less, however many it is said to have.
MIN_BYTES_OF_RANK = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What one worker may make us remember: a publisher gone wrong must not take the memory."""

    bytes: int = 256 * 1024 * 1024
    orphans: int = 65_536
    orphan_bytes: int = 32 * 1024 * 1024

    @property
    def blocks(self) -> int:
        """The most blocks."""
        return self.bytes // BYTES_PER_BLOCK

    def share(self, ranks: int) -> "Limits":
        """What one of a worker's ranks may take of it."""
        least = min(self.bytes, MIN_BYTES_OF_RANK)
        return Limits(
            max(self.bytes // ranks, least), self.orphans // ranks, self.orphan_bytes // ranks
        )


class Owner:
    """A rank: who it is, what is counted of it, and its orphans; the core has its blocks."""

    def __init__(
        self, core: Core, number: int, worker: str, rank: int, model: str, limits: Limits
    ) -> None:
        self.limits = limits
        self.number = number
        self.worker = worker
        self.rank = rank
        self.model = model
        self.orphans = Orphanage()
        self._core = core
        self._trusted = False
        self._counts: Counter[str] = Counter()
        self._names_salts: bool | None = None
        self._names_loras: bool | None = None

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
    def doubted_blocks(self) -> int:
        """Those stored since, but on tiers whose source is not known to announce removals."""
        doubted = self.status["doubted"]
        held = self._core.tiers(self.number, False)  # noqa: FBT003 - compiled, positional
        return sum(count for tier, count in enumerate(held) if doubted >> tier & 1)

    @property
    def counts(self) -> Counter[str]:
        """What was counted, by name."""
        status = self.status
        core = Counter(
            removed_unknown=status["removed_unknown"],
            restored_with_other_tokens=status["restored_with_other_tokens"],
            over_limit=status["over_limit"],
            copied_unknown=status["copied_unknown"],
        )
        return +(self._counts + core)

    def count(self, name: str) -> None:
        """Counts one under this name."""
        self._counts[name] += 1

    @property
    def names_salts(self) -> bool | None:
        """Whether its stores would say so if there was a cache salt; None before it is known.

        Where they would not, a salted block looks like an unsalted one.
        """
        return _either(self._core.layout(self.number)[0], self._names_salts)

    @property
    def names_loras(self) -> bool | None:
        """Whether its stores would name an adapter; None before it is known."""
        return _either(self._core.layout(self.number)[1], self._names_loras)

    def note_layout(self, event: BlocksStored) -> None:
        """Notes what a store shows of its layout."""
        self._names_salts = _either(event.names_salts, self._names_salts)
        self._names_loras = _either(event.names_loras, self._names_loras)

    def forget_layout(self) -> None:
        """Forgets what was learned of its layouts and groups: it may be another engine now."""
        self._names_salts = self._names_loras = None
        self._core.forget_layout(self.number)


def _either(one: bool | None, other: bool | None) -> bool | None:  # noqa: FBT001 - facts, not modes
    return other if one is None else one or bool(other)


# Of a store that is taken at once, where it has more than one block.
PIECE_TOKENS = 16_384
PIECE_BLOCKS = 1_024

# Blocks that are copied at once.
_COPIES = 32

# The names under which what the groups keep out is counted.
DOUBTFUL_GROUP = "group_without_kind"
_ADMISSION_FAULTS: dict[int, str] = {
    Admission.OTHER_GROUP: "other_attention_group",
    Admission.DOUBTFUL: DOUBTFUL_GROUP,
}


class EventApplier:
    """Applies typed events to a core.

    models_with_bigrams: those of which a rank stored pages of bigrams.
    """

    def __init__(self, core: Core) -> None:
        self.models_with_bigrams: set[str] = set()
        self._core = core

    def applying(
        self, owner: Owner, events: Iterable[Event]
    ) -> Generator[None, None, tuple[str, ...]]:
        """Applies events in their order; the names of what was skipped.

        With group_without_kind among them, everything the rank holds is uncertain now.
        """
        faults: list[str] = []
        for event in events:
            fault = yield from self._applying(owner, event)
            if fault:
                faults.append(fault)
            yield
        if DOUBTFUL_GROUP in faults:
            yield from self.demoting(owner)
        return tuple(faults)

    def demoting(self, owner: Owner) -> Generator[None, None, None]:
        """Makes everything a rank holds uncertain."""
        owner.orphans.clear()
        while not self._core.demote_some(owner.number, WORK):
            yield

    def clearing(self, owner: Owner) -> Generator[None, None, None]:
        """Forgets the blocks of a rank."""
        owner.orphans.clear()
        while not self._core.clear_some(owner.number, WORK):
            yield

    def _applying(self, owner: Owner, event: Event) -> Generator[None, None, str]:
        """Applies one event; under which name it was skipped, "" if it was not."""
        admission: int = Admission.INDEXED
        match event:
            case BlocksStored():
                holds_prefix = None if event.kind is None else True
                admission = self._core.admit(owner.number, event.group, holds_prefix)
                if admission == Admission.INDEXED:
                    yield from self._storing(owner, event)
            case OtherGroupStored():
                admission = self._core.admit(owner.number, event.group, False)  # noqa: FBT003
            case BlocksCopied():
                admission = self._core.admission(owner.number, event.group)
                if admission == Admission.INDEXED:
                    yield from self._copying(owner, event)
            case BlocksRemoved():
                yield from self._removing(owner, event)
            case _:  # everything was cleared
                yield from self.clearing(owner)
        return _ADMISSION_FAULTS.get(admission, "")

    def _storing(self, owner: Owner, event: BlocksStored) -> Generator[None, None, None]:
        owner.note_layout(event)
        if event.bigrams:
            self.models_with_bigrams.add(owner.model)
        for piece in self._pieces(owner, event):
            result = self._store(owner, piece)
            if result == StoreResult.UNKNOWN_PARENT:
                yield from self._parking(owner, event)
            if result != StoreResult.STORED:
                return
            yield
            if owner.orphans:
                for block in piece.hashes:
                    yield from self._attaching(owner, block)

    def _pieces(self, owner: Owner, event: BlocksStored) -> Iterator[BlocksStored]:
        """A long chain as several; whole where it will be refused, which costs nothing."""
        size, count = event.block_size, len(event.hashes)
        most = max(1, min(PIECE_TOKENS // size, PIECE_BLOCKS))
        if count <= most or owner.blocks + count > owner.limits.blocks:
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

    def _store(self, owner: Owner, event: BlocksStored) -> int:
        extras = [encoded(extra) for extra in event.extras] if event.extras else None
        return self._core.store(
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

    def _copying(self, owner: Owner, event: BlocksCopied) -> Generator[None, None, None]:
        before = self._core.status(owner.number)["over_limit"]
        for begin in range(0, len(event.hashes), _COPIES):
            some = event.hashes[begin : begin + _COPIES]
            self._core.copy(owner.number, some, event.medium, event.group)
            if self._core.status(owner.number)["over_limit"] > before:
                return
            yield

    def _parking(self, owner: Owner, event: BlocksStored) -> Generator[None, None, None]:
        for orphan in orphans_of(event):
            owner.count("orphaned")
            if _is_full(owner):
                owner.count("orphans_over_limit")
                return
            owner.orphans.park(orphan)
            yield

    def _attaching(self, owner: Owner, block: BlockHash) -> Generator[None, None, None]:
        """Gives the orphans of a block that turned up their keys, and theirs in turn."""
        turned_up = [block]
        while turned_up:
            parent = turned_up.pop()
            for orphan in owner.orphans.take(parent):
                for _ in range(orphan.copies):
                    self._store_orphan(owner, parent, orphan)
                turned_up.append(orphan.block)
                yield

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

    def _removing(self, owner: Owner, event: BlocksRemoved) -> Generator[None, None, None]:
        for block in event.hashes:
            yield
            held = self._core.remove(owner.number, block, event.medium, event.group)
            if held or owner.orphans.remove(event.medium, event.group, block):
                continue
            if self._core.admission(owner.number, event.group) == Admission.INDEXED:
                owner.count("removed_unknown")


def _is_full(owner: Owner) -> bool:
    """Whether no more orphans of a rank are kept."""
    orphans, limits = owner.orphans, owner.limits
    return len(orphans) >= limits.orphans or orphans.bytes >= limits.orphan_bytes


__all__ = ["BYTES_PER_BLOCK", "Applied", "Index", "Limits", "Owner"]

# Between the name of a worker and a number that tells its further ranks apart, each of which the
# core takes for a worker of its own; no address has it.
_FURTHER = "\n"


class Applied(NamedTuple):
    """What became of a message.

    clears: it emptied the cache. faults: names of what was skipped. removal_lost: a skipped event
    may have been a removal, or shows that earlier ones should not have been believed; everything
    before is uncertain now.
    """

    clears: bool
    faults: tuple[str, ...] = ()
    removal_lost: bool = False


class Index:
    """Blocks of all ranks of all workers.

    secret: 64 random bits, from which block keys are made. core: for tests; by default the compiled
    one where it was built.
    """

    def __init__(
        self, secret: int, limits: Limits | None = None, *, compiled: bool | None = None
    ) -> None:
        self._limits = limits = limits or Limits()
        self._core = make_core(secret, limits.blocks, compiled=compiled)
        self._applier = EventApplier(self._core)
        self._models: dict[str, int] = {}
        self._workers: list[str] = []  # by number; "" where a number is free
        self._holders: dict[int, str] = {}  # by owner
        self._further = 0  # of them, those that are further ranks
        self._serials = itertools.count()
        self._free: list[int] = []  # numbers
        self._owners: dict[str, list[Owner]] = {}  # by worker
        self._numbers: dict[str, int] = {}  # of workers
        self._with_bigrams = self._applier.models_with_bigrams

    def add(self, worker: str, rank: int, model: str, ranks: int = 1) -> Owner:
        """Makes room for a rank; it holds nothing and is not trusted yet.

        ranks: how many the worker has, which share what it may make us remember.
        """
        owners = self._owners.setdefault(worker, [])
        # a worker may be added again before its ranks of before are removed
        holder = f"{worker}{_FURTHER}{next(self._serials)}" if owners else worker
        number = self._core.add_owner(self._worker(holder), self._model(model), rank)
        limits = self._limits.share(ranks)
        self._core.limit(number, limits.blocks)
        owner = Owner(self._core, number, worker, rank, model, limits)
        self._holders[number] = holder
        self._further += holder != worker
        owners.append(owner)
        return owner

    def remove(self, owner: Owner) -> None:
        """Forgets a rank and frees all it had."""
        self._core.remove_owner(owner.number)
        others = self._owners[owner.worker]
        others.remove(owner)
        if not others:
            del self._owners[owner.worker]
        holder = self._holders.pop(owner.number)
        self._further -= holder != owner.worker
        number = self._numbers.pop(holder)
        self._workers[number] = ""
        self._free.append(number)

    def clearing(self, owner: Owner) -> Generator[None, None, None]:
        """Forgets everything a rank holds, and how it speaks, in steps: it restarted."""
        owner.forget_layout()
        yield from self._applier.clearing(owner)

    def clear(self, owner: Owner) -> None:
        """As `clearing`, in one go."""
        finished(self.clearing(owner))

    def demoting(self, owner: Owner) -> Generator[None, None, None]:
        """Makes everything a rank holds uncertain, in steps: its feed has a hole here.

        Until it is done, some of it still counts as certain, unless the rank is not trusted.
        """
        yield from self._applier.demoting(owner)

    def demote(self, owner: Owner) -> None:
        """As `demoting`, in one go."""
        finished(self.demoting(owner))

    def applying(self, owner: Owner, body: bytes | EventBatch) -> Generator[None, None, Applied]:
        """Applies one message of a feed in steps, by the core where it is as expected.

        body: a msgpack payload as ZMQ publishers send it, or what another decoder made. What is
        not done when the steps end early stays undone.

        Raises:
            WireError: it is no event batch; nothing has happened.
        """
        if isinstance(body, EventBatch):
            return (yield from self._applying_batch(owner, body))
        fast = False if owner.orphans else self._core.start(owner.number, body, WORK)
        try:
            while fast is True:
                yield
                fast = self._core.proceed(owner.number, WORK)
        finally:
            if fast is True:
                self._core.abandon(owner.number)
        if isinstance(fast, bool):
            batch = yield from decoding(body)
            return (yield from self._applying_batch(owner, batch))
        done, events, clears, faults = fast
        if done == events:
            return Applied(clears, faults)
        batch = yield from decoding(body, done)
        rest = yield from self._applying_batch(owner, batch)
        return Applied(clears or rest.clears, faults + rest.faults, rest.removal_lost)

    def apply_message(self, owner: Owner, body: bytes | EventBatch) -> Applied:
        """As `applying`, in one go."""
        return finished(self.applying(owner, body))

    def apply(self, owner: Owner, events: Iterable[Event]) -> tuple[str, ...]:
        """Applies events in their order; the names of what was skipped.

        With group_without_kind among them, everything the rank holds is uncertain now.
        """
        return finished(self._applier.applying(owner, events))

    def overlaps(self, prompt: Prompt, *, names_ranks: bool = True) -> dict[str, Overlap]:
        """The overlap of every worker that holds the prompt's first block, its best rank's.

        At most (tokens - 1) // block size blocks count: an engine always computes the last token.
        names_ranks: whether the request can name that rank. If not, the engine takes any of them,
        and certain is only what all of them hold.
        """
        found = self._by_holder(prompt)
        if not self._further:  # one rank each, as mostly
            return found
        by_worker: defaultdict[str, list[Overlap]] = defaultdict(list)
        for holder, overlap in found.items():
            by_worker[holder.partition(_FURTHER)[0]].append(overlap)
        return {
            worker: self._of_ranks(worker, overlaps, names_ranks=names_ranks)
            for worker, overlaps in by_worker.items()
        }

    def _of_ranks(self, worker: str, held: list[Overlap], *, names_ranks: bool) -> Overlap:
        """A worker's overlap, of those of its ranks that hold the first block."""
        best = max(held, key=lambda one: one.rank_order)
        ranks = len(self._owners[worker])
        if names_ranks or ranks == 1:
            return best
        least = min(held, key=lambda one: one.certain_tokens)
        return of_any_rank(best, least if len(held) == ranks else None)

    def _by_holder(self, prompt: Prompt) -> dict[str, Overlap]:
        model = self._models.get(prompt.model)
        if model is None:
            return {}
        first = encoded(prompt.namespace)
        found = self._core.overlaps(model, prompt.tokens, prompt.lora, first, self._workers)
        if prompt.model in self._with_bigrams:
            for worker, overlap in self._bigram_overlaps(model, prompt).items():
                known = found.get(worker)
                if known is None or overlap.rank_order > known.rank_order:
                    found[worker] = overlap
        return found

    def expire(self, owner: Owner, slots: int) -> bool:
        """Forgets blocks on doubted media that were not stored since the last age began.

        slots: how many places are looked at, at most. Returns whether that was all.
        """
        return self._core.expire(owner.number, slots)

    def blocks_by_tier(self, worker: str) -> tuple[int, int, int, int]:
        """Block hashes that a worker's ranks hold on each tier, certain or not."""
        counts = [0, 0, 0, 0]
        for owner in self._owners.get(worker, ()):
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
        if not self._free:
            self._free.append(len(self._workers))
            self._workers.append("")
        number = self._numbers[name] = self._free.pop()
        self._workers[number] = name
        return number

    def _model(self, name: str) -> int:
        if name not in self._models:
            self._models[name] = self._core.add_model(name.encode())
        return self._models[name]

    def _bigram_overlaps(self, model: int, prompt: Prompt) -> dict[str, Overlap]:
        """The same for pages of bigrams: of N tokens there are N - 1, and N - 2 can be reused."""
        if not prompt.tokens:
            return {}
        first = encoded((prompt.tokens[0], *prompt.namespace))
        seconds = memoryview(prompt.tokens)[1:]
        return self._core.overlaps(model, seconds, prompt.lora, first, self._workers)

    def _applying_batch(self, owner: Owner, batch: EventBatch) -> Generator[None, None, Applied]:
        faults = yield from self._applier.applying(owner, batch.events)
        if batch.removal_lost:
            yield from self.demoting(owner)
        removal_lost = batch.removal_lost or DOUBTFUL_GROUP in faults
        return Applied(batch.clears, batch.faults + faults, removal_lost)
