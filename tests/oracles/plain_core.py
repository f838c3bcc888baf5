"""The core in plain Python, with which the compiled one is compared.

Every owner has two segments of blocks, certain and uncertain. A row of the table maps a block key
to a bit set, four bits (one per tier) for each segment of each owner.

Invariants, which `check()` verifies:
- a bit is set if and only if some hash of that segment, on a medium of that tier, has that key;
- no row is empty.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat

from kvstate.events import BlockHash
from kvstate.index.core import BYTES_PER_TOKEN, BlockPool, OwnerStatus, StoreResult
from kvstate.overlap import Overlap, Tier, Tokens, tier_of
from kvstate.wire.extras import Admission, Groups
from tests.oracles.media import ORDER_OF_MEDIUM, REMOVING_MEDIA
from tests.oracles.plain_ends import EndClass, Ends, leading
from tests.oracles.plain_keys import chain, child, root_key
from tests.oracles.plain_rows import Learned, SavedBlocks, SavedRow, encoded, learned_in, rows_in


def _order(pool: BlockPool) -> tuple[int, int, int]:
    """The order in which an owner's pools are searched, the same in both cores."""
    group = -1 if pool.group is None else pool.group
    return ORDER_OF_MEDIUM[pool.medium], group, pool.block_size


# Block key -> the bits of all segments that hold it.
Table = dict[int, int]


