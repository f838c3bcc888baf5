"""One rank of a model with several kinds of attention, by brute force."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstate.events import BlockHash
from kvstate.overlap import Overlap, Prompt
from tests.kvstate.oracle import Block, Copy, Place, Rank

DEVICE = Place("GPU", 0)


class OtherGroup(NamedTuple):
    """A group that needs this many tokens before the end of a prefix."""

    number: int
    block_size: int
    reach: int

    def places(self, end: int, size: int) -> Iterator[int]:
        """The ends, in tokens, at which it needs a block if only every size-th token has one."""
        step = max(self.block_size, size)
        least = end - -(-self.reach // self.block_size) * self.block_size
        yield from range(end, max(0, least), -step)


@dataclass
class HeldEnd:
    """Copies of a block of another group."""

    copies: int = 0
    repeats: bool = False
    doubted: bool = False


@dataclass
class HybridRank(Rank):
    """The blocks of full attention, and those of other groups, by hash and group."""

    groups: dict[int, OtherGroup] = field(default_factory=dict)
    ends: dict[tuple[BlockHash, int], HeldEnd] = field(default_factory=dict)
    drop: int = 0

    def store_ends(
        self, group: OtherGroup, blocks: list[Block], *, root: bool, whole: bool
    ) -> None:
        """whole: each block of the chain is named."""
        self.groups[group.number] = group
        repeats = root and whole and self.may_reuse(blocks, group.block_size)
        if repeats and len(blocks) > -(-group.reach // group.block_size):
            return
        for block in blocks:
            end = self.ends.setdefault((block.block, group.number), HeldEnd())
            if not end.copies or end.doubted:
                end.copies, end.repeats, end.doubted = 1, False, False
            else:
                end.copies, end.repeats = end.copies + 1, end.repeats or repeats

    def remove_end(self, block: BlockHash, group: int, left: int | None) -> None:
        end = self.ends.get((block, group))
        if end is None:
            return
        if left is not None:
            end.copies, end.repeats, end.doubted = left, False, False
        else:
            self.announced |= end.doubted
            end.copies -= 1
            end.doubted |= end.copies > 0 and (end.repeats or not self.announced)
        if not end.copies:
            del self.ends[block, group]

    def may_reuse(self, blocks: Iterable[Block], size: int) -> bool:
        """Whether any prefix of a chain of blocks of this size could be reused."""
        by_end: dict[int, BlockHash] = {}
        for number, block in enumerate(blocks, start=1):
            if not self._held(block.block):
                break
            by_end[number * size] = block.block
        return any(self._has_all(by_end, end, size, in_doubt=True) for end in by_end)

    def may_repeat(self, blocks: list[Block], size: int) -> bool:
        """Whether a store of a prompt's first blocks may only announce them again."""
        if self.groups:
            return self.may_reuse(blocks, size)
        return not self.drop or all(self._held(block.block) for block in blocks[: self.drop + 1])

    def _has_all(
        self, by_end: dict[int, BlockHash], end: int, size: int, *, in_doubt: bool = False
    ) -> bool:
        """Whether each group has what it needs at this end of a prefix, in tokens."""
        if any(end % group.block_size for group in self.groups.values()):
            return False
        held = {
            key for key, one in self.ends.items() if one.copies and (in_doubt or not one.doubted)
        }
        return all(
            (by_end.get(place), group.number) in held
            for group in self.groups.values()
            for place in group.places(end, size)
        )

    def clear(self) -> None:
        super().clear()
        self.ends.clear()

    def demote(self) -> None:
        super().demote()
        self.ends.clear()

    def overlap(self, prompt: Prompt, size: int) -> Overlap | None:
        whole = super().overlap(prompt, size)
        if whole is None or not (self.groups or self.drop):
            return whole
        held = sum(whole.tiers) + whole.uncertain
        limit = max(0, held - self.drop)
        path = tuple(
            (tuple(prompt.tokens[at : at + size]), ()) for at in range(0, held * size, size)
        )
        copies = [self._best(path[: number + 1]) for number in range(held)]
        known = next((n for n, copy in enumerate(copies) if not copy.certain), held)
        usable = limit
        if self.groups:
            by_end = {(n + 1) * size: copy.held.block for n, copy in enumerate(copies[:known])}
            ends = range(min(known, limit), 0, -1)
            usable = next((end for end in ends if self._has_all(by_end, end * size, size)), 0)
        shown = limit if self.groups and known < limit else usable
        certain = min(usable, known) if self.trusted else 0
        return Overlap(
            size, (certain, 0, 0, 0), shown - certain, self.number, unusable=held - shown
        )

    def _best(self, path: tuple[object, ...]) -> Copy:
        return max((one for one in self.copies if one.held.path == path), key=lambda x: x.certain)
