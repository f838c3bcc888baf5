"""Applying typed events to the blocks of one rank, one by one, and the orphans among these.

A block whose parent is unknown has no key: it waits as an orphan, bounded, and counts for nothing
until the parent turns up.
"""

from collections.abc import Generator, Iterable, Iterator

import msgspec

from kvstate.core import WORK, Core, StoreResult
from kvstate.events import (
    BlockHash,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    Event,
    OtherGroupStored,
)
from kvstate.keys import encoded
from kvstate.orphans import Orphan, orphans_of
from kvstate.owner import Owner
from kvstate.wire.groups import Admission

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