class Segment:
    """Blocks of one rank that share a degree of certainty.

    first_bit: the first of the four bits (one per tier) that it owns in every row of the table.
    """

    def __init__(self, table: Table, first_bit: int) -> None:
        self.first_bit = first_bit
        self.table = table
        self.pools: dict[BlockPool, dict[BlockHash, int]] = {}  # in order
        self._copies: dict[tuple[BlockPool, BlockHash], int] = {}  # if more than one
        self._marks: dict[tuple[BlockPool, BlockHash], int] = {}  # of removals that made uncertain
        self._repeats: set[tuple[BlockPool, BlockHash]] = set()  # some of whose copies may be none
        self._ages: dict[tuple[BlockPool, BlockHash], int] = {}  # where copies are not counted
        self._sharers: dict[
            tuple[Tier, int], int
        ] = {}  # hashes with the same key, if more than one

    def __len__(self) -> int:
        return sum(len(blocks) for blocks in self.pools.values())

    @property
    def block_sizes(self) -> set[int]:
        """Block sizes in use."""
        return {pool.block_size for pool in self.pools}

    def count_by_tier(self) -> Counter[Tier]:
        """Hashes held on each tier."""
        counts: Counter[Tier] = Counter()
        for pool, blocks in self.pools.items():
            counts[pool.tier] += len(blocks)
        return counts

    def find(self, block: BlockHash) -> tuple[BlockPool, int] | None:
        """Returns pool and key of a block held under this hash, on the nearest medium."""
        for pool, blocks in self.pools.items():
            if block in blocks:
                return pool, blocks[block]
        return None

    def store(
        self, pool: BlockPool, block: BlockHash, key: int, age: int = 0, *, may_repeat: bool = False
    ) -> bool:
        """Adds a copy; returns False if the hash stood for other tokens, which are forgotten.

        age: when it was stored, if copies on this medium are not counted; else 0. may_repeat: if it
        is held, this may be no new copy.
        """
        known = self.pools.get(pool, {}).get(block)
        if known == key:
            if age:
                self._ages[pool, block] = age
                return True
            self.count(pool, block, self.copies(pool, block) + 1)
            if may_repeat:
                self.note_repeat(pool, block)
            return True
        if known is not None:
            self.forget(pool, block)
        if age:
            self._ages[pool, block] = age
        if pool not in self.pools:
            self._add(pool)
        self.pools[pool][block] = key
        self._share(pool.tier, key)
        return known is None

    def copies(self, pool: BlockPool, block: BlockHash) -> int:
        """Returns the number of copies of a block that is held."""
        return self._copies.get((pool, block), 1)

    def mark(self, pool: BlockPool, block: BlockHash) -> int:
        """Returns the mark of the removal that made a block uncertain; 0 if there is none."""
        return self._marks.get((pool, block), 0)

    def count(self, pool: BlockPool, block: BlockHash, copies: int, mark: int = 0) -> None:
        """Sets the number of copies of a block, and its mark."""
        self._copies.pop((pool, block), None)
        self._marks.pop((pool, block), None)
        if copies > 1:
            self._copies[pool, block] = copies
        if mark:
            self._marks[pool, block] = mark

    def may_be_fewer(self, pool: BlockPool, block: BlockHash) -> bool:
        """Whether some of the block's copies may be none."""
        return (pool, block) in self._repeats

    def note_repeat(self, pool: BlockPool, block: BlockHash) -> None:
        """Notes that some of the block's copies may be none."""
        self._repeats.add((pool, block))

    def forget_repeats(self, pool: BlockPool, block: BlockHash) -> None:
        """Notes that the number of the block's copies is known."""
        self._repeats.discard((pool, block))

    def keys_on_device(self, block: BlockHash) -> list[int]:
        """Returns the keys of the blocks held under this hash on the device."""
        return [
            blocks[block]
            for pool, blocks in self.pools.items()
            if pool.tier is Tier.DEVICE and block in blocks
        ]

    def place(self, medium: str, group: int | None, block: BlockHash) -> BlockPool | None:
        """Returns the pool in which a block is held, for its removal."""
        for pool, blocks in self.pools.items():
            if pool.medium == medium and pool.group == group and block in blocks:
                return pool
        return None

    def is_aging(self, pool: BlockPool, block: BlockHash) -> bool:
        """Whether the block's copies are not counted."""
        return (pool, block) in self._ages

    def key(self, pool: BlockPool, block: BlockHash) -> int:
        """Returns the key of a block that is held."""
        return self.pools[pool][block]

    def forget(self, pool: BlockPool, block: BlockHash) -> None:
        """Drops all copies of a block, if there are any."""
        if block in self.pools.get(pool, ()):
            self.count(pool, block, 0)
            self.forget_repeats(pool, block)
            self._unshare(pool.tier, self._pop(pool, block))

    def clear(self, most: int) -> bool:
        """Drops at most this many blocks; returns whether none is left."""
        for _ in range(most):
            if not self.pools:
                break
            pool, block, _ = self._last()
            self.forget(pool, block)
        return not self.pools

    def move_to(self, other: "Segment", most: int) -> bool:
        """Moves at most this many blocks to another segment; returns whether none is left.

        Of a block in both segments, only the copies in this one are kept.
        """
        for _ in range(most):
            if not self.pools:
                break
            pool, block, key = self._last()
            copies, mark = self.copies(pool, block), self.mark(pool, block)
            age, may_be_fewer = self._ages.get((pool, block), 0), self.may_be_fewer(pool, block)
            self.forget(pool, block)
            other.forget(pool, block)
            other.store(pool, block, key, age)
            other.count(pool, block, copies, mark)
            if may_be_fewer:
                other.note_repeat(pool, block)
        return not self.pools

    def restore_to(self, other: "Segment", mark: int) -> None:
        """Moves the blocks with this mark to another segment, unless they may have no copy."""
        for (pool, block), its in list(self._marks.items()):
            if its == mark and not self.may_be_fewer(pool, block):
                key, copies = self.key(pool, block), self.copies(pool, block)
                self.forget(pool, block)
                other.store(pool, block, key)
                other.count(pool, block, copies)

    def expire(self, media: Collection[str], age: int) -> None:
        """Drops blocks that were stored on these media before this age."""
        for (pool, block), stored in list(self._ages.items()):
            if pool.medium in media and stored < age:
                self.forget(pool, block)

    def rows(self, at: int, most: int, *, is_uncertain: bool) -> list[SavedRow]:
        """Returns at most this many of its hashes, from the `at`th on."""
        rows: list[SavedRow] = []
        for pool, blocks in self.pools.items():
            some = islice(blocks.items(), at, at + most - len(rows))
            rows += (self._row(pool, block, key, is_uncertain=is_uncertain) for block, key in some)
            at = max(0, at - len(blocks))
        return rows

    def put(self, row: SavedRow) -> None:
        """Adds a hash as it was saved.

        Raises:
            ValueError: it is damaged, or this segment has it.
        """
        pool = row.pool
        if row.copies < 1 or row.mark < 0 or row.age < 0 or row.block in self.pools.get(pool, ()):
            raise ValueError("this is no row of an owner")
        self.store(pool, row.block, row.key, row.age)
        self.count(pool, row.block, row.copies, row.mark)
        if row.may_be_fewer:
            self.note_repeat(pool, row.block)

    def _row(self, pool: BlockPool, block: BlockHash, key: int, *, is_uncertain: bool) -> SavedRow:
        return SavedRow(
            pool.medium,
            pool.group,
            pool.block_size,
            is_uncertain,
            block,
            key,
            self.copies(pool, block),
            self.mark(pool, block),
            self.may_be_fewer(pool, block),
            self._ages.get((pool, block), 0),
        )

    def bits_by_key(self) -> Table:
        """The table bits that this segment should have set, computed from the hashes alone."""
        bits: defaultdict[int, int] = defaultdict(int)
        for pool, blocks in self.pools.items():
            for key in blocks.values():
                bits[key] |= 1 << self.first_bit + pool.tier
        return dict(bits)

    def _last(self) -> tuple[BlockPool, BlockHash, int]:
        """Returns one of the blocks, found without iterating over the others."""
        pool = next(reversed(self.pools))
        block, key = next(reversed(self.pools[pool].items()))
        return pool, block, key

    def _add(self, pool: BlockPool) -> None:
        pools = sorted((*self.pools, pool), key=_order)
        self.pools = {pool: self.pools.get(pool, {}) for pool in pools}

    def _pop(self, pool: BlockPool, block: BlockHash) -> int:
        """Removes a hash, and an empty pool, so that a publisher cannot create ever more pools."""
        self._ages.pop((pool, block), None)
        blocks = self.pools[pool]
        key = blocks.pop(block)
        if not blocks:
            del self.pools[pool]
        return key

    def _share(self, tier: Tier, key: int) -> None:
        bit = 1 << self.first_bit + tier
        bits = self.table.get(key, 0)
        if bits & bit:
            self._sharers[tier, key] = self._sharers.get((tier, key), 1) + 1
        else:
            self.table[key] = bits | bit

    def _unshare(self, tier: Tier, key: int) -> None:
        sharers = self._sharers.pop((tier, key), 1)
        if sharers == 1:
            self._mask(key, ~(1 << self.first_bit + tier))
        elif sharers > 2:
            self._sharers[tier, key] = sharers - 1

    def _mask(self, key: int, keep: int) -> None:
        bits = self.table.get(key, 0) & keep
        if bits:
            self.table[key] = bits
        else:
            self.table.pop(key, None)


