"""The block index by brute force: every copy of every block, each with its whole path."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import NamedTuple

from kvstate.events import BlockHash
from kvstate.overlap import Extra, Overlap, Prompt, Tier, tier_of
from tests.oracles.media import ORDER_OF_MEDIUM, REMOVING_MEDIA


class Block(NamedTuple):
    """One block of an engine: its hash, and its whole path from the prompt's start."""

    block: BlockHash
    parent: BlockHash | None
    lora: str | None
    size: int
    path: tuple[tuple[tuple[int, ...], Extra], ...]


class Place(NamedTuple):
    """Where a copy lies."""

    medium: str
    group: int | None


@dataclass
class Copy:
    """One copy of a block that a rank holds."""

    place: Place
    held: Block
    certain: bool
    age: int = 0  # of an aging medium
    mark: int = 0  # of the removal that made it uncertain
    may_repeat: bool = False  # it may be another one, announced again


@dataclass
class Rank:
    """The blocks of one rank, and those stored after parents that it does not hold."""

    worker: str
    number: int = 0
    trusted: bool = False
    copies: list[Copy] = field(default_factory=list)
    orphans: list[tuple[Place, Block]] = field(default_factory=list)
    removing: set[str] = field(default_factory=lambda: set(REMOVING_MEDIA))
    aging: set[str] = field(default_factory=set)  # media doubted when their first block came
    age: int = 1
    announced: bool = False  # the removal of each copy is announced
    mark: int = 1

    def holds(self, block: BlockHash) -> bool:
        """Whether a block is held under this hash."""
        return bool(self._held(block))

    def store(self, place: Place, chain: list[Block], *, may_repeat: bool = True) -> None:
        """A stored event: the first block's parent decides for all of them.

        may_repeat: from a prompt's root on, it may only announce again what is held.
        """
        parent = chain[0].parent
        if parent is not None and not self._held(parent):
            self.orphans += [(place, block) for block in chain]
            return
        certain = parent is None or self._is_chained(self._held(parent)[0])
        for block in chain:
            self._hold(place, block, certain=certain, may_repeat=may_repeat and parent is None)
            self._attach(block)

    def copy(self, place: Place, block: BlockHash) -> None:
        """Adds a copy, as certain as the block held; ignored if the block is not held."""
        held = self._held(block)
        if held and tier_of(place.medium) is Tier.HOST:
            self.removing.add(place.medium)
        if held:
            self._hold(place, held[0].held, certain=self._is_chained(held[0]))

    def remove(self, place: Place, block: BlockHash, left: int | None = None) -> None:
        """Removes one copy: preferably a certain one, then an uncertain one, then an orphan.

        left: how many remain, if that is told. If not, they are uncertain until it is known that
        the removal of each copy is announced, and for good if some may have been announced twice.
        """
        self.removing.add(place.medium)
        mine = [copy for copy in self._held(block) if copy.place == place]
        if not mine:
            self.orphans = [
                (where, each)
                for where, each in self.orphans
                if (where, each.block) != (place, block)
            ]
            return
        like = [copy for copy in mine if copy.certain == mine[0].certain]
        if left is None and like[0].mark == self.mark:
            self.announced = True
        counted = place.medium not in self.aging
        rest = len(like) - 1 if left is None else left if counted else min(left, 1)
        believed = self.announced and not like[0].may_repeat
        certain = like[0].certain and (left is not None or believed)
        self._discard(like)
        if rest and like[0].certain and not certain:  # these replace uncertain ones
            self._discard(mine)
        if left is not None:
            mark = 0
        else:
            mark = self.mark if like[0].certain and not certain else like[0].mark
        may_repeat = like[0].may_repeat and left is None
        kept = replace(like[0], certain=certain, mark=mark, may_repeat=may_repeat)
        self.copies += [replace(kept) for _ in range(rest)]

    def _discard(self, copies: list[Copy]) -> None:
        gone = {id(copy) for copy in copies}
        self.copies = [copy for copy in self.copies if id(copy) not in gone]

    def clear(self) -> None:
        """Removes everything."""
        self.copies, self.orphans, self.aging = [], [], set()

    def expire(self) -> None:
        """Removes blocks stored before this age from media whose removals may not be announced."""
        doubted = self.aging - self.removing
        self.copies = [
            copy for copy in self.copies if copy.place.medium not in doubted or copy.age >= self.age
        ]
        self.age += 1
        for copy in self.copies:
            if self.announced and copy.mark == self.mark and not copy.may_repeat:
                copy.certain, copy.mark = True, 0

    def demote(self) -> None:
        """Makes certain blocks uncertain; they replace those that were uncertain before."""
        certain = [copy for copy in self.copies if copy.certain]
        renewed = {(copy.place, copy.held.block) for copy in certain}
        rest = [copy for copy in self.copies if (copy.place, copy.held.block) not in renewed]
        self.copies = rest + [replace(copy, certain=False) for copy in certain]
        self.orphans = []
        self.mark += 1

    def overlap(self, prompt: Prompt, size: int) -> Overlap | None:
        """The leading blocks of a prompt that are held; None if not even the first is."""
        mine = [
            copy for copy in self.copies if copy.held.size == size and copy.held.lora == prompt.lora
        ]
        if not mine:
            return None
        tiers, uncertain, believed = [0, 0, 0, 0], 0, self.trusted
        doubted = {tier_of(medium) for medium in self.aging - self.removing}
        for path in _paths(prompt, size):
            same = [copy for copy in mine if copy.held.path == path]
            on_tiers = [tier_of(copy.place.medium) or 0 for copy in same if copy.certain]
            certain = [tier for tier in on_tiers if tier not in doubted]
            if not same:
                break
            if believed and certain:
                tiers[min(certain)] += 1
            else:
                believed = False
                uncertain += 1
        if not sum(tiers) + uncertain:
            return None
        return Overlap(size, (tiers[0], tiers[1], tiers[2], tiers[3]), uncertain, self.number)

    def tokens_on(self, prompt: Prompt, size: int, tier: Tier) -> int:
        """The leading tokens of a prompt that are certainly on a tier, whatever is on others."""
        doubted = {tier_of(medium) for medium in self.aging - self.removing}
        there = {
            copy.held.path
            for copy in self.copies
            if copy.certain and tier_of(copy.place.medium) is tier
            if copy.held.size == size and copy.held.lora == prompt.lora
        }
        if not self.trusted or tier in doubted:
            return 0
        return size * len(list(takewhile(there.__contains__, _paths(prompt, size))))

    def _held(self, block: BlockHash) -> list[Copy]:
        """The copies of a block, certain ones first."""
        copies = [copy for copy in self.copies if copy.held.block == block]
        return sorted(copies, key=_order)

    def _is_chained(self, copy: Copy) -> bool:
        """Whether its chain was stored since the last hole, so that its children are certain."""
        return copy.certain or copy.mark == self.mark

    def _hold(self, place: Place, block: Block, *, certain: bool, may_repeat: bool = False) -> None:
        """Adds a copy; may_repeat: if there are others, this may be one of them."""
        if place.medium not in self.removing:
            self.aging.add(place.medium)
        is_aging = place.medium in self.aging
        self.copies = [
            copy
            for copy in self.copies
            if (copy.place, copy.held.block) != (place, block.block)
            or (copy.certain == certain and copy.held.path == block.path and not is_aging)
            or (copy.certain and not certain)
        ]
        others = [
            copy
            for copy in self.copies
            if (copy.place, copy.held.block, copy.certain) == (place, block.block, certain)
        ]
        repeats = bool(others) and (may_repeat or others[0].may_repeat)
        for copy in others:
            copy.mark, copy.may_repeat = 0, repeats
        self.copies.append(Copy(place, block, certain, self.age, may_repeat=repeats))

    def _attach(self, parent: Block) -> None:
        children = [orphan for orphan in self.orphans if orphan[1].parent == parent.block]
        self.orphans = [orphan for orphan in self.orphans if orphan[1].parent != parent.block]
        for place, child in children:
            certain = self._is_chained(self._held(parent.block)[0])
            self._hold(place, child, certain=certain, may_repeat=True)
        for _, child in children:
            self._attach(child)


