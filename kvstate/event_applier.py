"""Applying typed events to the blocks of one rank, one by one, and the orphans among these.

A block whose parent is unknown has no key: it waits as an orphan, bounded, and counts for nothing
until the parent turns up.
"""

from collections.abc import Iterable

from kvstate.core import Core, StoreResult
from kvstate.events import (
    BlockHash,
    BlocksCopied,
    BlocksRemoved,
    BlocksStored,
    Event,
    OtherGroupStored,
)
from kvstate.keys import encoded
from kvstate.orphans import Orphan, Orphanage, orphans_of
from kvstate.owner import Owner
from kvstate.wire.groups import Admission

# The names under which what the groups keep out is counted.
DOUBTFUL_GROUP = "group_without_kind"
_ADMISSION_FAULTS: dict[int, str] = {
    Admission.OTHER_GROUP: "other_attention_group",
    Admission.DOUBTFUL: DOUBTFUL_GROUP,
}


class EventApplier:
    """Applies typed events to a core.

    max_orphans, max_orphan_bytes: of one rank.
    models_with_bigrams: those of which a rank stored pages of bigrams.
    """

    def __init__(self, core: Core, max_orphans: int, max_orphan_bytes: int) -> None:
        self.models_with_bigrams: set[str] = set()
        self._core = core
        self._max_orphans = max_orphans
        self._max_orphan_bytes = max_orphan_bytes

    def apply(self, owner: Owner, events: Iterable[Event]) -> tuple[str, ...]:
        """Applies events in their order; the names of what was skipped.

        With group_without_kind among them, everything the rank holds is uncertain now.
        """
        faults = tuple(fault for event in events if (fault := self._apply(owner, event)))
        if DOUBTFUL_GROUP in faults:
            self.demote(owner)
        return faults

    def demote(self, owner: Owner) -> None:
        """Makes everything a rank holds uncertain."""
        self._core.demote(owner.number)
        owner.orphans.clear()

    def clear(self, owner: Owner) -> None:
        """Forgets the blocks of a rank."""
        self._core.clear(owner.number)
        owner.orphans.clear()

    def _apply(self, owner: Owner, event: Event) -> str:
        """Applies one event; under which name it was skipped, "" if it was not."""
        admission: int = Admission.INDEXED
        match event:
            case BlocksStored():
                holds_prefix = None if event.kind is None else True
                admission = self._core.admit(owner.number, event.group, holds_prefix)
                if admission == Admission.INDEXED:
                    self._store(owner, event)
            case OtherGroupStored():
                admission = self._core.admit(owner.number, event.group, False)  # noqa: FBT003
            case BlocksCopied():
                admission = self._core.admission(owner.number, event.group)
                if admission == Admission.INDEXED:
                    self._core.copy(owner.number, event.hashes, event.medium, event.group)
            case BlocksRemoved():
                self._remove_blocks(owner, event)
            case _:  # everything was cleared
                self.clear(owner)
        return _ADMISSION_FAULTS.get(admission, "")

    def _store(self, owner: Owner, event: BlocksStored) -> None:
        owner.note_layout(event)
        if event.bigrams:
            self.models_with_bigrams.add(owner.model)
        extras = [encoded(extra) for extra in event.extras] if event.extras else None
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
        for orphan in orphans_of(event):
            owner.count("orphaned")
            if self._is_full(owner.orphans):
                owner.count("orphans_over_limit")
                return
            owner.orphans.park(orphan)

    def _is_full(self, orphans: Orphanage) -> bool:
        return len(orphans) >= self._max_orphans or orphans.bytes >= self._max_orphan_bytes

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
            if held or owner.orphans.remove(event.medium, event.group, block):
                continue
            if self._core.admission(owner.number, event.group) == Admission.INDEXED:
                owner.count("removed_unknown")