# The work of a block here, in the units of `kvstate.index.core.WORK`.
_WORK_PER_BLOCK = 32


@dataclass(slots=True)
class _Owner:
    worker: int
    model: int
    rank: int
    certain: Segment
    uncertain: Segment
    first_bit: int
    limit_blocks: int
    trusted: bool = False
    block_size: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    groups: Groups = field(default_factory=Groups)
    ends: Ends | None = None  # of other groups, if it has any
    last_drop: int = 0
    removing: set[str] = field(default_factory=lambda: set(REMOVING_MEDIA))
    aging: set[str] = field(default_factory=set)  # media doubted at their first block
    age: int = 1
    copies_announced: bool = False  # the removal of each copy is announced, not only of the last
    mark: int = 1  # of removals since the last hole, another after each

    @property
    def doubted_media(self) -> set[str]:
        """Media whose removals may never be announced."""
        return self.aging - self.removing

    @property
    def doubted(self) -> int:
        """The tiers of doubted media, one bit each."""
        tiers = {tier_of(medium) or 0 for medium in self.doubted_media}
        return sum(1 << tier for tier in tiers)

    @property
    def blocks(self) -> int:
        return len(self.certain) + len(self.uncertain)

    @property
    def is_cut(self) -> bool:
        """Whether its overlaps may have to be cut."""
        return self.ends is not None or self.last_drop > 0

    def is_full(self, more: int) -> bool:
        """Whether this many more blocks or ends are too many."""
        ends = len(self.ends.entries) if self.ends else 0
        return self.blocks + ends + more > self.limit_blocks

    def find(self, block: BlockHash) -> tuple[Segment, BlockPool, int] | None:
        """Returns segment, pool and key of a block held under this hash, a certain one first.

        The segment is that of its children: certain if their chain was stored since the hole.
        """
        for segment in (self.certain, self.uncertain):
            found = segment.find(block)
            if found is not None:
                is_chained = segment.mark(found[0], block) == self.mark
                return self.certain if is_chained else segment, *found
        return None