def best_overlaps(ranks: list[Rank], prompt: Prompt, sizes: set[int]) -> dict[str, list[Overlap]]:
    """By worker, the best overlaps of its ranks and block sizes: more than one where they tie."""
    found: dict[str, list[Overlap]] = {}
    for rank in ranks:
        overlaps = [overlap for size in sizes if (overlap := rank.overlap(prompt, size))]
        found.setdefault(rank.worker, []).extend(overlaps)
    best = {
        worker: max(overlap.rank_order for overlap in overlaps)
        for worker, overlaps in found.items()
        if overlaps
    }
    return {
        worker: [overlap for overlap in found[worker] if overlap.rank_order == order]
        for worker, order in best.items()
    }


def _order(copy: Copy) -> tuple[bool, int, int]:
    """Certain copies first, then those on the nearest medium."""
    medium, group = copy.place
    return not copy.certain, ORDER_OF_MEDIUM[medium], -1 if group is None else group


def _paths(prompt: Prompt, size: int) -> Iterator[tuple[tuple[tuple[int, ...], Extra], ...]]:
    """The path to each of the prompt's blocks, which leave out its last token."""
    path: tuple[tuple[tuple[int, ...], Extra], ...] = ()
    for start in range(0, len(prompt.tokens) - size, size):
        extra: Extra = prompt.namespace if start == 0 else ()
        path = (*path, (tuple(prompt.tokens[start : start + size]), extra))
        yield path
