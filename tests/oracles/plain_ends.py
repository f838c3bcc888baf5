"""What a rank's other attention groups (windows, states) hold, for the core in plain Python.

kvstate/native/ends.h explains it and has the same in C.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstate.events import BlockHash
from tests.oracles.plain_rows import EndRow, SavedGroups

MAX_GROUPS = 12
MAX_CLASSES = 4
MAX_COPIES = 7
MAX_ALIGNMENT = 65_536


@dataclass(slots=True)
class End:
    """The copies of one block of one group.

    may_repeat: some may be none, since an engine may have announced a block again. in_doubt: a
    removal left it unknown whether any is there.
    """

    copies: int = 0
    may_repeat: bool = False
    in_doubt: bool = False

    @property
    def row(self) -> tuple[int, bool, bool]:
        """The fields, as they are saved."""
        return self.copies, self.may_repeat, self.in_doubt

    def store(self, *, may_repeat: bool) -> None:
        """Adds a copy."""
        if not self.copies or self.in_doubt:
            self.copies, self.may_repeat, self.in_doubt = 1, False, False
        else:
            self.copies = min(self.copies + 1, MAX_COPIES)
            self.may_repeat |= may_repeat

    def remove(self, left: int | None, *, copies_announced: bool) -> None:
        """Drops a copy; `Core.remove` has the rules."""
        if left is not None:
            self.copies, self.may_repeat, self.in_doubt = min(left, MAX_COPIES), False, False
        elif self.copies <= 1:
            self.copies = 0
        else:
            self.copies -= 1
            self.in_doubt |= self.may_repeat or not copies_announced


@dataclass(slots=True)
class Entry:
    """What the groups hold under one hash.

    message: the serial number of the message that last announced an end that was not held.
    """

    message: int
    ends: dict[int, End] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndClass:
    """Groups of one block size that need as many blocks before the end of a prefix."""

    block_size: int
    need: int


@dataclass(slots=True)
class Ends:
    """The blocks of one rank's other groups on the device, by hash and group."""

    groups: dict[int, tuple[int, int]] = field(default_factory=dict)
    classes: dict[EndClass, set[int]] = field(default_factory=dict)
    entries: dict[BlockHash, Entry] = field(default_factory=dict)
    is_inexact: bool = False
    message: int = 0

    def begin_message(self) -> None:
        """Begins the next message of the feed."""
        self.message += 1

    def note_group(self, group: int, block_size: int, reach: int) -> None:
        """Notes a group by a store of it; an engine never changes one."""
        known = self.groups.get(group)
        if known is not None:
            self.is_inexact |= known != (block_size, reach)
            return
        is_followed = block_size and reach and len(self.groups) < MAX_GROUPS
        if self.is_inexact or not is_followed:
            self.is_inexact = True
            return
        self.groups[group] = block_size, reach
        its = EndClass(block_size, (reach - 1) // block_size + 1)
        if its not in self.classes and len(self.classes) == MAX_CLASSES:
            self.is_inexact = True
            return
        self.classes.setdefault(its, set()).add(group)

    def saved(self) -> SavedGroups:
        """Returns what is known of the groups."""
        groups = [(group, *its) for group, its in self.groups.items()]
        return SavedGroups(groups, self.is_inexact)

    def put(self, saved: SavedGroups) -> None:
        """Puts that in, before anything else is known."""
        for group, block_size, reach in saved.groups:
            self.note_group(group, block_size, reach)
        self.is_inexact |= saved.is_inexact

    def rows(self, at: int, most: int) -> list[EndRow]:
        """Returns the ends of at most this many hashes, from the `at`th on."""
        some = itertools.islice(self.entries.items(), at, at + most)
        return [
            EndRow(block, [(group, *its.row) for group, its in entry.ends.items()])
            for block, entry in some
        ]

    def put_row(self, row: EndRow) -> None:
        """Adds the ends of a hash as they were saved.

        Raises:
            ValueError: they are damaged, or there are ends of this hash.
        """
        ends = {one[0]: End(*one[1:]) for one in row.ends}
        is_sound = all(0 < its.copies <= MAX_COPIES for its in ends.values())
        is_new = row.block not in self.entries and len(ends) == len(row.ends) > 0
        if not (is_sound and is_new and ends.keys() <= self.groups.keys()):
            raise ValueError("these are no ends of an owner")
        self.entries[row.block] = Entry(self.message, ends)

    def store(self, block: BlockHash, group: int, *, may_repeat: bool) -> None:
        """Adds a copy of a block of a group that was noted."""
        entry = self.entries.setdefault(block, Entry(self.message))
        if group not in entry.ends:
            entry.message = self.message
        entry.ends.setdefault(group, End()).store(may_repeat=may_repeat)

    def may_reuse(
        self, hashes: Sequence[BlockHash], block_size: int, is_held: Callable[[BlockHash], bool]
    ) -> bool:
        """Whether the engine could reuse any part of a prompt that begins with these blocks.

        By what was held before this message; where that is not known, it could. is_held: whether
        a block of the whole prefix is held under a hash.
        """
        if self.is_inexact:
            return True
        unit = math.lcm(block_size, *(its.block_size for its in self.classes))
        runs = dict.fromkeys(self.classes, 0)
        for end, block in zip(itertools.count(block_size, block_size), hashes, strict=False):
            if not is_held(block):
                return False
            for its in self.classes:
                if end % its.block_size == 0 or its.block_size < block_size:
                    runs[its] = runs[its] + 1 if self._was_complete(block, its) else 0
            if end % unit == 0 and all(
                run * max(its.block_size, block_size) >= min(its.need * its.block_size, end)
                for its, run in runs.items()
            ):
                return True
        return False

    def _was_complete(self, block: BlockHash, its: EndClass) -> bool:
        """Whether a class may have been complete before this message."""
        entry = self.entries.get(block)
        is_old = entry is not None and entry.message != self.message
        return entry is not None and is_old and self.classes[its] <= entry.ends.keys()

    def remove(
        self, block: BlockHash, group: int, left: int | None, *, copies_announced: bool
    ) -> bool:
        """Drops a copy; returns whether that shows that the removal of each copy is announced."""
        entry = self.entries.get(block)
        if entry is None or group not in entry.ends:
            return False
        end = entry.ends[group]
        is_proof = left is None and end.in_doubt
        end.remove(left, copies_announced=copies_announced or is_proof)
        if not end.copies:
            del entry.ends[group]
            if not entry.ends:
                del self.entries[block]
        return is_proof

    def is_complete(self, block: BlockHash, its: EndClass) -> bool:
        """Whether each group of a class certainly holds the block that ends where this one does."""
        ends = self.entries[block].ends
        return all(group in ends and not ends[group].in_doubt for group in self.classes[its])

    def alignment(self, block_size: int) -> int:
        """Returns the least common multiple of the block sizes, in blocks of this size.

        Returns 0 if the ends of some group are not where blocks of this size end, or if it is huge.
        """
        sizes = [its.block_size for its in self.classes]
        if any(size % block_size and block_size % size for size in sizes):
            return 0
        blocks = math.lcm(*(size // block_size or 1 for size in sizes))
        return blocks if blocks <= MAX_ALIGNMENT else 0

    def shows_reuse(self, block_size: int) -> bool:
        """Whether the ends show where a prefix can be reused."""
        return not self.is_inexact and self.alignment(block_size) > 0

    def is_exact(self, block_size: int) -> bool:
        """Whether they show it exactly: blocks that end within another block have no entry."""
        whole = all(its.block_size % block_size == 0 for its in self.classes)
        return self.shows_reuse(block_size) and whole

    def reusable(
        self, block_size: int, limit: int, has_end: Callable[[int, EndClass], bool]
    ) -> int:
        """Returns the longest prefix of at most `limit` blocks that the engine can reuse.

        has_end: whether a class is complete at the end of this many blocks.
        """
        unit = self.alignment(block_size)
        return next(
            (
                end
                for end in range(limit - limit % unit, 0, -unit)
                if all(
                    has_end(at, its) for its in self.classes for at in _run(its, block_size, end)
                )
            ),
            0,
        )


def _run(its: EndClass, block_size: int, end: int) -> Iterator[int]:
    """Yields where a class needs its blocks: those of its run, or all if there are fewer."""
    blocks = math.ceil(its.need * its.block_size / block_size)
    step = its.block_size // block_size or 1
    yield from range(end, max(0, end - blocks), -step)


def leading(flags: Sequence[bool]) -> int:
    """Returns how many of the first flags are set."""
    return next((number for number, flag in enumerate(flags) if not flag), len(flags))