class PlainCore:
    """Does what `kvstate/_core.pyi` says.

    It leaves messages to the typed decoder, and lends, passes on and watches nothing.
    """

    def __init__(self, secret: int, limit_blocks: int, _overlap: type[Overlap]) -> None:
        self._secret = secret
        self._limit_blocks = limit_blocks
        self.table: Table = {}
        self._owners: dict[int, _Owner] = {}
        self._seeds: list[bytes] = []

    def add_model(self, seed: bytes) -> int:
        self._seeds.append(seed)
        return len(self._seeds) - 1

    def add_owner(self, worker: int, model: int, rank: int) -> int:
        number = next(n for n in range(len(self._owners) + 1) if n not in self._owners)
        certain = Segment(self.table, first_bit=8 * number)
        uncertain = Segment(self.table, first_bit=8 * number + 4)
        self._owners[number] = _Owner(
            worker, model, rank, certain, uncertain, 8 * number, self._limit_blocks
        )
        return number

    def limit(self, owner: int, blocks: int) -> None:
        self._owners[owner].limit_blocks = blocks

    def remove_owner(self, owner: int) -> None:
        self.clear(owner)
        del self._owners[owner]

    def clear(self, owner: int) -> None:
        self.clear_some(owner, sys.maxsize)

    def demote(self, owner: int) -> None:
        self.demote_some(owner, sys.maxsize)

    def clear_some(self, owner: int, work: int) -> bool:
        held, most = self._owners[owner], 1 + work // _WORK_PER_BLOCK
        if held.ends:
            held.ends.entries.clear()
        if not (held.certain.clear(most) and held.uncertain.clear(most)):
            return False
        held.aging.clear()
        return True

    def demote_some(self, owner: int, work: int) -> bool:
        held = self._owners[owner]
        if held.ends:
            held.ends.entries.clear()
        is_done = held.certain.move_to(held.uncertain, 1 + work // _WORK_PER_BLOCK)
        if is_done:  # a store between two removals may have been lost
            held.mark += 1
        return is_done

    def trust(self, owner: int, trusted: bool) -> None:
        self._owners[owner].trusted = trusted

    def store(
        self,
        owner: int,
        hashes: list[BlockHash],
        parent: BlockHash | None,
        tokens: Tokens | memoryview,
        block_size: int,
        lora: str | int | None,
        extras: list[bytes | None] | None,
        medium: str,
        group: int | None,
        may_repeat: bool,
    ) -> int:
        held = self._owners[owner]
        held.block_size = block_size
        found = None if parent is None else held.find(parent)
        if parent is not None and found is None:
            return StoreResult.UNKNOWN_PARENT
        if held.is_full(len(hashes)):
            held.counts["over_limit"] += 1
            return StoreResult.OVER_LIMIT
        root = root_key(self._secret, self._seeds[held.model], lora, block_size)
        segment, _, key = found or (held.certain, None, root)
        pool = BlockPool.of(medium, group, block_size)
        step = block_size * BYTES_PER_TOKEN
        view = memoryview(tokens).cast("B")
        for position, (block, extra) in enumerate(
            zip(hashes, extras or repeat(None, len(hashes)), strict=True)
        ):
            key = child(key, view[position * step : (position + 1) * step], extra)
            _hold(held, segment, pool, block, key, may_repeat=may_repeat)
        return StoreResult.STORED

    def copy(self, owner: int, hashes: list[BlockHash], medium: str, group: int | None) -> None:
        held = self._owners[owner]
        for block in hashes:
            found = held.find(block)
            if found is None:
                held.counts["copied_unknown"] += 1
                continue
            if tier_of(medium) is Tier.HOST:
                held.removing.add(medium)
            if held.is_full(1):
                held.counts["over_limit"] += 1
                return
            segment, source, key = found
            _hold(held, segment, BlockPool.of(medium, group, source.block_size), block, key)

    def remove(
        self,
        owner: int,
        block: BlockHash,
        medium: str,
        group: int | None,
        left: int | None = None,
    ) -> bool:
        held = self._owners[owner]
        held.removing.add(medium)
        for segment in (held.certain, held.uncertain):
            pool = segment.place(medium, group, block)
            if pool is not None:
                _remove(held, segment, pool, block, left)
                return True
        return False

    def admit(self, owner: int, group: int | None, holds_prefix: bool | None) -> Admission:
        return self._owners[owner].groups.stored(group, holds_prefix=holds_prefix)

    def admission(self, owner: int, group: int | None) -> Admission:
        return self._owners[owner].groups.admission(group)

    def note_group(self, owner: int, group: int | None, block_size: int, reach: int) -> None:
        held = self._owners[owner]
        if group is not None:
            held.ends = held.ends or Ends()
            held.ends.note_group(group, block_size, reach)

    def store_ends(
        self, owner: int, hashes: list[BlockHash], group: int | None, may_repeat: bool
    ) -> None:
        held = self._owners[owner]
        if held.ends is None or group not in held.ends.groups:
            return
        for block in hashes:
            if block not in held.ends.entries and held.is_full(1):
                held.counts["over_limit"] += 1
                return
            held.ends.store(block, group, may_repeat=may_repeat)

    def remove_end(self, owner: int, block: BlockHash, group: int | None, left: int | None) -> None:
        held = self._owners[owner]
        if held.ends is not None and group in held.ends.groups:
            held.copies_announced |= held.ends.remove(
                block, group, left, copies_announced=held.copies_announced
            )

    def begin_message(self, owner: int) -> None:
        ends = self._owners[owner].ends
        if ends is not None:
            ends.begin_message()

    def may_reuse(self, owner: int, hashes: list[BlockHash], block_size: int) -> bool:
        held = self._owners[owner]
        if held.ends is None:  # more is held than a draft makes the engine compute again, or all
            most = held.last_drop + 1 if held.last_drop else 0
            return all(held.find(block) is not None for block in hashes[:most])
        return held.ends.may_reuse(hashes, block_size, lambda block: held.find(block) is not None)

    def other_groups(self, owner: int) -> tuple[int, bool, tuple[tuple[int, int], ...]]:
        ends = self._owners[owner].ends
        if ends is None:
            return 0, True, ()
        classes = tuple((its.block_size, its.need) for its in ends.classes)
        return len(ends.entries), not ends.is_inexact, classes

    def drop_last(self, owner: int, blocks: int) -> None:
        self._owners[owner].last_drop = blocks

    def announce_copies(self, owner: int) -> None:
        self._owners[owner].copies_announced = True

    def forget_layout(self, owner: int) -> None:
        self._owners[owner].groups.forget()
        self._owners[owner].ends = None
        self._owners[owner].removing = set(REMOVING_MEDIA)
        self._owners[owner].copies_announced = False

    def layout(self, owner: int) -> tuple[None, None]:
        return None, None  # its stores are all typed events, which state this

    def start(self, owner: int, payload: bytes, work: int) -> bool:
        return False  # this core has only the typed decoder

    def abandon(self, owner: int) -> None:
        """Does nothing: no message is ever under way here."""

    def overlaps(
        self,
        model: int,
        tokens: Tokens | memoryview,
        lora: str | int | None,
        first: bytes | None,
        names: Sequence[str],
    ) -> dict[str, Overlap]:
        best: dict[str, Overlap] = {}
        for block_size in self._block_sizes(model):
            root = root_key(self._secret, self._seeds[model], lora, block_size)
            runs = self._runs(root, tokens, block_size, first)
            first_bits = runs[0][0] if runs else 0
            for owner in self._owners.values():
                if first_bits >> owner.first_bit & 0xFF:
                    overlap = _count(runs, owner, block_size)
                    if owner.is_cut:
                        keys = list(chain(root, tokens, block_size, first, _held_of(overlap)))
                        overlap = _cut(owner, overlap, runs, keys)
                    known = best.get(names[owner.worker])
                    if known is None or overlap.rank_order > known.rank_order:
                        best[names[owner.worker]] = overlap
        return best

    def overlaps_on(
        self,
        model: int,
        tokens: Tokens | memoryview,
        lora: str | int | None,
        first: bytes | None,
        names: Sequence[str],
        tier: int,
    ) -> dict[str, Overlap]:
        best: dict[str, Overlap] = {}
        owners = [owner for owner in self._owners.values() if owner.model == model]
        if any(owner.is_cut for owner in owners):
            return best
        for block_size in self._block_sizes(model):
            root = root_key(self._secret, self._seeds[model], lora, block_size)
            runs = self._runs(root, tokens, block_size, first)
            for owner in owners:
                only = 1 << owner.first_bit + tier
                on_tier = [(bits & only, length) for bits, length in runs]
                overlap = _count(on_tier, owner, block_size)._replace(uncertain=0)
                known = best.get(names[owner.worker], Overlap(block_size))
                if overlap.rank_order > known.rank_order:
                    best[names[owner.worker]] = overlap
        return best

    def status(self, owner: int) -> OwnerStatus:
        held = self._owners[owner]
        return {
            "blocks": held.blocks,
            "block_size": held.block_size,
            "doubted": held.doubted,
            "removed_unknown": 0,
            "removed_certain": held.counts["removed_certain"],
            "restored_with_other_tokens": held.counts["restored_with_other_tokens"],
            "over_limit": held.counts["over_limit"],
            "copied_unknown": held.counts["copied_unknown"],
        }

    def tiers(self, owner: int, uncertain: bool) -> tuple[int, int, int, int]:
        held = self._owners[owner]
        counts = (held.uncertain if uncertain else held.certain).count_by_tier()
        device, host, disk, remote = (counts[tier] for tier in Tier)
        return device, host, disk, remote

    def expire(self, owner: int, slots: int) -> bool:  # in one go here
        held = self._owners[owner]
        for segment in (held.certain, held.uncertain):
            segment.expire(held.doubted_media, held.age)
        if held.copies_announced:
            held.uncertain.restore_to(held.certain, held.mark)
        held.age += 1
        return True

    def saved_learned(self, owner: int) -> bytes:
        held = self._owners[owner]
        return encoded(
            Learned(
                held.block_size,
                held.removing,
                held.aging,
                held.age,
                held.copies_announced,
                held.mark,
                held.counts["removed_certain"],
                sorted(held.groups.saved().items()),
                None if held.ends is None else held.ends.saved(),
            )
        )

    def put_learned(self, owner: int, saved: bytes) -> bool:
        held, learned = self._owners[owner], learned_in(saved)
        if learned is None or not held.groups.put(dict(learned.groups)):
            return False
        held.block_size, held.age, held.mark = learned.block_size, learned.age, learned.mark
        held.removing, held.aging = learned.removing, learned.aging
        held.copies_announced = learned.copies_announced
        held.counts["removed_certain"] = learned.removed_certain
        if learned.ends is not None:
            held.ends = Ends()
            held.ends.put(learned.ends)
        return True

    def saved_rows(self, owner: int, at: int, work: int) -> tuple[bytes, int | None]:
        held, left = self._owners[owner], 1 + work // _WORK_PER_BLOCK
        blocks, ends = held.blocks, held.ends or Ends()
        certain = len(held.certain)
        rows = held.certain.rows(at, left, is_uncertain=False)
        begin = max(0, at - certain)
        rows += held.uncertain.rows(begin, left - len(rows), is_uncertain=True)
        its_ends = ends.rows(max(0, at - blocks), left - len(rows))
        at += len(rows) + len(its_ends)
        is_over = at == blocks + len(ends.entries)
        return encoded(SavedBlocks(rows, its_ends)), None if is_over else at

    def put_rows(self, owner: int, rows: bytes, at: int, work: int) -> int:  # in one go here
        held, read = self._owners[owner], rows_in(rows)
        ends = held.ends or Ends()
        for row in read.blocks:
            if held.is_full(1) or row.age > held.age:
                raise ValueError("these are more rows than an owner may have, or newer ones")
            (held.uncertain if row.is_uncertain else held.certain).put(row)
        for its in read.ends:  # without other groups, none is possible
            if held.is_full(1):
                raise ValueError("these are more ends than an owner may have")
            ends.put_row(its)
        return len(rows)

    def check(self) -> None:
        expected: Table = {}
        for owner in self._owners.values():
            for segment in (owner.certain, owner.uncertain):
                for key, bits in segment.bits_by_key().items():
                    expected[key] = expected.get(key, 0) | bits
        if expected != self.table:
            raise AssertionError("the table differs from what the segments hold")

    def _block_sizes(self, model: int) -> set[int]:
        sizes: set[int] = set()
        for owner in self._owners.values():
            if owner.model == model:
                sizes |= owner.certain.block_sizes | owner.uncertain.block_sizes
        return sizes

    def _runs(
        self, root: int, tokens: Tokens | memoryview, block_size: int, first: bytes | None
    ) -> list[tuple[int, int]]:
        """Returns the rows of the prompt's blocks as (bits, count), up to the first absent one."""
        limit = (len(tokens) - 1) // block_size
        runs: list[tuple[int, int]] = []
        current, length = 0, 0
        for key in chain(root, tokens, block_size, first, limit):
            bits = self.table.get(key)
            if bits == current:
                length += 1
                continue
            if length:
                runs.append((current, length))
            if bits is None:
                return runs
            current, length = bits, 1
        return [*runs, (current, length)] if length else runs


def _hold(
    owner: _Owner,
    segment: Segment,
    pool: BlockPool,
    block: BlockHash,
    key: int,
    *,
    may_repeat: bool = False,
) -> None:
    if pool.medium not in owner.removing:
        owner.aging.add(pool.medium)
    if segment is owner.certain:
        owner.uncertain.forget(pool, block)  # it was stored again after the hole
    age = owner.age if pool.medium in owner.aging else 0
    if not segment.store(pool, block, key, age, may_repeat=may_repeat):
        owner.counts["restored_with_other_tokens"] += 1


def _remove(
    owner: _Owner, segment: Segment, pool: BlockPool, block: BlockHash, left: int | None
) -> None:
    """Drops a copy of a block; left: see `Core.remove`."""
    if left is None and segment.mark(pool, block) == owner.mark:
        owner.copies_announced = True  # removed twice, without a store between
    copies = segment.copies(pool, block) - 1 if left is None else left
    if copies <= 0:
        owner.counts["removed_certain"] += segment is owner.certain
        segment.forget(pool, block)
    elif segment.is_aging(pool, block):
        return
    elif left is not None:
        segment.count(pool, block, left)
        segment.forget_repeats(pool, block)
    elif segment is owner.certain and (
        segment.may_be_fewer(pool, block) or not owner.copies_announced
    ):
        _doubt(owner, pool, block, copies)
    else:
        segment.count(pool, block, copies, segment.mark(pool, block))


def _doubt(owner: _Owner, pool: BlockPool, block: BlockHash, copies: int) -> None:
    """Makes what is left of a certain block uncertain."""
    key = owner.certain.key(pool, block)
    may_be_fewer = owner.certain.may_be_fewer(pool, block)
    owner.certain.forget(pool, block)
    owner.uncertain.forget(pool, block)
    owner.uncertain.store(pool, block, key)
    owner.uncertain.count(pool, block, copies, owner.mark)
    if may_be_fewer:
        owner.uncertain.note_repeat(pool, block)


def _count(
    runs: Sequence[tuple[int, int]],
    owner: _Owner,
    block_size: int,
    limit: int = sys.maxsize,
    *,
    is_certain: bool = True,
) -> Overlap:
    """Counts at most `limit` blocks; is_certain: whether any of them may be certain."""
    tiers = [0, 0, 0, 0]
    uncertain = 0
    certain_so_far = owner.trusted and is_certain
    believed = ~owner.doubted
    for bits, whole_length in runs:
        length = min(whole_length, limit)
        limit -= length
        certain = bits >> owner.first_bit & 0xF & believed
        if certain_so_far and certain:
            tiers[(certain & -certain).bit_length() - 1] += length
        elif bits >> owner.first_bit & 0xFF:
            certain_so_far = False
            uncertain += length
        else:
            break
    return Overlap(block_size, (tiers[0], tiers[1], tiers[2], tiers[3]), uncertain, owner.rank)


def _held_of(overlap: Overlap) -> int:
    """Returns how many blocks of a prompt are held."""
    return sum(overlap.tiers) + overlap.uncertain


def _cut(
    owner: _Owner, overlap: Overlap, runs: Sequence[tuple[int, int]], keys: Sequence[int]
) -> Overlap:
    """Cuts an owner's overlap to what its engine can reuse; see `Core.overlaps`."""
    held, ends = len(keys), owner.ends
    limit = max(0, held - owner.last_drop)
    if ends is None:
        return _count(runs, owner, overlap.block_size, limit)._replace(unusable=held - limit)
    device = 0 if owner.doubted & 1 else 1 << owner.first_bit
    known = leading([bool(bits & device) for bits, length in runs for _ in range(length)])
    whole = limit
    if ends.shows_reuse(overlap.block_size):
        complete = {its: _complete_keys(owner, ends, its) for its in ends.classes}
        whole = ends.reusable(
            overlap.block_size,
            min(known, limit),
            lambda at, its: keys[at - 1] in complete[its],
        )
    is_exact = ends.is_exact(overlap.block_size)
    found = _count(runs, owner, overlap.block_size, whole, is_certain=is_exact)
    if known < limit:
        found = found._replace(uncertain=found.uncertain + limit - whole)
        whole = limit
    return found._replace(unusable=held - whole)


def _complete_keys(owner: _Owner, ends: Ends, its: EndClass) -> set[int]:
    """Returns the keys of certain blocks on the device at whose end a class is complete."""
    return {
        key
        for block in ends.entries
        if ends.is_complete(block, its)
        for key in owner.certain.keys_on_device(block)
    }
